"""Partial rotary positions: the first channels of each head turn with the position, the rest stay.

Half-split pairs (channel i turns with i + R/2), angles in fp32 or better.
Legend: T positions, R rotated channels, A = R/2 angles, B batch, H heads, C head_dim.
"""

import torch
from torch import Tensor


def angles(positions_T: Tensor, dims: int, base: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin (…, T, A) for positions (…, T). Computed, not stored: no buffer to place, grow or save.

    >>> cos, sin = angles(torch.arange(3), dims=4, base=10000.0)
    >>> cos.shape
    torch.Size([3, 2])
    """
    dtype = torch.promote_types(dtype, torch.float32)
    frequency_A = base ** (-torch.arange(0, dims, 2, dtype=dtype, device=positions_T.device) / max(dims, 1))
    angle_TA = positions_T.to(dtype)[..., None] * frequency_A
    return angle_TA.cos(), angle_TA.sin()


def rotate(x: Tensor, cos_TA: Tensor, sin_TA: Tensor, heads: int = 1) -> Tensor:
    """Turn the first 2·A channels of x (B, H, T, C), or (B, T, H, C) with heads=2, by angles (T, A) or (B, T, A)."""
    if heads == 2 or cos_TA.ndim == 3:  # one angle per position or sample, the same for all heads
        cos_TA, sin_TA = cos_TA.unsqueeze(-2 if heads == 2 else 1), sin_TA.unsqueeze(-2 if heads == 2 else 1)
    half = cos_TA.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = (first * cos_TA - second * sin_TA, second * cos_TA + first * sin_TA)
    return torch.cat([*(t.to(x.dtype) for t in turned), rest], dim=-1)
