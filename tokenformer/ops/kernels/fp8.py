"""Pattention for training with products in fp8. The specification is `reference` of ops/fp8.py.

Unusual: Θ's kernels write fp8 themselves (that of the gradient where one program has a whole row), and where Θ ignores
the scale of a row (l2_norm_gelu) that of x is never undone. Other casts are plain PyTorch, which torch.compile fuses
with what comes before. Kept for backward is what bf16 keeps: weight gradients are computed in bf16, from Θ recomputed.
Legend: T rows of data, D d_in, E d_out, W columns of scores.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenformer.ops.fp8 import E4M3, multiply, round_to, scale_of, scale_of_theta
from tokenformer.ops.kernels.pattention import (
    LAYOUT,
    columns,
    in_one_block,
    launch_backward,
    launch_forward,
    output_gradients,
    pack,
    per_segment,
    rotate_first_two,
    value_gradients,
)
from tokenformer.ops.pattention import THETAS

torch.library.define("tokenformer::theta_fp8", f"(Tensor scores, float scale, {LAYOUT}) -> (Tensor, Tensor)")
GIVEN = "Tensor[] grads, Tensor scores, Tensor totals, Tensor factors"
torch.library.define("tokenformer::theta_fp8_backward", f"({GIVEN}, {LAYOUT}) -> (Tensor, Tensor, Tensor, Tensor)")


@torch.library.impl("tokenformer::theta_fp8", ("cuda", "cpu"))
def theta_fp8(scores: Tensor, scale: float, *layout: Any) -> tuple[Tensor, Tensor]:
    """Θ of scores (T, W), times `scale`, in fp8, and the statistics of their rows."""
    out, totals = _empty(scores), per_segment(scores, layout[0])
    launch_forward(scores, out, totals, layout, scale=scale)
    return out.to(E4M3), totals


@torch.library.impl("tokenformer::theta_fp8_backward", ("cuda", "cpu"))
def theta_fp8_backward(
    grads: Sequence[Tensor], scores: Tensor, totals: Tensor, factors: Tensor, *layout: Any
) -> tuple[Tensor, ...]:
    """`theta_backward` of gradients that are to be multiplied by `factors` (T, members), and the gradient of the scores
    in fp8 with the scales of its rows; these are empty where no program has a whole row.
    """
    out, slopes = torch.empty_like(scores), torch.empty_like(scores)
    rounded = (_empty(scores), torch.empty_like(factors)) if in_one_block(layout[0]) else ()
    launch_backward(grads, scores, totals, totals, (out, slopes), layout, factors=factors, rounded=rounded)
    slopes8, scales = rounded or (scores.new_empty(0, scores.shape[1]), factors.new_empty(0, factors.shape[1]))
    return out, slopes, slopes8.to(E4M3), scales


def _empty(scores: Tensor) -> Tensor:
    """For fp8 numbers; fp32 in Triton's interpreter, which rounds to fp8 wrongly."""
    return torch.empty_like(scores, dtype=E4M3 if scores.is_cuda else None)


def _fake(scores: Tensor, scale: float, sizes: Sequence[int], *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scores, dtype=E4M3), per_segment(scores, sizes)


def _fake_backward(
    grads: Any, scores: Tensor, totals: Tensor, factors: Tensor, sizes: Sequence[int], *rest: Any
) -> tuple[Tensor, ...]:
    rows = len(scores) if in_one_block(sizes) else 0
    rounded, scales = scores.new_empty(rows, scores.shape[1], dtype=E4M3), factors.new_empty(rows, factors.shape[1])
    return torch.empty_like(scores), torch.empty_like(scores), rounded, scales


torch.library.register_fake("tokenformer::theta_fp8", _fake)
torch.library.register_fake("tokenformer::theta_fp8_backward", _fake_backward)


