"""Collectives of token parallelism, and differentiable functions that call one in forward and another in backward.

Unusual: they are PyTorch's functional ones, which torch.compile can see. Legend: R ranks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

OPS = torch.ops._c10d_functional  # collectives that torch.compile can see


@dataclasses.dataclass(frozen=True)
class Team:
    """The ranks that share a layer's parameter tokens."""

    group: Any  # its name
    rank: int
    ranks: int
    whole: bool  # each rank holds whole segments


def same_tensor(x: Tensor, group: Any, ranks: int) -> Tensor:
    return x.view_as(x)


def sum_over_ranks(x: Tensor, group: Any, ranks: int) -> Tensor:
    return OPS.wait_tensor(OPS.all_reduce(x.contiguous(), "sum", group))


def stack_ranks(x: Tensor, group: Any, ranks: int) -> Tensor:
    """All-gather (…) of each rank into (R, …)."""
    return OPS.wait_tensor(OPS.all_gather_into_tensor(x.contiguous(), ranks, group)).view(ranks, *x.shape)


def _gather_channels(x: Tensor, group: Any, ranks: int) -> Tensor:
    """All-gather (…, C) of each rank into (…, R·C)."""
    return stack_ranks(x, group, ranks).movedim(0, -2).flatten(-2)


def _scatter_channels(x: Tensor, group: Any, ranks: int) -> Tensor:
    """Reduce-scatter (…, R·C) of each rank: the sum of this rank's (…, C)."""
    by_rank = x.unflatten(-1, (ranks, -1)).movedim(-2, 0).contiguous()
    return OPS.wait_tensor(OPS.reduce_scatter_tensor(by_rank, "sum", ranks, group)).view(by_rank.shape[1:])


COLLECTIVES = {"same": same_tensor, "sum": sum_over_ranks, "gather": _gather_channels, "scatter": _scatter_channels}


class Collective(torch.autograd.Function):
    """One collective in the forward pass, another in the backward pass, both by name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, ranks: int, forward: str, backward: str) -> Tensor:
        ctx.group, ctx.ranks, ctx.back = group, ranks, backward
        return COLLECTIVES[forward](x, group, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return COLLECTIVES[ctx.back](gradients[0], ctx.group, ctx.ranks), None, None, None, None


def _collective(forward: str, backward: str) -> Callable[[Tensor, Team], Tensor]:
    return lambda x, team: cast(Tensor, Collective.apply(x, team.group, team.ranks, forward, backward))


# x is the same on all ranks, and each computes its own part with it: gradients are all-reduced
copied = _collective("same", "sum")
# All-reduce each rank's part; the sum, and so its gradient, is the same on all ranks
summed = _collective("sum", "same")
# All-reduce each rank's statistic, which every rank then uses for its own part: gradients are all-reduced too
total = _collective("sum", "sum")
# All-gather the channels, which every rank then uses for its own part: gradients are reduce-scattered
gathered = _collective("gather", "scatter")
# Reduce-scatter the channels: gradients are gathered
scattered = _collective("scatter", "gather")


class LogTotal(torch.autograd.Function):
    """`total` for logarithms of sums of exponentials."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        total = stack_ranks(own, group, ranks).logsumexp(0)
        ctx.save_for_backward((own - total).exp())
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (share,) = ctx.saved_tensors
        return sum_over_ranks(gradients[0], ctx.group, ctx.ranks) * share, None, None


class Stacked(torch.autograd.Function):
    """All-gather each rank's tensor into (R, …), from which every rank computes the same: no gradient is sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, ranks: int, rank: int) -> Tensor:
        ctx.rank = rank
        return stack_ranks(x, group, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0][ctx.rank], None, None, None
