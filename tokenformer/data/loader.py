"""Batches of samples for one rank, from any source.

Unusual: what a batch holds is a function of its position alone, so the state is three values (identity of the data,
seed, samples seen); world size, micro-batch and workers only say how one sequence is cut.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from tokenformer.data.permutation import EpochOrder
from tokenformer.data.readers import Readers
from tokenformer.data.source import Blend, Source, joined_identity
from tokenformer.errors import UserError

ORDERED_BY = ("data", "part", "context")  # what of an identity decides the order of an epoch
Allocate = Callable[[tuple[int, ...], DTypeLike], np.ndarray]


class Batch(NamedTuple):
    """A micro-batch."""

    fields: dict[str, np.ndarray]  # what the source's fields say, with the rows in front
    last: bool  # whether it ends a step
    samples_seen: int  # the loader's, after it


class Loader:
    """Iterates over the micro-batches of one rank, without end (or for `epochs`).

    A step has the next `batch` samples; rank r of W gets the r-th share of them, cut into micro-batches of one size.
    Every rank has equally many micro-batches; rows without a sample (the batch does not divide, or the last epoch is
    over) hold the fillers of the fields. Several sources are blended by `weights`. `workers` threads, or processes if
    the source asks for them, read up to `prefetch` micro-batches ahead into arrays that `allocate` makes.
    """

    def __init__(
        self,
        sources: Source | Sequence[Source],
        *,
        batch: int,
        micro_batch: int | None = None,
        weights: Sequence[float] | None = None,
        rank: int = 0,
        world: int = 1,
        seed: int = 1234,
        epochs: int | None = None,
        workers: int = 2,
        prefetch: int = 8,
        allocate: Allocate = np.empty,
    ) -> None:
        for name, value in (("batch", batch), ("micro_batch", micro_batch), ("prefetch", prefetch)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: give a number above 0")
        if not 0 <= rank < world:
            raise UserError(f"rank is {rank} of a world of {world}: ranks are counted from 0")
        self.sources: list[Source] = list(sources) if isinstance(sources, Sequence) else [sources]
        self.fields = self.sources[0].fields
        if len(self.sources) > 1:
            if epochs is not None:
                raise UserError("a blend has no common epoch: leave `epochs` out, or load its sets one by one")
            if not all(s.shuffled and s.fields == self.fields for s in self.sources):
                raise UserError("only shuffled sources with the same fields can be blended: load them one by one")
        self.batch, self.seed, self.workers, self.prefetch, self.allocate = batch, seed, workers, prefetch, allocate
        share = -(-batch // world)
        self.micro_batch = min(micro_batch or share, share)
        self.micro_batches = -(-share // self.micro_batch)  # of one step
        self._rows = range(rank * batch // world, (rank + 1) * batch // world)
        self.samples_seen = 0
        self.blend = Blend(weights or [1.0] * len(self.sources))
        self.identity = joined_identity(self.sources, self.blend)
        names = [":".join(s.identity[key] for key in ORDERED_BY if key in s.identity) for s in self.sources]
        self._orders = [EpochOrder(len(s), name, seed) for s, name in zip(self.sources, names, strict=True)]
        counts = [len(s) for s in self.sources]
        self.samples = sum(counts) if all(counts) else 0  # of one epoch
        self._stop = None if epochs is None else epochs * self.samples

    def state_dict(self) -> dict:
        """Return three values, which are the same on every rank after whole steps."""
        return {"identity": self.identity, "seed": self.seed, "samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict) -> None:
        """Continue after a state, at any world size, batch and micro-batch. Refuse other data."""
        try:
            was = state.get("identity")
            if was is None:  # older checkpoints hold it as one text
                was = dict(entry.split("=", 1) for entry in state["fingerprint"].split())
            was, seen = {**was, "seed": str(state["seed"])}, int(state["samples_seen"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError("the saved state of the data is not one of ours: take another checkpoint") from None
        now = {**self.identity, "seed": str(self.seed)}
        for name in {**now, **was}:
            if was.get(name) != now.get(name):
                raise UserError(
                    f"the data are not those of the saved state ({name} was {was.get(name)}, is {now.get(name)}): "
                    "give the same data and settings, or start a new run"
                )
        self.samples_seen = seen

    def __iter__(self) -> Iterator[Batch]:
        """Yield micro-batches from the state on. The state counts a step when its last micro-batch was handed out."""
        if not self.samples:
            about = ", ".join(f"{name} {value}" for name, value in self.identity.items())
            raise UserError(f"the data are empty ({about}): give more of them, or other shares in data.split")
        for batch in self._ahead() if self.workers else (self._batch(*place) for place in self._places()):
            self.samples_seen = batch.samples_seen
            yield batch

    def _places(self) -> Iterator[tuple[int, int]]:
        """Yield (position at which the step begins, number of the micro-batch), from the state on."""
        step = self.samples_seen
        while self._stop is None or step < self._stop:
            yield from ((step, micro) for micro in range(self.micro_batches))
            step += self.batch

    def positions(self, step: int, micro: int) -> np.ndarray:
        """Return the global positions of this rank's samples in a micro-batch of the step that begins at `step`."""
        rows = self._rows[micro * self.micro_batch : (micro + 1) * self.micro_batch]
        places = step + np.arange(rows.start, rows.stop)
        return places if self._stop is None else places[places < self._stop]

    def _batch(self, step: int, micro: int, readers: Readers | None = None) -> Batch:
        fields = {name: self.allocate((self.micro_batch, *f.shape), f.dtype) for name, f in self.fields.items()}
        turns, places = self.blend.turns(self.positions(step, micro))
        for number in range(len(self.sources)):
            mine = turns == number
            if mine.all():  # into the batch itself
                self._read(number, places, {name: array[: len(places)] for name, array in fields.items()}, readers)
                continue
            some = {name: np.empty((mine.sum(), *f.shape), f.dtype) for name, f in self.fields.items()}
            self._read(number, places[mine], some, readers)
            for name, array in fields.items():
                array[: len(places)][mine] = some[name]
        for name, field in self.fields.items():
            fields[name][len(places) :] = field.filler
        last = micro == self.micro_batches - 1
        return Batch(fields, last, step + self.batch * last)

    def _read(self, number: int, places: np.ndarray, out: dict[str, np.ndarray], readers: Readers | None) -> None:
        """Fill `out` with samples of a source, given their positions in its sequence over all epochs."""
        if not len(places):
            return
        source, order = self.sources[number], self._orders[number]
        indices, epochs = order(places) if source.shuffled else (places % order.count, places // order.count)
        if readers is not None and source.processes:
            readers.read(number, indices, epochs, out)
        else:
            source.read(indices, epochs, out)

    def _ahead(self) -> Iterator[Batch]:
        """Yield the micro-batches in order, read up to `prefetch` ahead."""
        readers = None
        if any(s.processes for s in self.sources):
            readers = Readers(self.sources, self.fields, self.micro_batch, self.workers)
        threads, places = ThreadPoolExecutor(self.workers), self._places()
        try:
            waiting = deque(threads.submit(self._batch, *place, readers) for place in islice(places, self.prefetch))
            while waiting:
                batch = waiting.popleft().result()
                waiting.extend(threads.submit(self._batch, *place, readers) for place in islice(places, 1))
                yield batch
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            if readers:
                readers.close()
