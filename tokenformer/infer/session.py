"""A conversation with a language model: each text continues all that was said before, the oldest of it forgotten when
the context is full.
"""

from collections.abc import Callable, Sequence

from tokenformer.infer.engine import Engine
from tokenformer.infer.sampling import Sampling
from tokenformer.infer.text import AnyTokenizer, TextResult, continue_ids, to_ids


class Session:
    """`say` adds to the history and continues it; `clear` forgets; turn i is drawn with seed + i."""

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
        every: int = 4,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.engine, self.tokenizer, self.n, self.sampling = engine, tokenizer, n, sampling
        self.seed, self.stops, self.stop_ids, self.remember, self.every = seed, stops, stop_ids, remember, every
        self.history, self.turns = "", 0

    def say(
        self,
        text: str,
        said: Callable[[str], object] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> TextResult:
        """The continuation of the history and `text`, its pieces told to `said` as they come, until `enough()`."""
        whole = self.history + text
        ids = to_ids(self.tokenizer, whole, "the text")
        room = max(1, self.engine.context // 2, self.engine.context - self.n)  # half, however much is asked for
        heard = None if said is None else lambda _, piece: said(piece)
        (result,) = continue_ids(
            self.engine, self.tokenizer, [text], [ids[-room:]], self.n, self.sampling, [self.seed + self.turns],
            self.stops, self.every, said=heard, stop_ids=self.stop_ids, enough=enough,
        )  # fmt: skip
        self.turns += 1
        self.history = whole + result.text if self.remember else ""
        return result

    def clear(self) -> None:
        self.history = ""
