"""What a layout needs before it runs: memory a GPU and bytes that collectives move in a step; which layout to choose.

Unusual: the bytes are exact for what this package sends (a test counts them on every rank); memory is an estimate of
the peak, from what autograd keeps of each layer. Bytes of a collective: the larger of what goes in and what comes out
on one rank; a message between two stages counts on both.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from tokenformer.config import PROJECTIONS, Config, ModelConfig
from tokenformer.errors import UserError
from tokenformer.models import build
from tokenformer.models.cost import cost
from tokenformer.models.names import Name, parse
from tokenformer.ops.cross_entropy import LOGITS, ROWS
from tokenformer.parallel.gather import STACK, count_alike
from tokenformer.parallel.layout import Split, volume
from tokenformer.parallel.mesh import Degrees, check, stages
from tokenformer.parallel.pipeline import layers_of
from tokenformer.parallel.tokens import token_splits

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}
LOGIT = 12  # bytes of one logit in the backward pass of the loss: its logarithm, two gradients, all fp32
MUON = 28  # bytes of one number while Muon updates it: gradient, momentum, direction, move, some of them twice
FLOPS, NEAR, FAR = 4e14, 3e11, 4e10  # a GPU's in a second; bytes inside a node and between nodes: to compare layouts
KEPT = {  # of a score: bytes in fp32 and numbers in the compute type; bytes a row of a Pattention; numbers in backward
    "op by op": (8, 1, 0, 9),
    "compiled": (0, 2, 0, 2),  # scores and Θ
    "selective": (0, 1, 0, 2),  # scores
    "kernels": (0, 1, 4, 3),  # scores and a statistic
}
TIMES = {"qkv": 3, "proj": 1, "ffn": 1}  # Pattentions of a block

Part = dict[Name, Split]  # parameters, as the token degree cuts them


@dataclasses.dataclass(frozen=True)
class Rank:
    """A place among the degrees; `data` is that of replicate × shard."""

    pipeline: int = 0
    data: int = 0
    token: int = 0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one layout, on its fullest rank: bytes of memory by what they hold, bytes sent in a step by why."""

    degrees: Degrees
    micro_batch: int
    memory: dict[str, int]
    sent: dict[str, int]
    seconds: float  # of a step, roughly

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def traffic(self) -> int:
        return sum(self.sent.values())


def estimate(config: Config, d: Degrees, per_node: int = 8) -> Estimate:
    """Memory and traffic of a layout with the config's batch.

    >>> from tokenformer.config import load
    >>> one = estimate(load("lm/150m", overrides=["batch=8", "micro_batch=8"]), Degrees())
    >>> one.traffic, 2e9 < one.total < 80e9
    (0, True)
    """
    return Planner(config).estimate(d, per_node)


