"""Texts that join and leave between the steps of one engine: each has a row of one cache, prompts enter in chunks.

Unusual: rows that decode are the first of the cache, so a step works on its first rows, in a few sizes that can be CUDA
graphs, and a row that leaves is replaced by the last. A row that is computed only because a size is rounded up writes
to a slot that its own text overwrites before it is seen.
Legend: R rows of the cache, B rows at once, T positions, D dim, W vocabulary, K alternatives.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.infer.batch import capture, warm_up
from tokenformer.infer.cache import StaticCache
from tokenformer.infer.engine import SLOTS, Engine, Step
from tokenformer.infer.sampling import Sampling, choose_each, uniform
from tokenformer.infer.scoring import LOGITS

ALTERNATIVES = 20  # of a token, at most
SEED, COUNT, TOP_K, TOKEN, POSITION, LIVE = range(6)  # whole numbers of a row on the device


class Token(NamedTuple):
    """A token; where they were asked for, its log-probability and the most likely tokens with theirs."""

    id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


@dataclass(eq=False)
class Text:
    """A text in the making. `tops` asks for log-probabilities and alternatives, `scored` for those of the prompt."""

    ids: list[int]
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    switches: Mapping[str, float] = field(default_factory=dict)
    tops: bool = False
    scored: bool = False
    row: int = -1
    length: int = 0  # positions that are in the cache, or will be after the steps that are under way
    gone: bool = False
    prompt: list[Token] = field(default_factory=list)  # tokens after the first, if `scored`


class How(NamedTuple):
    """What some row of a step needs; a CUDA graph is captured for each combination that comes."""

    sampled: bool
    cuts: bool
    tops: bool
    names: tuple[str, ...]


class Made(NamedTuple):
    """Tokens of a step that is under way; iterating waits for it."""

    texts: list[Text]
    values: list[Tensor]
    done: torch.cuda.Event | None

    def __iter__(self) -> Iterator[tuple[Text, Token]]:  # pyrefly: ignore
        if self.done is not None:
            self.done.synchronize()
        ids, *rest = (value.tolist() for value in self.values)
        if not rest:
            return zip(self.texts, map(Token, ids), strict=True)
        return zip(self.texts, map(_token, ids, *rest), strict=True)


class Slots:
    """Texts of one engine. A text that is chosen for alone or beside others has the tokens of `Engine.generate`.

    >>> from tokenformer import ModelConfig, models
    >>> config = ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=4, vocab=9)
    >>> slots = Slots(Engine(models.build(config)), rows=2)
    >>> slots.enter([Text([1, 2, 3]), Text([4])])
    >>> [[len(made.texts) for made in slots.launch()] for _ in range(2)]
    [[2], [2]]
    """

    def __init__(self, engine: Engine, rows: int, rounded: bool | None = None) -> None:
        """`rounded`: whether steps have a few sizes only (None: where they are CUDA graphs)."""
        packed, device = engine.packed, engine.packed.device
        self.engine, self.rows = engine, rows
        self.rounded = engine.graph if rounded is None else rounded
        # one slot more than the context: a row is computed once more before the host knows that its text ended
        slots = -(-(engine.context + 1) // SLOTS) * SLOTS
        self.cache = StaticCache(packed.config, rows, slots, device, packed.dtype)
        self.ints = torch.zeros(6, rows, dtype=torch.long, device=device)
        self.temperature_R, self.top_p_R = torch.zeros(2, rows, dtype=torch.double, device=device).unbind(0)
        self.weights = {name: torch.zeros(rows, device=device) for name in engine.names}
        self.id_R, best = torch.zeros(rows, dtype=torch.long, device=device), min(ALTERNATIVES, engine.vocab)
        self.logprob_R, self.top_RK = torch.zeros(rows, device=device), torch.zeros(rows, best, device=device)
        self.top_id_RK = torch.zeros(rows, best, dtype=torch.long, device=device)
        self.texts: list[Text] = []  # that decode: text i is in row i
        self.entering: list[Text] = []  # whose prompts are computed, in rows behind them
        self.entered = 0  # positions of them
        self._steps: dict[int, Step] = {}
        self._replays: dict[tuple[int, How], Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if engine.graph else None

    @property
    def free(self) -> int:
        """How many texts can enter now."""
        return 0 if self.entering else self.rows - len(self.texts)

    def enter(self, texts: Sequence[Text], room: int | None = None) -> None:
        """Let texts begin in free rows; `launch` computes their prompts in chunks of `room` positions in all."""
        self.entering, self.entered, first = list(texts), 0, len(self.texts)
        self._chunk = max(1, (room or self.engine.chunk) // len(texts))
        rows, device = slice(first, first + len(texts)), self.ints.device
        for i, text in enumerate(texts):
            text.row = first + i
        ints = [[t.seed for t in texts], [0] * len(texts), [t.sampling.top_k for t in texts]]
        self.ints[:, rows] = 0
        self.ints[: len(ints), rows] = torch.tensor(ints).to(device)
        self.temperature_R[rows] = torch.tensor([t.sampling.temperature for t in texts]).double().to(device)
        self.top_p_R[rows] = torch.tensor([t.sampling.top_p for t in texts]).double().to(device)
        for name, weight_R in self.weights.items():
            weight_R[rows] = torch.tensor([float(t.switches.get(name, 0.0)) for t in texts]).to(device)
        ids_BT = torch.zeros(len(texts), max(len(t.ids) for t in texts), dtype=torch.long)
        for row, text in zip(ids_BT, texts, strict=True):
            row[: len(text.ids)] = torch.tensor(text.ids)
        self._ids_BT = ids_BT.to(device)
        self._hidden_BD = torch.zeros(len(texts), self.engine.packed.config.dim, device=device).to(self.cache.k.dtype)

    def leave(self, text: Text) -> None:
        """Free the row of a text; the last text that decodes moves there."""
        text.gone = True
        if text in self.entering:  # it is dropped when its prompt would begin to decode
            self.entering = [] if all(other.gone for other in self.entering) else self.entering
            return
        last = self.texts.pop()
        if last is not text:
            self._move(last, text.row)
        self.ints[POSITION:, len(self.texts)] = 0

    @torch.no_grad()
    def launch(self) -> list[Made]:
        """Begin one step of the texts that decode, and one chunk of the prompts that enter."""
        made = []
        if self.texts:
            how, size = self._how(self.texts), self._size(len(self.texts))
            if self.engine.graph:
                self._replay(size, how)
            else:
                self._step(size, how)
            for text in self.texts:
                text.length += 1
            made.append(self._read(self.texts, 0, how))
        if self.entering and self._prefill():
            first, how = self.entering[0].row, self._how(self.entering)
            made.append(self._read(self.entering, first, how))
            for text in (text for text in self.entering if not text.gone):
                self._move(text, len(self.texts))
                self.texts.append(text)
            self.ints[POSITION:, len(self.texts) :] = 0
            self.entering = []
        return made

    def _prefill(self) -> bool:
        """Compute one chunk of the prompts; after the last one, choose their first tokens and return True."""
        texts, start, engine = self.entering, self.entered, self.engine
        stop = min(start + self._chunk, self._ids_BT.shape[1])
        rows, how = slice(texts[0].row, texts[0].row + len(texts)), self._how(texts)
        cache = self.cache.part(rows)
        hidden_BTD = engine.hidden(self._ids_BT[:, start:stop], cache, start, self._switches(rows, how))
        for i, text in enumerate(texts):
            if start < len(text.ids) <= stop:
                self._hidden_BD[i] = hidden_BTD[i, len(text.ids) - 1 - start]
            if text.scored and not text.gone:
                self._score(text, hidden_BTD[i], start)
        self.entered = stop
        self.ints[POSITION, rows] = stop
        if stop < self._ids_BT.shape[1]:
            return False
        for text in texts:
            text.length = len(text.ids)
        self.ints[POSITION, rows] = torch.tensor([text.length for text in texts]).to(self.ints.device)
        self.ints[LIVE, rows] = 1
        self._pick(engine.packed.logits(self._hidden_BD), rows, how)
        return True

    def _score(self, text: Text, hidden_TD: Tensor, start: int) -> None:
        """Note the log-probabilities of the prompt's tokens that follow positions from `start` on."""
        ids, step = text.ids[start + 1 : start + 1 + len(hidden_TD)], max(1, LOGITS // len(self.engine.packed.head))
        for at in range(0, len(ids), step):
            some = ids[at : at + step]
            logits_TW = self.engine.packed.logits(hidden_TD[at : at + len(some)])
            values = self._tops(logits_TW, torch.tensor(some, device=logits_TW.device))
            text.prompt += map(_token, some, *(value.tolist() for value in values))

    def _step(self, size: int, how: How) -> None:
        rows = slice(0, size)
        if size not in self._steps:
            self._steps[size] = self.engine.make_step(size)
        ints = self.ints[:, rows]
        slots = None
        if self.engine.backend == "torch" and not self.engine.graph:  # which computes the slots that nobody sees, too
            most = max(self.entered if self.entering else 0, *(text.length for text in self.texts))
            slots = -(-(most + 1) // SLOTS) * SLOTS
        cache = self.cache.part(rows, slots)
        logits_BW = self._steps[size](ints[TOKEN], ints[POSITION], cache, self._switches(rows, how))
        ints[POSITION] += ints[LIVE]
        if how.sampled or how.tops:
            logits_BW = logits_BW.to(torch.promote_types(logits_BW.dtype, torch.float32))
        self._pick(logits_BW, rows, how)

    def _replay(self, size: int, how: How) -> None:
        """Replay the graph of a step; capture it when it comes for the first time, with no row alive meanwhile."""
        if (size, how) not in self._replays:
            before = self.ints.clone()
            self.ints[LIVE] = 0
            warm_up(lambda: self._step(size, how))
            self._replays[size, how] = capture(lambda: self._step(size, how), self._pool)
            self.ints.copy_(before)
        self._replays[size, how]()

    def _pick(self, logits_BW: Tensor, rows: slice, how: How) -> None:
        """Choose the next token of each row; those that are not alive keep theirs. No text has ids under a switch."""
        config = self.engine.packed.config
        if config.added_switch:
            logits_BW = logits_BW[:, : config.vocab]  # the kernels compute those of all ids
        kept_BW, ints = logits_BW[:, : self.engine.vocab], self.ints[:, rows]
        if how.sampled:
            chance_B = uniform(ints[SEED], ints[COUNT])
            of_rows = (self.temperature_R[rows], ints[TOP_K], self.top_p_R[rows])
            ids_B = choose_each(kept_BW, *of_rows, chance_B, how.cuts)
        else:
            ids_B = kept_BW.argmax(-1)
        ints[TOKEN] = torch.where(ints[LIVE] > 0, ids_B, ints[TOKEN])
        ints[COUNT] += ints[LIVE]
        self.id_R[rows] = ids_B
        if how.tops:
            self.logprob_R[rows], self.top_id_RK[rows], self.top_RK[rows] = self._tops(logits_BW, ids_B)

    def _tops(self, logits_BW: Tensor, ids_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probabilities of ids, and the most likely ids with theirs."""
        logprob_BW = logits_BW.log_softmax(-1).float()
        top = logprob_BW[:, : self.engine.vocab].topk(self.top_RK.shape[1])
        return logprob_BW.gather(1, ids_B[:, None])[:, 0], top.indices, top.values

    def _read(self, texts: Sequence[Text], first: int, how: How) -> Made:
        """Copy the tokens of texts, which are in rows from `first` on, to the host without waiting for them."""
        values = [self.id_R, *((self.logprob_R, self.top_id_RK, self.top_RK) if how.tops else ())]
        values = [value[first : first + len(texts)] for value in values]
        if self.ints.device.type != "cuda":
            return Made(list(texts), [value.clone() for value in values], None)
        host = [torch.empty(v.shape, dtype=v.dtype, pin_memory=True).copy_(v, non_blocking=True) for v in values]
        done = torch.cuda.Event()
        done.record()
        return Made(list(texts), host, done)

    def _move(self, text: Text, row: int) -> None:
        """Move a text to another row."""
        if row == text.row:
            return
        self.cache.copy_row(text.row, row, text.length)
        for held in (*self.ints, self.temperature_R, self.top_p_R, *self.weights.values()):
            held[row] = held[text.row]
        if row < len(self.texts):
            self.texts[row] = text
        text.row = row

    def _how(self, texts: Sequence[Text]) -> How:
        sampled = [text.sampling for text in texts if not text.sampling.greedy]
        cuts = any(how.top_k or how.top_p for how in sampled)
        names = {name for text in texts for name, weight in text.switches.items() if weight}
        return How(bool(sampled), cuts, any(text.tops for text in texts), tuple(sorted(names)))

    def _switches(self, rows: slice, how: How) -> dict[str, Tensor] | None:
        return {name: self.weights[name][rows] for name in how.names} if self.engine.names else None

    def _size(self, count: int) -> int:
        """Round a number of rows up: to a power of two, from 8 on to a multiple of 8."""
        rounded = 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8
        return min(rounded, self.rows) if self.rounded else count


def _token(id: int, logprob: float, ids: list[int], logprobs: list[float]) -> Token:
    return Token(id, logprob, list(zip(ids, logprobs, strict=True)))
