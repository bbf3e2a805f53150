"""What a layout will need: the peak of memory per GPU, bytes that are sent (traffic.py), the time of a step (times.py).

Unusual: memory is an estimate from what autograd keeps of each layer (within 15 % of what was measured).
"""

import dataclasses
import math

from tokenformer.config import PROJECTIONS, Config, ModelConfig
from tokenformer.ops.cross_entropy import LOGITS, ROWS
from tokenformer.parallel.gather import STACK
from tokenformer.parallel.hardware import Hardware
from tokenformer.parallel.mesh import Degrees, keeps_whole_gradients
from tokenformer.parallel.times import times
from tokenformer.parallel.traffic import TIMES, WIDTH, Cut, Rank, sent

LOGIT = 12  # bytes of one logit in the backward pass of the loss: its logarithm, two gradients, all fp32
MUON = 28  # bytes of one number while Muon updates it: gradient, momentum, direction, move, some of them twice
KEPT = {  # per score: bytes in fp32, numbers in the compute type; bytes per row of a Pattention; numbers in backward
    "op by op": (8, 1, 0, 9),
    "selective": (0, 1, 0, 2),  # scores
    "kernels": (0, 1, 4, 3),  # scores and a statistic
}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one layout needs on its fullest rank: bytes of memory, bytes sent per step, and seconds of a step."""

    config: Config
    degrees: Degrees
    memory: dict[str, int]  # by what they hold
    sent: dict[str, int]  # by purpose
    time: dict[str, float]  # by what they are spent on

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def traffic(self) -> int:
        return sum(self.sent.values())

    @property
    def seconds(self) -> float:
        return sum(self.time.values())


def estimate(config: Config | Cut, d: Degrees, hardware: Hardware = Hardware()) -> Estimate:
    """Estimate the memory, traffic and time of a layout with the config's batch.

    >>> from tokenformer.config import load
    >>> one = estimate(load("lm/150m", overrides=["batch=8", "micro_batch=8"]), Degrees())
    >>> one.traffic, 2e9 < one.total < 80e9
    (0, True)
    """
    cut = config if isinstance(config, Cut) else Cut(config)
    token = cut.fullest(d.token)
    places = sorted({0, d.pipeline // 2, d.pipeline - 1})
    most_sent = max((sent(cut, d, Rank(p, 0, token)) for p in places), key=lambda found: sum(found.values()))
    held = max((memory(cut, d, p) for p in places), key=lambda found: sum(found.values()))
    return Estimate(cut.config, d, held, most_sent, times(cut, d, hardware, most_sent))


def memory(cut: Cut, d: Degrees, pipeline: int) -> dict[str, int]:
    """Return the peak of a rank by what it holds: what stays, and the fullest moment of a step."""
    config, model, t = cut.config, cut.model, cut.config.train
    c, token, (micro, steps) = WIDTH[t.precision], cut.fullest(d.token), cut.batches(d)
    sizes, rest = cut.sizes(d, pipeline, token)
    whole, block, rows = sum(sizes) + rest, max(sizes), micro * model.length
    moments = 8 if config.optimizer.kind == "adamw" else 4
    found = {"parameters": 4.0 * whole, "gradients": 4.0 * whole, "optimizer": moments * sum(sizes) + 8.0 * rest}
    found |= {"average": 4.0 * whole} if t.ema else {}
    found = {name: 0.0 if config.parallel.offload else n / d.shard for name, n in found.items()}
    full = t.activation_checkpointing == "full"
    compiled = t.compile not in (False, "none")
    how = (model, d.token, c, compiled, t.activation_checkpointing)
    score, stream, work = cut.remember(("row", *how[1:]), lambda: row_bytes(*how))
    inside = rows * (score + stream)  # what a block's backward needs of its forward
    kept = in_flight(d, config.parallel.schedule, pipeline, steps) * len(sizes)
    kept *= rows * model.dim * c if full else inside
    if d.shard > 1:
        copies = c * (2 * block if config.parallel.reshard_after_forward else sum(sizes)) + 4 * (block + 2 * rest)
    else:
        through = t.precision == "fp8" and steps > 1 and d.world == 1  # both layouts in fp8, quantised once per step
        copies = 0 if c == 4 else c * (block if full and not through else sum(sizes))
    last = pipeline == d.pipeline - 1
    read, wide = (micro, model.classes) if model.of == "image" else (rows, model.vocab)  # by the head, and its rows
    head = last * wide * model.dim / d.token  # in the compute type, with its gradient
    logits = last * LOGIT * min(read * wide / d.token, LOGITS)
    if compiled and d.token == 1 and model.of == "language":
        # by its kernel: a chunk's logits become their gradients, that of the head is fp32
        logits = last * c * min(rows, ROWS) * model.vocab + 4 * head + last * c * rows * model.dim
    moment = {
        "loss": {"activations": kept, "weights": copies + 2 * c * head, "logits": logits},
        "backward": {"activations": kept + full * inside, "weights": copies + 4 * head, "work": rows * work},
        "update": {"muon": MUON * _stacked(cut, d, pipeline) if config.optimizer.kind == "muon" else 0},
    }
    if steps == 1:  # gradients come while activations go
        moment["loss"]["gradients"] = moment["backward"]["gradients"] = 0.0
    elif keeps_whole_gradients(d, config.parallel):
        moment["loss"]["gradients"] = moment["backward"]["gradients"] = 4.0 * whole
    most = max(moment.values(), key=lambda m: sum((found | m).values()))
    return {name: math.ceil(n) for name, n in (found | most).items()}


def _stacked(cut: Cut, d: Degrees, pipeline: int) -> int:
    """Return how many numbers Muon works on at once: matrices of one shape, up to a limit."""
    units = cut.alike(d, pipeline).items()
    sizes = [(sum(math.prod(split.shape) for split in splits), n) for splits, n in units]
    return max(max(one, min(n * one, STACK)) for one, n in sizes) // (d.shard * d.token)


def in_flight(d: Degrees, schedule: str, pipeline: int, steps: int) -> float:
    """Return how many micro-batches' activations a pipeline rank holds at once."""
    if d.pipeline == 1 or schedule == "gpipe":
        return 1 if d.pipeline == 1 else steps
    if schedule == "1f1b":
        return min(steps, d.pipeline - pipeline)
    return min(steps, (d.pipeline + 2 * (d.pipeline - 1 - pipeline) + 1) / 2)  # of two half stages


