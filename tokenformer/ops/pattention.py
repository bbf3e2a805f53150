"""Pattention, y = Θ(x·Kᵀ)·V: data tokens attend to parameter tokens. The reference here is the specification.

Unusual: a layer is a list of segments. Each is normalised by itself, with its own τ, and their outputs are added; one
segment is the paper's layer.
Legend: T rows of data (any leading shape), D d_in, E d_out, N parameter tokens of one segment.
"""

import functools
import importlib
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.errors import UserError

BACKENDS = ("auto", "reference", "triton")
CHOICE = os.environ.get("TOKENFORMER_PATTENTION", "auto")  # the backend where a call does not choose one
INTERPRETED = ("1", "true", "yes", "on", "y")  # values of TRITON_INTERPRET that Triton takes for true
MISSING = "triton is not installed: pip install 'tokenformer[kernels]'"
Segments = Sequence[tuple[Tensor, Tensor, float]]  # keys (N, D), values (N, E), τ


def _identity(score_TN: Tensor) -> Tensor:
    return score_TN


class Theta(NamedTuple):
    """Θ(a) = after(before(a) · τ^2p / (Σ mass(before(a)))^p), p being `power`, the sum over a segment's tokens.

    To add one: a row of THETAS, its name in `theta` of config_model.py, and which growth is exact for it (`check_rule`
    of growth/plan.py). The reference computes it everywhere, until ops/kernels/pattention.py has a branch for it and
    `kernels` is True. One whose sum may overflow also needs the branches that softmax has here and in
    parallel/partial.py.
    """

    before: Callable[[Tensor], Tensor]
    mass: Callable[[Tensor], Tensor]
    power: float
    after: Callable[[Tensor], Tensor]
    kernels: bool = False

    @property
    def scale_free(self) -> bool:
        """Whether multiplying all keys of a segment by one number changes nothing."""
        return self.before is _identity


THETAS = {
    "l2_norm_gelu": Theta(_identity, torch.square, 0.5, F.gelu, kernels=True),
    "gelu_l2_norm": Theta(F.gelu, torch.square, 0.5, _identity, kernels=True),
    "softmax": Theta(torch.exp, _identity, 1.0, _identity, kernels=True),  # by logarithms: exponentials overflow
    "l1_norm_gelu": Theta(_identity, torch.abs, 1.0, F.gelu, kernels=True),
}


def pattention(
    x_TD: Tensor,
    segments: Segments,
    *,
    theta: str = "l2_norm_gelu",
    mask: Tensor | None = None,
    choice: str | None = None,
) -> Tensor:
    """One Pattention. `mask` (ΣN,) or (…, ΣN), True = counts: a masked token is in no sum, and τ does not change.

    >>> keys, values = torch.eye(2), torch.eye(2)
    >>> pattention(torch.tensor([3.0, 4.0]), [(keys, values, 5.0)])  # gelu([3, 4] · 5 / 5)
    tensor([2.9959, 3.9999])
    """
    return pattention_group(x_TD, [segments], theta=theta, masks=[mask], choice=choice)[0]


def pattention_group(
    x_TD: Tensor,
    members: Sequence[Segments],
    *,
    theta: str = "l2_norm_gelu",
    masks: Sequence[Tensor | None] | None = None,
    choice: str | None = None,
) -> list[Tensor]:
    """Several Pattentions of one input (q, k and v), their scores in one product. `choice`: see `backend`."""
    masked = masks is not None and any(mask is not None for mask in masks)
    if backend(x_TD, choice, masked, theta) == "triton":
        return fused(x_TD, members, theta)
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

    `count_TN`: True = the token counts. `total_T1`: the statistic of the whole segment, where the scores are a part.
    """
    score_TN = score_TN.to(torch.promote_types(score_TN.dtype, torch.float32))
    if theta == "softmax":
        if total_T1 is not None:
            return (score_TN - total_T1).exp() * tau**2
        if count_TN is None:
            return score_TN.softmax(-1) * tau**2
        some = count_TN.any(-1, keepdim=True)  # a row of masked tokens alone must not become NaN on the way
        return score_TN.masked_fill(~count_TN & some, -torch.inf).softmax(-1) * count_TN * tau**2
    if count_TN is not None:
        score_TN = score_TN.masked_fill(~count_TN, 0)  # adds nothing to any norm, and gelu(0) = 0
    form = _lookup(theta)
    score_TN = form.before(score_TN)
    total_T1 = form.mass(score_TN).sum(-1, keepdim=True) if total_T1 is None else total_T1
    return form.after(score_TN * _divide(tau ** (2 * form.power), total_T1, form.power))


def statistic(score_TN: Tensor, theta: str) -> Tensor:
    """The statistic (T, 1) of these scores: what they add to their segment's sum; of softmax, the logarithm of that."""
    score_TN = score_TN.to(torch.promote_types(score_TN.dtype, torch.float32))
    if theta == "softmax":
        return score_TN.logsumexp(-1, keepdim=True)
    form = _lookup(theta)
    return form.mass(form.before(score_TN)).sum(-1, keepdim=True)


