"""Attention between data tokens, causal or not, through PyTorch's fused kernels. Every attention mask is made here.

Legend: B batch, H heads, G key/value heads, T queries, S keys, C head_dim.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Fastest first, as measured on Hopper: cuDNN takes two thirds of the time of flash, forward and backward. It prepares
# itself anew for every length, so it is for training alone.
TRAINING = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    causal: bool = True,
    documents_BT: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention, scale 1/√C. If causal, the last query is at the position of the last key.

    `documents` (B, T): the number of the document of each position; documents do not see each other (T = S, no cache).
    `mask` (B or 1, H or 1, T, S), True = is seen, or numbers that are added to the scores, replaces the causal mask.
    """
    length, keys = q_BHTC.shape[-2], k_BGSC.shape[-2]
    if mask is None and causal and (documents_BT is not None or 1 < length != keys):
        mask = causal_mask(length, keys, q_BHTC.device)
    if documents_BT is not None:
        same = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
        if mask is None or mask.dtype == torch.bool:
            mask = same if mask is None else mask & same
        else:
            mask = mask.masked_fill(~same, -torch.inf)
    flash = False
    if mask is None and length > 1:  # a branch: under compile the length may be symbolic and `length > 1` no bool
        flash = True
    ours = flash and q_BHTC.requires_grad and not callers_choice()
    with sdpa_kernel(TRAINING, set_priority=True) if ours else contextlib.nullcontext():
        return F.scaled_dot_product_attention(
            q_BHTC,
            k_BGSC,
            v_BGSC,
            attn_mask=mask,
            is_causal=flash and causal,
            enable_gqa=q_BHTC.shape[1] != k_BGSC.shape[1],
        )


@torch.compiler.assume_constant_result
def callers_choice() -> bool:
    """Tell whether the caller turned some kernels off, by `sdpa_kernel` or for the whole program."""
    cuda = torch.backends.cuda
    enabled = (cuda.cudnn_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    return not all(each() for each in enabled)


def causal_mask(length: int, keys: int, device: torch.device) -> Tensor:
    """The causal mask (T, S), True = is seen, where the last query is at the position of the last key.

    >>> causal_mask(2, 3, torch.device("cpu"))
    tensor([[ True,  True, False],
            [ True,  True,  True]])
    """
    return torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)
