"""The expected time of a step, by what it is spent on: computation, and communication that computation does not hide.

Unusual: FSDP gathers the next block while one is computed, and reduces the last one's gradients meanwhile, so such
traffic costs only what is longer than the computation beside it. Rough: it ranks layouts, nobody timed it on a cluster.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tokenformer.models.cost import cost
from tokenformer.parallel.hardware import Hardware
from tokenformer.parallel.layout import Split
from tokenformer.parallel.mesh import Degrees, keeps_whole_gradients, stages
from tokenformer.parallel.traffic import Cut, muon_batches

TOUCHED = 8  # bytes per parameter and micro-batch: cast to the compute type, gradient added in fp32; half is hidden
UPDATED = {"adamw": 28, "muon": 20}  # bytes per parameter: what an update reads and writes
CONTROL = 3  # all-reduces of single numbers per step: loss and labels, norm, whether all is finite
NEWTON = 5  # Muon's iterations
AT_ONCE = 8  # messages that an exchange of all with all has under way
NARROW = 0.05  # of the rate of products lost each time the token degree halves them


def collective(h: Hardware, size: float, calls: float, ranks: int, near: int, rounds: float = 1) -> float:
    """Return the seconds of `calls` collectives of `size` bytes together, in a group with `near` ranks per node.

    `rounds`: an all-gather or reduce-scatter goes once around a ring, an all-reduce twice, or up and down a tree. The
    ranks of a group that share a node also share its way out.

    >>> h = Hardware()
    >>> near, far = (collective(h, 1e9, 1, 8, n) for n in (8, 1))
    >>> 0.002 < near < 0.003 and 0.02 < far < 0.03
    True
    """
    if ranks == 1:
        return 0.0
    near = max(1, min(near, ranks))
    nodes = math.ceil(ranks / near)
    speed = h.link if nodes == 1 else min(h.link, near * h.network)
    hops = rounds * ((ranks - nodes) * h.link_latency + (nodes - 1) * h.network_latency)
    if rounds == 2:
        hops = min(hops, 2 * ((near - 1) * h.link_latency + math.log2(nodes) * h.network_latency))
    return rounds * size * (ranks - 1) / ranks / (speed * h.wire * 1e9) + calls * (h.call + hops) * 1e-6


def times(cut: Cut, d: Degrees, h: Hardware, sent: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds of a step on its slowest rank, by what they are spent on. `sent`: bytes by purpose."""
    config, model, p = cut.config, cut.model, cut.config.parallel
    _, steps = cut.batches(d)
    layers = math.ceil(model.layers / d.pipeline)
    forward, uneven = _forward(cut, d, h)
    full, saved = config.train.activation_checkpointing == "full", forward * _saved_by_fp8(cut, h)
    forward, backward = forward - saved, forward * (3 if full else 2) - saved * (1 + full)
    found = defaultdict[str, float](float)
    computed = steps * (forward + backward - full * forward)
    found["compute"], found["uneven"] = (computed * share for share in (1 / uneven, 1 - 1 / uneven))
    found["recompute"] = full * steps * forward
    whole = cut.numbers(d)
    found["weights"] = steps * TOUCHED * whole / (h.memory_speed * h.wire * 1e9)
    found["update"] = UPDATED[config.optimizer.kind] * whole / d.shard / (h.memory_speed * h.wire * 1e9)
    if d.token > 1:
        split = model.kind == "tokenformer"
        calls = (2 + 2 * split + 3 * (split and p.segments == "split")) * 2 + 3 * full
        size, rounds = sent.get("token", 0) + sent.get("statistics", 0), 4 / 3 if split else 2
        found["token"] = collective(h, size, steps * layers * calls, d.token, d.token, rounds)
    found |= _sharding(cut, d, h, sent, steps, layers, (forward, backward))
    if d.pipeline > 1:
        speed, hop = _slowest(h, d.world)
        seconds = sent["pipeline"] / 2 / (speed * h.wire * 1e9) + 2 * steps * (h.call + hop) * 1e-6  # both ways at once
        found["pipeline"] = seconds - h.overlap * min(seconds, steps * (forward + backward))
        chunks = stages(d, p) // d.pipeline
        busy = sum(found.values()) - found["update"]
        found["bubble"] = busy * (d.pipeline - 1) / (steps * chunks)  # waiting for the first and the last micro-batch
    if config.optimizer.kind == "muon":
        ranks, batches = d.replicate * d.shard * d.token, list(muon_batches(cut, d, 0))
        speed, hop = _slowest(h, ranks)  # each rank sends to each other one, to some of them at once
        found["update"] += sum(_newton(splits, n, ranks) for splits, n in batches) / (h.tflops * h.reached * 1e12)
        exchange = h.call + hop * (ranks - 1) / AT_ONCE
        found["muon"] = sent.get("muon", 0) / (speed * h.wire * 1e9) + 2 * len(batches) * exchange * 1e-6
    found["control"] = collective(h, 0, CONTROL, d.world, h.per_node, 2)
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _forward(cut: Cut, d: Degrees, h: Hardware) -> tuple[float, float]:
    """Return the seconds of one micro-batch's forward pass in the slowest stage, and that over the mean stage."""
    (micro, _), model = cut.batches(d), cut.model
    counted = cut.remember("cost", lambda: cost(model))
    whole = counted.sample_flops(model.length)
    head = model.length * 2 * counted.head_parameters
    last = math.ceil(model.layers / d.pipeline) * (whole - head) / model.layers + head  # the last stage has most
    rate = h.tflops * h.reached * 1e12 * (1 - NARROW) ** math.log2(d.token)
    return micro * last / d.token / rate, last * d.pipeline / whole


