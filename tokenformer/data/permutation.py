"""A keyed permutation of 0 … n-1 that is computed, not stored: any element by itself, in any order.

Unusual: a Feistel network over the next even number of bits, applied again while the result is out of range (cycle
walking).
"""

import hashlib
from functools import lru_cache

import numpy as np

ROUNDS = 8
BLOCK = 1024  # positions that are computed together and cached: threads ask for neighbours next


def round_keys(*words: object) -> np.ndarray:
    """Derive the keys of the network from any values (fingerprint, seed, epoch), by their text."""
    digest = hashlib.blake2b("|".join(map(str, words)).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, "<u8")


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Return the image of each index.

    >>> sorted(permute(np.arange(5), 5, round_keys("example", 1, 0)).tolist())
    [0, 1, 2, 3, 4]
    """
    if n < 1 or index.size == 0:
        return index.astype(np.int64)
    half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
    value = _feistel(index.astype(np.uint64), half, keys)
    while (outside := value >= n).any():
        value[outside] = _feistel(value[outside], half, keys)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = np.uint64((1 << int(half)) - 1)
    left, right = value >> half, value & mask
    for key in keys:
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # odd constants with well spread bits; products wrap
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << half) | right


class EpochOrder:
    """Maps positions, counted over all epochs, to `count` samples. Each epoch has its own order.

    >>> indices, epochs = EpochOrder(4, "example", 1)(np.arange(8))
    >>> sorted(indices[:4].tolist()), sorted(indices[4:].tolist()), epochs.tolist()
    ([0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1, 1])
    """

    def __init__(self, count: int, name: str, seed: int) -> None:
        self.count, self._name = count, (name, seed)
        self._block = lru_cache(maxsize=16)(self._compute)

    def _compute(self, block: int) -> np.ndarray:
        epochs, places = np.divmod(np.arange(block * BLOCK, (block + 1) * BLOCK), self.count)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places[here] = permute(places[here], self.count, round_keys(*self._name, epoch))
        return places

    def __call__(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the samples at rising positions, and their epochs."""
        indices = np.empty(len(places), np.int64)
        blocks = places // BLOCK
        for block in dict.fromkeys(blocks.tolist()):
            here = blocks == block
            indices[here] = self._block(block)[places[here] % BLOCK]
        return indices, places // self.count
