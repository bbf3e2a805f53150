"""Output head and cross entropy in one. Gradients are computed in forward, so no logit is kept or computed twice.

Legend: T rows, D dim, W vocabulary.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tokenformer.ops.kernels.pattention import exp2, jit

LOG2E = tl.constexpr(1.4426950408889634)


@jit
def _loss(logits, labels, losses, ignore, W: tl.constexpr, BLOCK: tl.constexpr, GRAD: tl.constexpr, FAST: tl.constexpr):
    """−log p(label) of a row, in powers of 2; NaN for a label that is no row of the weight. With GRAD the gradient of
    the logits is written over them.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counts = label != ignore
    known = (label >= 0) & (label < W)
    at = logits + row * W
    cols = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]  # 8 columns per thread
    peak = tl.full((BLOCK // 8,), -1e30, tl.float32)  # per thread; reduced once, at the end
    total = tl.zeros((BLOCK // 8,), tl.float32)
    for i in range(0, tl.cdiv(W, BLOCK)):
        inside = i * BLOCK + cols < W
        a = tl.where(inside, tl.load(at + i * BLOCK + cols, mask=inside, other=0.0).to(tl.float32), -1e30)
        higher = tl.maximum(peak, tl.max(a, 1) * LOG2E)
        total = total * exp2(peak - higher, FAST) + tl.sum(exp2(a * LOG2E - higher[:, None], FAST), 1)
        peak = higher
    top = tl.max(peak, 0)
    log_sum = top + tl.log2(tl.sum(total * exp2(peak - top, FAST), 0))
    own = tl.load(at + tl.where(known, label, 0)).to(tl.float32) * LOG2E
    tl.store(losses + row, tl.where(counts, tl.where(known, (log_sum - own) / LOG2E, float("nan")), 0.0))
    if GRAD:
        log_sum = tl.where(counts, log_sum, 1e30)  # the gradient of a row that does not count is 0
        tl.debug_barrier()  # the label's logit is read before it is overwritten, and written last
        for i in range(0, tl.cdiv(W, BLOCK)):
            inside = i * BLOCK + cols < W
            a = tl.load(at + i * BLOCK + cols, mask=inside, other=0.0).to(tl.float32)
            g = exp2(a * LOG2E - log_sum, FAST)
            tl.store(at + i * BLOCK + cols, g.to(logits.dtype.element_ty), mask=inside)
        tl.debug_barrier()
        g = tl.exp2(own - log_sum) - 1.0
        tl.store(at + label, g.to(logits.dtype.element_ty), mask=counts & known)


@torch.library.custom_op("tokenformer::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore: int, chunk: int, grad: bool, learns: bool
) -> list[Tensor]:
    """The loss summed over all rows and, with `grad`, its gradients with respect to `hidden` and, if that one `learns`,
    `weight`.
    """
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    dhidden = torch.empty_like(hidden) if grad else hidden.new_empty(0)
    wide = hidden.is_cuda and hidden.dtype != torch.float32  # 16-bit types: chunks are added in fp32
    dweight = torch.zeros_like(weight, dtype=torch.float32) if learns else hidden.new_empty(0, dtype=torch.float32)
    logits = hidden.new_empty(min(chunk, len(hidden)), len(weight))
    for first in range(0, len(hidden), chunk):
        rows, here = hidden[first : first + chunk], slice(first, first + chunk)
        part = torch.mm(rows, weight.T, out=logits[: len(rows)])
        _loss[(len(rows),)](
            part, labels[here], losses[here], ignore, len(weight), 8192, grad, hidden.is_cuda, num_warps=32
        )
        if grad:
            torch.mm(part, weight, out=dhidden[here])
        if learns and wide:
            torch.addmm(dweight, part.T, rows, out_dtype=torch.float32, out=dweight)
        elif learns:
            dweight.addmm_(part.T.float(), rows.float())
    return [losses.sum(), dhidden, dweight]


@linear_cross_entropy.register_fake
def _(hidden, weight, labels, ignore, chunk, grad, learns):
    nothing = hidden.new_empty(0)
    dweight = torch.empty_like(weight, dtype=torch.float32) if learns else nothing.float()
    return [hidden.new_empty((), dtype=torch.float32), torch.empty_like(hidden) if grad else nothing, dweight]


def _save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtype, ctx.learns = inputs[1].dtype, inputs[6]


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple:
    dhidden, dweight = ctx.saved_tensors
    scaled = (dhidden.float() * gradients[0]).to(dhidden.dtype)
    return scaled, (dweight * gradients[0]).to(ctx.dtype) if ctx.learns else None, None, None, None, None, None


linear_cross_entropy.register_autograd(_backward, setup_context=_save)


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, ignore: int, chunk: int) -> Tensor:
    grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return linear_cross_entropy(hidden, weight, labels, ignore, chunk, grad, grad and weight.requires_grad)[0]
