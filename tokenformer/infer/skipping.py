"""Value tokens that say nothing are not read: in a step for one text, tokens whose weight lies in a certain range count
as the mean of that range.

Unusual: gelu puts most weights between −0.17, its least value, and 0, rather than near 0. So what is left out of
y = Σ (S − c)·V + c·ΣV are tokens whose S is near c; c·ΣV is known beforehand. Ranges are found on a text, one for each
projection of each layer, so that each skips the same share (experiments/skip).
Legend: T rows, M members (q, k, v), N tokens of each, E output dim; S = Θ(x·Kᵀ), the weights.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.infer.packed import Packed, PackedTokens
from tokenformer.models import LanguageModel

SAMPLES = 1 << 18  # weights of a projection by which its range is found


class Skip(NamedTuple):
    """Weights from `low` to `high` count as their centre; all (M,), one per member."""

    low_M: Tensor
    high_M: Tensor
    centre_M: Tensor

    def kept(self, weight_TMN: Tensor) -> Tensor:
        return (weight_TMN < self.low_M[:, None]) | (weight_TMN > self.high_M[:, None])


def find_range(weights: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return low, high and mean of the range that holds this share of weights and in which they differ least from it.

    >>> [round(x.item(), 6) for x in find_range(torch.tensor([-0.1, 2.0, -0.12, 0.0, 1.0, -0.11]), 0.5)]
    [-0.12, -0.1, -0.11]
    """
    v = weights.flatten().double().sort().values
    k = max(1, round(share * len(v)))
    first, second = (torch.cat([v.new_zeros(1), powers.cumsum(0)]) for powers in (v, v.square()))
    at = ((second[k:] - second[:-k]) - (first[k:] - first[:-k]).square() / k).argmin()
    return v[at].float(), v[at + k - 1].float(), ((first[at + k] - first[at]) / k).float()


class Skipping:
    """A `PackedTokens` that skips; as long as it has no `skip` it finds one in what it computes."""

    def __init__(self, packed: PackedTokens, share: float) -> None:
        self.packed, self.share = packed, share
        self.skip: Skip | None = None

    def __call__(self, x: Tensor, switches: Any = None) -> Tensor:
        weight = self.packed.weights(x)
        if self.skip is None:
            weight_TMN = weight.flatten(0, -3)
            every = max(1, weight_TMN[:, 0].numel() // SAMPLES)
            found = [find_range(weight_TMN[::every, m], self.share) for m in range(self.packed.members)]
            self.skip = Skip(*map(torch.stack, zip(*found, strict=True)))
        else:
            weight = torch.where(self.skip.kept(weight), weight, self.skip.centre_M[:, None])
        return self.packed.sums(weight)


def projections(model: LanguageModel) -> Iterator[Any]:
    """Yield what holds the packed projections of each layer: q, k and v; proj; ffn."""
    for block in model.blocks:
        part: Any = block
        yield from (part.attention, part.attention.proj, part.ffn)


@torch.no_grad()
def skipping(model: LanguageModel, dtype: torch.dtype, ids_BT: Tensor, share: float) -> tuple[Packed, list[Skip]]:
    """Return the packed model that skips this share of value tokens, by ranges found on ids, and the ranges of q, k and
    v, proj, ffn of the first layer, of the second, …
    """
    packed, skips = Packed(model, dtype), []
    for holder in projections(packed.model):
        holder.packed = Skipping(holder.packed, share)
    packed.model.hidden(ids_BT)
    for holder in projections(packed.model):
        skips.append(holder.packed.skip)
    return packed, skips


def check_skip(model: LanguageModel, share: float) -> None:
    """Refuse a share that is none, and models that cannot skip."""
    if not 0 < share < 1:
        raise UserError(f"skip is {share:g}: give the share of value tokens that is not read, such as 0.5")
    if model.config.kind != "tokenformer" or model.config.switch_names():
        raise UserError("only models of parameter tokens without adapters can skip value tokens: leave skip out")
