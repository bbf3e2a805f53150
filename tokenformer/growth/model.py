"""Grow a model in memory: plan, make the tensors, build the bigger module around them. And `slice`, the way back."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.errors import UserError
from tokenformer.growth.layers import Module, grow_layers, plan_layers, recipes_of, refuse_wrapped
from tokenformer.growth.make import make_tensors
from tokenformer.growth.plan import Plan, Recipe, plan_growth
from tokenformer.growth.shape import table, trunk_of, with_table
from tokenformer.growth.state import carry_optimizer, check_optimizer
from tokenformer.models import LanguageModel
from tokenformer.models.names import parse, refuse_foreign
from tokenformer.strict import need

Model = TypeVar("Model", bound=LanguageModel)


def grow(
    model: Module,
    *,
    on: str = "",
    tokens: int | Mapping[str, int] | None = None,
    qkv_tokens: int | None = None,
    proj_tokens: int | None = None,
    ffn_tokens: int | None = None,
    layers: int | None = None,
    vocab: int | None = None,
    switch: str = "",
    positions: str | Sequence[int] | None = None,
    new_tokens: str | Mapping[str, str] | None = None,
    tau: str | Mapping[str, str] | None = None,
    noise: float = 0.0,
    seed: int = 0,
    share: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> Module:
    """Return a bigger model that computes the same. Sizes are totals afterwards; the old model is not changed.

    `new_tokens`: `segment` (default: its own normalisation; exact for every Θ), `zero_key` (exact with τ held, not for
    softmax), `zero_value`, `random` (the official rule); one for all, or `{"ffn": "random", "qkv": "segment"}`.
    `tau` of appended rows: `hold` (default of `zero_key`) or `sqrt_n`. `layers` inserts identity blocks: `positions` is
    `even` (default), `end` or their layer numbers. `vocab` adds ids behind the padded vocabulary, such as codes of
    images. With `switch`, new segments and ids count only in calls that give it: `model(ids, switches={…})`. `on`:
    which trunk of a model that has several. With `share` the Parameters that did not change are the old model's own;
    otherwise they are copied.

    `optimizer`: the torch optimizer of your own loop; from here on it trains the grown model. Its groups and settings
    stay, old rows keep their state and new ones begin fresh, so the loss does not jump. It may be AdamW, SGD or any
    other that keeps tensors of a parameter's shape.

    A module of your own grows by `tokens`: so many for each Pattention layer in it, or `{"mlp.up": 256}`. It is copied,
    or grows in place with `share`. Of DDP, a compiled or a Hugging Face model, grow what it wraps and wrap it again;
    what accelerate prepared must be prepared again.

    >>> from tokenformer.config import ModelConfig
    >>> from tokenformer.models import build
    >>> config = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=64, vocab=128)
    >>> model = build(config)
    >>> bigger = grow(model, ffn_tokens=256, layers=3)
    >>> bigger.config.ffn_tokens, bigger.config.layers
    ([64, 192], 3)
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> torch.allclose(bigger(ids).logits, model(ids).logits, atol=1e-6)
    True
    """
    given = {name: value for name, value in locals().items() if name in Growth.__dataclass_fields__}
    refuse_wrapped(model)
    old = dict(model.named_parameters())
    if optimizer is not None:
        check_optimizer(optimizer, old)
    bigger, recipes = _grown(model, Growth(**given), tokens, seed, share)
    if optimizer is not None:
        carry_optimizer(optimizer, old, dict(bigger.named_parameters()), recipes)
    if bigger is not model and any(getattr(held, "_is_accelerate_prepared", False) for held in (model, optimizer)):
        warnings.warn(
            "accelerate prepared what was grown, and goes on saving the old model: call accelerator.free_memory(), "
            "then prepare the grown model, the optimizer and all else again",
            stacklevel=2,
        )
    return bigger


def _grown(
    model: Module, growth: Growth, tokens: int | Mapping[str, int] | None, seed: int, share: bool
) -> tuple[Module, Mapping[str, Recipe]]:
    """Grow one of our models, or a user's own module. Also returns the recipe of each parameter."""
    if hasattr(model, "trunks"):
        need(tokens is None, "tokens is for a module of your own: give qkv_tokens, proj_tokens or ffn_tokens")
        plan = plan_for(cast(LanguageModel, model), growth, seed)
        refuse_frozen(model, plan.recipes)
        return cast(Module, apply_plan(cast(LanguageModel, model), plan, share=share)), plan.recipes
    rule, tau = growth.new_tokens or "segment", growth.tau
    only = dataclasses.replace(growth, new_tokens=None, tau=None) == Growth()
    if tokens is None or not only or not isinstance(rule, str) or not isinstance(tau, str | None):
        raise UserError(
            f"{type(model).__name__} is a module of your own: give tokens=N or tokens={{LAYER: N}}, and with it "
            "new_tokens and tau as one word each; the other sizes belong to our models"
        )
    plans = plan_layers(model, tokens, rule, tau)
    recipes = recipes_of(model, plans, rule)
    refuse_frozen(model, recipes)
    return grow_layers(model, plans, rule, seed, in_place=share), recipes


