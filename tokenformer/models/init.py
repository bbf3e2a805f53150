"""The initialisation of every model. Values depend on the seed, the config and a parameter's name and full shape.

So any number of processes, on any device, begin with the same model. Values are drawn in fp32 on the CPU.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.models.names import Role, parse


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill a model with its first values (see `initial`)."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial(name, tuple(parameter.shape), config, seed, model.ends))  # pyrefly: ignore


def initial(
    name: str, shape: tuple[int, ...], config: ModelConfig, seed: int, ends: Mapping[str, Role], key: str | None = None
) -> Tensor:
    """The initial values of one parameter: keys, tables, positions and inward matrices N(0, 0.02); values and outward
    matrices N(0, 2/(layers·√dim)) of their trunk.

    `config.init: centred` subtracts from values their mean over the tokens of a segment; with `zero`, what a block adds
    to the stream begins at 0. The random numbers depend on `key`, if given (new rows of a growth), instead of the name.
    """
    found = parse(name, ends)
    role = found.role.kind
    if not found.role.drawn:
        return torch.full(shape, {"one": 1.0, "zero": 0.0}.get(role, found.role.start))
    trunk, outward = config.trunk(found.trunk), role in ("value", "outward")
    if trunk.init == "zero" and outward and found.projection in ("proj", "ffn", "down") and key is None:
        return torch.zeros(shape)
    deep = outward and (found.layer is not None or not config.trunks)  # an end of several trunks has no depth
    values = draw(seed, key or name, shape) * (2 / (trunk.layers * trunk.dim**0.5) if deep else 0.02)
    if trunk.init == "centred" and role == "value":
        values -= values.mean(0)
    return values


def draw(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers that belong to (seed, name, shape).

    >>> torch.equal(draw(0, "a", (2, 3)), draw(0, "a", (2, 3))), torch.equal(draw(0, "a", (3,)), draw(0, "b", (3,)))
    (True, False)
    """
    digest = hashlib.sha256(f"{seed}/{name}/{shape}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1))