class Fused(torch.autograd.Function):
    """As that of kernels/pattention.py. `rest`: each member's values, then what `quantise` makes of keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        head_dim: int,
        layout: tuple,
        onto: str,
        keys: Tensor,
        *rest: Tensor,
    ):
        sizes, members, taus, kind = layout
        one, (keys8, _, undo), *values8 = _split(rest[len(members) :])
        row, up = scale_of(x, rows=True), scale_of_theta(kind, taus)
        scores = multiply(round_to(x, row), keys8, (one, undo), x.dtype)
        if not THETAS[kind].scale_free:
            scores = scores / row.to(x.dtype)
        weights, totals = torch.ops.tokenformer.theta_fp8(scores, up, *layout)
        ctx.save_for_backward(x, cos, sin, row, scores, totals, *rest[len(members) :])
        ctx.layout, ctx.onto, ctx.head_dim = layout, onto, head_dim
        ctx.set_materialize_grads(False)
        down = torch.full_like(one, 1 / up)
        outputs = [
            multiply(weights[:, place], turned, (down, undo), x.dtype)
            for place, (_, turned, undo) in zip(columns(sizes, members), values8, strict=True)
        ]
        rotate_first_two(outputs, cos, sin, head_dim, False)
        base = x if onto == "input" else residual
        outputs = outputs if base is None else [base + out for out in outputs]
        return *outputs, *([x.view_as(x)] if onto == "fork" else [])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("products in fp8 have no second derivative: set train.precision=bf16")
        x, cos, sin, row, scores, totals, *rest = ctx.saved_tensors
        sizes, _, _, kind = ctx.layout
        one, (_, keys8, undo), *values8 = _split(rest)
        own = output_gradients(ctx, grads, [v.shape[1] for v, _, _ in values8], (x, cos, sin))
        rows = [scale_of(g, rows=True) for g in own]
        thetas = [  # gradients of Θ, times the scale of the row
            multiply(round_to(g, by), v, (one, back), x.dtype)
            for g, by, (v, _, back) in zip(own, rows, values8, strict=True)
        ]
        factors = (row if THETAS[kind].scale_free else 1) / torch.cat(rows, dim=1)
        given = (thetas, scores, totals, factors, *ctx.layout)
        weights, slopes, slopes8, by = torch.ops.tokenformer.theta_fp8_backward(*given)
        base, dx = grads[-1] if ctx.onto in ("input", "fork") else None, None
        wanted = ctx.needs_input_grad  # no product is computed for what is frozen
        if wanted[0]:
            if not in_one_block(sizes):
                by = scale_of(slopes, rows=True)
                slopes8 = round_to(slopes, by)
            dx, back = multiply(slopes8, keys8, (one, undo), x.dtype), (1 / by).to(x.dtype)
            dx = dx * back if base is None else torch.addcmul(base, dx, back)
        dkeys = slopes.T @ x if wanted[7] else None
        dvalues, dresidual = value_gradients(ctx, weights, own), own[0] if ctx.onto == "residual" else None
        return dx, dresidual, None, None, None, None, None, dkeys, *dvalues, *[None] * len(rest)


def quantise(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the number 1, then of each weight: it in fp8, transposed too, and the number that undoes its scale."""
    found = [torch.ones((), device=weights[0].device)]
    for weight in weights:
        scale = scale_of(weight)
        rounded = round_to(weight, scale)
        found += [rounded, rounded.T.contiguous(), 1 / scale]
    return found


def quantised(members: Any, dtype: torch.dtype, centred: bool) -> list[Tensor]:
    """Return what `fused` takes as `kept`."""
    _, _, keys, values = pack(members[0][0][0].new_empty(0, 1, dtype=dtype), members, "", centred)
    return quantise([keys, *values])


def _split(flat: Sequence[Tensor]) -> list[Any]:
    return [flat[0], *(flat[i : i + 3] for i in range(1, len(flat), 3))]


def fused(
    x: Tensor,
    members: Sequence[Sequence[tuple[Tensor, Tensor, float]]],
    theta: str,
    kept: Sequence[Tensor] = (),
    *,
    centred: bool = False,
    onto: str = "nothing",
    residual: Tensor | None = None,
    rotary: tuple[Tensor | None, Tensor | None, int] = (None, None, 0),
) -> list[Tensor]:
    """`fused` of kernels/pattention.py in fp8. `kept`: what `quantised` made of the same weights."""
    flat, layout, keys, values = pack(x, members, theta, centred)
    with torch.no_grad():
        ready = kept or quantise([keys, *values])
    base = None if residual is None else residual.flatten(0, -2)
    outputs = Fused.apply(flat, base, *rotary, layout, onto, keys, *values, *ready)
    return [out.view(*x.shape[:-1], out.shape[-1]) for out in outputs]