class Planner:
    """Answers for many layouts of one config; the model is made once, without memory."""

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, config.model.resolved()
        with torch.device("meta"):
            self.made = build(config.model)
        self.names = {name: parse(name, self.made.ends) for name, _ in self.made.named_parameters()}
        self.cut: dict[int, Part] = {1: {self.names[n]: Split(tuple(p.shape)) for n, p in self.made.named_parameters()}}

    def splits(self, token: int) -> Part:
        if token not in self.cut:
            whole = self.config.parallel.segments == "per-rank" and self.model.kind == "tokenformer"
            self.cut[token] = {self.names[n]: s for n, s in token_splits(self.made, token, whole).items()}
        return self.cut[token]

    def fullest(self, token: int) -> int:
        """The token rank that holds most."""
        return max(range(token), key=lambda t: sum(size(s, t) for s in self.splits(token).values()))

    def batches(self, d: Degrees) -> tuple[int, int]:
        """Sequences of a micro-batch, and micro-batches of a step on one rank."""
        batch, data = self.config.batch, d.replicate * d.shard
        if batch is None or batch % data:
            raise UserError(f"batch is {batch}: give a multiple of {data}, the ranks that see other data")
        micro = min(self.config.micro_batch or batch // data, batch // data)
        if batch // data % micro or batch // data // micro % d.pipeline:
            raise UserError(f"batch {batch} is not cut into equal micro-batches for {d}: give another micro_batch")
        return micro, batch // data // micro

    def stages(self, d: Degrees, pipeline: int) -> list[tuple[int, list[Part], Part]]:
        """Of a pipeline rank: the number of each stage, its blocks and the rest of it."""
        c, every, splits = self.model, stages(d, self.config.parallel), self.splits(d.token)
        blocks: dict[int, Part] = {layer: {} for layer in range(c.layers)}
        for name, split in splits.items():
            if name.layer is not None:
                blocks[name.layer][name] = split
        found = []
        for number in range(pipeline, every, d.pipeline):
            first, last = number == 0, number == every - 1
            here = {"embedding": first or (last and c.tied)}  # the norm and the head: at the end
            rest = {n: s for n, s in splits.items() if n.layer is None and here.get(n.part, last)}
            found.append((number, [blocks[layer] for layer in layers_of(number, c.layers, every)], rest))
        return found

    # what is sent

    def sent(self, d: Degrees, rank: Rank) -> dict[str, int]:
        """By one rank in one step, why."""
        config, model, c = self.config, self.model, WIDTH[self.config.train.precision]
        micro, steps = self.batches(d)
        held, found = self.stages(d, rank.pipeline), Counter[str]()
        stream = micro * model.context * model.dim
        ends = [(number == 0, number == stages(d, config.parallel) - 1) for number, _, _ in held]
        for _, blocks, rest in held:
            found.update(self._shard_bytes(d, rank.token, blocks, rest, steps))
        if d.token > 1:
            for (number, _, _), (first, last) in zip(held, ends, strict=True):
                layers = layers_of(number, model.layers, stages(d, config.parallel))
                found.update({k: steps * n for k, n in self._token_bytes(d, micro, layers, first, last).items()})
        if d.pipeline > 1:
            links = sum((not first) + (not last) for first, last in ends)
            found["pipeline"] = steps * links * 2 * c * stream + 4  # the loss at last
            if model.tied and rank.pipeline in (0, d.pipeline - 1):
                embedding = self.splits(d.token)[self.names["embedding.weight"]]
                found["tied"] = 4 * volume(embedding.box(rank.token, rank.data % d.shard, d.shard))
        if config.optimizer.kind == "muon" and d.replicate * d.shard * d.token > 1:
            found["muon"] = self._muon_bytes(d, rank, [block for _, blocks, _ in held for block in blocks])
        if d.world > 1:
            found["numbers"] = 8 + 8 + 4  # loss and labels, whether to stop, the norm
        return dict(found)

    def _shard_bytes(self, d: Degrees, token: int, blocks: Sequence[Part], rest: Part, steps: int) -> dict[str, int]:
        """FSDP pads each parameter's rows to equal parts. PyTorch's pipeline gathers a block once less than twice a

        micro-batch (it stays between a backward pass and the next), and reduces gradients once a step.
        """
        if d.shard * d.replicate == 1:
            return {}
        c, again = WIDTH[self.config.train.precision], self.config.parallel.reshard_after_forward

        def padded(part: Part) -> int:
            shapes = [split.local(token) for split in part.values()]
            return sum(-(-n // d.shard) * d.shard * math.prod(more) for n, *more in shapes)

        inner, outer = sum(padded(block) for block in blocks), padded(rest)
        gathers, once = (2 * steps if again else steps, steps) if d.pipeline == 1 else (steps + 1 if again else 1, 1)
        found = {"replicate": once * 4 * (inner + outer) // d.shard} if d.replicate > 1 else {}
        if d.shard > 1:
            found |= {"gather": gathers * c * inner + once * 4 * outer, "reduce": once * 4 * (inner + outer)}
        return found

    def _token_bytes(self, d: Degrees, micro: int, layers: range, first: bool, last: bool) -> dict[str, int]:
        """Forward and backward of one micro-batch in a stage."""
        model, c = self.model, WIDTH[self.config.train.precision]
        rows, again = micro * model.context, self.config.train.activation_checkpointing != "none"
        kv = (model.kv_heads or model.heads) * model.head_dim
        stream, qkv = rows * model.dim, rows * (model.dim + 2 * kv)
        own = model.kind == "tokenformer"
        forward = 2 * stream + (qkv + stream if own else 0)  # two outputs; q, k and v scattered, heads gathered
        twice = forward - stream if again else 0  # what is made again, up to the last product
        sent = len(layers) * (2 * forward + twice) * c
        sent += stream * (4 * first + c * last)  # the embedding is summed in fp32; gradients of what the head reads
        sent += last * d.token * 2 * rows * 4 * (2 if rows * model.vocab / d.token > LOGITS else 1)  # cross entropy
        found = {"token": sent}
        if own and self.config.parallel.segments == "split":
            numbers = sum(n * len(model.segments(which, layer)) for layer in layers for which, n in TIMES.items())
            each = d.token if model.theta == "softmax" else 1  # gathered, or summed; gradients are summed
            found["statistics"] = numbers * rows * 4 * (each * (1 + again) + 1)
        return found

    def _muon_bytes(self, d: Degrees, rank: Rank, blocks: Sequence[Part]) -> int:
        """Two exchanges for each batch of matrices that are cut alike (layout.spread)."""
        ranks, copy = d.replicate * d.shard * d.token, d.shard * d.token
        own, total = rank.data * d.token + rank.token, 0
        for splits, units in count_alike(blocks, self.config.optimizer.segments == "joint").items():
            whole = sum(math.prod(split.shape) for split in splits)
            mine = sum(volume(split.box(rank.token, rank.data % d.shard, d.shard)) for split in splits)
            many = max(1, STACK // whole) * d.world
            for begin in range(0, units, many):
                n = min(many, units - begin)
                owned = len(range(own, n, ranks))
                near = n // ranks * copy + min(max(n % ranks - rank.data // d.shard * copy, 0), copy)  # by this copy
                total += max(near * mine, owned * whole) + max(owned * whole * d.replicate, n * mine)
        return 4 * total

    # what is held

    def memory(self, d: Degrees, pipeline: int) -> dict[str, int]:
        """The peak of a rank by what it holds: what stays, and the fullest moment of a step."""
        config, model, t = self.config, self.model, self.config.train
        c, token, (micro, steps) = WIDTH[t.precision], self.fullest(d.token), self.batches(d)
        held = self.stages(d, pipeline)
        sizes = [sum(size(s, token) for s in block.values()) for _, blocks, _ in held for block in blocks]
        rest = sum(size(s, token) for _, _, part in held for s in part.values())
        whole, block, rows = sum(sizes) + rest, max(sizes), micro * model.context
        moments = 8 if config.optimizer.kind == "adamw" else 4
        found = {"parameters": 4.0 * whole, "gradients": 4.0 * whole, "optimizer": moments * sum(sizes) + 8.0 * rest}
        found = {name: 0.0 if config.parallel.offload else n / d.shard for name, n in found.items()}
        full = t.activation_checkpointing == "full"
        compiled = t.compile not in (False, "none")
        score, stream, work = row_bytes(model, d.token, c, compiled, t.activation_checkpointing)
        inside = rows * (score + stream)  # what a block's backward needs of its forward
        kept = in_flight(d, config.parallel.schedule, pipeline, steps) * len(sizes)
        kept *= rows * model.dim * c if full else inside
        if d.shard > 1:
            copies = c * (2 * block if config.parallel.reshard_after_forward else sum(sizes)) + 4 * (block + 2 * rest)
        else:
            copies = 0 if c == 4 else c * (block if full else sum(sizes))
        last = held[-1][0] == stages(d, config.parallel) - 1
        head = last * model.vocab * model.dim / d.token  # in the compute type, with its gradient
        logits = last * LOGIT * min(rows * model.vocab / d.token, LOGITS)
        if compiled and d.token == 1:  # its kernel: a chunk's logits become their gradients, that of the head is fp32
            logits = last * c * min(rows, ROWS) * model.vocab + 4 * head + last * c * rows * model.dim
        moment = {
            "loss": {"activations": kept, "weights": copies + 2 * c * head, "logits": logits},
            "backward": {"activations": kept + full * inside, "weights": copies + 4 * head, "work": rows * work},
            "update": {"muon": MUON * self._stacked(d, held) if config.optimizer.kind == "muon" else 0},
        }
        if steps == 1:  # gradients come while activations go
            for name in ("loss", "backward"):
                moment[name]["gradients"] = 0.0
        most = max(moment.values(), key=lambda m: sum((found | m).values()))
        return {name: math.ceil(n) for name, n in (found | most).items()}

    def _stacked(self, d: Degrees, held: Sequence[tuple[int, list[Part], Part]]) -> int:
        """Numbers that Muon works on at once: matrices of one shape, up to a limit."""
        units = count_alike(
            [block for _, blocks, _ in held for block in blocks], self.config.optimizer.segments == "joint"
        )
        sizes = [(sum(math.prod(split.shape) for split in splits), n) for splits, n in units.items()]
        return max(max(one, min(n * one, STACK)) for one, n in sizes) // (d.shard * d.token)

    # which one

    def estimate(self, d: Degrees, per_node: int) -> Estimate:
        micro, steps = self.batches(d)
        token = self.fullest(d.token)
        places = sorted({0, d.pipeline // 2, d.pipeline - 1})
        sent = max((self.sent(d, Rank(p, 0, token)) for p in places), key=lambda found: sum(found.values()))
        memory = max((self.memory(d, p) for p in places), key=lambda found: sum(found.values()))
        assert self.config.batch is not None
        tokens = self.config.batch * self.model.context
        compute = tokens * cost(self.model).training_flops(self.model.context) / d.world / FLOPS
        compute *= 4 / 3 if self.config.train.activation_checkpointing == "full" else 1
        compute *= 1 + (d.pipeline - 1) / steps  # ranks of a pipeline wait for the first and the last
        reach = {"token": d.token, "shard": d.token * d.shard, "data": d.world // d.pipeline}
        far = {"token": "token", "statistics": "token", "gather": "shard", "reduce": "shard", "replicate": "data"}
        far |= {"muon": "data"}
        slow = {why: FAR if reach.get(far.get(why, ""), d.world) > per_node else NEAR for why in sent}
        return Estimate(d, micro, memory, sent, compute + sum(n / slow[why] for why, n in sent.items()))


def size(split: Split, token: int) -> int:
    return math.prod(split.local(token))


def in_flight(d: Degrees, schedule: str, pipeline: int, steps: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at once."""
    if d.pipeline == 1 or schedule == "gpipe":
        return 1 if d.pipeline == 1 else steps
    if schedule == "1f1b":
        return min(steps, d.pipeline - pipeline)
    return min(steps, (d.pipeline + 2 * (d.pipeline - 1 - pipeline) + 1) / 2)  # of two half stages


def row_bytes(model: ModelConfig, token: int, c: int, compiled: bool, again: str) -> tuple[float, float, float]:
    """Of one row in one block: scores and the rest that autograd keeps, and what its backward has at once besides."""
    d, kv = model.dim, (model.kv_heads or model.heads) * model.head_dim
    stream = c * (7 * d + (d + 2 * kv) / token) + 4 * model.heads / token  # norms, attention, their outputs
    if model.kind != "tokenformer":
        wide = model.mlp_dim / token
        return wide * c * (5 if model.kind == "llama" else 2), stream, wide * c * 3
    numbers = [{w: sum(n for n, _ in model.segments(w, i)) / token for w in PROJECTIONS} for i in range(model.layers)]
    scores = max(3 * n["qkv"] + n["proj"] + n["ffn"] for n in numbers)
    largest = max(max(3 * n["qkv"], n["ffn"]) for n in numbers)
    how = "selective" if again == "selective" else "compiled" if compiled else "op by op"
    if compiled and token == 1:
        how = "kernels"
        if model.theta == "l2_norm_gelu":  # without norms: the stream twice, q, k, v and what attention gives
            stream = c * (4 * d + 2 * kv) + 4 * model.heads
    wide, narrow, row, work = KEPT[how]
    return scores * (wide + narrow * c) + sum(TIMES.values()) * row, stream, largest * work * c


def layouts(planner: Planner, gpus: int, per_node: int = 8) -> Iterator[Degrees]:
    """Every layout that the model and the batch allow: token degrees stay inside a node."""

    def divisors(n: int, most: int) -> list[int]:
        return [i for i in range(1, min(n, most) + 1) if n % i == 0]

    for token in divisors(gpus, per_node):
        for pipeline in divisors(gpus // token, planner.model.layers):
            for shard in divisors(gpus // token // pipeline, gpus):
                d = Degrees(pipeline, gpus // token // pipeline // shard, shard, token)
                try:
                    check(planner.model, d, planner.config.parallel)
                    planner.batches(d)
                except UserError:
                    continue
                yield d


def choose(
    config: Config, gpus: int, room: float, per_node: int = 8, fixed: Mapping[str, int | None] | None = None
) -> tuple[list[Estimate], Estimate | None]:
    """All estimates, the fastest first, and the first that fits with a tenth of the memory to spare.

    `fixed`: degrees by name that are decided already; -1 and None leave one open.
    """
    planner = Planner(config)
    wanted = {name: n for name, n in (fixed or {}).items() if n not in (None, -1)}
    found = layouts(planner, gpus, per_node)
    every = [planner.estimate(d, per_node) for d in found if all(getattr(d, name) == n for name, n in wanted.items())]
    if not every and wanted:
        named = " and ".join(f"parallel.{name}={n}" for name, n in wanted.items())
        raise UserError(f"no layout of {gpus} GPUs has {named} and divides the batch of {config.batch}: change one")
    if not every:
        raise UserError(f"no layout of {gpus} GPUs divides the batch of {config.batch}: give another batch")
    every.sort(key=lambda e: (e.seconds, e.degrees.token, e.total))
    return every, next((e for e in every if e.total <= 0.9 * room), None)
