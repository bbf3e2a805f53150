"""Weights in 8 bits (float8_e4m3fn) for decoding, where a step takes as long as its weights take to be read.

Unusual: a row's scale is a power of two, so multiplying by it never rounds: weights in 8 bits times their scales are
exactly numbers of bfloat16, and a model of these is the reference. Each row is rounded by itself, so segments that come
or go (growth, adapters) leave the others as they are.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.models import LanguageModel
from tokenformer.ops.fp8 import E4M3, LARGEST


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in fp8, and the scale (a power of two, in fp32) of each, by which its largest number is 224 to 448.

    >>> quantise(torch.tensor([[1.0, -0.3, 0.0], [0.0, 0.0, 0.0]]))[0].float()
    tensor([[256., -80.,   0.],
            [  0.,   0.,   0.]])
    """
    weight = weight.detach().float()
    part, exponent = torch.frexp(weight.abs().amax(-1) / LARGEST)  # part · 2^exponent, with a part of 0.5 to 1
    scale = torch.ldexp(torch.ones_like(part), exponent - (part == 0.5).int())
    return (weight / scale[..., None]).to(E4M3), scale


def check_type(dtype: torch.dtype) -> None:
    """Refuse a type that is too narrow for Θ times a value's scale."""
    if dtype == torch.float16:
        raise UserError("weights in fp8 are not computed in float16: choose bfloat16 or float32 (--dtype)")


def rounded(model: LanguageModel) -> LanguageModel:
    """Return a copy of a model whose matrices are rounded to fp8: what weights in fp8 compute, in the model's own type.

    >>> from tokenformer import ModelConfig, models
    >>> config = ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=4, vocab=9)
    >>> len(rounded(models.build(config)).embedding.weight.unique()) < 144
    True
    """
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for matrix in matrices(copied):
            rows, scale = quantise(matrix)
            matrix.copy_(rows.float() * scale[:, None])
    return copied


def matrices(model: LanguageModel) -> Iterator[Tensor]:
    """Yield what is quantised: everything but the norms, and an embedding that is not the head too."""
    parts = [model.embedding, model.added_embedding] if model.head is not None else []
    looked_up = {id(part.weight) for part in parts if part is not None}  # a row is read, not all of it
    return (p for p in model.parameters() if p.ndim == 2 and id(p) not in looked_up)
