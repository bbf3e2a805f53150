"""Products in fp8 (e4m3), as `train.precision: fp8` computes them. `reference` is the specification, on any device.

Both factors of a product are rounded in the forward pass, and for the gradient of its input; the gradient of a weight
is computed in the type of the input, from what was not rounded. Inputs and gradients are scaled by row, weights as a
whole, just in time; Θ, which τ bounds, by a constant. Unusual: all scales are powers of two, so scaling itself never
rounds, and nothing saturates. Legend: T rows, D d_in, E d_out, N parameter tokens, K what a product sums over.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.ops.pattention import Segments, normalise

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of e4m3
BOUNDED = ("l2_norm_gelu", "gelu_l2_norm")  # |Θ| ≤ τ
STEP = 16  # a product's sides are multiples of it


def scale_of(x: Tensor, rows: bool = False) -> Tensor:
    """Return the power of two that brings the largest |x|, of all or of each row (T, 1), into [128, 256); NaN where a
    number is not finite: rounding would hide it.

    >>> scale_of(torch.tensor([[3.0, -1.0], [0.0, 0.25]]), rows=True)
    tensor([[ 64.],
            [512.]])
    """
    peak = (x.abs().amax(-1, keepdim=True) if rows else x.abs().amax()).float()
    exponent = (peak.view(torch.int32) >> 23).clamp(127 - 53, 127 + 67)  # so that two scales together stay in range
    scale = ((127 + 7 + 127 - exponent) << 23).view(torch.float32)
    return torch.where(peak < torch.inf, scale, torch.nan)


def scale_of_theta(theta: str, taus: Sequence[float]) -> float:
    """Return the power of two that brings τ, which bounds Θ, into (224, 448]. Refuse a Θ that it does not bound.

    >>> scale_of_theta("l2_norm_gelu", [28.0, 3.0])
    16.0
    """
    if theta not in BOUNDED:
        raise UserError(
            f"fp8 holds numbers up to 448, but theta {theta} gives numbers up to the number of parameter tokens: set "
            f"train.precision=bf16, or train a model of theta {' or '.join(BOUNDED)}"
        )
    if max(taus) > LARGEST:
        raise UserError(
            f"fp8 holds numbers up to 448, but a segment's tau is {max(taus):g}, which Θ can reach: set "
            "train.precision=bf16, or split its parameter tokens into segments"
        )
    return 2.0 ** math.floor(math.log2(LARGEST / max(taus)))


def round_to(x: Tensor, scale: Tensor | float) -> Tensor:
    """Return x · scale in fp8, rounded to nearest."""
    return (x.float() * scale).to(E4M3)


def multiply(a_TK: Tensor, b_NK: Tensor, undo: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a·bᵀ times both numbers of `undo`, of two fp8 matrices, by the GPU's fp8 units."""
    return torch._scaled_mm(a_TK, b_NK.T, *undo, out_dtype=dtype, use_fast_accum=True)


def emulate(a_TK: Tensor, b_NK: Tensor, undo: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Compute the same anywhere: fp8 numbers are exact in bf16, and sums are at least fp32."""
    return a_TK.to(dtype) @ b_NK.to(dtype).T * (undo[0] * undo[1]).to(dtype)


class Product(torch.autograd.Function):
    """a (T, K) · b (N, K)ᵀ. `scale` is that of a; None: one per row, just in time."""

    @staticmethod
    def forward(ctx: Any, a_TK: Tensor, b_NK: Tensor, scale: float | None, emulated: bool) -> Tensor:
        ctx.save_for_backward(a_TK, b_NK)
        ctx.emulated = emulated
        whole, work = scale_of(b_NK), emulate if emulated else multiply
        by = scale_of(a_TK, rows=True) if scale is None else torch.full_like(whole, scale)
        out = work(round_to(a_TK, by), round_to(b_NK, whole), (torch.ones_like(whole), 1 / whole), b_NK.dtype)
        return out / by.to(out.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        a_TK, b_NK = ctx.saved_tensors
        (grad_TN,), da_TK, db_NK = grads, None, None
        if ctx.needs_input_grad[0]:
            by, whole, work = scale_of(grad_TN, rows=True), scale_of(b_NK), emulate if ctx.emulated else multiply
            turned, undo = round_to(b_NK, whole).T.contiguous(), (torch.ones_like(whole), 1 / whole)
            da_TK = work(round_to(grad_TN, by), turned, undo, grad_TN.dtype)
            da_TK = (da_TK / by.to(da_TK.dtype)).to(a_TK.dtype)
        if ctx.needs_input_grad[1]:
            db_NK = grad_TN.T @ a_TK.to(grad_TN.dtype)
        return da_TK, db_NK, None, None


def product(a: Tensor, b_NK: Tensor, scale: float | None = None, emulated: bool = True) -> Tensor:
    """Return a·bᵀ of a (…, K), with gradients, all as the head of this file says."""
    out = cast(Tensor, Product.apply(a.reshape(-1, a.shape[-1]), b_NK, scale, emulated))
    return out.view(*a.shape[:-1], len(b_NK))


def reference(x_TD: Tensor, members: Sequence[Segments], theta: str) -> list[Tensor]:
    """Compute `pattention_group` with fp8 products, emulated."""
    scale = scale_of_theta(theta, [tau for segments in members for *_, tau in segments])
    keys = [key_ND for segments in members for key_ND, _, _ in segments]
    scores = iter(product(x_TD, torch.cat(keys)).split([len(key_ND) for key_ND in keys], dim=-1))
    outputs = []
    for segments in members:
        weights = torch.cat([normalise(next(scores), theta, tau) for *_, tau in segments], dim=-1)
        outputs.append(product(weights, torch.cat([value_NE for _, value_NE, _ in segments]).T, scale))
    return outputs
