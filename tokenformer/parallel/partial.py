"""Pattention with a slice of each segment: what a rank's parameter tokens add to the outputs, before these are summed.

Unusual: one number per row and segment is exchanged forward and one backward, for all members together, and none where
each rank holds whole segments. The reference is the specification; kernels do the same in two halves, with the exchange
between them. Legend: T rows, D d_in, N parameter tokens of a slice, E d_out, S segments.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tokenformer.ops.pattention import Segments, backend, fused, normalise, statistic
from tokenformer.parallel.collectives import LogTotal, Team, stack_ranks, sum_over_ranks, total


def partial_group(x_TD: Tensor, members: Sequence[Segments], theta: str, team: Team) -> list[Tensor]:
    """Compute `pattention_group` with a slice of each segment, by the kernels where they run."""
    if backend(x_TD, theta=theta) != "triton":
        return reference(x_TD, members, theta, team)
    if team.whole:
        return fused(x_TD, members, theta)
    from tokenformer.ops.kernels import pattention as kernels

    flat_TD, layout, keys, values = kernels.pack(x_TD, members, theta)
    outputs = Halves.apply(flat_TD, layout, team.group, team.ranks, keys, *values)
    return [out.view(*x_TD.shape[:-1], out.shape[-1]) for out in cast(tuple[Tensor, ...], outputs)]


def reference(x_TD: Tensor, members: Sequence[Segments], theta: str, team: Team) -> list[Tensor]:
    keys = [key_ND for segments in members for key_ND, _, _ in segments]
    scores = (x_TD @ torch.cat(keys).T).split([len(key_ND) for key_ND in keys], dim=-1)
    totals: Sequence[Tensor | None] = [None] * len(scores)
    if not team.whole:  # of all members and segments at once
        own = torch.cat([statistic(score_TN, theta) for score_TN in scores], dim=-1)
        every = LogTotal.apply(own, team.group, team.ranks) if theta == "softmax" else total(own, team)
        totals = cast(Tensor, every).split(1, dim=-1)
    pairs, outputs = iter(zip(scores, totals, strict=True)), []
    for segments in members:
        parts = []
        for _, value_NE, tau in segments:
            score_TN, total_T1 = next(pairs)
            parts.append(normalise(score_TN, theta, tau, total_T1=total_T1).to(value_NE.dtype) @ value_NE)
        outputs.append(sum(parts[1:], parts[0]))
    return outputs


class Halves(torch.autograd.Function):
    """The kernels' `Fused` with an exchange in the middle of Θ and of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: tuple, group: Any, ranks: int, keys: Tensor, *values: Tensor):
        from tokenformer.ops.kernels.pattention import columns

        sizes, members, _, kind = layout
        scores = x @ keys.T
        own_TS = torch.ops.tokenformer.theta_sums(scores, *layout)
        if kind == "softmax":
            total_TS = stack_ranks(own_TS, group, ranks).logsumexp(0)
        else:
            total_TS = sum_over_ranks(own_TS, group, ranks)
        weights = torch.ops.tokenformer.theta_rest(scores, total_TS, *layout)
        ctx.save_for_backward(x, keys, scores, total_TS, *values)
        ctx.layout, ctx.group, ctx.ranks = layout, group, ranks
        return tuple(weights[:, place] @ v for place, v in zip(columns(sizes, members), values, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        from tokenformer.ops.kernels.pattention import columns

        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("the kernels have no second derivative: set TOKENFORMER_PATTENTION=reference")
        x, keys, scores, total_TS, *values = ctx.saved_tensors
        sizes, members, _, _ = ctx.layout
        own = [grad.contiguous() for grad in grads]
        given = [g @ v.T for g, v in zip(own, values, strict=True)], scores, total_TS  # gradients of Θ
        sum_TS = torch.ops.tokenformer.theta_backward_sums(*given, *ctx.layout)
        sum_TS = sum_over_ranks(sum_TS, ctx.group, ctx.ranks)
        weights, slopes = torch.ops.tokenformer.theta_backward_rest(*given, sum_TS, *ctx.layout)
        wanted = ctx.needs_input_grad  # no product is computed for what is frozen
        dvalues = [
            weights[:, place].T @ g if learns else None
            for place, g, learns in zip(columns(sizes, members), own, wanted[5:], strict=True)
        ]
        dx, dkeys = slopes @ keys if wanted[0] else None, slopes.T @ x if wanted[4] else None
        return dx, None, None, None, dkeys, *dvalues
