"""Writes texts from prompts: batches, stop strings, pieces as they come, conversations. Tokenizers come from outside.

Unusual: a piece is given out only when no later token can change it: not inside a character, nor inside what may
become a stop string.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tokenformer.errors import UserError
from tokenformer.infer.batch import Finished
from tokenformer.infer.engine import Engine
from tokenformer.infer.sampling import Sampling

LIVE = 4  # tokens between two pieces for somebody who reads along


class AnyTokenizer(Protocol):
    """What is needed of a tokenizer."""

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
    """The text of a row while it grows, cut at the stop string that ends first, however many ids come at once.

    >>> text = Piecewise(lambda ids: "".join(map(chr, ids)), ["END"])
    >>> text.add([72, 105, 69]), text.add([78]), text.add([68, 33]), text.text, text.stopped
    ('Hi', '', '', 'Hi', True)
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self.decode, self.stops = decode, [s for s in stops if s]
        self._longest = max(map(len, self.stops), default=1)
        self.ids: list[int] = []
        self.text, self.given, self.stopped = "", 0, False
        self._whole = (0, 0, 0)  # ids of whole characters; as many of them when `add` was called before; their text

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """Add ids and return the new piece that no later id can change; with `last` everything."""
        if self.stopped:
            return ""
        self.ids.extend(ids)
        self._extend()
        if self.stops:
            places = [(self.text.find(stop, self.given), len(stop)) for stop in self.stops]
            found = [(at + length, at) for at, length in places if at >= 0]
            if found:
                self.text, self.stopped = self.text[: min(found)[1]], True
        certain = len(self.text)
        if not (last or self.stopped):
            certain -= self._open()
        piece = self.text[self.given : certain]
        self.given = max(self.given, certain)
        return piece

    def _extend(self) -> None:
        """Decode the last ids alone, not all of them for each that comes. Some before them are decoded again, since a
        decoder may treat the first id otherwise.
        """
        count, before, length = self._whole
        known, new = self.decode(self.ids[before:count]), self.decode(self.ids[before:])
        fits = new.startswith(known)
        self.text = self.text[:length] + new[len(known) :] if fits else self.decode(self.ids)
        if not self.text.endswith("�"):
            self._whole = (len(self.ids), count, len(self.text))

    def tokens_kept(self) -> int:
        """Count the ids before the stop string, if it came; an id that is partly in it does not count."""
        kept = len(self.ids)
        while self.stopped and kept and not self.text.startswith(self.decode(self.ids[:kept])):
            kept -= 1
        return kept

    def _open(self) -> int:
        """Count the characters at the end that may still change: a cut one, or the beginning of a stop string."""
        whole = self.text.rstrip("�")
        held = len(self.text) - len(whole)
        new = len(whole) - self.given  # no stop string begins in what was given out
        for size in range(min(new, self._longest - 1), 0, -1):
            if any(stop.startswith(whole[-size:]) for stop in self.stops):
                return held + size
        return held


def token_start(before: str, after: str) -> int:
    """Return where the text of a token begins, from the texts before and after it was added. A token that begins inside
    a character has the place of that character, which is shown as U+FFFD until its last byte has come.

    >>> token_start("a", "ab"), token_start("a�", "a€"), token_start("a�", "a�"), token_start("a�", "a�b")
    (1, 1, 1, 2)
    """
    if before == after and before.endswith("�"):
        return len(before) - 1
    if after.startswith(before):
        return len(before)
    return next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))


