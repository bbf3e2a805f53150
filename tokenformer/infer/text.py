"""From prompts to texts: batches, stop strings, pieces as they come. Tokenizers come from outside.

Unusual: a piece is given out only when no later token can change it: not inside a character, nor inside what may
become a stop string.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tokenformer.infer.engine import Engine, Finished
from tokenformer.infer.sampling import Sampling


class AnyTokenizer(Protocol):
    """What a tokenizer must be here."""

    vocab_size: int

    @property
    def end_of_document(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class TextResult(NamedTuple):
    """What came of one prompt. `finished`: the text ended by itself, by the end of the document or a stop string."""

    context: str
    text: str
    ids: list[int]
    logprobs: list[float]
    finished: bool
    seconds: float


class Piecewise:
    """The text of a row as it grows, cut at the first stop string.

    >>> text = Piecewise(lambda ids: "".join(map(chr, ids)), ["END"])
    >>> text.add([72, 105, 69]), text.add([78]), text.add([68, 33]), text.text, text.stopped
    ('Hi', '', '', 'Hi', True)
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self.decode, self.stops = decode, [s for s in stops if s]
        self.ids: list[int] = []
        self.text, self.given, self.stopped = "", 0, False

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """The new piece that is certain by now; with `last` everything."""
        if self.stopped:
            return ""
        self.ids.extend(ids)
        self.text = self.decode(self.ids)
        found = [at for at in (self.text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        certain = len(self.text)
        if not (last or self.stopped):
            certain -= self._open()
        piece = self.text[self.given : certain]
        self.given = max(self.given, certain)
        return piece

    def _open(self) -> int:
        """Characters at the end that may still change: a cut one, or the beginning of a stop string."""
        whole = self.text.rstrip("�")
        held = len(self.text) - len(whole)
        for size in range(min(len(whole), max(map(len, self.stops), default=1) - 1), 0, -1):
            if any(stop.startswith(whole[-size:]) for stop in self.stops):
                return held + size
        return held


def write_texts(
    engine: Engine,
    tokenizer: AnyTokenizer,
    prompts: Sequence[str],
    n: int,
    sampling: Sampling | None = None,
    *,
    seeds: Sequence[int] | None = None,
    stops: Sequence[str] = (),
    batch: int = 32,
    every: int | None = None,
    logprobs: bool = False,
    said: Callable[[int, str], object] | None = None,
) -> Iterator[TextResult]:
    """Texts of prompts, in order, `batch` at a time; `said(i, piece)` hears the pieces of prompt i. An empty prompt is
    the beginning of a document.
    """
    seeds = range(len(prompts)) if seeds is None else seeds
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        ids = [tokenizer.encode(p) or [tokenizer.end_of_document] for p in some]
        heard = None if said is None else lambda i, piece, first=first: said(first + i, piece)
        yield from continue_ids(
            engine, tokenizer, some, ids, n, sampling, seeds[first : first + batch], stops, every, logprobs, heard
        )


def continue_ids(
    engine: Engine,
    tokenizer: AnyTokenizer,
    contexts: Sequence[str],
    ids: Sequence[Sequence[int]],
    n: int,
    sampling: Sampling | None,
    seeds: Sequence[int],
    stops: Sequence[str] = (),
    every: int | None = None,
    logprobs: bool = False,
    said: Callable[[int, str], object] | None = None,
) -> list[TextResult]:
    """One batch, from ids; `contexts` are what the results call their prompts."""
    begun = time.perf_counter()
    ends = [tokenizer.end_of_document]
    running = engine.start(ids, n, sampling, seeds=seeds, stop_ids=ends, logprobs=logprobs)
    texts = [Piecewise(tokenizer.decode, stops) for _ in ids]
    while not running.over:
        before = list(running.ended)
        for i, new in enumerate(running.advance(every or engine.every)):
            if before[i]:
                continue
            piece = texts[i].add(new, last=running.ended[i])
            if texts[i].stopped:
                running.end(i)
            if piece and said is not None:
                said(i, piece)
    seconds = time.perf_counter() - begun
    out = []
    for context, text, row in zip(contexts, texts, running.results(), strict=True):
        row = _up_to(text, row)
        out.append(TextResult(context, text.text, row.ids, row.logprobs, row.finished or text.stopped, seconds))
    return out


def _up_to(text: Piecewise, row: Finished) -> Finished:
    """Without the tokens that make the stop string and what follows it."""
    if not text.stopped:
        return row
    ids = list(row.ids)
    while ids and not text.text.startswith(text.decode(ids)):
        ids.pop()
    return row._replace(ids=ids, logprobs=row.logprobs[: len(ids)])
