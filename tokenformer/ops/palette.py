"""Pictures as rows of codes: each pixel is the number of the nearest colour of a palette, found by k-means.

Unusual: k-means counts in whole numbers alone, so that the same pictures give the same palette on every machine.
Legend: B batch, H height, W width, K colours, N distinct colours.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ROUNDS = 30  # of k-means, at most


class Codes(NamedTuple):
    """What a model draws with: colours (K, 3) as bytes, and the side of its square pictures in pixels."""

    palette: Tensor
    side: int


def quantise(bytes_BHW3: Tensor, palette_K3: Tensor) -> Tensor:
    """Return the number of the nearest colour of each pixel (B, H · W), row by row.

    >>> palette = torch.tensor([[0, 0, 0], [255, 0, 0]], dtype=torch.uint8)
    >>> quantise(torch.tensor([[[[9, 9, 9], [200, 0, 30]]]], dtype=torch.uint8), palette)
    tensor([[0, 1]])
    """
    points, palette = bytes_BHW3.flatten(1, 2).float(), palette_K3.float()
    distances = palette.square().sum(-1) - 2 * points @ palette.T  # whole numbers below 2^24: exact
    return distances.argmin(-1)


def colours(codes_BN: Tensor, codes: Codes) -> Tensor:
    """Return pictures (B, side, side, 3) as bytes."""
    return codes.palette.to(codes_BN.device)[codes_BN].unflatten(1, (codes.side, codes.side))


def find_palette(pictures: Iterable[np.ndarray], count: int) -> Tensor:
    """Return `count` colours (K, 3) for pictures (…, 3) of bytes: k-means, begun with the colours that are far apart.

    >>> some = [np.array([[0, 0, 0], [250, 250, 250], [0, 0, 2]], np.uint8)]
    >>> find_palette(some, 2).tolist()
    [[0, 0, 1], [250, 250, 250]]
    """
    counts, sums = np.zeros(1 << 15, np.int64), np.zeros((1 << 15, 3), np.int64)
    for some in pictures:  # colours that agree in five bits of each channel are one
        points = some.reshape(-1, 3).astype(np.int64)
        bins = ((points >> 3) * np.array([1 << 10, 1 << 5, 1])).sum(-1)
        counts += np.bincount(bins, minlength=len(counts))
        for channel in range(3):
            sums[:, channel] += np.bincount(bins, points[:, channel], minlength=len(counts)).astype(np.int64)
    there = counts > 0
    counts, sums = counts[there], sums[there]
    points = _rounded(sums, counts)
    centres = points[[counts.argmax()]]
    nearest = _distances(points, centres)[:, 0]
    while len(centres) < count:  # the colour whose pixels are farthest from all chosen ones, together
        centres = np.concatenate([centres, points[[(nearest * counts).argmax()]]])
        nearest = np.minimum(nearest, _distances(points, centres[-1:])[:, 0])
    for _ in range(ROUNDS):
        owner = _distances(points, centres).argmin(1)
        sizes = np.bincount(owner, counts, minlength=count).astype(np.int64)
        totals = np.stack([np.bincount(owner, sums[:, c], minlength=count) for c in range(3)], 1).astype(np.int64)
        moved = np.where(sizes[:, None] > 0, _rounded(totals, np.maximum(sizes, 1)), centres)
        if (moved == centres).all():
            break
        centres = moved
    order = np.lexsort(centres.T[::-1])
    return torch.from_numpy(centres[order].astype(np.uint8))


def _rounded(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return (2 * sums + counts[:, None]) // (2 * counts[:, None])


def _distances(points_N3: np.ndarray, centres_K3: np.ndarray) -> np.ndarray:
    """Return squared distances (N, K)."""
    squares = (centres_K3**2).sum(1) - 2 * points_N3 @ centres_K3.T
    return squares + (points_N3**2).sum(1, keepdims=True)
