"""Partial rotary positions: the first R channels of each head are rotated by the position, the rest are not.

Channel i is paired with channel i + R/2 (half-split); angles are in fp32 or better.
Legend: T positions, R rotated channels, A = R/2 angles, B batch, H heads, C head_dim.
"""

import torch
from torch import Tensor


def angles(positions_T: Tensor, dims: int, base: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin (…, T, A) of positions (…, T). Computed, not stored: there is no buffer to place, grow or save.

    >>> cos, sin = angles(torch.arange(3), dims=4, base=10000.0)
    >>> cos.shape
    torch.Size([3, 2])
    """
    dtype = torch.promote_types(dtype, torch.float32)
    frequency_A = base ** (-torch.arange(0, dims, 2, dtype=dtype, device=positions_T.device) / max(dims, 1))
    angle_TA = positions_T.to(dtype)[..., None] * frequency_A
    return angle_TA.cos(), angle_TA.sin()


def rotate(x_BTHC: Tensor, cos_TA: Tensor, sin_TA: Tensor) -> Tensor:
    """Rotate the first 2·A channels of each head by angles (T, A) or (B, T, A), the same for all heads."""
    cos, sin, half = cos_TA.unsqueeze(-2), sin_TA.unsqueeze(-2), cos_TA.shape[-1]
    first, second, rest = x_BTHC.split([half, half, x_BTHC.shape[-1] - 2 * half], dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(x_BTHC.dtype) for part in rotated), rest], dim=-1)
