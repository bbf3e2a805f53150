"""Bytes that collectives move in a step, exact for what this package sends: a test counts them on every rank.

A collective counts as the larger of its input and its output on one rank; a message between two stages counts on both.
docs/parallelism.md has the same sums as a table.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tokenformer.config import Config
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

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}
TIMES = {"qkv": 3, "proj": 1, "ffn": 1}  # Pattentions of a block

Part = dict[Name, Split]  # parameters, as the token degree splits them


class Rank(NamedTuple):
    """The place of a rank in each degree; `data` is its place in replicate × shard."""

    pipeline: int = 0
    data: int = 0
    token: int = 0


class Cut:
    """How the model of one config is split, for any degrees; it is made once, without memory."""

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, config.model.resolved()
        known = self.model.of in ("language", "image")
        need(known, f"layouts are planned for models of language and image, not for model.of {self.model.of}")
        with torch.device("meta"):
            self.made = build(config.model)
        shapes = {name: tuple(p.shape) for name, p in self.made.named_parameters()}
        self.names = {name: parse(name, self.made.ends) for name in shapes}
        self.known: dict[int, Part] = {1: {self.names[name]: Split(shape) for name, shape in shapes.items()}}

    def splits(self, token: int) -> Part:
        if token not in self.known:
            whole = self.config.parallel.segments == "per-rank" and self.model.kind == "tokenformer"
            self.known[token] = {self.names[n]: s for n, s in token_splits(self.made, token, whole).items()}
        return self.known[token]

    def fullest(self, token: int) -> int:
        """Return the token rank that holds most."""
        return max(range(token), key=lambda t: sum(size(s, t) for s in self.splits(token).values()))

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
    for _, blocks, rest in held:
        found.update(_shard_bytes(cut, d, rank.token, blocks, rest, steps))
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
        found["muon"] = _muon_bytes(cut, d, rank, [block for _, blocks, _ in held for block in blocks])
    if d.world > 1:
        found["numbers"] = 8 + 8 + 4  # loss and labels, whether to stop, the norm
    return dict(found)


def _shard_bytes(cut: Cut, d: Degrees, token: int, blocks: Sequence[Part], rest: Part, steps: int) -> dict[str, int]:
    """Return the bytes of FSDP, which pads each parameter's rows to equal parts.

    PyTorch's pipeline gathers a block once per micro-batch and once more: it stays between a backward pass and the next
    forward.
    """
    if d.shard * d.replicate == 1:
        return {}
    c, reshard = WIDTH[cut.config.train.precision], cut.config.parallel.reshard_after_forward

    def padded(part: Part) -> int:
        shapes = [split.local(token) for split in part.values()]
        return sum(-(-n // d.shard) * d.shard * math.prod(more) for n, *more in shapes)

    inner, outer = sum(padded(block) for block in blocks), padded(rest)
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
        numbers = sum(n * len(model.segments(which, layer)) for layer in layers for which, n in TIMES.items())
        each = d.token if model.theta == "softmax" else 1  # gathered, or summed; gradients are summed
        found["statistics"] = numbers * rows * 4 * (each * (1 + recompute) + 1)
    return found


def _muon_bytes(cut: Cut, d: Degrees, rank: Rank, blocks: Sequence[Part]) -> int:
    """Return the bytes of Muon: two exchanges per batch of matrices that are split alike (gather.solve_whole)."""
    ranks, copy = d.replicate * d.shard * d.token, d.shard * d.token
    own, total = rank.data * d.token + rank.token, 0
    for splits, units in count_alike(blocks, cut.config.optimizer.segments == "joint").items():
        whole = sum(math.prod(split.shape) for split in splits)
        mine = sum(volume(split.box(rank.token, rank.data % d.shard, d.shard)) for split in splits)
        many = max(1, STACK // whole) * d.world
        for begin in range(0, units, many):
            n = min(many, units - begin)
            owned = len(range(own, n, ranks))
            near = n // ranks * copy + min(max(n % ranks - rank.data // d.shard * copy, 0), copy)  # by this copy
            total += max(near * mine, owned * whole) + max(owned * whole * d.replicate, n * mine)
    return 4 * total
