"""Losses of pairs of images and texts, over all ranks: softmax (CLIP) and sigmoid (SigLIP).

Unusual: both return gradients. Features are leaves here, so that the models behind them may be differentiated one
micro-batch at a time, and rows are worked on in chunks, so that never all scores of a batch are in memory.
Legend: B pairs of this rank, N pairs of all ranks, R rows of a chunk, E width of the shared space.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

SCORES = 1 << 26  # the most that are held at once


class Result(NamedTuple):
    """The loss summed over this rank's pairs, and gradients of the sum over all ranks.

    Those of `scale` and `bias` are this rank's part: ranks add them up as they add those of other parameters.
    """

    total: Tensor
    image: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor | None


@torch.enable_grad()
def softmax_loss(
    image_BE: Tensor, text_BE: Tensor, scale: Tensor, group: dist.ProcessGroup | None = None, scores: int = SCORES
) -> Result:
    """Cross entropy of each image against all texts and of each text against all images, halved.

    `scale` is the logarithm of what cosines are multiplied by. Features have length 1, and equally many on each rank.

    >>> same = torch.eye(2)
    >>> softmax_loss(same, same, torch.tensor(0.0)).total  # 2 · log(1 + 1/e)
    tensor(0.6265)
    """
    mine = [_leaf(features) for features in (image_BE, text_BE)]
    every = [_leaf(gathered(features, group)) for features in (image_BE, text_BE)]
    scale, total, count = _leaf(scale), image_BE.new_zeros(()), len(image_BE)
    first = dist.get_rank(group) * count if group else 0
    for rows in _chunks(count, len(every[0]), scores):
        labels_R = torch.arange(first + rows.start, first + rows.stop, device=image_BE.device)
        for one, other in ((0, 1), (1, 0)):
            scores_RN = scale.exp() * mine[one][rows] @ every[other].T
            loss = F.cross_entropy(scores_RN, labels_R, reduction="sum") / 2
            loss.backward()
            total += loss.detach()
    image, text = (_grad(m) + _own_rows(_grad(e), first, count, group) for m, e in zip(mine, every, strict=True))
    return Result(total, image, text, _grad(scale), None)


@torch.enable_grad()
def sigmoid_loss(
    image_BE: Tensor,
    text_BE: Tensor,
    scale: Tensor,
    bias: Tensor,
    group: dist.ProcessGroup | None = None,
    scores: int = SCORES,
) -> Result:
    """Binary cross entropy of every image with every text: do they belong together?

    Texts travel around the ring of ranks, with the gradients that they have collected, until they are home again.

    >>> same, zero = torch.eye(2), torch.tensor(0.0)
    >>> sigmoid_loss(same, same, zero, zero).total  # 2 · log(1 + 1/e) + 2 · log 2
    tensor(2.0128)
    """
    image, scale, bias = (_leaf(tensor) for tensor in (image_BE, scale, bias))
    text, collected, total = text_BE.detach(), torch.zeros_like(text_BE), image_BE.new_zeros(())
    world = dist.get_world_size(group) if group else 1
    for hop in range(world):
        text = _leaf(text)
        for rows in _chunks(len(image), len(text), scores):
            scores_RB = scale.exp() * image[rows] @ text.T + bias
            sign = torch.full_like(scores_RB, -1)
            if hop == 0:  # this rank's own texts
                sign.diagonal(rows.start).fill_(1)
            loss = -F.logsigmoid(sign * scores_RB).sum()
            loss.backward()
            total += loss.detach()
        collected = collected + _grad(text)
        if group and world > 1:
            text, collected = _passed_on(torch.stack([text.detach(), collected]), group).unbind()
    return Result(total, _grad(image), collected, _grad(scale), _grad(bias))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _chunks(rows: int, columns: int, scores: int) -> Iterator[slice]:
    size = max(1, scores // max(1, columns))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def gathered(features_BE: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the features of all ranks (N, E), in the order of the ranks."""
    if group is None:
        return features_BE
    parts = [torch.empty_like(features_BE) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, features_BE.detach().contiguous(), group=group)
    return torch.cat(parts)


def _own_rows(grad_NE: Tensor, first: int, count: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return what all ranks have found for this rank's features."""
    if group is not None:
        dist.all_reduce(grad_NE, group=group)
    return grad_NE[first : first + count]


def _passed_on(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send a tensor to the next rank of the ring, and return that of the one before."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ahead, behind = (dist.get_global_rank(group, (rank + step) % world) for step in (1, -1))
    received = torch.empty_like(sent)
    both = [dist.P2POp(dist.isend, sent, ahead, group), dist.P2POp(dist.irecv, received, behind, group)]
    for request in dist.batch_isend_irecv(both):
        request.wait()
    return received
