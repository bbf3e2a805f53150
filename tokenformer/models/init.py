"""One function fills any model. A parameter's values depend on (seed, its name, its full shape) and on nothing else,

so that one process and a thousand, on any device, begin with the same model. Drawn in fp32 on the CPU for that reason.
"""

import hashlib

import torch
from torch import Tensor, nn

from tokenformer.config import ModelConfig


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """The official initialisation: keys, embeddings and inward matrices N(0, 0.02); all values and outward matrices

    N(0, 2/(layers·√dim)). `config.init: centred` subtracts from values their mean over the tokens of a segment.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(initial(name, tuple(parameter.shape), config, seed))


def initial(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The first values of one parameter."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("norm.bias"):
        return torch.zeros(shape)
    outward = name.endswith(("value_tokens", "proj.weight", "down.weight"))
    values = draw(seed, name, shape) * (2 / (config.layers * config.dim**0.5) if outward else 0.02)
    if config.init == "centred" and name.endswith("value_tokens"):
        values -= values.mean(0)
    return values


def draw(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers that belong to (seed, name, shape).

    >>> torch.equal(draw(0, "a", (2, 3)), draw(0, "a", (2, 3))), torch.equal(draw(0, "a", (3,)), draw(0, "b", (3,)))
    (True, False)
    """
    digest = hashlib.sha256(f"{seed}/{name}/{shape}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1))