def to_ids(tokenizer: AnyTokenizer, text: str, name: str = "the prompt") -> list[int]:
    """Return the ids of a prompt; an empty one is the beginning of a document.

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
    on_piece: Callable[[int, str], object] | None = None,
    stop_ids: Sequence[int] = (),
    names: Sequence[str] | None = None,
    switches: Sequence[Mapping[str, float] | None] | None = None,
) -> Iterator[TextResult]:
    """Write a text for each prompt, in order, `batch` at a time; `on_piece(i, piece)` gets the pieces of text i.
    All prompts are checked before the first text; messages call them by their `names`.
    """
    names = names or [f"prompts[{i}]" for i in range(len(prompts))]
    ids = [to_ids(tokenizer, prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    rows, chosen = engine.check(ids, seeds, names)
    adapters = switches or [None] * len(rows)
    engine.check_switches(adapters, len(rows))

    def work() -> Iterator[TextResult]:
        for first in range(0, len(prompts), batch):
            some = slice(first, first + batch)
            each = None if on_piece is None else lambda i, piece, first=first: on_piece(first + i, piece)
            yield from continue_ids(
                engine, tokenizer, prompts[some], rows[some], n, sampling, chosen[some], stops, every, logprobs, each,
                stop_ids, switches=adapters[some],
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
    on_piece: Callable[[int, str], object] | None = None,
    stop_ids: Sequence[int] = (),
    enough: Callable[[], bool] = lambda: False,
    switches: Sequence[Mapping[str, float] | None] | None = None,
) -> list[TextResult]:
    """Continue one batch of ids; `contexts` are the prompts in the results. At `enough()` texts end as they are."""
    begun = time.perf_counter()
    ends = [tokenizer.end_of_document, *stop_ids]
    running = engine.start(ids, n, sampling, seeds=seeds, stop_ids=ends, logprobs=logprobs, switches=switches)
    texts = [Piecewise(tokenizer.decode, stops) for _ in ids]
    while not running.over:
        before, pieces = list(running.ended), running.advance(every or engine.every)
        last = enough()
        for i, new in enumerate(pieces):
            if before[i]:
                continue
            piece = texts[i].add(new, last=last or running.ended[i])
            if last or texts[i].stopped:
                running.ended[i] = True
            if piece and on_piece is not None:
                on_piece(i, piece)
    seconds = time.perf_counter() - begun
    out = []
    for context, prompt, text, row in zip(contexts, ids, texts, running.rows, strict=True):
        row = _before_stop(text, row)
        finished = row.finished or text.stopped
        full = not finished and len(row.ids) < n and len(prompt) + len(row.ids) == engine.context
        out.append(TextResult(context, text.text, row.ids, row.logprobs, finished, seconds, full))
    return out


def _before_stop(text: Piecewise, row: Finished) -> Finished:
    """Remove the tokens of the stop string and of what follows it."""
    kept = text.tokens_kept()
    return row._replace(ids=row.ids[:kept], logprobs=row.logprobs[:kept]) if text.stopped else row


class Session:
    """A conversation: each text continues what was said, but for the oldest beyond the context. Turn i: seed + i."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: AnyTokenizer,
        n: int,
        sampling: Sampling | None = None,
        *,
        seed: int = 0,
        stops: Sequence[str] = (),
        remember: bool = True,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.engine, self.tokenizer, self.n, self.sampling = engine, tokenizer, n, sampling
        self.seed, self.stops, self.stop_ids, self.remember = seed, stops, stop_ids, remember
        self.history, self.turns = "", 0

    def say(
        self, text: str, on_piece: Callable[[str], object] | None = None, enough: Callable[[], bool] = lambda: False
    ) -> TextResult:
        """Continue the history and `text`, calling `on_piece` with pieces as they come, until `enough()`."""
        whole = self.history + text
        ids = to_ids(self.tokenizer, whole, "the text")
        room = max(1, self.engine.context // 2, self.engine.context - self.n)  # half, however much is asked for
        forward = None if on_piece is None else lambda _, piece: on_piece(piece)
        (result,) = continue_ids(
            self.engine, self.tokenizer, [text], [ids[-room:]], self.n, self.sampling, [self.seed + self.turns],
            self.stops, LIVE, on_piece=forward, stop_ids=self.stop_ids, enough=enough,
        )  # fmt: skip
        self.turns += 1
        self.history = whole + result.text if self.remember else ""
        return result
