"""What a layout needs before it runs: memory a GPU and bytes that collectives move in a step; which layout to choose.

Unusual: the bytes are exact for what this package sends (a test counts them); memory is an estimate of the peak, from
what autograd keeps of each layer. Bytes of a collective: the larger of what goes in and what comes out on one rank.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator

from tokenformer.config import PROJECTIONS, Config, ModelConfig
from tokenformer.errors import UserError
from tokenformer.models.cost import cost
from tokenformer.ops.cross_entropy import LOGITS
from tokenformer.parallel.mesh import Degrees, check

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}
CHUNK = 4096  # rows whose logits the kernel of the loss holds at once (ops/kernels/cross_entropy.py)
LOGIT = 12  # bytes of one logit in the backward pass of the loss: its logarithm, two gradients, all fp32
MUON = 28  # bytes of one number while Muon updates it: gradient, momentum, direction, move, some of them twice
STACK = 1 << 26  # numbers that Muon works on at once (train/optim.py)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one layout: bytes of memory a GPU by what they hold, bytes sent in a step by why."""

    degrees: Degrees
    micro_batch: int
    memory: dict[str, int]
    sent: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def traffic(self) -> int:
        return sum(self.sent.values())


def estimate(config: Config, d: Degrees) -> Estimate:
    """Memory and traffic of a layout with the config's batch.

    >>> from tokenformer.config import load
    >>> one = estimate(load("lm/150m", overrides=["batch=8", "micro_batch=8"]), Degrees())
    >>> one.traffic, 2e9 < one.total < 80e9
    (0, True)
    """
    data = d.replicate * d.shard
    if config.batch is None or config.batch % data:
        raise UserError(f"batch is {config.batch}: give a multiple of {data}, the ranks that see other data")
    micro = min(config.micro_batch or config.batch // data, config.batch // data)
    steps = config.batch // data // micro  # micro-batches of a step
    sent = {name: steps * n for name, n in micro_batch_bytes(config, d, micro).items()}
    if config.optimizer.kind == "muon" and d.replicate * d.shard * d.token > 1:
        sent["muon"] = 2 * 4 * cost(config.model).matmul_parameters // (d.shard * d.token)
    return Estimate(d, micro, memory(config, d, micro, steps), sent)


def matrices(model: ModelConfig, layer: int, token: int) -> list[tuple[int, int]]:
    """(rows, columns) of each parameter of a block, as the largest of the token ranks holds it."""
    kv = (model.kv_heads or model.heads) * model.head_dim
    if model.kind == "tokenformer":
        counts = {"qkv": 3, "proj": 1, "ffn": 1}
        sizes = [n for which, times in counts.items() for n, _ in model.segments(which, layer) * times]
        return [(-(-n // token), model.dim) for n in sizes for _ in range(2)]
    d, mlp = model.dim, -(-model.mlp_dim // token)
    ffn = [(mlp, d)] * (2 if model.kind == "llama" else 1) + [(d, mlp)]
    norms = [(d, 1)] * 2 if model.kind == "llama" else []
    return [(d // token, d), *[(kv // token, d)] * 2, (d, d // token), *ffn, *norms]


def root(model: ModelConfig, token: int) -> list[tuple[int, int]]:
    """The same for what lies outside the blocks."""
    embedding = (-(-model.vocab // token), model.dim)
    norms = [(model.dim, 1)] * (1 if model.kind == "llama" else 2)
    return [embedding, *norms, *([] if model.tied else [embedding])]


def padded(shapes: list[tuple[int, int]], ranks: int) -> int:
    """Numbers that FSDP gathers: each parameter's rows are padded to equal parts."""
    return sum(-(-rows // ranks) * ranks * columns for rows, columns in shapes)


def micro_batch_bytes(config: Config, d: Degrees, micro: int) -> dict[str, int]:
    """Forward and backward of one micro-batch on one rank."""
    model, c = config.model, WIDTH[config.train.precision]
    rows, sent = micro * model.context, {}
    blocks = [padded(matrices(model, layer, d.token), d.shard) for layer in range(model.layers)]
    rest = padded(root(model, d.token), d.shard)
    if d.shard > 1:
        times = 2 if config.parallel.reshard_after_forward else 1
        sent["gather"] = times * c * sum(blocks) + 4 * rest
        sent["reduce"] = 4 * (sum(blocks) + rest)
    if d.replicate > 1:
        sent["replicate"] = 4 * (sum(blocks) + rest) // d.shard
    if d.token > 1:
        kv = (model.kv_heads or model.heads) * model.head_dim
        stream, qkv = rows * model.dim, rows * (model.dim + 2 * kv)
        block = 4 * stream  # two outputs forward, two inputs backward
        if model.kind == "tokenformer":
            block += 2 * qkv + 2 * stream  # q, k and v scattered, heads gathered; and back
        sent["token"] = model.layers * block * c + stream * (4 + c)  # the embedding is summed in fp32
        sent["token"] += d.token * 2 * rows * 4  # of the cross entropy
        if model.kind == "tokenformer" and config.parallel.segments == "split":
            times = {"qkv": 3, "proj": 1, "ffn": 1}
            numbers = sum(n * len(model.segments(w, i)) for i in range(model.layers) for w, n in times.items())
            sent["statistics"] = numbers * rows * 4 * (d.token + 1 if model.theta == "softmax" else 2)
    return sent


def memory(config: Config, d: Degrees, micro: int, steps: int) -> dict[str, int]:
    """The peak of the fullest rank by what it holds: what stays, and the fullest moment of a step."""
    model, t, c = config.model, config.train, WIDTH[config.train.precision]
    layers, rows = -(-model.layers // d.pipeline), micro * model.context
    block = max(sum(r * n for r, n in matrices(model, i, d.token)) for i in range(model.layers))
    rest = sum(r * n for r, n in root(model, d.token))
    held = (layers * block + rest) / d.shard
    moments = 8 if config.optimizer.kind == "adamw" else 4
    found = {"parameters": 4 * held, "gradients": 4 * held}
    found["optimizer"] = (layers * block * moments + rest * 8) / d.shard
    if config.parallel.offload:
        found = dict.fromkeys(found, 0.0)
    compiled = t.compile not in (False, "none")
    score, stream, work = row_bytes(model, d.token, c, compiled, t.activation_checkpointing)
    inside = rows * (score + stream)  # what a block's backward needs of its forward
    kept = rows * model.dim * c if t.activation_checkpointing == "full" else inside
    again = inside if t.activation_checkpointing == "full" else 0
    weights = c * block  # a block's in the compute type
    if d.shard > 1:
        copies = weights * (2 if config.parallel.reshard_after_forward else layers) + 4 * rest + 4 * (block + rest)
    else:
        copies = 0 if c == 4 else weights * (1 if t.activation_checkpointing == "full" else layers)
    head = model.vocab * model.dim / d.token  # of the output head: in the compute type, with its gradient
    logits = LOGIT * min(rows * model.vocab / d.token, LOGITS)
    if compiled and d.token == 1:  # its kernel: a chunk's logits become their gradients, that of the head is fp32
        logits = c * min(rows, CHUNK) * model.vocab + 4 * head + c * rows * model.dim
    moments_of_a_step = {
        "loss": {"activations": layers * kept, "weights": copies + 2 * c * head, "logits": logits},
        "backward": {"activations": layers * kept + again, "weights": copies + 4 * head, "work": rows * work},
        "update": {"muon": MUON * stacked(model, d) if config.optimizer.kind == "muon" else 0},
    }
    if steps == 1:  # gradients come while activations go
        for name in ("loss", "backward"):
            moments_of_a_step[name]["gradients"] = 0.0
    fullest = max(moments_of_a_step.values(), key=lambda m: sum((found | m).values()))
    return {name: math.ceil(n) for name, n in (found | fullest).items()}


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
    if compiled and token == 1:  # kernels: scores and their statistics
        if model.theta == "l2_norm_gelu":  # without norms: the stream twice, q, k, v and what attention gives
            stream = c * (4 * d + 2 * kv) + 4 * model.heads
        return scores * c + 20, stream, largest * 3 * c
    if compiled:  # scores and Θ in the compute type; selective: scores alone
        return scores * c * (1 if again == "selective" else 2), stream, largest * 2 * c
    return scores * (c if again == "selective" else 8 + c), stream, largest * (16 + c)


def stacked(model: ModelConfig, d: Degrees) -> int:
    """Numbers that Muon works on at once: matrices of one shape, up to a limit."""
    shapes = Counter(shape for i in range(-(-model.layers // d.pipeline)) for shape in matrices(model, i, 1))
    most = max(max(r * n, min(count * r * n, STACK)) for (r, n), count in shapes.items())
    return most // (d.shard * d.token)


def layouts(model: ModelConfig, config: Config, gpus: int, per_node: int = 8) -> Iterator[Degrees]:
    """Every layout that the model allows: token degrees stay inside a node."""
    for token in (n for n in range(1, min(per_node, gpus) + 1) if gpus % n == 0):
        for shard in (n for n in range(1, gpus // token + 1) if gpus // token % n == 0):
            d = Degrees(replicate=gpus // token // shard, shard=shard, token=token)
            try:
                check(model, d, config.parallel)
                if config.batch is None or config.batch % (d.replicate * d.shard):
                    continue
            except UserError:
                continue
            yield d


def choose(config: Config, gpus: int, room: float) -> tuple[list[Estimate], Estimate | None]:
    """All estimates, least traffic first, and the first that fits with a tenth of the memory to spare."""
    every = sorted(
        (estimate(config, d) for d in layouts(config.model, config, gpus)),
        key=lambda e: (e.traffic, e.degrees.token, e.total),
    )
    if not every:
        raise UserError(f"no layout of {gpus} GPUs divides the batch of {config.batch}: give another batch")
    return every, next((e for e in every if e.total <= 0.9 * room), None)
