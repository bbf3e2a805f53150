"""Token parallelism: every rank holds a slice of the parameter tokens, of the heads and of the vocabulary.

Unusual: for Θ ranks exchange one number per row and segment alone, in partial.py (none where a rank holds whole
segments); q, k and v come out of one reduce-scatter that splits the heads. Modules change class, not name.
Legend: T rows, D dim, R ranks, W words.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.config_data import IGNORED
from tokenformer.errors import UserError
from tokenformer.models import LanguageModel, Pattention
from tokenformer.models.layers import Linear, guard_hooks, hooked, project
from tokenformer.models.names import Name, parse
from tokenformer.models.trunk import MLP, Attention, Block, View
from tokenformer.ops.cross_entropy import LOGITS, linear_cross_entropy
from tokenformer.parallel.collectives import Stacked, Team, copied, gathered, scattered, stack_ranks, summed
from tokenformer.parallel.layout import Split
from tokenformer.parallel.mesh import Place
from tokenformer.parallel.partial import partial_group

TILE = 64  # kernels work on this many parameter tokens at once


class TokenPattention(Pattention):
    team: Team
    of_heads: bool  # the input is split by heads

    def forward(self, x: Tensor, mask: Tensor | None = None, switches: Any = None) -> Tensor:
        assert mask is None and switches is None, "masks and switches are for one process"
        team = self.team
        whole = gathered(x, team) if self.of_heads else copied(x, team)
        (own,) = partial_group(whole, [self.parts(x.dtype)], self.theta, team)
        return summed(own, team)


class TokenLinear(Linear):
    """A linear layer over this rank's input channels: the outputs are summed."""

    team: Team

    def forward(self, input: Tensor) -> Tensor:
        return summed(super().forward(input), self.team)


class TokenAttention(Attention):
    """Attention with this rank's heads."""

    team: Team

    def qkv(self, x: Tensor, view: View) -> Sequence[Tensor]:
        layers, team = [self.query, self.key, self.value], self.team
        x = copied(x, team)
        tokens = [layer for layer in layers if isinstance(layer, Pattention)]
        if not tokens:
            return project(x, layers)
        guard_hooks()
        if any(map(hooked, tokens)):
            raise UserError(
                "a query, key or value projection carries a hook or an adapter, which under parallel.token is never "
                "called: take it off, or set parallel.token=1 (parallel.shard splits the weights too)"
            )
        outputs = partial_group(x, [layer.parts(x.dtype) for layer in tokens], tokens[0].theta, team)
        by_rank = [output.unflatten(-1, (team.ranks, -1)) for output in outputs]
        mine = scattered(torch.cat(by_rank, dim=-1).flatten(-2), team)
        return mine.split([part.shape[-1] for part in by_rank], dim=-1)


class TokenMLP(MLP):
    team: Team

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(copied(x, self.team))


class TokenEmbedding(nn.Embedding):
    team: Team
    first: int  # id of the first row

    def forward(self, input: Tensor) -> Tensor:
        row = input - self.first
        here = (row >= 0) & (row < len(self.weight))
        found = F.embedding(row.clamp(0, len(self.weight) - 1), self.weight)
        return summed(found * here[..., None], self.team)


