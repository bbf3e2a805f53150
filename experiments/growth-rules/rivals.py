"""Rivals of growth by tokens: Net2Net widening, the block form of the TokenFormer paper, stacking of blocks.

Unusual: the outgoing weights of a unit are divided among its copies unequally, by noise that sums to zero over the
copies. The function stays the same, and the copies can become different in training (HyperCloning's idea).
"""

import dataclasses

import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.growth.make import rms
from tokenformer.growth.model import with_tensors
from tokenformer.growth.shape import sizes, table, with_table
from tokenformer.models import LanguageModel
from tokenformer.models.init import draw, initial
from tokenformer.models.names import Name, parse
from tokenformer.strict import need

Size = tuple[int, int]  # units before and after; unit j after is a copy of unit j mod before


@dataclasses.dataclass(frozen=True)
class Copies:
    """Which sides of a parameter are copied, and which of them (`rows` or `columns`) reads copied units."""

    rows: Size | None
    columns: Size | None
    divide: str | None


def widen(
    model: LanguageModel,
    dim: int | None = None,
    ffn_dim: int | None = None,
    *,
    block: bool = False,
    noise: float = 0.1,
    seed: int = 0,
) -> LanguageModel:
    """Return a wider model whose units are copies. The function stays where the new dim is a whole multiple (whole
    heads are copied, so rotary positions stay right), and for any `ffn_dim` alone; other ratios move LayerNorm's
    statistics. `block` is the paper's form, the old matrix in a corner of a new one, and preserves nothing. `noise`:
    how much the copies of a unit differ, as a share of the RMS; what reads them sees none of it.
    """
    config = model.config
    wide = config.dim if dim is None else dim
    need(wide >= config.dim, f"dim is {wide}, but the model has {config.dim} already: give more")
    need(wide % config.head_dim == 0, f"dim is {wide}: give a multiple of {config.head_dim}: heads are copied whole")
    heads = wide // config.head_dim
    kv, rest = divmod((config.kv_heads or config.heads) * heads, config.heads)
    need(rest == 0, f"among {heads} heads {config.kv_heads} key/value heads do not spread evenly: give another dim")
    changes: dict = {"dim": wide, "heads": heads, "kv_heads": kv if config.kv_heads else None}
    hidden: Size = (0, 0)
    if config.kind == "tokenformer":
        need(ffn_dim is None, "kind tokenformer has no ffn_dim: grow ffn_tokens")
    else:
        hidden = (config.mlp_dim, ffn_dim or round(config.mlp_dim * wide / config.dim))
        need(hidden[1] >= hidden[0], f"ffn_dim is {hidden[1]}, but the model has {hidden[0]} already: give more")
        changes["ffn_dim"] = None if config.ffn_dim is None and hidden[1] == 4 * wide else hidden[1]
    need(wide > config.dim or hidden[1] > hidden[0], "the model is as wide already: give a larger dim or ffn_dim")
    final = dataclasses.replace(config, **changes)
    keys: Size = ((config.kv_heads or config.heads) * config.head_dim, kv * config.head_dim)
    tensors = {}
    for text, parameter in model.named_parameters():
        copies = copied_sides(parse(text, model.ends), config, (config.dim, wide), keys, hidden)
        key = f"growth {len(model.history)}/{text}"
        if not (copies.rows or copies.columns):
            tensors[text] = parameter.detach().clone()
        elif block:
            new = initial(text, _shape(parameter, copies), final, seed, model.ends, key).to(parameter)
            new[tuple(slice(n) for n in parameter.shape)] = parameter.detach()
            tensors[text] = new
        else:
            tensors[text] = _copy(parameter.detach(), copies, noise, seed, key)
    event = {"what": "widen", "rule": {"width": "block" if block else "net2net"}, "noise": noise}
    event |= {"before": sizes(config) | {"dim": config.dim}, "after": sizes(final) | {"dim": wide}}
    return with_tensors(model, final, tensors, event)


def copied_sides(name: Name, config: ModelConfig, stream: Size, keys: Size, hidden: Size) -> Copies:
    """Return what is copied of one parameter, from its role and from what it reads and writes."""
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
    return Copies(rows, columns, divide)


def _shape(old: Tensor, copies: Copies) -> tuple[int, ...]:
    sides = (copies.rows or (0, len(old)), copies.columns or (0, old.shape[-1]))
    return tuple([new for _, new in sides][: old.ndim])


def _copy(old: Tensor, copies: Copies, noise: float, seed: int, key: str) -> Tensor:
    """Copy rows and columns, and divide the weights that read copies."""
    for side, size in enumerate((copies.rows, copies.columns)):
        if size is not None:
            old = old.index_select(side, torch.arange(size[1], device=old.device) % size[0])
    size, side = (copies.columns, old.ndim - 1) if copies.divide == "columns" else (copies.rows, 0)
    if copies.divide is None or size is None:
        return old
    source = torch.arange(size[1]) % size[0]
    count = source.bincount(minlength=size[0]).to(old)
    per_unit = count[source.to(old.device)]
    new = old / (per_unit if side == old.ndim - 1 else per_unit[:, None])
    if noise and old.ndim == 2:
        drawn = _cancel(draw(seed, key, tuple(new.shape)).to(new), source.to(new.device), count)
        new = new + drawn * (noise * rms([new]))
    return new


def _cancel(noise: Tensor, source: Tensor, count: Tensor) -> Tensor:
    """Subtract from noise (rows, units) its mean over the copies of each unit, so that it sums to zero over them."""
    sums = torch.zeros(len(noise), len(count), dtype=noise.dtype, device=noise.device).index_add_(1, source, noise)
    return noise - (sums / count)[:, source]


def stack(model: LanguageModel, layers: int) -> LanguageModel:
    """Return a deeper model that repeats the stack: block l is a copy of old block l mod L. Changes the function."""
    config = model.config
    need(layers > config.layers, f"layers is {layers}, but the model has {config.layers} already: give more")
    source = [layer % config.layers for layer in range(layers)]
    of_layers = {which: [s[k] for k in source] for which, s in table(config).items()}
    final = with_table(config, of_layers) if of_layers else dataclasses.replace(config, layers=layers)
    tensors = {}
    for text, parameter in model.named_parameters():
        name = parse(text, model.ends)
        copies = (
            [text]
            if name.layer is None
            else [name._replace(layer=layer).text for layer in range(layers) if source[layer] == name.layer]
        )
        tensors |= {copy: parameter.detach().clone() for copy in copies}
    event = {"what": "stack", "before": sizes(config), "after": sizes(final)}
    return with_tensors(model, final, tensors, event)