def refuse_frozen(model: nn.Module, recipes: Mapping[str, Recipe]) -> None:
    """Refuse to append rows to a frozen parameter: they would never learn."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for recipe in recipes.values():
        need(
            recipe.old not in frozen or recipe.new_rows <= 0,
            f"'{recipe.old}' is frozen, so new rows that are appended to it would never learn: grow by segments, or "
            "unfreeze it first",
        )


def plan_for(model: LanguageModel, growth: Growth, seed: int = 0) -> Plan:
    """Plan a growth of this model, numbered after those in its history."""
    names = [name for name, _ in model.named_parameters()]
    return plan_growth(model.config, names, growth, ends=model.ends, seed=seed, number=len(model.history))


def apply_plan(model: Model, plan: Plan, *, share: bool = False, build: Callable | None = None) -> Model:
    """Build the grown model, by its class or by `build`. A parameter is frozen where the old one was."""
    old = dict(model.named_parameters())
    made: dict[str, Tensor] = {}
    for name, tensor in make_tensors(plan, old):
        same = tensor is old.get(plan.recipes[name].old or "")
        made[name] = tensor.detach().clone() if same and not share else tensor
    new = with_tensors(model, plan.config, made, plan.event, build)
    for name, parameter in new.named_parameters():
        kept = plan.recipes[name].old
        parameter.requires_grad_(kept is None or old[kept].requires_grad)
    return new


def with_tensors(
    model: Model, config: ModelConfig, tensors: Mapping[str, Tensor], event: dict, build: Callable | None = None
) -> Model:
    """Build a model like this one around other tensors, without a copy: Parameters stay the same objects."""
    attached = "" if event["what"] == "merge_adapters" else ", ".join(getattr(model, "adapters", {}))
    need(not attached, f"adapters are attached ({attached}): merge them first, or take the base alone")
    with torch.device("meta"):
        new = (build or type(model))(config)
    frozen = [t for t in tensors.values() if isinstance(t, nn.Parameter) and not t.requires_grad]
    new.load_state_dict(tensors, assign=True)
    for parameter in frozen:
        parameter.requires_grad_(False)  # load_state_dict turned it on
    new.history, new.compute_dtype = [*model.history, event], model.compute_dtype
    for now, was in zip(new.trunks().values(), model.trunks().values(), strict=True):
        now.active = {name: weight for name, weight in was.active.items() if name in now.config.switch_names()}
    for beside in ("images", "tokenizer_json", "codes"):
        if hasattr(model, beside):
            setattr(new, beside, getattr(model, beside))
    return new.train(model.training)


def slice(model: Model, *, segments: int, on: str = "") -> Model:
    """Return the model of the first segments of every layer: a view, whose Parameters are those of the whole model.

    A layer with fewer segments keeps all. After growth by segments this is the small model, with what it learned since.

    >>> from tokenformer.config import ModelConfig
    >>> from tokenformer.models import build
    >>> config = ModelConfig(layers=1, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=[64, 64], vocab=128)
    >>> model = build(config)
    >>> small = slice(model, segments=1)
    >>> small.config.ffn_tokens, small.embedding.weight is model.embedding.weight
    (64, True)
    """
    refuse_foreign(model)
    need(segments > 0, f"segments is {segments}: a model needs at least one")
    trunk = trunk_of(model.config, on)
    need(trunk.kind == "tokenformer", f"kind {trunk.kind} has no segments to choose from")
    cut = {which: [s[:segments] for s in layers] for which, layers in table(trunk).items()}

    def is_kept(name: str) -> bool:
        found = parse(name, model.ends)
        return found.segment is None or found.trunk != on or found.segment < segments

    parameters = {name: p for name, p in model.named_parameters() if is_kept(name)}
    event = {"what": "slice", "segments": segments, "number": len(model.history)}
    return with_tensors(model, model.config.with_trunk(on, with_table(trunk, cut)), parameters, event)
