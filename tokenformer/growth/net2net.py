"""Other ways to grow, to compare with: Net2Net widening, the block form of the TokenFormer paper, stacking of blocks.

Unusual: copies of a unit share its outgoing weights unequally, by noise that cancels between them, so that they can
part in training while the function stays the same (HyperCloning's idea; with equal copies they would stay equal).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.growth.plan import ALL, Plan, rms
from tokenformer.growth.shape import sizes, table, with_table
from tokenformer.models import LanguageModel
from tokenformer.models.init import draw, initial
from tokenformer.strict import need

Size = tuple[int, int]  # units before and after; unit j after is a copy of unit j mod before


@dataclass(frozen=True)
class Widened:
    """One parameter of a wider model: rows and columns copied, weights that read copies divided between them."""

    old: str
    rows: Size | None = None
    columns: Size | None = None
    divide: str | None = None  # `rows` or `columns`: the side that reads copied units
    block: bool = False  # the paper's form: the old matrix in a corner, a new model's values elsewhere
    noise: float = 0.0  # relative to the RMS, summing to zero over the copies of a unit

    @property
    def new_rows(self) -> int:
        return ALL if self.rows or self.columns else 0

    def reads(self) -> set[str]:
        return {self.old}

    def grow_state(self, entry: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Moments of a divided weight are not those of the whole: they begin anew."""
        return None if self.new_rows else entry

    def make(self, name: str, tensors: Mapping[str, Tensor], plan: Plan) -> Tensor:
        old = tensors[self.old].detach()
        if not self.new_rows:
            return tensors[self.old]
        key = f"growth {plan.number}/{name}"
        if self.block:
            shape = [new for _, new in (self.rows or (0, old.shape[0]), self.columns or (0, old.shape[-1]))][: old.ndim]
            new = initial(name, tuple(shape), plan.config, plan.seed, LanguageModel.ends, key).to(old)
            new[tuple(slice(n) for n in old.shape)] = old
            return new
        for dim, size in ((0, self.rows), (1, self.columns)):
            if size is not None:
                old = old.index_select(dim, torch.arange(size[1], device=old.device) % size[0])
        size, dim = (self.columns, old.ndim - 1) if self.divide == "columns" else (self.rows, 0)
        if self.divide is None or size is None:
            return old
        source = torch.arange(size[1]) % size[0]
        count = source.bincount(minlength=size[0]).to(old)
        per_unit = count[source.to(old.device)]
        new = old / (per_unit if dim == old.ndim - 1 else per_unit[:, None])
        if self.noise and old.ndim == 2:
            new = new + _cancelling(draw(plan.seed, key, tuple(new.shape)).to(new), source.to(new.device), count) * (
                self.noise * rms([new])
            )
        return new


def _cancelling(noise: Tensor, source: Tensor, count: Tensor) -> Tensor:
    """Noise (rows, units) less its mean over the copies of each unit: what reads the copies reads nothing of it."""
    sums = torch.zeros(len(noise), len(count), dtype=noise.dtype, device=noise.device).index_add_(1, source, noise)
    return noise - (sums / count)[:, source]


@dataclass(frozen=True)
class Copied:
    """A block that is there twice: its own tensors, and its own copy of the optimizer's state."""

    old: str
    new_rows = ALL

    def reads(self) -> set[str]:
        return {self.old}

    def make(self, name: str, tensors: Mapping[str, Tensor], plan: Plan) -> Tensor:
        return tensors[self.old].detach().clone()

    def grow_state(self, entry: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: t.clone() for key, t in entry.items()}


