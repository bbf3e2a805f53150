"""Bytes that collectives move in a step, exact for what this package sends: a test counts them on every rank.

A collective counts as the larger of its input and its output on one rank; a message between two stages counts on both.
docs/parallelism.md has the same sums as a table.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from tokenformer.config import Config, ModelConfig
from tokenformer.errors import UserError
from tokenformer.models import build
from tokenformer.models.names import Name, parse
from tokenformer.ops.cross_entropy import LOGITS
from tokenformer.parallel.gather import STACK, count_alike
from tokenformer.parallel.layout import Split, volume
from tokenformer.parallel.mesh import Degrees, keeps_whole_gradients, stages
from tokenformer.parallel.pipeline import layers_of
from tokenformer.parallel.tokens import token_splits
from tokenformer.strict import need

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}  # of what flows between products and ranks
TIMES = {"qkv": 3, "proj": 1, "ffn": 1}  # Pattentions of a block

Part = dict[Name, Split]  # parameters, as the token degree splits them
T = TypeVar("T")


class Rank(NamedTuple):
    """The place of a rank in each degree; `data` is its place in replicate × shard."""

    pipeline: int = 0
    data: int = 0
    token: int = 0


class Cut:
    """How the model of one config is split, for any degrees; it is made once, without memory.

    `replaced` gives the same with other keys than the model's, and shares what is known about it.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, config.model.resolved()
        known = self.model.of in ("language", "image")
        need(
            known,
            f"layouts are planned for models of language and image, not for model.of {self.model.of}: begin with "
            "parallel.replicate, and use parallel.shard where its memory is short",
        )
        need(
            config.adapter is None,
            "layouts are planned for runs that train all parameters, not for an adapter: its base has no gradients "
            "and no optimizer state, so begin with parallel.replicate",
        )
        with torch.device("meta"):
            self.made = build(config.model)
        shapes = {name: tuple(p.shape) for name, p in self.made.named_parameters()}
        self.names = {name: parse(name, self.made.ends) for name in shapes}
        self.whole = {self.names[name]: Split(shape) for name, shape in shapes.items()}
        self.known: dict[Hashable, Any] = {}

    def replaced(self, config: Config) -> "Cut":
        other = copy.copy(self)
        other.config = config
        return other

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def splits(self, token: int) -> Part:
        def split() -> Part:
            whole = self.config.parallel.segments == "per-rank" and self.model.kind == "tokenformer"
            return {self.names[n]: s for n, s in token_splits(self.made, token, whole).items()}

        return self.whole if token == 1 else self.remember(("splits", token), split)

    def fullest(self, token: int) -> int:
        """Return the token rank that holds most."""

        def most() -> int:
            return max(range(token), key=lambda t: sum(size(s, t) for s in self.splits(token).values()))

        return self.remember(("fullest", token), most)

    def numbers(self, d: Degrees) -> int:
        """Return how many numbers the fullest rank holds before they are sharded."""

        def most() -> int:
            token = self.fullest(d.token)
            held = [self.sizes(d, pipeline, token) for pipeline in range(d.pipeline)]
            return max(sum(blocks) + rest for blocks, rest in held)

        return self.remember(("numbers", d.token, d.pipeline), most)

    def sizes(self, d: Degrees, pipeline: int, token: int) -> tuple[list[int], int]:
        """Return how many numbers each block of a rank has, and the rest of it."""

        def count() -> tuple[list[int], int]:
            held = self.stages(d, pipeline)
            blocks = [sum(size(s, token) for s in block.values()) for _, blocks, _ in held for block in blocks]
            return blocks, sum(size(s, token) for _, _, part in held for s in part.values())

        return self.remember(("sizes", d.token, d.pipeline, pipeline, token), count)

    def alike(self, d: Degrees, pipeline: int) -> Counter[tuple[Split, ...]]:
        """Count the matrices of a pipeline rank that Muon solves together."""

        def count() -> Counter[tuple[Split, ...]]:
            blocks = [block for _, blocks, _ in self.stages(d, pipeline) for block in blocks]
            return count_alike(blocks, self.config.optimizer.segments == "joint")

        return self.remember(("alike", d.token, d.pipeline, pipeline), count)

    def batches(self, d: Degrees) -> tuple[int, int]:
        """Return the sequences per micro-batch, and the micro-batches per step and rank."""
        batch, data = self.config.batch, d.replicate * d.shard
        if batch is None or batch % data:
            raise UserError(f"batch is {batch}: give a multiple of {data}, the ranks that see different data")
        micro = min(self.config.micro_batch or batch // data, batch // data)
        if batch // data % micro or batch // data // micro % d.pipeline:
            raise UserError(f"batch {batch} is not cut into equal micro-batches for {d}: give another micro_batch")
        return micro, batch // data // micro

    def stages(self, d: Degrees, pipeline: int) -> list[tuple[int, list[Part], Part]]:
        """Return the stages of a pipeline rank: the number of each, its blocks and the rest of it."""
        return self.remember(("stages", d.token, d.pipeline, pipeline), lambda: self._stages(d, pipeline))

    def _stages(self, d: Degrees, pipeline: int) -> list[tuple[int, list[Part], Part]]:
        c, count, splits = self.model, stages(d, self.config.parallel), self.splits(d.token)
        blocks: dict[int, Part] = {layer: {} for layer in range(c.layers)}
        for name, split in splits.items():
            if name.layer is not None:
                blocks[name.layer][name] = split
        found = []
        for number in range(pipeline, count, d.pipeline):
            first, last = number == 0, number == count - 1
            here = {"embedding": first or (last and c.tied)}  # the norm and the head: at the end
            rest = {n: s for n, s in splits.items() if n.layer is None and here.get(n.part, last)}
            found.append((number, [blocks[layer] for layer in layers_of(number, c.layers, count)], rest))
        return found


def size(split: Split, token: int) -> int:
    return math.prod(split.local(token))


def sent(cut: Cut, d: Degrees, rank: Rank) -> dict[str, int]:
    """Return the bytes that one rank sends or receives in one step, by purpose."""
    config, model, c = cut.config, cut.model, WIDTH[cut.config.train.precision]
    micro, steps = cut.batches(d)
    held, found = cut.stages(d, rank.pipeline), Counter[str]()
    stream = micro * model.length * model.dim
    ends = [(number == 0, number == stages(d, config.parallel) - 1) for number, _, _ in held]
    found.update(_shard_bytes(cut, d, rank, steps))
    if d.token > 1:
        for (number, _, _), (first, last) in zip(held, ends, strict=True):
            layers = layers_of(number, model.layers, stages(d, config.parallel))
            found.update({k: steps * n for k, n in _token_bytes(cut, d, micro, layers, first, last).items()})
    if d.pipeline > 1:
        links = sum((not first) + (not last) for first, last in ends)
        found["pipeline"] = steps * links * 2 * c * stream + 4  # 4: the loss
        if model.tied and rank.pipeline in (0, d.pipeline - 1):
            embedding = cut.splits(d.token)[cut.names["embedding.weight"]]
            found["tied"] = 4 * volume(embedding.box(rank.token, rank.data % d.shard, d.shard))
    if config.optimizer.kind == "muon" and d.replicate * d.shard * d.token > 1:
        found["muon"] = cut.remember(("muon", d, rank), lambda: _muon_bytes(cut, d, rank))
    if d.world > 1:
        found["numbers"] = 8 + 8 + 4  # loss and labels, whether to stop, the norm
    return dict(found)


def _shard_bytes(cut: Cut, d: Degrees, rank: Rank, steps: int) -> dict[str, int]:
    """Return the bytes of FSDP, which pads each parameter's rows to equal parts.

    PyTorch's pipeline gathers a block once per micro-batch and once more: it stays between a backward pass and the next
    forward.
    """
    if d.shard * d.replicate == 1:
        return {}
    c, reshard = WIDTH[cut.config.train.precision], cut.config.parallel.reshard_after_forward

    def padded(part: Part) -> int:
        shapes = [split.local(rank.token) for split in part.values()]
        return sum(-(-n // d.shard) * d.shard * math.prod(more) for n, *more in shapes)

    def count() -> tuple[int, int]:
        held = cut.stages(d, rank.pipeline)
        return sum(padded(block) for _, blocks, _ in held for block in blocks), sum(padded(rest) for *_, rest in held)

    inner, outer = cut.remember(("padded", d, rank.pipeline, rank.token), count)
    gathers, rests = (1, 1) if not reshard else (2 * steps, steps) if d.pipeline == 1 else (steps + 1, 1)
    reduces = 1 if keeps_whole_gradients(d, cut.config.parallel) else steps
    found = {"replicate": 4 * (inner + outer) // d.shard} if d.replicate > 1 else {}
    if d.shard > 1:
        found |= {"gather": gathers * c * inner + rests * 4 * outer, "reduce": reduces * 4 * (inner + outer)}
    return found


def _token_bytes(cut: Cut, d: Degrees, micro: int, layers: range, first: bool, last: bool) -> dict[str, int]:
    """Return the bytes of the token degree for the forward and backward passes of one micro-batch in a stage."""
    model, c = cut.model, WIDTH[cut.config.train.precision]
    rows, recompute = micro * model.context, cut.config.train.activation_checkpointing != "none"
    kv = (model.kv_heads or model.heads) * model.head_dim
    stream, qkv = rows * model.dim, rows * (model.dim + 2 * kv)
    own = model.kind == "tokenformer"
    forward = 2 * stream + (qkv + stream if own else 0)  # two outputs; q, k and v scattered, heads gathered
    recomputed = forward - stream if recompute else 0  # up to the last product
    sent = len(layers) * (2 * forward + recomputed) * c
    sent += stream * (4 * first + c * last)  # the embedding is summed in fp32; gradients of what the head reads
    sent += last * d.token * 2 * rows * 4 * (2 if rows * model.vocab / d.token > LOGITS else 1)  # cross entropy
    found = {"token": sent}
    if own and cut.config.parallel.segments == "split":
        per_layer = cut.remember("segments", lambda: [_segments(model, i) for i in range(model.layers)])
        numbers = sum(per_layer[layer] for layer in layers)
        each = d.token if model.theta == "softmax" else 1  # gathered, or summed; gradients are summed
        found["statistics"] = numbers * rows * 4 * (each * (1 + recompute) + 1)
    return found


def _segments(model: ModelConfig, layer: int) -> int:
    """Return how many segments the Pattentions of a block have together."""
    return sum(n * len(model.segments(which, layer)) for which, n in TIMES.items())


def muon_batches(cut: Cut, d: Degrees, pipeline: int) -> Iterator[tuple[tuple[Split, ...], int]]:
    """Yield the batches of matrices that are split alike, with their number: each is exchanged twice (gather.py)."""
    for splits, units in cut.alike(d, pipeline).items():
        many = max(1, STACK // sum(math.prod(split.shape) for split in splits)) * d.world
        for begin in range(0, units, many):
            yield splits, min(many, units - begin)


def _muon_bytes(cut: Cut, d: Degrees, rank: Rank) -> int:
    ranks, copy = d.replicate * d.shard * d.token, d.shard * d.token
    own, total = rank.data * d.token + rank.token, 0
    for splits, n in muon_batches(cut, d, rank.pipeline):
        whole = sum(math.prod(split.shape) for split in splits)
        mine = sum(volume(split.box(rank.token, rank.data % d.shard, d.shard)) for split in splits)
        owned = len(range(own, n, ranks))
        near = n // ranks * copy + min(max(n % ranks - rank.data // d.shard * copy, 0), copy)  # by this copy
        total += max(near * mine, owned * whole) + max(owned * whole * d.replicate, n * mine)
    return 4 * total
