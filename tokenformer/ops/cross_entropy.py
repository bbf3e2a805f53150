"""Output head and cross entropy in one, in chunks of rows: the logits of all rows are never held at once.

Returns a sum and a count, so that one mean can be taken over accumulation and ranks.
Legend: T rows, D dim, W vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tokenformer.config_data import IGNORED
from tokenformer.errors import UserError
from tokenformer.ops.pattention import MISSING, backend

LOGITS = 1 << 27  # held at once
ROWS = 4096  # rows whose logits the kernel holds at once


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    labels_T: Tensor,
    chunk: int | None = None,
    loss_of: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    choice: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ −log p(label) in fp32 or better, and the number of labels that count (not -100). `chunk`: rows at once.

    `loss_of(hidden, weight, labels)` computes the sum of a chunk instead, such as over a vocabulary split over ranks.
    `choice`: the backend, as in Pattention. The kernels return NaN where a label is no row of the weight.

    >>> total, count = linear_cross_entropy(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([3, -100]))
    >>> round(total.item(), 4), count.item()
    (2.0794, 1)
    """
    hidden_TD, labels_T = hidden_TD.flatten(0, -2), labels_T.flatten()
    if loss_of is None and backend(hidden_TD, choice) == "triton":
        try:  # transformers refuses an exported file whose imports are missing, but for those in a try
            from tokenformer.ops.kernels.cross_entropy import fused
        except ImportError as error:
            raise UserError(MISSING) from error
        total = fused(hidden_TD, weight_WD, labels_T.contiguous(), IGNORED, chunk or ROWS)
        return total, (labels_T != IGNORED).sum()
    chunk = chunk or max(1, LOGITS // len(weight_WD))
    pairs = list(zip(hidden_TD.split(chunk), labels_T.split(chunk), strict=True))
    loss_of = loss_of or (lambda hidden_TD, weight_WD, labels_T: summed_loss(hidden_TD @ weight_WD.T, labels_T))
    if len(pairs) == 1:
        total = loss_of(hidden_TD, weight_WD, labels_T)
    else:  # backward recomputes each chunk's logits instead of keeping them
        parts = [checkpoint(loss_of, h, weight_WD, y, use_reentrant=False, preserve_rng_state=False) for h, y in pairs]
        total = torch.stack(parts).sum()
    return total, (labels_T != IGNORED).sum()


def summed_loss(logits_TW: Tensor, labels_T: Tensor) -> Tensor:
    """Σ −log p(label), in fp32 or better."""
    logits_TW = logits_TW.to(torch.promote_types(logits_TW.dtype, torch.float32))
    return F.cross_entropy(logits_TW, labels_T, ignore_index=IGNORED, reduction="sum")
