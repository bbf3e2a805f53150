"""Runs the engine in a thread of its own: requests wait in turn, join between two steps, and get pieces as they come.

Unusual: nothing but this thread touches the model. Answers of one request wait together, and requests take turns, so
one with a hundred prompts does not hold up the others. On a GPU a step begins before the last one's tokens are read.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenformer.infer.engine import Engine
from tokenformer.infer.slots import Made, Slots, Text, Token
from tokenformer.infer.text import AnyTokenizer, Piecewise, token_start

CHUNKS = 8  # of prompts in one step, at most


class Placed(NamedTuple):
    """A token, and where its text begins in the answer."""

    token: Token
    offset: int


class Piece(NamedTuple):
    """What is new of an answer. `reason`: why it ended (stop, length, failed); None: it goes on."""

    index: int
    text: str
    tokens: list[Placed]
    reason: str | None


class Busy(Exception):
    """The queue is full."""


@dataclass(eq=False)
class Answer:
    """One text that a request asked for: `index` among them, at most `limit` tokens, cut at a stop string."""

    index: int
    text: Text
    limit: int
    written: Piecewise
    end: int | None  # the id that ends a document; None: it ends nothing
    send: Callable[[Piece], object]  # is called in the engine's thread
    tokens: list[Placed] = field(default_factory=list)
    reason: str | None = None
    came: float = field(default_factory=time.perf_counter)
    _ends: list[int] = field(default_factory=list)  # of the text of each token, known when its characters are whole
    _sent: int = 0  # tokens

    def add(self, token: Token) -> None:
        """Take the next token, and send what no later one can change."""
        if self.limit == 0:  # the prompt alone was wanted
            self.finish("length")
            return
        written, ended, before = self.written, token.id == self.end, self.written.text
        last = ended or len(self.tokens) + 1 == self.limit
        text = written.add([] if ended else [token.id], last=last)
        self.tokens.append(Placed(token, len(before) if ended else token_start(before, written.text)))
        if ended or written.stopped:
            self.reason = "stop"
        elif last:
            self.reason = "length"
        if not written.text.endswith("�"):
            self._ends += [len(written.text)] * (len(self.tokens) - len(self._ends))
        count = self._sent
        if written.stopped:
            count = max(count, written.tokens_kept())
        elif last:
            count = len(self.tokens)
        else:
            while count < len(self._ends) and self._ends[count] <= written.given:
                count += 1
        if text or self.reason or count > self._sent:
            new, self._sent = self.tokens[self._sent : count], count
            self.send(Piece(self.index, text, new, self.reason))

    def finish(self, reason: str) -> None:
        self.reason = reason
        self.send(Piece(self.index, "", [], reason))


@dataclass
class Counts:
    """What the server has done so far."""

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    cancelled: int = 0
    step_seconds: float = 0.0


class Batcher:
    """Takes answers from any thread and writes them, several at a time.

    `queue` is how many answers may wait; `flush` is called after each step that sent something.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: AnyTokenizer,
        rows: int,
        queue: int,
        flush: Callable[[], object] = lambda: None,
        lag: bool | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.queue, self.flush = engine, tokenizer, queue, flush
        self.slots, self.counts = Slots(engine, rows), Counts()
        self.lag = engine.graph if lag is None else lag
        self.failure: BaseException | None = None
        self._waiting: deque[deque[Answer]] = deque()  # one entry per request
        self._running: dict[Text, Answer] = {}
        self._cancelled: list[Answer] = []
        self._stopping = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return sum(map(len, list(self._waiting)))

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, answers: Sequence[Answer]) -> None:
        """Let the answers of one request wait for their turn."""
        with self._change:
            if self.failure is not None or self._stopping:
                raise RuntimeError("the engine has stopped")
            free = self.slots.rows - len(self._running)
            if self.waiting + len(answers) > self.queue + max(0, free):
                raise Busy
            self._waiting.append(deque(answers))
            self._change.notify()

    def cancel(self, answers: Iterable[Answer]) -> None:
        """Give up answers whose reader has gone: those that wait are dropped, the others leave before the next step."""
        with self._change:
            self._cancelled += [answer for answer in answers if answer.reason is None]
            self._change.notify()

    def stop(self) -> None:
        """Stop after the current step; what runs or waits has failed."""
        with self._change:
            self._stopping = True
            self._change.notify()

    def close(self) -> None:
        """Stop, and wait for it."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        under_way: deque[list[Made]] = deque()
        try:
            while self._turn():
                begun = time.perf_counter()
                under_way.append(self.slots.launch())
                while len(under_way) > (self.lag and bool(self.slots.texts or self.slots.entering)):
                    self._read(under_way.popleft())
                self.counts.steps += 1
                self.counts.step_seconds += time.perf_counter() - begun
                self.flush()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            with self._change:
                self._stopping = True
                left = [*self._running.values(), *(answer for request in self._waiting for answer in request)]
                self._running.clear()
                self._waiting.clear()
            for answer in left:
                if answer.reason is None:
                    answer.finish("failed")
            self.flush()

    def _turn(self) -> bool:
        """Wait until there is work; drop what was cancelled, and let the next answers enter. False: it is over."""
        with self._change:
            while True:
                for answer in self._cancelled:
                    self._drop(answer)
                self._cancelled.clear()
                if self._stopping:
                    return False
                room = self._room()
                group = self._next_group(room)
                if group or self._running:
                    break
                self._change.wait()
        if group:
            self._running |= {answer.text: answer for answer in group}
            self.counts.prompt_tokens += sum(len(answer.text.ids) for answer in group)
            self.slots.enter([answer.text for answer in group], room)
        return True

    def _drop(self, answer: Answer) -> None:
        if answer.reason is not None:
            return
        answer.reason = "cancelled"
        self.counts.cancelled += 1
        if answer.text in self._running:
            self.slots.leave(self._running.pop(answer.text).text)
        self._waiting = deque(r for r in (deque(a for a in r if a.reason is None) for r in self._waiting) if r)

    def _room(self) -> int:
        """Return how many positions of prompts a step computes: on a GPU more where many rows can be filled."""
        fill = min(self.waiting, self.slots.free)
        return self.engine.chunk * max(1, CHUNKS * fill // self.slots.rows if self.lag else 1)

    def _next_group(self, room: int) -> list[Answer]:
        """Take answers, one of each request in turn, whose prompts together fit into `room`; a longer one alone."""
        group: list[Answer] = []
        longest, free = 0, self.slots.free
        while self._waiting and len(group) < free:
            request = self._waiting[0]
            longest = max(longest, len(request[0].text.ids))
            if group and longest * (len(group) + 1) > room:
                break
            self._waiting.popleft()
            group.append(request.popleft())
            if request:
                self._waiting.append(request)
        return group

    def _read(self, step: Sequence[Made]) -> None:
        for made in step:
            for text, token in made:
                answer = self._running.get(text)
                if answer is None:
                    continue  # it ended before this step was read
                self.counts.new_tokens += answer.limit > 0
                answer.add(token)
                if answer.reason is not None:
                    del self._running[text]
                    self.slots.leave(text)
