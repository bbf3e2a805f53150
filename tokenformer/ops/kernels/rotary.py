"""Rotary positions in place: only the rotated channels are read and written.

Legend: T rows of data, H heads, C head_dim, A angles of a head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

jit: Any = triton.jit  # Any: type checkers do not understand kernels


@jit
def _rotate(
    x, cos, sin, count, heads, period, sign, C: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, BLOCK: tl.constexpr
):
    unit = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # one head of one row
    a = tl.arange(0, AP)
    here = (unit < count)[:, None] & (a < A)[None, :]
    first = x + unit[:, None] * C + a[None, :]
    angle = (unit // heads % period)[:, None] * A + a[None, :]
    u = tl.load(first, mask=here).to(tl.float32)
    v = tl.load(first + A, mask=here).to(tl.float32)
    c = tl.load(cos + angle, mask=here)
    s = tl.load(sin + angle, mask=here) * sign
    tl.store(first, (u * c - v * s).to(x.dtype.element_ty), mask=here)
    tl.store(first + A, (v * c + u * s).to(x.dtype.element_ty), mask=here)


torch.library.define("tokenformer::rotate_", "(Tensor(a!) x, Tensor cos, Tensor sin, int head_dim, bool back) -> ()")
torch.library.register_fake("tokenformer::rotate_", lambda x, cos, sin, head_dim, back: None)


@torch.library.impl("tokenformer::rotate_", ("cuda", "cpu"))
def rotate_(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, back: bool) -> None:
    """Rotate x (T, H·C) in place, or back. cos and sin (P, A) are those of P rows, and repeat for the next P rows."""
    count, (period, angles) = x.numel() // head_dim, cos.shape
    if count and angles:
        _rotate[(triton.cdiv(count, 128),)](
            x, cos, sin, count, x.shape[1] // head_dim, period, -1.0 if back else 1.0, head_dim, angles,
            triton.next_power_of_2(angles), 128, num_warps=4,
        )  # fmt: skip
