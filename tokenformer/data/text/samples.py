"""Samples of context + 1 tokens across documents, the three parts of a set, and blends of several sets.

Unusual: sample i is tokens i·context … (i+1)·context, so every token but the first is a target exactly once. Which
sample stands at a position is arithmetic (a keyed permutation of each epoch); so is whose turn it is in a blend.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from tokenformer.data.permutation import permute, round_keys
from tokenformer.data.text.indexed import Indexed

PARTS = ("train", "validation", "test")
BLOCK = 1024  # positions whose samples are computed together
FINEST = 100_000  # weights of a blend are rounded to one part in this many


def bounds(total: int, shares: Sequence[float]) -> list[int]:
    """Where the parts of `total` things begin and end, rounded as GPT-NeoX does.

    >>> bounds(21, [969, 30, 1])
    [0, 20, 21, 21]
    """
    shares = [*shares, 0.0, 0.0][:3]
    places = [0]
    for share in shares:
        places.append(places[-1] + round(share / sum(shares) * total))
    over = places[-1] - total
    return [0, *(place - over for place in places[1:])]


def part_edges(source: Indexed, shares: Sequence[float]) -> tuple[list[int], str]:
    """Where the parts begin and end in the stream, and a sentence where not all of them are whole documents.

    A part that would get no document is cut from its neighbours by tokens.
    """
    shares = [*shares, 0.0, 0.0][:3]
    places, total = bounds(source.documents, shares), len(source.tokens)
    edges = [source.document_start(p) for p in places]
    wanted = [i for i in range(3) if shares[i] > 0]
    starved = {i for i in wanted if places[i + 1] <= places[i]}
    if not starved:
        return edges, ""
    cuts = bounds(total, shares)
    edges = [0, *(cuts[i] if starved & {i - 1, i} else edges[i] for i in (1, 2)), total]
    if any(edges[i + 1] <= edges[i] for i in wanted):
        edges = cuts
    names = " and ".join(PARTS[i] for i in sorted(starved))
    return edges, f"{source.documents:,} documents are too few, {names} would get none: cut by tokens"


class PermutedOrder:
    """Samples of a range of tokens, each epoch in its own order."""

    def __init__(self, source: Indexed, start: int, stop: int, context: int, seed: int, name: str = "") -> None:
        self.source, self.start, self.context = source, start, context
        self.count = max(0, stop - start - 1) // context
        self.dropped = max(0, stop - start - 1) % context  # a tail shorter than a sample
        self._name = (name, seed)
        self._block = lru_cache(maxsize=16)(self._compute)  # neighbours are asked for next, by every rank and thread
        self._starts: np.ndarray | None = None

    def _compute(self, block: int) -> np.ndarray:
        epochs, places = np.divmod(np.arange(block * BLOCK, (block + 1) * BLOCK), self.count)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places[here] = permute(places[here], self.count, round_keys(*self._name, epoch))
        return places

    def index(self, position: int) -> int:
        """Which sample stands at a position (counted over all epochs)."""
        return int(self._block(position // BLOCK)[position % BLOCK])

    def pieces(self, position: int) -> list[tuple[int, int]]:
        """Where the tokens of the sample at a position are in the stream."""
        begin = self.start + self.index(position) * self.context
        return [(begin, begin + self.context + 1)]

    def documents(self, pieces: list[tuple[int, int]]) -> np.ndarray:
        """The number (0, 1, …) of the document of each token of a sample."""
        if self._starts is None:  # only with boundaries: 8 bytes a document
            items = np.append(self.source.pointers // self.source.dtype.itemsize, len(self.source.tokens))
            self._starts = np.unique(items[self.source.doc_idx[:-1]])
        [(begin, end)] = pieces
        first, last = np.searchsorted(self._starts, [begin, end - 1], side="right")
        changes = np.zeros(end - begin, np.int32)
        changes[self._starts[first:last] - begin] = 1
        return np.cumsum(changes)


class Blend:
    """Whose turn it is: after any number of samples each set is within one sample of its share (Tijdeman's rule).

    >>> blend = Blend([3, 1])
    >>> [int(s) for s in blend.turns(np.arange(8))[0]]
    [0, 0, 1, 0, 0, 0, 1, 0]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(w)) for w in weights]
        shares = [w / sum(exact) for w in exact]
        period = math.lcm(*(s.denominator for s in shares))
        if period > FINEST:
            period, shares = FINEST, _rounded(shares)
        self.period, self.counts = period, np.array([int(s * period) for s in shares], np.int64)
        self.schedule = _schedule(self.counts)
        self._rank = np.empty(self.period, np.int64)
        for number in range(len(self.counts)):
            own = self.schedule == number
            self._rank[own] = np.arange(own.sum())

    def turns(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The set at each position, and how many of its samples came before."""
        rounds, places = np.divmod(positions, self.period)
        sets = self.schedule[places]
        return sets, rounds * self.counts[sets] + self._rank[places]

    def given(self, position: int) -> np.ndarray:
        """How many samples of each set come before a position."""
        rounds, place = divmod(position, self.period)
        return rounds * self.counts + np.bincount(self.schedule[:place], minlength=len(self.counts))


def _rounded(shares: list[Fraction]) -> list[Fraction]:
    """Shares in whole parts of FINEST, at least one each, that add up to 1."""
    parts = [max(1, round(s * FINEST)) for s in shares]
    parts[parts.index(max(parts))] += FINEST - sum(parts)
    return [Fraction(p, FINEST) for p in parts]


def _schedule(counts: np.ndarray) -> np.ndarray:
    """One period: at each turn, of the sets that are far enough behind, the one that must come soonest."""
    period, sets = int(counts.sum()), len(counts)
    out = np.zeros(period, np.int64)
    slack = 2 * sets - 2
    if slack == 0:
        return out
    # in units of 1 / (period · slack): behind = turn · share − given; whole numbers, so nothing is rounded
    behind, gains, limit = [0] * sets, [int(c) * slack for c in counts], period * (slack - 1)
    for turn in range(period):
        chosen, soonest = 0, math.inf
        for i, gain in enumerate(gains):
            behind[i] += gain
            if behind[i] >= period and (due := (limit - behind[i]) / gain) < soonest:
                chosen, soonest = i, due
        behind[chosen] -= period * slack
        out[turn] = chosen
    return out
