"""From prompts to texts: batches, stop strings, pieces as they come. Tokenizers come from outside.

Unusual: a piece is given out only when no later token can change it: not inside a character, nor inside what may
become a stop string.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tokenformer.errors import UserError
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
    """What came of one prompt. `finished`: the text ended by itself, by the end of the document, a stop string or a
    stop token; `full`: by the end of the model's context, before all the tokens that were asked for.
    """

    context: str
    text: str
    ids: list[int]
    logprobs: list[float]
    finished: bool
    seconds: float
    full: bool = False


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


def to_ids(tokenizer: AnyTokenizer, text: str, name: str = "the prompt") -> list[int]:
    """Ids of a prompt; an empty one is the beginning of a document.

    >>> from tokenformer.data.text.tokenizer import load_tokenizer
    >>> to_ids(load_tokenizer("byte"), "AB"), to_ids(load_tokenizer("byte"), "")
    ([66, 67], [0])
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not UTF-8 text ({text[error.start]!a} is no character): convert it") from None
    return tokenizer.encode(text) or [tokenizer.end_of_document]


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
    stop_ids: Sequence[int] = (),
    names: Sequence[str] | None = None,
) -> Iterator[TextResult]:
    """Texts of prompts, in order, `batch` at a time; `said(i, piece)` hears the pieces of prompt i. An empty prompt is
    the beginning of a document. All prompts are checked at once, before any text; sentences call them by their `names`.
    """
    names = names or [f"prompts[{i}]" for i in range(len(prompts))]
    ids = [to_ids(tokenizer, prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    rows, chosen = engine.check(ids, seeds, names)

    def work() -> Iterator[TextResult]:
        for first in range(0, len(prompts), batch):
            some = slice(first, first + batch)
            heard = None if said is None else lambda i, piece, first=first: said(first + i, piece)
            yield from continue_ids(
                engine, tokenizer, prompts[some], rows[some], n, sampling, chosen[some], stops, every, logprobs, heard,
                stop_ids,
            )  # fmt: skip

    return work()


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
    stop_ids: Sequence[int] = (),
    enough: Callable[[], bool] = lambda: False,
) -> list[TextResult]:
    """One batch, from ids; `contexts` are what the results call their prompts. At `enough()` texts end as they are."""
    begun = time.perf_counter()
    ends = [tokenizer.end_of_document, *stop_ids]
    running = engine.start(ids, n, sampling, seeds=seeds, stop_ids=ends, logprobs=logprobs)
    texts = [Piecewise(tokenizer.decode, stops) for _ in ids]
    while not running.over:
        before, pieces = list(running.ended), running.advance(every or engine.every)
        last = enough()
        for i, new in enumerate(pieces):
            if before[i]:
                continue
            piece = texts[i].add(new, last=last or running.ended[i])
            if last or texts[i].stopped:
                running.end(i)
            if piece and said is not None:
                said(i, piece)
    seconds = time.perf_counter() - begun
    out = []
    for context, prompt, text, row in zip(contexts, ids, texts, running.results(), strict=True):
        row = _up_to(text, row)
        finished = row.finished or text.stopped
        full = not finished and len(row.ids) < n and len(prompt) + len(row.ids) == engine.context
        out.append(TextResult(context, text.text, row.ids, row.logprobs, finished, seconds, full))
    return out


def _up_to(text: Piecewise, row: Finished) -> Finished:
    """Without the tokens that make the stop string and what follows it."""
    if not text.stopped:
        return row
    ids = list(row.ids)
    while ids and not text.text.startswith(text.decode(ids)):
        ids.pop()
    return row._replace(ids=ids, logprobs=row.logprobs[: len(ids)])
