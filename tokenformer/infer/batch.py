"""One batch of texts in the making: prefill, single-token steps, what the host reads of them; and CUDA graphs of steps.

Legend: B batch, T positions, D dim, W vocabulary, K new tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tokenformer.infer.cache import StaticCache
from tokenformer.infer.sampling import choose, penalise, uniform

if TYPE_CHECKING:
    from tokenformer.infer.engine import Engine

PADDED = 64  # under graphs prompts are padded to a multiple of this


class Finished(NamedTuple):
    """New ids of one prompt, without the stop token; log-probabilities, if asked for; whether a stop token came."""

    ids: list[int]
    logprobs: list[float]
    finished: bool


def capture(work: Callable[[], object], pool: Any = None) -> Callable[[], None]:
    """Capture work on the device as a CUDA graph; calling the result repeats it. Graphs of one `pool` share memory:
    none of them may run beside another, nor leave a result in memory of its own.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph.replay


def warm_up(work: Callable[[], object]) -> None:
    """Do work that will be captured: kernels are compiled and chosen by the first calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)


class Batch:
    """Its state is on the device; `made` columns of new ids are known to the host."""

    def __init__(self, engine: "Engine", key: tuple) -> None:
        self.engine, self.key = engine, key
        batch, slots, self.n, self.sampling, stops, self.with_logprobs, names, self.choices, self.guidance = key
        packed = engine.packed
        device = packed.device
        self.cache = StaticCache(packed.config, batch, slots, device, packed.dtype)
        self.forward = engine.make_step(batch)
        self.switches = {n: torch.zeros(batch, device=device) for n in names} if engine.names else None
        self.token_B, self.position_B = torch.zeros(2, batch, dtype=torch.long, device=device).unbind(0)
        self.seed_B, self.limit_B = torch.zeros(2, batch, dtype=torch.long, device=device).unbind(0)
        self.last_B = torch.zeros(batch, dtype=torch.long, device=device)  # where prompts end
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self.done_B = torch.zeros(batch, dtype=torch.bool, device=device)
        self.stop_ids = torch.zeros(stops, dtype=torch.long, device=device)
        self.out_BK = torch.zeros(batch, self.n, dtype=torch.long, device=device)
        self.logprob_BK = torch.zeros(batch, self.n, device=device)
        penalty = self.sampling.repetition_penalty != 1
        every = packed.config.vocab + packed.config.added_vocab
        self.seen_BW = torch.zeros(batch, every, dtype=torch.bool, device=device) if penalty else None
        first = len(self.choices) == 1 and self.choices[0].start == 0  # the ids that are chosen from begin with 0
        ids = [id for some in self.choices for id in some]
        self.ids_W = None if first else torch.tensor(ids, device=device)
        self.plain = self.sampling.greedy and not penalty and not self.with_logprobs  # only tokens are wanted
        self.plain = self.plain and first and self.guidance is None
        self.replay: Callable[[], None] = self._step
        if engine.graph:
            warm_up(lambda: (self._step(), self.count.zero_()))
            self.replay = capture(self._step)
        self.last_ids: Tensor | None = None  # of the last prefill
        self.prefill_again: Callable[[], None] | None = None  # on them

    def _prefill(self, ids_BT: Tensor) -> None:
        """Run the prompts in chunks, and choose the first new token of each row."""
        chunk, length, packed, before = self.engine.chunk, ids_BT.shape[1], self.engine.packed, self.engine.before
        if self.engine.prefix is not None:
            packed.read(self.engine.prefix.expand(len(ids_BT), -1, -1), self.cache, self.switches)
        hidden_BD = torch.zeros(len(ids_BT), packed.config.dim, dtype=packed.dtype, device=ids_BT.device)
        for start in range(0, length, chunk):
            hidden_BTD = self.engine.hidden(ids_BT[:, start : start + chunk], self.cache, before + start, self.switches)
            last_B = self.last_B - before - start
            index_B = last_B.clamp(0, hidden_BTD.shape[1] - 1)
            here_B = (last_B >= 0) & (last_B < hidden_BTD.shape[1])
            hidden_BD = torch.where(here_B[:, None], hidden_BTD[self.cache.rows_B1[:, 0], index_B], hidden_BD)
        self._pick(packed.logits(hidden_BD, self.switches))

    def _step(self) -> None:
        logits_BW = self.forward(self.token_B, self.position_B, self.cache, self.switches)
        if self.plain and self.engine.backend == "triton":
            from tokenformer.ops.kernels import decode

            decode.greedy(
                logits_BW, self.engine.vocab, self.token_B, self.out_BK, self.position_B, self.last_B, self.limit_B,
                self.done_B.view(torch.int8), self.stop_ids,
            )  # fmt: skip
            return
        self.position_B += ~self.done_B
        self._pick(logits_BW.to(torch.promote_types(logits_BW.dtype, torch.float32)))

    def _chosen_from(self, values_BW: Tensor) -> Tensor:
        """Return the columns of the ids that may be chosen."""
        parts = [values_BW[:, some.start : some.stop] for some in self.choices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _pick(self, logits_BW: Tensor) -> None:
        config = self.engine.packed.config
        if config.added_switch and config.added_switch not in (self.switches or {}):
            logits_BW = logits_BW[:, : config.vocab]  # the kernels compute those of all ids
        raw_BW = logits_BW
        if config.added_switch in (self.switches or {}):  # who does not have the switch does not have its ids
            off_B1 = self.switches[config.added_switch][:, None] == 0  # pyrefly: ignore
            added = torch.arange(logits_BW.shape[-1], device=off_B1.device) >= config.vocab
            logits_BW = raw_BW = logits_BW.masked_fill(off_B1 & added, -torch.inf)
        logits_BW = self._chosen_from(logits_BW)
        if self.guidance is not None:
            wanted_BW, against_BW = logits_BW.chunk(2)
            logits_BW = torch.lerp(against_BW, wanted_BW, self.guidance).repeat(2, 1)
        if self.seen_BW is not None:
            logits_BW = penalise(logits_BW, self._chosen_from(self.seen_BW), self.sampling.repetition_penalty)
        chance_B = self.seed_B if self.sampling.greedy else uniform(self.seed_B, self.count)
        ids_B = choose(logits_BW, self.sampling, chance_B)
        ids_B = ids_B if self.ids_W is None else self.ids_W[ids_B]
        self.token_B.copy_(ids_B)
        self.out_BK.index_copy_(1, self.count, ids_B[:, None])
        if self.with_logprobs:
            chosen_B1 = raw_BW.log_softmax(-1).gather(1, ids_B[:, None])
            self.logprob_BK.index_copy_(1, self.count, chosen_B1.float())
        if self.seen_BW is not None:
            self.seen_BW.scatter_(1, ids_B[:, None], True)
        self.count += 1
        self.done_B |= self.count >= self.limit_B
        if len(self.stop_ids):
            self.done_B |= (ids_B[:, None] == self.stop_ids).any(-1)

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        stop_ids: Sequence[int],
        weights: Mapping[str, list[float]],
    ) -> None:
        """Prefill; rows are padded on the right, which no query sees before it is overwritten."""
        for name, factor_B in (self.switches or {}).items():
            factor_B.copy_(torch.tensor(weights[name]))
        engine, device = self.engine, self.engine.packed.device
        lengths = [len(p) for p in prompts]
        room = -(-max(lengths) // PADDED) * PADDED if engine.graph else max(lengths)
        ids_BT = torch.zeros(len(prompts), room, dtype=torch.long)
        for row, prompt in zip(ids_BT, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        last_B = engine.before + torch.tensor(lengths) - 1
        self.last_B.copy_(last_B)
        self.position_B.copy_(last_B + 1)
        self.seed_B.copy_(torch.tensor(list(seeds)))
        self.limits = [min(self.n, engine.context - length) for length in lengths]
        if self.guidance is not None:
            half = len(prompts) // 2  # a row ends together with the one that it is guided against
            self.limits = 2 * list(map(min, self.limits[:half], self.limits[half:]))
        self.limit_B.copy_(torch.tensor(self.limits))
        self.stop_ids.copy_(torch.tensor(list(stop_ids), dtype=torch.long))
        self.count.zero_()
        self.done_B.zero_()
        if self.seen_BW is not None:
            self.seen_BW.zero_()
            for row, prompt in zip(self.seen_BW, prompts, strict=True):
                row[torch.tensor(prompt, device=device)] = True
        if not engine.graph or self.last_ids is None or self.last_ids.shape != ids_BT.shape:
            self.last_ids, self.prefill_again = ids_BT.to(device), None  # the first time is not worth a graph
            self._prefill(self.last_ids)
        else:
            held_BT = self.last_ids.copy_(ids_BT)
            self.prefill_again = self.prefill_again or capture(lambda: self._prefill(held_BT))
            self.prefill_again()
        self.made = 1  # columns of out_BK, known to the host
        self.rows = [Finished([], [], False) for _ in prompts]
        self.ended = [False] * len(prompts)
        self._stops, self._taken = frozenset(stop_ids), 0

    @property
    def over(self) -> bool:
        return all(self.ended)

    @torch.no_grad()
    def advance(self, steps: int) -> list[list[int]]:
        """Make at most `steps` more tokens per row, read the device once at the end, and return the new ids."""
        for _ in range(min(steps - (self._taken == 0), self.n - self.made)):
            self.replay()
            self.made += 1
        ids = self.out_BK[:, self._taken : self.made].tolist()
        logprobs = self.logprob_BK[:, self._taken : self.made].tolist() if self.with_logprobs else [[]] * len(ids)
        new = []
        for i, row in enumerate(self.rows):
            mine = [] if self.ended[i] else ids[i][: self.limits[i] - len(row.ids)]
            stop = next((j for j, token in enumerate(mine) if token in self._stops), None) if self._stops else None
            mine = mine[:stop]
            row.ids.extend(mine)
            row.logprobs.extend(logprobs[i][: len(mine)])
            if stop is not None:
                self.rows[i] = row._replace(finished=True)
            self.ended[i] |= stop is not None or len(row.ids) >= self.limits[i]
            new.append(mine)
        self._taken = self.made
        return new