def row_bytes(model: ModelConfig, token: int, c: int, compiled: bool, recompute: str) -> tuple[float, float, float]:
    """Return the bytes of one row in one block: scores and the rest that autograd keeps, and what backward adds."""
    d, kv = model.dim, (model.kv_heads or model.heads) * model.head_dim
    stream = c * (7 * d + (d + 2 * kv) / token) + 4 * model.heads / token  # norms, attention, their outputs
    if model.kind != "tokenformer":
        wide = model.mlp_dim / token
        return wide * c * (5 if model.kind == "llama" else 2), stream, wide * c * 3
    numbers = [{w: sum(n for n, _ in model.segments(w, i)) / token for w in PROJECTIONS} for i in range(model.layers)]
    scores = max(3 * n["qkv"] + n["proj"] + n["ffn"] for n in numbers)
    largest = max(max(3 * n["qkv"], n["ffn"]) for n in numbers)
    how = "kernels" if compiled else "selective" if recompute == "selective" else "op by op"
    if compiled and token == 1 and model.theta == "l2_norm_gelu":
        # without norms: the stream twice, q, k, v and what attention gives
        stream = c * (4 * d + 2 * kv) + 4 * model.heads
    wide, narrow, row, work = KEPT[how]
    return scores * (wide + narrow * c) + sum(TIMES.values()) * row, stream, largest * work * c