def _lookup(theta: str) -> Theta:
    if theta not in THETAS:
        raise ValueError(f"theta is '{theta}', not one of {', '.join(THETAS)}")
    return THETAS[theta]


def _divide(scale: float, total_T1: Tensor, power: float) -> Tensor:
    """scale / total^power; 0 with zero gradient where the total is 0 (the inner `where` keeps NaN out of backward)."""
    zero = total_T1 == 0
    return torch.where(zero, 0, scale * torch.where(zero, 1, total_T1).pow(-power))


def backend(x: Tensor, choice: str | None = None, masked: bool = False, theta: str = "l2_norm_gelu") -> str:
    """The backend for x: "triton" where the kernels can run, else "reference". `choice`, or the environment variable
    TOKENFORMER_PATTENTION, forces one of them.
    """
    choice = choice or CHOICE
    if choice == "reference" or (choice == "auto" and (x.device.type == "cpu" or masked)):
        return "reference"
    return _constant(choice, x.device.type, x.device.index, x.dtype, masked, theta)


@torch.compiler.assume_constant_result
def _constant(choice: str, device: str, index: int | None, dtype: torch.dtype, masked: bool, theta: str) -> str:
    return _choose(choice, device, index, dtype, masked, theta)


@functools.cache
def _choose(choice: str, device: str, index: int | None, dtype: torch.dtype, masked: bool, theta: str) -> str:
    """Choose the backend. Warns once where a GPU gets no kernels; refuses kernels that cannot run."""
    if choice not in BACKENDS:
        do = f"set TOKENFORMER_PATTENTION, or the argument choice, to one of {', '.join(BACKENDS)}"
        raise UserError(f"Pattention has no backend '{choice}': {do}")
    reason = "masks are computed by the reference" if masked else ""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reason = f"there are none for {dtype}"
    elif not _lookup(theta).kernels:
        reason = f"there are none for {theta}"
    elif device == "cuda" and torch.cuda.get_device_capability(index) < (8, 0):
        reason = f"{torch.cuda.get_device_name(index)} is older than they were tried on (compute capability 8.0)"
    elif not _has_kernels():
        reason = MISSING
    elif device != "cuda" and os.environ.get("TRITON_INTERPRET", "").lower() not in INTERPRETED:
        reason = f"they do not run on {device}"
    if not reason:
        return "triton"
    if choice == "triton":
        raise UserError(f"Pattention's kernels were asked for, but {reason}")
    warnings.warn(f"Pattention is computed by the reference, without kernels: {reason}", stacklevel=2)
    return "reference"


def _has_kernels() -> bool:
    """Whether the kernels can be imported: an exported model file runs without this package, too."""
    try:
        importlib.import_module("tokenformer.ops.kernels.pattention")
    except ImportError:
        return False
    return True


def fused(x_TD: Tensor, members: Sequence[Segments], theta: str, **options) -> list[Tensor]:
    """`pattention_group` on kernels. `options`: see ops/kernels/pattention.py."""
    _lookup(theta)
    for key_ND, value_NE, _ in itertools.chain(*members):
        if len(key_ND) != len(value_NE):
            raise ValueError(f"a segment has {len(key_ND)} keys and {len(value_NE)} values: give as many of each")
    try:  # transformers refuses an exported file whose imports are missing, but for those in a try
        from tokenformer.ops.kernels import pattention as kernels
    except ImportError as error:
        raise UserError(MISSING) from error
    return kernels.fused(x_TD, members, theta, **options)