def _saved_by_fp8(cut: Cut, h: Hardware) -> float:
    """Return the share of a forward pass's time that fp8 saves if all shapes use it. It saves as much of a backward
    pass, whose other half, the gradients of weights, stays in bf16.
    """
    if cut.config.train.precision != "fp8":
        return 0.0
    counted = cut.remember("cost", lambda: cost(cut.model))
    return counted.product_share(cut.model.length) * (1 - 1 / h.fp8)


def _sharding(
    cut: Cut, d: Degrees, h: Hardware, sent: Mapping[str, int], steps: int, layers: int, passes: tuple[float, float]
) -> dict[str, float]:
    """Return the seconds that FSDP's traffic is not hidden by the passes of the micro-batches beside it."""
    if d.shard * d.replicate == 1:
        return {}
    p, units = cut.config.parallel, layers + 1  # blocks and what is outside them
    gathers = 1 if not p.reshard_after_forward else 2 * steps if d.pipeline == 1 else steps + 1
    once = keeps_whole_gradients(d, p)
    inner = h.per_node // d.token
    gather = collective(h, sent.get("gather", 0), gathers * units, d.shard, inner)
    reduce = collective(h, sent.get("reduce", 0), (1 if once else steps) * units, d.shard, inner)
    copies = collective(h, sent.get("replicate", 0), units, d.replicate, inner // d.shard, 2)
    passing = steps if gathers > 1 else 1  # micro-batches that gather in their forward pass
    again = gather / 2 if gathers == 2 * steps else 0.0  # and in their backward passes, all together
    found = defaultdict[str, float](float)

    def beside(window: float, **traffic: float) -> None:
        """Count what is not hidden by one pass of so many seconds; traffic comes one after the other."""
        for name, seconds in traffic.items():
            found[name] += seconds - h.overlap * min(seconds, window)
            window = max(0.0, window - seconds)

    for number in range(steps):
        last = number == steps - 1
        beside(passes[0], gather=(gather - again) / passing if number < passing else 0.0)
        summed = reduce / steps if not once else reduce * last
        beside(passes[1], gather=again / steps, reduce=summed, replicate=copies * last)
    ends = {"gather": (gather - again) / passing, "reduce": reduce / (1 if once else steps), "replicate": copies}
    for name, seconds in ends.items():  # nothing is computed beside the first gather and the last sums
        found[name] += seconds / units
    return found


def _newton(splits: Sequence[Split], units: int, ranks: int) -> float:
    """Return the FLOPs of Muon's Newton–Schulz iterations on the rank that solves most matrices of a batch."""
    rows, columns = sorted((sum(split.shape[0] for split in splits), splits[0].shape[1]))
    return math.ceil(units / ranks) * NEWTON * (4 * rows * rows * columns + 2 * rows**3)


def _slowest(h: Hardware, ranks: int) -> tuple[float, float]:
    """Return the GB/s and the latency of the slowest way between neighbours of so many ranks."""
    return (h.network, h.network_latency) if ranks > h.per_node else (h.link, h.link_latency)
