"""What a picture costs by counting alone: a code given the one to its left and the one above it, smoothed."""

import itertools

import numpy as np

STRENGTHS = (0.02, 0.1, 0.5, 2.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0, 1000.0)


def contexts(pictures: np.ndarray, colours: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the left and the upper code of each; outside there is one code more."""
    left = np.pad(pictures, ((0, 0), (0, 0), (1, 0)), constant_values=colours)[:, :, :-1]
    return left, np.pad(pictures, ((0, 0), (1, 0), (0, 0)), constant_values=colours)[:, :-1]


def order_two(
    train: np.ndarray, validation: np.ndarray, whole: np.ndarray, held: np.ndarray, colours: int
) -> dict[str, float]:
    """Return the bits of a code of held-out pictures (B, side, side), by counts over `whole`.

    Counts of (left, upper) are smoothed by the mean of those of left alone and upper alone, and these by those of all
    codes; both strengths are chosen on validation pictures by counts over `train`.
    """
    counted = _count(train, colours)
    best = min(itertools.product(STRENGTHS, STRENGTHS), key=lambda s: _bits(counted, validation, colours, *s))
    return {"bits": _bits(_count(whole, colours), held, colours, *best), "strengths": list(best)}


def _count(pictures: np.ndarray, colours: int) -> np.ndarray:
    count = np.zeros((colours + 1, colours + 1, colours))
    np.add.at(count, (*contexts(pictures, colours), pictures), 1)
    return count


def _bits(count: np.ndarray, pictures: np.ndarray, colours: int, outer: float, inner: float) -> float:
    plain = count.sum((0, 1)) + 0.5
    plain /= plain.sum()
    left, upper = (
        (some + inner * plain) / (some.sum(-1, keepdims=True) + inner) for some in (count.sum(1), count.sum(0))
    )
    mixed = (left[:, None] + upper[None]) / 2
    chance = (count + outer * mixed) / (count.sum(-1, keepdims=True) + outer)
    return float(-np.log2(chance[(*contexts(pictures, colours), pictures)]).mean())
