"""Growth of a model as it stands: a plan, its tensors, a module around them. And the view of the first segments."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.growth.net2net import stack, widen
from tokenformer.growth.plan import Plan, rms
from tokenformer.growth.shape import table, with_table
from tokenformer.growth.tokens import plan as by_tokens
from tokenformer.models import LanguageModel
from tokenformer.models.init import draw
from tokenformer.strict import need

SIZES = {"qkv_tokens", "proj_tokens", "ffn_tokens", "layers"}


def plan(config: ModelConfig, names: Iterable[str], **how: Any) -> Plan:
    """The plan that the arguments of `grow` ask for: by tokens and blocks, by width, or by stacking."""
    how = {name: value for name, value in how.items() if value is not None}
    origin = {name: how.pop(name) for name in ("seed", "number") if name in how}
    wide = {name: how.pop(name) for name in ("dim", "ffn_dim", "widen", "noise") if name in how}
    new_layers = how.pop("new_layers", "identity")
    need(new_layers in ("identity", "stack"), f"new_layers is '{new_layers}', but must be identity or stack")
    if "dim" in wide or "ffn_dim" in wide:
        need(not how.keys() & SIZES, "widening is a growth of its own: give tokens and layers to another one")
        rule = wide.pop("widen", "net2net")
        return widen(config, names, **wide, rule=rule, **origin)
    need(not wide, "widen and noise are about width: give dim or ffn_dim with them")
    if new_layers == "stack":
        need(
            "layers" in how and not how.keys() & SIZES - {"layers"},
            "stacking is a growth of its own: give layers alone",
        )
        return stack(config, names, layers=how["layers"], **origin)
    return by_tokens(config, names, **how, **origin)


def grow(
    model: LanguageModel,
    *,
    qkv_tokens: int | None = None,
    proj_tokens: int | None = None,
    ffn_tokens: int | None = None,
    layers: int | None = None,
    positions: str | Sequence[int] | None = None,
    new_tokens: str | Mapping[str, str] | None = None,
    tau: str | Mapping[str, str] | None = None,
    new_layers: str | None = None,
    dim: int | None = None,
    ffn_dim: int | None = None,
    widen: str | None = None,
    noise: float | None = None,
    seed: int = 0,
    share: bool = False,
) -> LanguageModel:
    """A bigger model that computes the same. Sizes are totals afterwards; the old model stays as it is.

    `new_tokens`: `segment` (default: its own normalisation; exact for every Θ), `zero_key` (exact with held τ, not for
    softmax), `zero_value`, `random` (the official rule); for all, or one each: `{"ffn": "random", "qkv": "segment"}`.
    `tau` of appended rows: `hold` (default of `zero_key`) or `sqrt_n`. `layers` puts identity blocks in: `positions` is
    `even` (default), `end` or their layer numbers. To compare with: `new_layers="stack"` copies blocks, `dim` and
    `ffn_dim` widen by Net2Net (`widen="block"`: the paper's form). With `share` the Parameters that did not change are
    the old model's own; otherwise they are copied.

    >>> from tokenformer import LanguageModel, ModelConfig
    >>> config = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=64, vocab=128)
    >>> model = LanguageModel(config)
    >>> bigger = grow(model, ffn_tokens=256, layers=3)
    >>> bigger.config.ffn_tokens, bigger.config.layers
    ([64, 192], 3)
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> torch.allclose(bigger(ids).logits, model(ids).logits, atol=1e-6)
    True
    """
    sizes = {"qkv_tokens": qkv_tokens, "proj_tokens": proj_tokens, "ffn_tokens": ffn_tokens, "layers": layers}
    rules = {"positions": positions, "new_tokens": new_tokens, "tau": tau, "new_layers": new_layers}
    width = {"dim": dim, "ffn_dim": ffn_dim, "widen": widen, "noise": noise}
    names = [name for name, _ in model.named_parameters()]
    how = {**sizes, **rules, **width, "seed": seed, "number": len(model.history)}
    return follow(model, plan(model.config, names, **how), share=share)


def follow(model: LanguageModel, growth: Plan, *, share: bool = False) -> LanguageModel:
    """The model after a growth that was planned."""
    old = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, tensor in growth.tensors(old):
        kept = growth.recipes[name].old
        alike = kept is not None and tensor is old[kept]
        tensors[name] = tensor.detach().clone() if alike and not share else tensor
    new = hold(type(model), growth.config, tensors, [*model.history, growth.event])
    new.compute_dtype = model.compute_dtype
    for name, parameter in new.named_parameters():
        kept = growth.recipes[name].old
        parameter.requires_grad_(kept is None or old[kept].requires_grad)
    return new.train(model.training)


@torch.no_grad()
def disturb(name: str, parameter: Tensor, growth: Plan, noise: float) -> None:
    """Random numbers on the old parameter tokens, as a share of their RMS, in place."""
    kept = growth.recipes[name].old is not None and name.endswith("_tokens")
    rows = len(parameter) - max(growth.recipes[name].new_rows, 0)
    if noise and kept and rows:
        key = f"growth {growth.number} noise/{name}"
        numbers = draw(growth.seed, key, (rows, *parameter.shape[1:])).to(parameter)
        parameter[:rows] += numbers * (noise * rms([parameter[:rows]]))


def hold(cls: type, config: Any, tensors: Mapping[str, Tensor], history: list[dict]) -> Any:
    """A module around these tensors, without a copy; Parameters stay the same objects."""
    with torch.device("meta"):
        model = cls(config)
    frozen = [t for t in tensors.values() if isinstance(t, torch.nn.Parameter) and not t.requires_grad]
    model.load_state_dict(tensors, assign=True)
    for parameter in frozen:
        parameter.requires_grad_(False)  # assignment turned it on
    model.history = history
    return model


def slice(model: LanguageModel, *, segments: int) -> LanguageModel:
    """The model that the first segments of every layer make: a view, its Parameters are those of the whole.

    A layer with fewer segments keeps all. After growth by segments this is the model before, trained since then.

    >>> from tokenformer import LanguageModel, ModelConfig
    >>> config = ModelConfig(layers=1, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=[64, 64], vocab=128)
    >>> model = LanguageModel(config)
    >>> small = slice(model, segments=1)
    >>> small.config.ffn_tokens, small.embedding.weight is model.embedding.weight
    (64, True)
    """
    need(segments > 0, f"segments is {segments}: a model needs at least one")
    need(model.config.kind == "tokenformer", f"kind {model.config.kind} has no segments to choose from")
    cut = {which: [s[:segments] for s in layers] for which, layers in table(model.config).items()}
    config = with_table(model.config, cut)
    with torch.device("meta"):
        wanted = {name for name, _ in type(model)(config).named_parameters()}
    parameters = {name: p for name, p in model.named_parameters() if name in wanted}
    event = {"what": "slice", "segments": segments, "number": len(model.history)}
    view = hold(type(model), config, parameters, [*model.history, event])
    view.compute_dtype = model.compute_dtype
    return view.train(model.training)
