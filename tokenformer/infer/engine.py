"""The decoding engine: prefill in chunks, then single-token steps, each a CUDA graph where there is CUDA.

Unusual: tokens, positions, ends and randomness live on the device, and the host reads them once in `every` steps.
Legend: B batch, T positions, D dim, W vocabulary.
"""

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.infer.batch import Batch, Finished
from tokenformer.infer.cache import StaticCache
from tokenformer.infer.kernel_step import FusedModel, Tuning, why_not
from tokenformer.infer.packed import Packed, check_readable
from tokenformer.infer.quantised import check_type, rounded
from tokenformer.infer.sampling import Sampling
from tokenformer.infer.skipping import check_skip, skipping
from tokenformer.models import LanguageModel

SLOTS = 128  # caches have a multiple of this, so that a graph serves several prompts
OWN_TEXT = 256  # tokens that a model writes to find out what it can skip

Ids = Sequence[int] | Tensor  # of one prompt; a tensor has one dimension


class Engine:
    """Generates for batches of prompts of any lengths; greedy, exactly the tokens of `LanguageModel.generate`.

    >>> from tokenformer import ModelConfig, models
    >>> config = ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=4, vocab=9)
    >>> [len(row.ids) for row in Engine(models.build(config)).generate([[1, 2, 3], [4]], 5)]
    [5, 5]
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        dtype: torch.dtype | None = None,
        chunk: int = 1024,
        vocab: int | None = None,
        every: int = 16,
        backend: str | None = None,
        graph: bool | None = None,
        tuning: Tuning | None = None,
        prefix: Tensor | None = None,
        weights: str | None = None,
        skip: float | None = None,
    ) -> None:
        """`chunk`: positions of a prompt computed at once. `vocab`: ids from there on are never chosen (padding of the
        embedding). `every`: steps between two reads by the host. `backend`: torch or triton (None: triton if possible).
        `graph`: whether a step is a CUDA graph (None: where there is CUDA). `tuning`: of the kernels. `prefix`: see
        `read`. `weights`: fp8 rounds them to 8 bits, of which the kernels then read half the bytes (None: as they are).
        `skip`: this share of value tokens is not read in steps, which are then for one prompt at a time.
        """
        if skip is not None:
            check_skip(model, skip)
        self._given, self._seen = weakref.ref(model), dict(model.active)
        if weights not in (None, "fp8"):
            raise UserError(f"weights is '{weights}', but must be fp8, or left out")
        if weights:
            check_readable(model)
            model = rounded(model)
        self.packed = Packed(model, dtype)
        if weights:
            check_type(self.packed.dtype)
        self.chunk, self.every = chunk, every
        self.vocab = min(vocab or model.config.vocab, model.config.vocab)
        self.graph = self.packed.device.type == "cuda" if graph is None else graph
        tuning, fp8 = tuning or Tuning(), bool(weights)
        self.backend, self.make_step, self.hidden, said = choose_backend(model, self.packed, backend, tuning, fp8)
        self.said = [said] if said else []  # what a user should know
        self.names, self.active = model.config.switch_names(), dict(model.active)
        self.adapters = getattr(self._given(), "adapters", {})  # name → the tensors of the base that it moves
        self._last: Batch | None = None
        self.read(None)
        if skip is not None:
            self._skip(model, skip, tuning, fp8)
        self.read(prefix)

    def _skip(self, model: LanguageModel, share: float, tuning: Tuning, fp8: bool) -> None:
        """Skip value tokens from now on; what is skipped is found on a text that the model writes itself, by PyTorch's
        operations, so that every backend skips the same.
        """
        count, hidden = min(OWN_TEXT, self.context - 1), self.hidden
        _, self.make_step, self.hidden, _ = choose_backend(model, self.packed, "torch", tuning)
        ids = [0, *self.generate([[0]], count, Sampling(temperature=1.0))[0].ids]
        self.hidden = hidden
        sparse, skips = skipping(model, self.packed.dtype, torch.tensor([ids], device=self.packed.device), share)
        step, saved = plain_step(sparse), "nothing is saved without kernels"
        if self.backend == "triton":
            fused = FusedModel(model, self.packed.dtype, fp8, skips)
            whole, less = fused.nbytes / 1e9, share * fused.value_bytes / 1e9
            step, saved = fused.step(1, tuning), f"a step reads about {whole - less:.3f} GB of weights, not {whole:.3f}"
        assert step is not None

        def make_step(batch: int) -> Step:
            if batch != 1:
                raise UserError(f"value tokens are skipped for one text at a time, not {batch}: leave skip out")
            return step

        self.make_step = make_step
        self.said.append(
            f"{share:.0%} of the value tokens are skipped, by ranges found on {count} tokens of the model: {saved}"
        )

    def read(self, prefix: Tensor | None) -> None:
        """Let every prompt come after embeddings (P, D) that see each other, such as an image's. None: none."""
        if prefix is not None and len(prefix) >= self.packed.config.context:
            most = f"the model's context is {self.packed.config.context}"
            raise UserError(f"there are {len(prefix)} positions before the text, but {most}: give a smaller image")
        self.prefix, self._last = None if prefix is None else prefix.detach(), None  # graphs have read the old one
        self.before = 0 if prefix is None else len(prefix)
        self.context = self.packed.config.context - self.before  # positions that are left for a text

    def choices(self, adds: bool) -> tuple[range, ...]:
        """Return the ids that may be chosen: without the padding, behind which lie those that growth added."""
        c = self.packed.config
        added = range(c.vocab, c.vocab + c.added_vocab) if adds else range(0)
        return (range(self.vocab), *([added] if added else []))

    def check_switches(
        self, switches: Sequence[Mapping[str, float] | None] | None, count: int
    ) -> dict[str, list[float]]:
        """Return the weights of each switch that some row uses, row by row; all checked."""
        self._follow()
        rows = [self.active if row is None else row for row in switches or [None] * count]
        if len(rows) != count:
            raise UserError(f"there are switches for {len(rows)} of {count} prompts: give one mapping per prompt")
        rows = [self.packed.config.checked_weights(row, self.adapters) for row in rows]
        for name in (name for name, moved in self.adapters.items() if moved):
            if len({row.get(name, 0.0) for row in rows} | {self.active.get(name, 0.0)}) > 1:
                raise UserError(
                    f"adapter '{name}' moves parameters of its base, so it counts for all rows as the engine was made "
                    f"({self.active.get(name, 0.0):g}): give its weight for all, --adapter FOLDER=WEIGHT"
                )
        used = sorted(name for name in self.names if any(row.get(name) for row in rows))
        return {name: [row.get(name, 0.0) for row in rows] for name in used}

    def _follow(self) -> None:
        """Take over which adapters are active in the model now. Weights are packed, so none can be added."""
        model, seen = self._given(), self._seen
        if model is None:
            return
        moves = [name for name, moved in self.adapters.items() if moved]
        others = getattr(model, "adapters", self.adapters) is not self.adapters
        if others or any(model.active.get(name, 0.0) != seen.get(name, 0.0) for name in moves):
            raise UserError("the model's adapters changed after this engine was made: make another engine")
        if model.active != seen:
            self.active = self._seen = dict(model.active)

    def check(
        self,
        prompts: Sequence[Ids] | Tensor,
        seeds: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        new: int = 1,
        adds: bool = True,
    ) -> tuple[list[list[int]], list[int]]:
        """Return prompts and seeds as plain numbers, all checked: the context must have room for `new` tokens behind
        each prompt. Messages call prompts by their `names`. `adds`: prompts may hold ids that growth added.
        """
        rows = []
        for i, prompt in enumerate(prompts):
            name = names[i] if names else f"prompts[{i}]"
            try:
                row = list(map(operator.index, prompt.tolist() if isinstance(prompt, Tensor) else prompt))
            except TypeError:
                raise UserError(f"{name} is no row of ids: give whole numbers, as a list or a 1-D tensor") from None
            if not row:
                raise UserError(f"{name} has no tokens: begin with the token that ends a document")
            if len(row) + new > self.context:
                room = f"the model's context is {self.context:,}{' behind the image' * bool(self.before)}"
                raise UserError(f"{name} has {len(row):,} tokens, {room}: shorten it")
            known = self.choices(adds)
            sure = any(min(row) in some and max(row) in some for some in known)
            for strange in () if sure else (id for id in row if not any(id in some for some in known)):
                ranges = " and ".join(f"{some.start} to {some.stop - 1:,}" for some in known)
                raise UserError(f"{name} holds the id {strange}: give ids from {ranges}")
            rows.append(row)
        chosen = list(range(len(rows)) if seeds is None else seeds)
        if len(chosen) != len(rows):
            raise UserError(f"there are {len(chosen)} seeds for {len(rows)} prompts: give one per prompt")
        if any(abs(seed) >= 1 << 63 for seed in chosen):
            raise UserError(f"the seed {max(chosen, key=abs)} is too large: give one below 2 to the 63rd")
        return rows, chosen

    @torch.no_grad()
    def start(
        self,
        prompts: Sequence[Ids] | Tensor,
        n: int,
        sampling: Sampling | None = None,
        *,
        seeds: Sequence[int] | None = None,
        stop_ids: Sequence[int] = (),
        logprobs: bool = False,
        switches: Sequence[Mapping[str, float] | None] | None = None,
        choices: range | None = None,
        against: Sequence[Ids] | Tensor | None = None,
        guidance: float = 1.0,
    ) -> Batch:
        """Prefill and choose the first token of each row; `advance` makes the rest. One batch can run at a time."""
        rows, seeds = self.check(prompts, seeds)
        weights = self.check_switches(switches, len(rows))
        if against is not None:  # the second half of the batch, which chooses what the first half does
            others, _ = self.check(against)
            if len(others) != len(rows):
                raise UserError(f"there are {len(others)} prompts against {len(rows)}: give one for each")
            rows, seeds, weights = rows + others, 2 * seeds, {name: 2 * some for name, some in weights.items()}
        name = self.packed.config.added_switch
        chosen = (choices,) if choices else self.choices(not name or name in weights)
        if not rows or n < 1:
            raise UserError("there is nothing to generate: give at least one prompt and one token")
        n = min(n, self.context)  # no row can have more
        slots = -(-(self.before + min(max(map(len, rows)) + n, self.context)) // SLOTS) * SLOTS
        halves = None if against is None else guidance
        key = (len(rows), slots, n, sampling or Sampling(), len(stop_ids), logprobs, tuple(weights), chosen, halves)
        if self._last is None or self._last.key != key:
            self._last = None  # frees its cache first
            self._last = Batch(self, key)
        self._last.begin(rows, seeds, stop_ids, weights)
        return self._last

    def generate(
        self,
        prompts: Sequence[Ids] | Tensor,
        n: int,
        sampling: Sampling | None = None,
        *,
        seeds: Sequence[int] | None = None,
        stop_ids: Sequence[int] = (),
        logprobs: bool = False,
        switches: Sequence[Mapping[str, float] | None] | None = None,
        choices: range | None = None,
        against: Sequence[Ids] | Tensor | None = None,
        guidance: float = 1.0,
    ) -> list[Finished]:
        """Generate up to `n` new tokens per prompt: fewer where a stop token comes or the context is full. Row i's seed
        is i unless `seeds` says otherwise; `logprobs` asks for log-probabilities. `switches`: the adapters of each row
        with their weights; None, for a row or all of them, means those that are active in the model.
        `choices`: the only ids that may be chosen. `against`: a prompt for each, whose logits a are pushed away from:
        tokens are chosen by a + guidance · (logits − a) (classifier-free guidance).
        """
        how = {"seeds": seeds, "stop_ids": stop_ids, "logprobs": logprobs, "switches": switches}
        batch = self.start(prompts, n, sampling, **how, choices=choices, against=against, guidance=guidance)
        while not batch.over:
            batch.advance(self.every)
        return batch.rows if against is None else batch.rows[: len(batch.rows) // 2]


Switches = Mapping[str, Tensor] | None  # name → (B,) weights; None: the model has none
Step = Callable[[Tensor, Tensor, StaticCache, Switches], Tensor]  # ids (B,), positions (B,), … → logits (B, W)
Hidden = Callable[[Tensor, StaticCache, int, Switches], Tensor]  # ids (B, T), cache, start, … → (B, T, D), for the head


def choose_backend(
    model: LanguageModel, packed: Packed, wanted: str | None, tuning: Tuning, fp8: bool = False
) -> tuple[str, Callable[[int], Step], Hidden, str]:
    """Return the name of the backend, a function that makes a step for a batch size, the prefill, and what is to be
    said about weights in fp8.
    """
    if wanted not in (None, "torch", "triton"):
        raise UserError(f"backend is '{wanted}', but must be torch or triton")
    reason = why_not(packed.config, packed.device)
    if wanted == "triton" and reason:
        raise UserError(f"the triton kernels cannot be used, since {reason}: take the backend torch")

    def plain(batch: int) -> Step:
        return plain_step(packed)

    def plain_hidden(ids_BT: Tensor, cache: StaticCache, start: int, switches: Switches) -> Tensor:
        places = torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device)
        return packed.hidden(ids_BT, places, cache, start, switches)

    if wanted == "torch" or reason:
        kind = str(packed.dtype).removeprefix("torch.")
        why = f", since {reason}" if reason else ""
        said = f"weights in fp8: rounded to 8 bits, and computed in {kind} without kernels{why}: nothing is saved"
        return "torch", plain, plain_hidden, said if fp8 else ""
    fused, said = FusedModel(model, packed.dtype), ""
    steps = fused
    if fp8:
        steps = FusedModel(model, packed.dtype, fp8=True)
        said = f"weights in fp8: a step reads {steps.nbytes / 1e9:.3f} GB of them instead of {fused.nbytes / 1e9:.3f}"
    return "triton", lambda batch: steps.step(batch, tuning) or plain(batch), fused.hidden, said


def plain_step(packed: Packed) -> Step:
    """Return a step by PyTorch's operations, for any batch."""

    def step(ids: Tensor, positions: Tensor, cache: StaticCache, switches: Switches) -> Tensor:
        hidden = packed.hidden(ids[:, None], positions[:, None], cache, switches=switches)
        return packed.logits(hidden[:, 0], switches)

    return step
