"""What the newest segments of a grown model learned: the words whose loss is lower with them than without."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.growth.model import slice as without_newest
from tokenformer.growth.shape import table


class Learned(NamedTuple):
    """`gain_T`: how much lower the loss of each place's next token is; with the newest segments, and without."""

    segments: int  # of the model without them
    count: int  # of places that have a next token in their row
    with_T: Tensor
    without_T: Tensor

    @property
    def gain_T(self) -> Tensor:
        return self.without_T - self.with_T


@torch.no_grad()
def losses(model: Any, ids_BT: Tensor) -> Tensor:
    """The loss of the token behind each place (B · T,); of the last one of a row it is 0."""
    found = []
    for row in ids_BT:
        logits = model(row[None, :-1]).logits[0].float()
        found.append(F.pad(F.cross_entropy(logits, row[1:], reduction="none"), (0, 1)))
    return torch.cat(found)


def what_growth_learned(model: Any, ids_BT: Tensor) -> Learned | None:
    """Compare with the model of all segments but the newest; None where no projection has several."""
    most = max(len(layer) for layers in table(model.config).values() for layer in layers)
    if most < 2:
        return None
    found = (losses(each, ids_BT) for each in (model, without_newest(model, segments=most - 1)))
    return Learned(most - 1, ids_BT[:, 1:].numel(), *found)


def words(learned: Learned, ids_T: Tensor, vocab: int) -> Tensor:
    """The summed gain of each vocabulary entry, as the token that came next (vocab,)."""
    return torch.zeros(vocab, dtype=torch.float64).index_add_(0, ids_T[1:].cpu(), learned.gain_T[:-1].double().cpu())
