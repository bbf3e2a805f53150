"""What flows into each Pattention of a model on given ids: the measurements that shrinking and merging rest on.

Legend: T rows of data, D dim, N parameter tokens of one segment.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokenformer.config import PROJECTION_OF
from tokenformer.models import Pattention
from tokenformer.models.layers import THETAS, Segment
from tokenformer.models.trunk import Block

Where = tuple[int, str, int]  # layer, projection, segment


def layers(model: nn.Module, on: str = "") -> Iterator[tuple[int, str, Pattention]]:
    """(layer, projection, module) of every Pattention of a trunk, query first."""
    trunk = model.get_submodule(on.removesuffix("."))
    for layer, block in enumerate(cast(Sequence[Block], trunk.blocks)):
        for name in PROJECTION_OF:
            yield layer, name, cast(Pattention, block.ffn if name == "ffn" else getattr(block.attention, name))


def segments(model: nn.Module, on: str = "") -> Iterator[tuple[Where, Segment]]:
    """Every segment of a trunk, and where it is."""
    for layer, name, module in layers(model, on):
        for i, segment in enumerate(module.segments):
            yield (layer, name, i), segment


@contextlib.contextmanager
def watching(model: Any, visit: Callable[[Where, Tensor, Tensor], None]) -> Iterator[None]:
    """Inside of the with block, call `visit(where, score_TN, activation_TN)` per segment whenever the model runs."""

    def hook(layer: int, name: str, module: Pattention, _caller: nn.Module, inputs: tuple) -> None:
        for i, (score_TN, active_TN) in enumerate(module.activations(inputs[0].flatten(0, -2))):
            visit((layer, name, i), score_TN, active_TN)

    hooks = []
    for layer, name, module in layers(model):
        # q, k and v are one product, in which no module is called: they read what their attention reads
        caller = module if name in ("proj", "ffn") else cast(Block, model.blocks[layer]).attention
        hooks.append(caller.register_forward_pre_hook(functools.partial(hook, layer, name, module)))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def each_activation(model: Any, ids: Tensor, visit: Callable[[Where, Tensor, Tensor], None]) -> None:
    """Run the model on ids (B, T) or pixels, one sample after the other, and `visit` each segment, in float64."""
    run = model.forward_features if model.config.of == "image" else model.hidden
    with watching(model, lambda where, score_TN, active_TN: visit(where, score_TN.double(), active_TN.double())):
        for row in ids:
            run(row[None])


def mass(score_TN: Tensor, theta: str) -> Tensor:
    """The terms whose sum normalises a row. Without some of them, Θ of the others stays if τ² shrinks with the sum.

    >>> mass(torch.tensor([[3.0, -4.0]]), "l2_norm_gelu")
    tensor([[ 9., 16.]])
    """
    if theta == "softmax":
        return score_TN.softmax(-1)
    return THETAS[theta].mass(THETAS[theta].before(score_TN))
