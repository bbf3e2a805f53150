"""Pattention, y = Θ(x·Kᵀ)·V: data tokens attend to parameter tokens. This reference is the specification.

Unusual: a layer is a list of segments, each normalised by itself with its own τ, their outputs added; one segment is
the paper's layer. Legend: T rows of data (any leading shape), D d_in, E d_out, N parameter tokens of one segment.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

THETAS = ("l2_norm_gelu", "gelu_l2_norm", "softmax", "l1_norm_gelu")
Segments = Sequence[tuple[Tensor, Tensor, float]]  # keys (N, D), values (N, E), τ


def pattention(x_TD: Tensor, segments: Segments, *, theta: str = "l2_norm_gelu", mask: Tensor | None = None) -> Tensor:
    """One Pattention. `mask` (ΣN,) or (…, ΣN), True = counts: a masked token counts in no sum, and τ stays.

    >>> keys, values = torch.eye(2), torch.eye(2)
    >>> pattention(torch.tensor([3.0, 4.0]), [(keys, values, 5.0)])  # gelu([3, 4] · 5 / 5)
    tensor([2.9959, 3.9999])
    """
    return pattention_group(x_TD, [segments], theta=theta, masks=[mask])[0]


def pattention_group(
    x_TD: Tensor,
    members: Sequence[Segments],
    *,
    theta: str = "l2_norm_gelu",
    masks: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Several Pattentions of one input (q, k and v), the scores of all of them in one product."""
    keys = [key_ND for segments in members for key_ND, _, _ in segments]
    scores = iter((x_TD @ (keys[0] if len(keys) == 1 else torch.cat(keys)).T).split([len(k) for k in keys], dim=-1))
    outputs = []
    for segments, mask in zip(members, masks or [None] * len(members), strict=True):
        sizes = [len(key_ND) for key_ND, _, _ in segments]
        counts = [None] * len(sizes) if mask is None else mask.split(sizes, dim=-1)
        parts = [
            normalise(next(scores), theta, tau, count_TN).to(value_NE.dtype) @ value_NE
            for (_, value_NE, tau), count_TN in zip(segments, counts, strict=True)
        ]
        outputs.append(sum(parts[1:], parts[0]))
    return outputs


def normalise(
    score_TN: Tensor, theta: str, tau: float, count_TN: Tensor | None = None, total_T1: Tensor | None = None
) -> Tensor:
    """Θ of one segment's scores, in fp32 or better. Where the statistic is zero: zeros, and zero gradients.

    `total_T1` is the statistic of the whole segment, where the scores are a part of it.
    """
    score_TN = score_TN.to(torch.promote_types(score_TN.dtype, torch.float32))
    if theta == "softmax":
        if total_T1 is not None:
            return (score_TN - total_T1).exp() * tau**2
        if count_TN is None:
            return score_TN.softmax(-1) * tau**2
        some = count_TN.any(-1, keepdim=True)  # a row that is masked whole must not become NaN on the way
        return score_TN.masked_fill(~count_TN & some, -torch.inf).softmax(-1) * count_TN * tau**2
    if count_TN is not None:
        score_TN = score_TN.masked_fill(~count_TN, 0)  # adds nothing to any norm, and gelu(0) = 0
    if theta == "gelu_l2_norm":
        score_TN = F.gelu(score_TN)
    total_T1 = _total(score_TN, theta) if total_T1 is None else total_T1
    if theta == "gelu_l2_norm":
        return score_TN * _over(total_T1, tau, 0.5)
    return F.gelu(score_TN * (_over(total_T1, tau**2, 1.0) if theta == "l1_norm_gelu" else _over(total_T1, tau, 0.5)))


def statistic(score_TN: Tensor, theta: str) -> Tensor:
    """(T, 1): what these scores add to the total of their segment: a sum, or the logarithm of one (softmax)."""
    score_TN = score_TN.to(torch.promote_types(score_TN.dtype, torch.float32))
    if theta == "softmax":
        return score_TN.logsumexp(-1, keepdim=True)
    return _total(F.gelu(score_TN) if theta == "gelu_l2_norm" else score_TN, theta)


def _total(score_TN: Tensor, theta: str) -> Tensor:
    if theta == "l1_norm_gelu":
        return score_TN.abs().sum(-1, keepdim=True)
    if theta in ("l2_norm_gelu", "gelu_l2_norm"):
        return score_TN.square().sum(-1, keepdim=True)
    raise ValueError(f"theta is '{theta}', not one of {', '.join(THETAS)}")


def _over(total_T1: Tensor, scale: float, power: float) -> Tensor:
    """scale / total^power; 0 with zero gradient where the total is 0 (the inner `where` keeps NaN out of backward)."""
    zero = total_T1 == 0
    return torch.where(zero, 0, scale * torch.where(zero, 1, total_T1).pow(-power))


def flops(rows: int, d_in: int, d_out: int, tokens: int) -> int:
    """Of the two products of a forward pass; a backward pass is twice that. Θ itself is not counted."""
    return 2 * rows * tokens * (d_in + d_out)


def bytes_moved(rows: int, d_in: int, d_out: int, tokens: int, width: int = 2) -> int:
    """Fewest bytes of a forward pass: input, keys and values read once, output written once, no score stored."""
    return width * (rows * (d_in + d_out) + tokens * (d_in + d_out))
