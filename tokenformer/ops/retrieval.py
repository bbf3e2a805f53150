"""How often what belongs together is found: recall of texts by images and of images by texts, all captions counted.

Unusual: what scores as high as the right one stands before it, so that a model that finds all alike finds nothing.
Legend: A images, B texts.
"""

import torch
from torch import Tensor

FIRST = (1, 5, 10)


def recalls(scores_AB: Tensor, owner_B: Tensor) -> dict[str, float]:
    """Return the shares of images with one of their texts among the first k, and of texts with their image there.

    `owner_B` is the number of the image that a text belongs to. An image without a text is not asked for.

    >>> scores = torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.3, 0.2]])  # two images; the first has two captions
    >>> found = recalls(scores, torch.tensor([0, 0, 1]))
    >>> found["image_to_text_r1"], round(found["text_to_image_r1"], 2)
    (0.5, 0.33)
    """
    own_AB = owner_B == torch.arange(len(scores_AB), device=owner_B.device)[:, None]
    ranks_A = _ranks(scores_AB, own_AB)[own_AB.any(1)]
    ranks_B = _ranks(scores_AB.T, own_AB.T)
    ways = {"image_to_text": ranks_A, "text_to_image": ranks_B}
    return {f"{way}_r{k}": (ranks < k).double().mean().item() for way, ranks in ways.items() for k in FIRST}


def _ranks(scores: Tensor, right: Tensor) -> Tensor:
    """Return for each row how many wrong columns score at least as high as its best right one."""
    best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
    return (~(scores < best) & ~right).sum(1)  # so that NaN, which is not below anything, finds nothing