def widen(
    config: ModelConfig,
    names: Iterable[str],
    *,
    dim: int | None = None,
    ffn_dim: int | None = None,
    rule: str = "net2net",
    noise: float = 0.1,
    seed: int = 0,
    number: int = 0,
) -> Plan:
    """Wider by copies of units. Exact where the new dim is a whole multiple (heads are copied whole, so that rotary
    positions stay theirs), and for any `ffn_dim` alone; other ratios move LayerNorm's statistics. `rule="block"` is the
    paper's form and preserves nothing.

    >>> tiny = ModelConfig(kind="transformer", layers=1, dim=32, heads=4)
    >>> wider = widen(tiny, [], dim=64)
    >>> wider.config.dim, wider.config.heads, wider.config.mlp_dim, wider.exact
    (64, 8, 256, True)
    """
    need(rule in ("net2net", "block"), f"widen is '{rule}', but must be net2net or block")
    need(dim is not None or ffn_dim is not None, "nothing to widen: give dim or ffn_dim")
    wide = config.dim if dim is None else dim
    need(wide >= config.dim, f"dim is {wide}, but the model has {config.dim} already: give more")
    need(
        wide % config.head_dim == 0, f"dim is {wide}: give a multiple of {config.head_dim}, for heads are copied whole"
    )
    heads = wide // config.head_dim
    kv, rest = divmod((config.kv_heads or config.heads) * heads, config.heads)
    need(
        rest == 0, f"dim {wide} gives {heads} heads, among which {config.kv_heads} key/value heads do not spread evenly"
    )
    changes: dict = {"dim": wide, "heads": heads, "kv_heads": kv if config.kv_heads else None}
    hidden = (0, 0)
    if config.kind == "tokenformer":
        need(ffn_dim is None, "kind tokenformer has no ffn_dim: give ffn_tokens")
    else:
        hidden = (config.mlp_dim, ffn_dim or round(config.mlp_dim * wide / config.dim))
        need(hidden[1] >= hidden[0], f"ffn_dim is {hidden[1]}, but the model has {hidden[0]} already: give more")
        changes["ffn_dim"] = None if config.ffn_dim is None and hidden[1] == 4 * wide else hidden[1]
    need(wide > config.dim or hidden[1] > hidden[0], "the model is as wide already: give a larger dim or ffn_dim")
    final = dataclasses.replace(config, **changes)
    stream: Size = (config.dim, wide)
    keys: Size = ((config.kv_heads or config.heads) * config.head_dim, kv * config.head_dim)
    recipes = {name: _widened(name, config, stream, keys, hidden, rule, noise) for name in names}
    event = {"what": "widen", "number": number, "rule": {"width": rule}, "tau": {}, "seed": seed, "new_layers": []}
    event |= {"noise": noise, "before": sizes(config) | {"dim": config.dim}, "after": sizes(final) | {"dim": wide}}
    return Plan(final, recipes, event, exact=rule == "net2net" and wide % config.dim == 0)


def _widened(
    name: str, config: ModelConfig, stream: Size, keys: Size, hidden: Size, rule: str, noise: float
) -> Widened:
    """What happens to one parameter, by its name."""
    rows: Size | None = None
    columns: Size | None = None
    divide: str | None = None
    if name.endswith(("norm.weight", "norm.bias")):
        rows, divide = (
            stream,
            "rows" if config.tied and not name.startswith("blocks.") else None,
        )  # the tied head reads r
    elif name in ("embedding.weight", "head.weight"):
        columns, divide = stream, "columns" if name == "head.weight" else None
    elif name.endswith("key_tokens"):
        columns, divide = stream, "columns"  # proj reads heads, which are as many as the stream has units
    elif name.endswith("value_tokens"):
        columns = stream
    elif match := re.search(r"(query|key|value|proj|up|gate|down)\.weight$", name):
        sides = {"query": stream, "key": keys, "value": keys, "up": hidden, "gate": hidden}
        rows, columns, divide = sides.get(match[1], stream), hidden if match[1] == "down" else stream, "columns"
    rows, columns = (None if side is None or side[0] == side[1] else side for side in (rows, columns))
    return Widened(name, rows, columns, divide, rule == "block", noise)


def stack(config: ModelConfig, names: Iterable[str], *, layers: int, seed: int = 0, number: int = 0) -> Plan:
    """Deeper by copies of the whole stack: block l of the new model is block l mod L. Changes the function.

    >>> stack(ModelConfig(kind="transformer", layers=2, dim=32, heads=4), [], layers=4).config.layers
    4
    """
    need(layers > config.layers, f"layers is {layers}, but the model has {config.layers} already: give more")
    source = [layer % config.layers for layer in range(layers)]
    of_layers = {which: [s[k] for k in source] for which, s in table(config).items()}
    final = with_table(config, of_layers) if of_layers else dataclasses.replace(config, layers=layers)
    names = list(names)
    recipes: dict[str, Widened | Copied] = {name: Widened(name) for name in names}
    for layer, old in enumerate(source):
        if layer >= config.layers:
            of = [name for name in names if name.startswith(f"blocks.{old}.")]
            recipes |= {name.replace(f"blocks.{old}.", f"blocks.{layer}.", 1): Copied(name) for name in of}
    event = {"what": "stack", "number": number, "rule": {"layers": "stack"}, "tau": {}, "seed": seed}
    event |= {"new_layers": list(range(config.layers, layers)), "before": sizes(config), "after": sizes(final)}
    return Plan(final, recipes, event, exact=False)
