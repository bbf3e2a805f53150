"""Batches of samples for one rank. What a batch holds is a function of its position alone, so the state is three values
(fingerprint, seed, samples seen); world size, micro-batch and threads only say how one sequence is cut.

Shapes: B rows of a micro-batch, T context.
"""

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenformer.config import DataConfig
from tokenformer.data.text.indexed import Indexed, description_path
from tokenformer.data.text.official_order import OfficialOrder
from tokenformer.data.text.samples import PARTS, Blend, PermutedOrder, bounds, part_edges
from tokenformer.data.text.tokenizer import FileTokenizer, Tokenizer, fingerprint, load_tokenizer
from tokenformer.errors import UserError

IGNORED = -100  # a label that counts in no loss


@dataclass
class Batch:
    """A micro-batch. `labels[t]` is the target of position t. `samples_seen` is the loader's after it."""

    ids: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64
    documents: Tensor | None  # (B, T) int32, the number of the document inside the sample; only with boundaries
    last: bool  # whether it ends a step
    samples_seen: int


class Loader:
    """Iterates the micro-batches of one rank, without end (or for `epochs`).

    A step takes the next `batch` samples; rank r of W has the r-th share of them, cut into micro-batches of one size.
    Rows that do not divide (or lie behind the last epoch) are there with every label ignored. Every rank has equally
    many micro-batches. `samples` is how many are asked for in all, which decides `order: official`.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        context: int,
        batch: int,
        micro_batch: int | None = None,
        rank: int = 0,
        world: int = 1,
        seed: int = 1234,
        part: str = "train",
        samples: int | None = None,
        vocab: int | None = None,
        epochs: int | None = None,
        pin: bool | None = None,
        allow_empty: bool = False,
    ) -> None:
        if not config.path:
            raise UserError("data.path is missing: name a set made by `tokenformer prepare`")
        if part not in PARTS:
            raise UserError(f"there is no part '{part}': parts are {', '.join(PARTS)}")
        for name, value in (
            ("context", context),
            ("batch", batch),
            ("micro_batch", 1 if micro_batch is None else micro_batch),
        ):
            if value < 1:
                raise UserError(f"{name} is {value}: give a number above 0")
        if not 0 <= rank < world:
            raise UserError(f"rank is {rank} of a world of {world}: ranks are counted from 0")
        self.config, self.context, self.batch, self.seed, self.part = config, context, batch, seed, part
        share = -(-batch // world)
        self.micro_batch = min(micro_batch or share, share)
        self.micro_batches = -(-share // self.micro_batch)  # of one step
        self._rows = range(rank * batch // world, (rank + 1) * batch // world)
        self.pin = torch.cuda.is_available() if pin is None else pin
        self.samples_seen = 0
        weights = config.path if isinstance(config.path, dict) else {config.path: 1.0}
        self.sets = [Indexed(path, config.verify, vocab) for path in weights]
        for source in self.sets:
            source.read_at_random()
        self._check_one_tokenizer()
        self.blend = Blend(list(weights.values()))
        self.fingerprint = self._fingerprint(samples)
        self.orders = [self._order(s, samples, f"{s.fingerprint}:{part}:{context}") for s in self.sets]
        empty = [s.prefix.name for s, o in zip(self.sets, self.orders, strict=True) if not o.count]
        if empty and not allow_empty:
            raise UserError(
                f"the {part} part of {empty[0]} has no sample of {context} + 1 tokens: "
                "give more text, a smaller context or another data.split"
            )
        self.samples = 0 if empty else sum(o.count for o in self.orders)  # of one epoch
        self.dropped = sum(o.dropped for o in self.orders)  # tokens of tails shorter than a sample
        if epochs is not None and len(self.sets) > 1:
            raise UserError("a blend has no common epoch: leave `epochs` out, or load its sets one by one")
        self._stop = None if epochs is None else epochs * self.samples

    def _order(self, source: Indexed, samples: int | None, name: str) -> PermutedOrder | OfficialOrder:
        if self.config.order == "permutation":
            edges, note = part_edges(source, self.config.split)
            if note:
                warnings.warn(f"{source.prefix.name}: {note}", stacklevel=4)
            start, stop = edges[PARTS.index(self.part) :][:2]
            return PermutedOrder(source, start, stop, self.context, self.seed, name)
        if len(self.sets) > 1:
            raise UserError("data.order official knows one set: use order permutation for a blend")
        if samples is None:
            raise UserError("data.order official needs the number of samples that the run will ask for: give `samples`")
        first, last = bounds(len(source), self.config.split)[PARTS.index(self.part) :][:2]
        cache = Path(self.config.cache or source.prefix.parent)
        return OfficialOrder(source, first, last, self.context, samples, self.seed, cache)

    def _fingerprint(self, samples: int | None) -> str:
        parts = [s.fingerprint for s in self.sets]
        if len(parts) > 1:
            parts = [f"{p}*{n}/{self.blend.period}" for p, n in zip(parts, self.blend.counts, strict=True)]
        shares = ",".join(f"{s:.12g}" for s in self.config.split)
        asked = f" samples={samples}" if self.config.order == "official" else ""
        order = f"order={self.config.order} context={self.context} split={shares} part={self.part}"
        return f"data={'+'.join(parts)} {order}{asked}"

    def _check_one_tokenizer(self) -> None:
        known = [(s.prefix.name, (s.description or {}).get("tokenizer")) for s in self.sets]
        known = [(name, tokenizer) for name, tokenizer in known if tokenizer]
        for name, tokenizer in known:
            if tokenizer["sha256"] != known[0][1]["sha256"]:
                raise UserError(
                    f"{name} was prepared with {tokenizer['name']} but {known[0][0]} with {known[0][1]['name']}: "
                    "blend sets of one tokenizer"
                )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the set: as configured, or the one that its description names."""
        if self.config.tokenizer:
            return load_tokenizer(self.config.tokenizer)
        return set_tokenizer(self.sets[0])

    @property
    def epoch(self) -> float:
        """How often the data were seen; of a blend, the set that was seen most often."""
        given = self.blend.given(self.samples_seen)
        return max(n / o.count for n, o in zip(given.tolist(), self.orders, strict=True)) if self.samples else 0.0

    @property
    def tokens_seen(self) -> int:
        return self.samples_seen * self.context

    def state_dict(self) -> dict:
        """Three values; the same at any rank, after whole steps."""
        return {"fingerprint": self.fingerprint, "seed": self.seed, "samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict) -> None:
        """Go on after a state, at any world size, batch and micro-batch; other data are refused."""
        mine = self.state_dict()
        was, now = (dict(e.split("=") for e in f"{s['fingerprint']} seed={s['seed']}".split()) for s in (state, mine))
        for name in now:
            if was.get(name) != now[name]:
                raise UserError(
                    f"the data are not those of the saved state ({name} was {was.get(name)}, is {now[name]}): "
                    "give the same data and settings, or start a new run"
                )
        self.samples_seen = int(state["samples_seen"])

    def __iter__(self) -> Iterator[Batch]:
        """From where the state stands. The state counts a step when its last micro-batch was handed out."""
        if not self.samples:
            raise UserError(f"the {self.part} part of the data is empty: give more text or another data.split")
        batches = (self._batch(*place) for place in self._places())
        if self.config.workers:
            batches = _ahead(self._batch, self._places(), self.config.workers, self.config.prefetch)
        for batch in batches:
            self.samples_seen = batch.samples_seen
            yield batch

    def _places(self) -> Iterator[tuple[int, int]]:
        """(position where the step begins, number of the micro-batch), from where the state stands."""
        step = self.samples_seen
        while self._stop is None or step < self._stop:
            yield from ((step, micro) for micro in range(self.micro_batches))
            step += self.batch

    def positions(self, step: int, micro: int) -> np.ndarray:
        """Global positions of this rank's samples in a micro-batch of the step that begins at position `step`."""
        rows = self._rows[micro * self.micro_batch : (micro + 1) * self.micro_batch]
        places = step + np.arange(rows.start, rows.stop)
        return places if self._stop is None else places[places < self._stop]

    def _batch(self, step: int, micro: int) -> Batch:
        shape = (self.micro_batch, self.context)
        ids_BT, labels_BT = (torch.empty(shape, dtype=torch.int64, pin_memory=self.pin) for _ in range(2))
        documents_BT = None
        if self.config.boundaries:
            documents_BT = torch.zeros(shape, dtype=torch.int32, pin_memory=self.pin)
        ids, labels = ids_BT.numpy(), labels_BT.numpy()
        row = 0
        for row, (tokens, documents) in enumerate(self._samples(self.positions(step, micro)), 1):
            ids[row - 1], labels[row - 1] = tokens[:-1], tokens[1:]
            if documents is not None and documents_BT is not None:
                documents_BT.numpy()[row - 1] = documents[:-1]
                if self.config.boundary_labels == "ignore":
                    labels[row - 1][documents[1:] != documents[:-1]] = IGNORED
        ids[row:], labels[row:] = 0, IGNORED
        last = micro == self.micro_batches - 1
        return Batch(ids_BT, labels_BT, documents_BT, last, step + self.batch * last)

    def _samples(self, positions: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Tokens of samples, and the documents they belong to. The disk is asked for all of them at once."""
        turns, places = self.blend.turns(positions)
        plans = [
            (self.orders[t], self.orders[t].pieces(p)) for t, p in zip(turns.tolist(), places.tolist(), strict=True)
        ]
        for order, pieces in plans:
            for start, stop in pieces:
                order.source.fetch(start, stop)
        for order, pieces in plans:
            spans = [order.source.span(start, stop) for start, stop in pieces]
            tokens = spans[0] if len(spans) == 1 else np.concatenate(spans)
            yield tokens, order.documents(pieces) if self.config.boundaries else None


def _ahead(make: Callable[..., Batch], places: Iterator[tuple], workers: int, depth: int) -> Iterator[Batch]:
    """What `make` gives for each place, in order, made by threads up to `depth` before it is asked for."""
    threads = ThreadPoolExecutor(workers)
    try:
        waiting = deque(threads.submit(make, *place) for place in islice(places, depth))
        while waiting:
            batch = waiting.popleft().result()
            waiting.extend(threads.submit(make, *place) for place in islice(places, 1))
            yield batch
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def set_tokenizer(source: Indexed) -> Tokenizer:
    """The tokenizer that the description of a set names; a copy of any but the built-in ones stands beside the set."""
    if not source.description or "tokenizer" not in source.description:
        raise UserError(f"{source.prefix.name} does not say its tokenizer: name it with data.tokenizer (--tokenizer)")
    about = source.description["tokenizer"]
    copy = description_path(source.prefix).with_suffix(".tokenizer.json")
    if os.path.exists(copy):
        found: Tokenizer = FileTokenizer(copy.read_text(encoding="utf-8"), about["name"], about["end_of_document"])
    else:
        found = load_tokenizer(about["name"])
    if fingerprint(found) != about["sha256"]:
        raise UserError(
            f"the tokenizer {about['name']} is not the one that {source.prefix.name} was prepared with: "
            f"restore {copy}, or name the right one with data.tokenizer (--tokenizer)"
        )
    return found
