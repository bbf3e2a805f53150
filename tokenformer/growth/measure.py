"""What flows into each Pattention of a model on given ids: the measurements that shrinking and merging rest on.

Legend: T rows of data, D dim, N parameter tokens of one segment.
"""

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from tokenformer.models import LanguageModel, Pattention
from tokenformer.models.layers import THETAS, Segment

KIND = {"query": "qkv", "key": "qkv", "value": "qkv", "proj": "proj", "ffn": "ffn"}
Where = tuple[int, str, int]  # layer, projection, segment


def layers(model: LanguageModel) -> Iterator[tuple[int, str, Pattention]]:
    """(layer, projection, module) of every Pattention, query first."""
    for layer, block in enumerate(model.blocks):
        attention = cast(nn.Module, block.attention)
        for name in KIND:
            yield layer, name, cast(Pattention, block.ffn if name == "ffn" else getattr(attention, name))


def segments(model: LanguageModel) -> Iterator[tuple[Where, Segment]]:
    """Every segment with where it stands."""
    for layer, name, module in layers(model):
        for i, segment in enumerate(module.segments):
            yield (layer, name, i), segment


@torch.no_grad()
def watch(model: LanguageModel, ids: Tensor, see: Callable[[Where, Tensor, Tensor], None]) -> None:
    """Run the model on ids (B, T); `see(where, score_TN, activation_TN)` is told of every segment, sample by sample."""
    hooks = []

    def tell(layer: int, names: list[str], members: list[Pattention]) -> Callable:
        def hook(_module: nn.Module, arguments: tuple) -> None:
            x_TD = arguments[0].flatten(0, -2)
            for name, member in zip(names, members, strict=True):
                for i, (score_TN, active_TN) in enumerate(member.activations(x_TD)):
                    see((layer, name, i), score_TN.double(), active_TN.double())

        return hook

    for layer, block in enumerate(model.blocks):
        found = {name: module for at, name, module in layers(model) if at == layer}
        qkv = ["query", "key", "value"]
        attention = cast(nn.Module, block.attention)  # q, k and v are one product: their input is the attention's
        hooks.append(attention.register_forward_pre_hook(tell(layer, qkv, [found[name] for name in qkv])))
        hooks += [found[n].register_forward_pre_hook(tell(layer, [n], [found[n]])) for n in ("proj", "ffn")]
    try:
        for row in ids:
            model.hidden(row[None])
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
