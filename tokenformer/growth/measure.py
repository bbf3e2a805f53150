"""What flows into each Pattention of a model on given ids: the measurements that shrinking and merging rest on.

Legend: T rows of data, D dim, N parameter tokens of one segment.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokenformer.config import PROJECTION_OF
from tokenformer.models import Pattention
from tokenformer.models.layers import THETAS, Segment
from tokenformer.models.names import Name
from tokenformer.models.trunk import Block

Where = tuple[int, str, int]  # layer, projection, segment


def place_of(name: Name) -> Where:
    """Where a parameter token stands."""
    assert name.layer is not None and name.segment is not None
    return name.layer, name.projection, name.segment


def layers(model: nn.Module, on: str = "") -> Iterator[tuple[int, str, Pattention]]:
    """(layer, projection, module) of every Pattention of a trunk, query first."""
    trunk = model.get_submodule(on.removesuffix("."))
    for layer, block in enumerate(cast(Sequence[Block], trunk.blocks)):
        for name in PROJECTION_OF:
            yield layer, name, cast(Pattention, block.ffn if name == "ffn" else getattr(block.attention, name))


def segments(model: nn.Module, on: str = "") -> Iterator[tuple[Where, Segment]]:
    """Every segment with where it stands."""
    for layer, name, module in layers(model, on):
        for i, segment in enumerate(module.segments):
            yield (layer, name, i), segment


@torch.no_grad()
def each_activation(model: Any, ids: Tensor, visit: Callable[[Where, Tensor, Tensor], None]) -> None:
    """Run the model on ids (B, T), or on pixels, and call `visit(where, score_TN, activation_TN)` per segment and
    sample.
    """
    hooks = []

    def hook_of(layer: int, names: list[str], members: list[Pattention]) -> Callable:
        def hook(_module: nn.Module, arguments: tuple) -> None:
            x_TD = arguments[0].flatten(0, -2)
            for name, member in zip(names, members, strict=True):
                for i, (score_TN, active_TN) in enumerate(member.activations(x_TD)):
                    visit((layer, name, i), score_TN.double(), active_TN.double())

        return hook

    for layer, block in enumerate(cast(Sequence[Block], model.blocks)):
        found = {name: module for at, name, module in layers(model) if at == layer}
        qkv = ["query", "key", "value"]  # one product: their input is the attention's
        hooks.append(block.attention.register_forward_pre_hook(hook_of(layer, qkv, [found[name] for name in qkv])))
        hooks += [found[n].register_forward_pre_hook(hook_of(layer, [n], [found[n]])) for n in ("proj", "ffn")]
    try:
        run = model.forward_features if model.config.of == "image" else model.hidden
        for row in ids:
            run(row[None])
    finally:
        for handle in hooks:
            handle.remove()


def mass(score_TN: Tensor, theta: str) -> Tensor:
    """The terms whose sum normalises a row: when some are left out, Θ of the others stays if τ² follows the sum.

    >>> mass(torch.tensor([[3.0, -4.0]]), "l2_norm_gelu")
    tensor([[ 9., 16.]])
    """
    if theta == "softmax":
        return score_TN.softmax(-1)
    return THETAS[theta].mass(THETAS[theta].before(score_TN))
