"""What gives samples to the loader: the contract of a source, and which source is next in a blend of several.

Unusual: a source knows no order. The loader says which samples it wants, and a source fills a whole micro-batch with
them in one call, so that the disk is asked once and nothing is copied twice.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

FINEST = 100_000  # weights of a blend are rounded to one part in this many


class Field(NamedTuple):
    """One array of a batch."""

    shape: tuple[int, ...]  # of one row
    dtype: DTypeLike
    filler: float = 0  # what stands in rows that hold no sample


class Source(Protocol):
    """Samples 0 … len - 1. What a sample holds depends on its index and the epoch, and on nothing else."""

    identity: dict[str, str]
    """What must be equal to resume. `data` names the contents; `data`, `part` and `context` (where they are there)
    decide the order of an epoch, together with the seed."""
    fields: dict[str, Field]
    shuffled: bool
    """False: index i stands at position i, because the source brings its own order. It cannot be blended."""
    processes: bool
    """Whether processes read it (decoding) instead of threads (copying). It is then pickled, so its class stands in a
    module that can be imported."""

    def __len__(self) -> int:
        """Return how many samples an epoch has."""
        ...

    def read(self, indices: np.ndarray, epochs: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Fill row i of every array with sample `indices[i]` of epoch `epochs[i]`."""
        ...


def joined_identity(sources: Sequence[Source], blend: "Blend") -> dict[str, str]:
    """Return the identity of a blend: what its sources have in common, and the share of each where they differ."""
    if len(sources) == 1:
        return dict(sources[0].identity)
    joined = {}
    for name in dict.fromkeys(["data", *(name for s in sources for name in s.identity)]):
        values = [s.identity.get(name, "") for s in sources]
        shares = [f"{v}*{n}/{blend.period}" for v, n in zip(values, blend.counts, strict=True)]
        joined[name] = "+".join(shares) if name == "data" or len(set(values)) > 1 else values[0]
    return joined


class Blend:
    """Which source is next: after any number of samples each is within one sample of its share (Tijdeman's rule).

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
        """Return the source at each position, and how many of its samples came before."""
        rounds, places = np.divmod(positions, self.period)
        sources = self.schedule[places]
        return sources, rounds * self.counts[sources] + self._rank[places]


def _rounded(shares: list[Fraction]) -> list[Fraction]:
    """Round shares to whole parts of FINEST, at least one each, that add up to 1."""
    parts = [max(1, round(s * FINEST)) for s in shares]
    parts[parts.index(max(parts))] += FINEST - sum(parts)
    return [Fraction(p, FINEST) for p in parts]


def _schedule(counts: np.ndarray) -> np.ndarray:
    """Return one period: at each turn, of the sources that are far enough behind, the one that must come soonest."""
    period, sources = int(counts.sum()), len(counts)
    out = np.zeros(period, np.int64)
    slack = 2 * sources - 2
    if slack == 0:
        return out
    # in units of 1 / (period · slack): behind = turn · share − given; whole numbers, so nothing is rounded
    behind, gains, limit = [0] * sources, [int(c) * slack for c in counts], period * (slack - 1)
    for turn in range(period):
        chosen, soonest = 0, math.inf
        for i, gain in enumerate(gains):
            behind[i] += gain
            if behind[i] >= period and (due := (limit - behind[i]) / gain) < soonest:
                chosen, soonest = i, due
        behind[chosen] -= period * slack
        out[turn] = chosen
    return out
