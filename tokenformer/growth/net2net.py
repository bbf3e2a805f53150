"""Rivals of growth by tokens: Net2Net widening, the block form of the TokenFormer paper, stacking of blocks.

Unusual: the outgoing weights of a unit are divided among its copies unequally, by noise that sums to zero over the
copies. The function stays the same, and the copies can become different in training (HyperCloning's idea).
"""

import dataclasses
from collections.abc import Sequence

from tokenformer.config import ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.growth.recipes import Copied, Plan, Size, Widened
from tokenformer.growth.shape import sizes, table, with_table
from tokenformer.models.names import Name
from tokenformer.strict import need


def plan_widening(config: ModelConfig, names: Sequence[Name], growth: Growth) -> Plan:
    """Plan a wider model by copying units. Exact where the new dim is a whole multiple (whole heads are copied, so
    rotary positions stay right), and for any `ffn_dim` alone; other ratios move LayerNorm's statistics.
    `widen: block` is the paper's form and preserves nothing.

    >>> tiny = ModelConfig(kind="transformer", layers=1, dim=32, heads=4)
    >>> wider = plan_widening(tiny, [], Growth(dim=64))
    >>> wider.config.dim, wider.config.heads, wider.config.mlp_dim, wider.exact
    (64, 8, 256, True)
    """
    rule, dim, ffn_dim = growth.widen or "net2net", growth.dim, growth.ffn_dim
    need(rule in ("net2net", "block"), f"widen is '{rule}', but must be net2net or block")
    need(
        config.of == "language" and not growth.on,
        "widening is for language models, whose embedding, norm and head it knows: give tokens or layers",
    )
    need(growth.alone("dim", "ffn_dim"), "widening is a growth of its own: grow tokens and layers in another one")
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
    recipes = {name.text: _widened(name, config, stream, keys, hidden, rule, growth.copy_noise) for name in names}
    event = {"what": "widen", "rule": {"width": rule}, "tau": {}, "new_layers": [], "noise": growth.copy_noise}
    event |= {"before": sizes(config) | {"dim": config.dim}, "after": sizes(final) | {"dim": wide}}
    return Plan(final, recipes, event, exact=rule == "net2net" and wide % config.dim == 0)


def _widened(
    name: Name, config: ModelConfig, stream: Size, keys: Size, hidden: Size, rule: str, noise: float
) -> Widened:
    """The recipe of one parameter, from its role and from what it reads and writes."""
    rows: Size | None = None
    columns: Size | None = None
    divide: str | None = None
    kind, end = name.role.kind, name.layer is None
    if kind in ("one", "zero"):
        rows, divide = stream, "rows" if config.tied and end else None  # the tied head reads the final norm
    elif kind == "table":
        columns, divide = stream, "columns" if name.part == "head" else None
    elif kind == "key":
        columns, divide = stream, "columns"  # proj reads heads, which are as many as the stream has units
    elif kind == "value":
        columns = stream
    else:
        sides = {"query": stream, "key": keys, "value": keys, "up": hidden, "gate": hidden}
        rows, columns = sides.get(name.projection, stream), hidden if name.projection == "down" else stream
        divide = "columns"
    rows, columns = (None if side is None or side[0] == side[1] else side for side in (rows, columns))
    return Widened(name.text, rows, columns, divide, rule == "block", noise)


def plan_stacking(config: ModelConfig, names: Sequence[Name], growth: Growth) -> Plan:
    """Plan a deeper model by copying the whole stack: block l is old block l mod L. Changes the function.

    >>> plan_stacking(ModelConfig(kind="transformer", layers=2, dim=32, heads=4), [], Growth(layers=4)).config.layers
    4
    """
    need(growth.layers is not None and growth.alone("layers"), "stacking is a growth of its own: give layers alone")
    layers = growth.layers or 0
    need(layers > config.layers, f"layers is {layers}, but the model has {config.layers} already: give more")
    source = [layer % config.layers for layer in range(layers)]
    of_layers = {which: [s[k] for k in source] for which, s in table(config).items()}
    final = with_table(config, of_layers) if of_layers else dataclasses.replace(config, layers=layers)
    recipes: dict[str, Widened | Copied] = {name.text: Widened(name.text) for name in names}
    for layer in range(config.layers, layers):
        of = [name for name in names if name.trunk == growth.on and name.layer == source[layer]]
        recipes |= {name._replace(layer=layer).text: Copied(name.text) for name in of}
    event = {"what": "stack", "rule": {"layers": "stack"}, "tau": {}}
    event |= {"new_layers": list(range(config.layers, layers)), "before": sizes(config), "after": sizes(final)}
    return Plan(final, recipes, event, exact=False)
