"""Output head and cross entropy in one: gradients are made in forward, so no logit is kept or computed twice.

Legend: T rows, D dim, W vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4096  # whose logits are held at once
jit: Any = triton.jit  # what it makes is beyond a type checker


@jit
def _loss(logits, labels, losses, ignore, W: tl.constexpr, BLOCK: tl.constexpr, GRAD: tl.constexpr):
    """−log p(label) of a row; with GRAD its logits become their gradient."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counts = label != ignore
    at = logits + row * W
    cols = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]  # a line of 8 is a thread's own
    peak = tl.full((BLOCK // 8,), -1e30, tl.float32)  # lines meet once, at the end
    total = tl.zeros((BLOCK // 8,), tl.float32)
    for i in range(0, tl.cdiv(W, BLOCK)):
        inside = i * BLOCK + cols < W
        a = tl.where(inside, tl.load(at + i * BLOCK + cols, mask=inside, other=0.0).to(tl.float32), -1e30)
        higher = tl.maximum(peak, tl.max(a, 1))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(a - higher[:, None]), 1)
        peak = higher
    top = tl.max(peak, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    own = tl.load(at + tl.where(counts, label, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, log_sum - own, 0.0))
    if GRAD:
        tl.debug_barrier()  # the label's logit is read before it is written over
        for i in range(0, tl.cdiv(W, BLOCK)):
            inside = i * BLOCK + cols < W
            a = tl.load(at + i * BLOCK + cols, mask=inside, other=0.0).to(tl.float32)
            g = tl.exp(a - log_sum) - tl.where(i * BLOCK + cols == label, 1.0, 0.0)
            tl.store(at + i * BLOCK + cols, tl.where(counts, g, 0.0).to(logits.dtype.element_ty), mask=inside)


@torch.library.custom_op("tokenformer::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore: int, chunk: int, grad: bool
) -> list[Tensor]:
    """The sum over all rows, and with `grad` its gradients by `hidden` and by `weight`."""
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    dhidden = torch.empty_like(hidden) if grad else hidden.new_empty(0)
    wide = hidden.is_cuda and hidden.dtype != torch.float32  # half types: chunks are added up in fp32
    dweight = torch.zeros_like(weight, dtype=torch.float32) if grad else hidden.new_empty(0, dtype=torch.float32)
    logits = hidden.new_empty(min(chunk, len(hidden)), len(weight))
    for first in range(0, len(hidden), chunk):
        rows, here = hidden[first : first + chunk], slice(first, first + chunk)
        part = torch.mm(rows, weight.T, out=logits[: len(rows)])
        _loss[(len(rows),)](part, labels[here], losses[here], ignore, len(weight), 8192, grad, num_warps=32)
        if grad:
            torch.mm(part, weight, out=dhidden[here])
            if wide:
                torch.addmm(dweight, part.T, rows, out_dtype=torch.float32, out=dweight)
            else:
                dweight.addmm_(part.T.float(), rows.float())
    return [losses.sum(), dhidden, dweight]


@linear_cross_entropy.register_fake
def _(hidden, weight, labels, ignore, chunk, grad):
    nothing = hidden.new_empty(0)
    dweight = torch.empty_like(weight, dtype=torch.float32) if grad else nothing.float()
    return [hidden.new_empty((), dtype=torch.float32), torch.empty_like(hidden) if grad else nothing, dweight]


def _keep(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtype = inputs[1].dtype


def _chain(ctx: Any, gradients: list[Tensor]) -> tuple:
    dhidden, dweight = ctx.saved_tensors
    scaled = (dhidden.float() * gradients[0]).to(dhidden.dtype), (dweight * gradients[0]).to(ctx.dtype)
    return *scaled, None, None, None, None


linear_cross_entropy.register_autograd(_chain, setup_context=_keep)


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, ignore: int, chunk: int | None) -> Tensor:
    grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return linear_cross_entropy(hidden, weight, labels, ignore, chunk or ROWS, grad)[0]