class TokenLanguageModel(LanguageModel):
    team: Team
    cuts: tuple[int, ...]  # of the vocabulary

    def logits(self, hidden_BTD: Tensor, added_WD: Tensor | None = None) -> Tensor:
        """Return all logits on every rank, without gradients. Ids that a growth added are refused before (mesh.py)."""
        weight_WD = self.head_rows(hidden_BTD)
        sizes = [last - first for first, last in zip(self.cuts, self.cuts[1:], strict=False)]
        own = F.pad(hidden_BTD @ weight_WD.T, (0, max(sizes) - len(weight_WD)))
        every = stack_ranks(own, self.team.group, self.team.ranks)
        return torch.cat([part[..., :n] for part, n in zip(every, sizes, strict=True)], dim=-1)

    def loss(self, hidden_BTD: Tensor, labels: Tensor, added_WD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weight_WD = self.head_rows(hidden_BTD)
        hidden_BTD = copied(hidden_BTD, self.team)
        one = functools.partial(split_cross_entropy, first=self.cuts[self.team.rank], team=self.team)
        chunk = max(1, LOGITS * self.team.ranks // self.cuts[-1])  # the same on all ranks
        return linear_cross_entropy(hidden_BTD, weight_WD, labels, chunk, one)


def split_cross_entropy(hidden_TD: Tensor, weight_WD: Tensor, labels_T: Tensor, first: int, team: Team) -> Tensor:
    """Return Σ −log p(label) from the logits of a slice of the vocabulary that begins at id `first`: one all-gather."""
    logits_TW = hidden_TD @ weight_WD.T
    logits_TW = logits_TW.to(torch.promote_types(logits_TW.dtype, torch.float32))
    row_T = labels_T - first
    here_T = (row_T >= 0) & (row_T < len(weight_WD))
    label_T = logits_TW.gather(-1, row_T.clamp(0, len(weight_WD) - 1)[:, None])[:, 0] * here_T
    own = torch.stack([logits_TW.logsumexp(-1), label_T])
    every_R2T = cast(Tensor, Stacked.apply(own, team.group, team.ranks, team.rank))
    loss_T = every_R2T[:, 0].logsumexp(0) - every_R2T[:, 1].sum(0)
    return loss_T.masked_fill(labels_T == IGNORED, 0).sum()


# Which rank holds what


def even(n: int, ranks: int) -> tuple[int, ...]:
    """Return where `n` rows are cut into even parts.

    >>> even(10, 4)
    (0, 2, 5, 7, 10)
    """
    return tuple(rank * n // ranks for rank in range(ranks + 1))


def tiled(n: int, ranks: int) -> tuple[int, ...]:
    """Return cuts between tiles, if every rank gets one: ranks differ by at most one tile.

    >>> tiled(2140, 8)
    (0, 256, 512, 768, 1088, 1344, 1600, 1856, 2140)
    """
    if n < TILE * ranks:
        return even(n, ranks)
    return tuple(min(TILE * tile, n) for tile in even(-(-n // TILE), ranks))


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each segment that stays whole: the largest first, each to the rank that has least.

    >>> owners([64, 16, 16, 32], 2)
    [0, 1, 1, 1]
    """
    load, found = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        found[i] = load.index(min(load))
        load[found[i]] += sizes[i]
    return found


def token_splits(model: LanguageModel, ranks: int, whole: bool) -> dict[str, Split]:
    """Return how each parameter is split over `ranks`; `whole`: segments are not split, but distributed whole."""
    shapes = {parse(name, model.ends): tuple(p.shape) for name, p in model.named_parameters()}
    sizes: dict[str, list[int]] = {}  # of the segments of each projection
    for name, shape in shapes.items():
        if name.segment is not None:
            sizes.setdefault(name._replace(segment=0).text, []).append(shape[0])

    def split(name: Name, shape: tuple[int, ...]) -> Split:
        if name.segment is not None:
            if not whole:
                return Split(shape, 0, tiled(shape[0], ranks))
            owner = owners(sizes[name._replace(segment=0).text], ranks)[name.segment]
            return Split(shape, 0, (0,) * (owner + 1) + (shape[0],) * (ranks - owner))
        if not name.role.decays:
            return Split(shape)  # norms are replicated
        dim = int(name.role.kind == "outward")  # the input of these is split
        return Split(shape, dim, even(shape[dim], ranks))

    return {name.text: split(name, shape) for name, shape in shapes.items()}


def split_tokens(model: LanguageModel, place: Place) -> dict[str, Split]:
    """Split a model on the meta device in place, and return how."""
    c, ranks = model.config, place.degrees.token
    whole = place.config.segments == "per-rank" and c.kind == "tokenformer"
    team = Team(place.groups["token"].group_name, place.token, ranks, whole)
    splits = token_splits(model, ranks, whole)

    def convert(module: nn.Module, kind: type, **more: Any) -> None:
        module.__class__ = kind
        for name, value in {"team": team, **more}.items():
            setattr(module, name, value)

    for block in cast(Sequence[Block], model.blocks):
        convert(block.attention, TokenAttention)
        for name in ("query", "key", "value", "proj"):
            layer = getattr(block.attention, name)
            if isinstance(layer, Pattention):
                convert(layer, TokenPattention, of_heads=True)
            elif name == "proj":
                convert(layer, TokenLinear)
        if isinstance(block.ffn, Pattention):
            convert(block.ffn, TokenPattention, of_heads=False)
        else:
            convert(cast(MLP, block.ffn).down, TokenLinear)
            convert(block.ffn, TokenMLP)
    vocabulary = splits["embedding.weight"].cuts
    convert(model.embedding, TokenEmbedding, first=vocabulary[place.token])
    convert(model, TokenLanguageModel, cuts=vocabulary)
    for name, split in splits.items():
        owner, _, own = name.rpartition(".")
        local = torch.empty(split.local(place.token), device="meta")
        setattr(model.get_submodule(owner), own, nn.Parameter(local))
    return splits
