"""Prepared text as a source: samples of context + 1 tokens across documents, from one part of a set.

Unusual: sample i is tokens i·context … (i+1)·context, so every token but the first is a target exactly once. The order
of GPT-NeoX (`official_order.py`) cuts other samples. Shapes: B samples that are read together, T context.
"""

import warnings
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer.config import Config, DataConfig
from tokenformer.config_data import IGNORED
from tokenformer.data.loader import Loader
from tokenformer.data.source import Field
from tokenformer.data.text.indexed import Indexed, find_prefix, set_files
from tokenformer.data.text.official_order import OfficialOrder
from tokenformer.data.text.parts import PARTS, bounds, part_edges
from tokenformer.data.text.sets import set_tokenizer
from tokenformer.data.text.tokenizer import Tokenizer, load_tokenizer, padded_vocab
from tokenformer.errors import UserError
from tokenformer.files import refuse_same

Piece = tuple[int, int]  # where tokens begin and end in the stream


class Windows:
    """Samples of a range of tokens, one after another; neighbours share one token."""

    def __init__(self, source: Indexed, start: int, stop: int, context: int) -> None:
        self.source, self.start, self.context = source, start, context
        self.count = max(0, stop - start - 1) // context  # a shorter tail is dropped

    def pieces(self, indices: np.ndarray) -> list[list[Piece]]:
        """Return where the tokens of samples are in the stream."""
        begins = self.start + indices * self.context
        return [[(begin, begin + self.context + 1)] for begin in begins.tolist()]

    @cached_property
    def _documents(self) -> np.ndarray:
        """Where documents begin in the stream. It takes 8 bytes per document, so only `data.boundaries` asks for it."""
        items = np.append(self.source.pointers // self.source.dtype.itemsize, len(self.source.tokens))
        return np.unique(items[self.source.doc_idx[:-1]])

    def documents(self, pieces: list[Piece]) -> np.ndarray:
        """Return the number (0, 1, …) of the document that each token of a sample belongs to."""
        [(begin, end)] = pieces
        first, last = np.searchsorted(self._documents, [begin, end - 1], side="right")
        changes = np.zeros(end - begin, np.int32)
        changes[self._documents[first:last] - begin] = 1
        return np.cumsum(changes, dtype=np.int32)


class TextSource:
    """The samples of one part of a set. `order: official` depends on how many `samples` are asked for in all."""

    processes = False

    def __init__(
        self, config: DataConfig, found: Indexed, context: int, part: str, seed: int, samples: int | None
    ) -> None:
        self.config, self.set = config, found
        self.shuffled = config.order == "permutation"
        shares = ",".join(f"{s:.12g}" for s in config.split)
        self.identity = {"data": self.set.fingerprint, "order": config.order, "context": str(context)}
        self.identity |= {"split": shares, "part": part}
        self.fields = {"ids": Field((context,), np.int64), "labels": Field((context,), np.int64, IGNORED)}
        if config.boundaries:
            self.fields["documents"] = Field((context,), np.int32)
        number = PARTS.index(part)
        self.windows: Windows | OfficialOrder
        if self.shuffled:
            edges, note = part_edges(self.set, config.split)
            if note:
                warnings.warn(f"{self.set.prefix.name}: {note}", stacklevel=4)
            self.windows = Windows(self.set, edges[number], edges[number + 1], context)
        else:
            if samples is None:
                raise UserError("data.order official needs the number of samples that a run asks for: give `samples`")
            self.identity["samples"] = str(samples)
            cache = Path(config.cache or self.set.prefix.parent)
            first, last = bounds(len(self.set), config.split)[number : number + 2]
            self.windows = OfficialOrder(self.set, first, last, context, samples, seed, cache)

    def __len__(self) -> int:
        return self.windows.count

    def read(self, indices: np.ndarray, epochs: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Fill rows with samples, which are the same in every epoch. `labels[t]` is what position t predicts."""
        ids_BT, labels_BT, documents_BT = out["ids"], out["labels"], out.get("documents")
        samples = self.windows.pieces(indices)
        for pieces in samples:
            for start, stop in pieces:
                self.set.fetch(start, stop)
        for row, pieces in enumerate(samples):
            spans = [self.set.span(start, stop) for start, stop in pieces]
            tokens = spans[0] if len(spans) == 1 else np.concatenate(spans)
            ids_BT[row], labels_BT[row] = tokens[:-1], tokens[1:]
            if documents_BT is not None:
                documents = self.windows.documents(pieces)
                documents_BT[row] = documents[:-1]
                if self.config.boundary_labels == "ignore":
                    labels_BT[row][documents[1:] != documents[:-1]] = IGNORED


def find_sets(config: DataConfig) -> list[Path]:
    """Return where the sets are that a config names, or refuse it; nothing is read."""
    if not config.sets:
        raise UserError("data.path is missing: name a set made by `tokenformer prepare`")
    found = [find_prefix(path) for path in config.sets]
    refuse_same(set_files(prefix)["index"] for prefix in found)
    return found


def open_sets(config: DataConfig, vocab: int | None = None) -> list[Indexed]:
    """Open the sets that a config names, verified as it says. Refuse those of different tokenizers."""
    sets = [Indexed(prefix, config.verify, vocab) for prefix in find_sets(config)]
    known = [(s.prefix.name, (s.description or {}).get("tokenizer")) for s in sets]
    known = [(name, tokenizer) for name, tokenizer in known if tokenizer]
    for name, tokenizer in known:
        if tokenizer["sha256"] != known[0][1]["sha256"]:
            raise UserError(
                f"{name} was prepared with {tokenizer['name']} but {known[0][0]} with {known[0][1]['name']}: "
                "blend sets of one tokenizer"
            )
    for one in sets:
        one.read_at_random()
    return sets


def text_tokenizer(config: DataConfig, sets: list[Indexed]) -> Tokenizer:
    """Load the tokenizer of the text: the configured one, or the one that the sets were prepared with."""
    return load_tokenizer(config.tokenizer) if config.tokenizer else set_tokenizer(sets[0])


def text_loader(
    config: DataConfig,
    *,
    context: int,
    part: str = "train",
    seed: int = 1234,
    samples: int | None = None,
    vocab: int | None = None,
    sets: list[Indexed] | None = None,
    empty: bool = False,
    **cut: Any,
) -> Loader:
    """Make a loader of the text that a config names. `cut` are the loader's arguments (batch, micro_batch, rank, …).

    `sets` are those of the config if they are open already. A part without samples is refused unless it may be `empty`.
    """
    if part not in PARTS:
        raise UserError(f"there is no part '{part}': parts are {', '.join(PARTS)}")
    if context < 1:
        raise UserError(f"context is {context}: give a number above 0")
    if config.order == "official" and len(config.sets) > 1:
        raise UserError("data.order official knows one set: use order permutation for a blend")
    sources = [TextSource(config, s, context, part, seed, samples) for s in sets or open_sets(config, vocab)]
    for source in sources:
        if not len(source) and not empty:
            raise UserError(
                f"the {part} part of {source.set.prefix.name} has no sample of {context} + 1 tokens: "
                "give more text, a smaller context or another data.split"
            )
    ahead: Any = {"workers": config.workers, "prefetch": config.prefetch}
    return Loader(sources, weights=list(config.sets.values()), seed=seed, **ahead, **cut)


def training_text(c: Config, **cut: Any) -> tuple[Tokenizer, Loader, Loader]:
    """Open the text of a run: its tokenizer, a loader of what is trained on, and one of the held-out samples.

    `cut` are the loaders' arguments that say which part of a batch this process reads (micro_batch, rank, …).
    """
    assert c.batch is not None
    sets = open_sets(c.data, c.model.vocab)
    tokenizer = text_tokenizer(c.data, sets)
    load = partial(text_loader, c.data, sets=sets, context=c.model.context, seed=c.seed, **cut)
    loader = load(batch=c.batch, samples=c.steps * c.batch)
    held, fits = c.model.vocab, padded_vocab(tokenizer.vocab_size)
    said = f"the data has a vocabulary of {tokenizer.vocab_size} ids but"
    if tokenizer.vocab_size > held and c.start:
        raise UserError(f"{said} {c.start} knows {held}: prepare it with the tokenizer of these weights")
    if tokenizer.vocab_size > held:
        raise UserError(f"{said} model.vocab is {held}: set model.vocab={fits}, or prepare it with another tokenizer")
    if 2 * fits <= held and not c.start:
        warnings.warn(f"{said} model.vocab is {held}: model.vocab={fits} would do", stacklevel=2)
    v, epochs = c.validation, None if len(sets) > 1 else 1  # each held-out sample counts once
    times = c.steps // v.every + 1 if v.every else 1
    wanted = v.samples if v.batches is None else v.batches * c.batch
    held_out = load(batch=wanted, samples=times * wanted, part="validation", epochs=epochs, empty=True)
    return tokenizer, loader, held_out
