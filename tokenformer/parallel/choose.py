"""Which layout to choose: every one that the model and the batch allow is estimated and ranked by its expected time.

What is searched: the degrees, the micro-batch, activation checkpointing, and where parameters and gradients are kept
(ZeRO-2, ZeRO-3, gradients whole or sharded). What the caller fixes is not.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tokenformer.config import Config
from tokenformer.config_train import DEGREES
from tokenformer.errors import UserError
from tokenformer.parallel.estimate import Estimate, estimate
from tokenformer.parallel.hardware import Hardware
from tokenformer.parallel.mesh import Degrees, check
from tokenformer.parallel.traffic import Cut

SPENT = {  # what a step's time is spent on, as plan says it
    "compute": "computes",
    "recompute": "recomputes",
    "uneven": "waits for the last stage",
    "bubble": "waits for the pipeline's ends",
    "gather": "waits for parameters",
    "reduce": "waits for gradients",
    "replicate": "waits for gradients of replicas",
    "token": "sums between token ranks",
    "pipeline": "sends between stages",
    "weights": "casts weights",
    "update": "updates",
    "muon": "exchanges Muon's matrices",
    "control": "agrees on numbers",
}
KEPT = ("reshard_after_forward", "accumulate")  # where parameters and gradients are
SEARCHED = {name: f"parallel.{name}" for name in (*DEGREES, *KEPT)}
SEARCHED |= {"micro_batch": "micro_batch", "activation_checkpointing": "train.activation_checkpointing"}  # their keys
EQUAL = 1.02  # times that differ by less are no reason to choose
PIPELINE = 1.15  # a pipeline must be so much faster: it is harder to run, and estimates are no better
LARGEST = 4096  # micro-batch that is tried


def layouts(cut: Cut, gpus: int, per_node: int, fixed: Mapping[str, Any]) -> Iterator[Degrees]:
    """Yield every layout that the model and the batch allow, with a token degree inside a node.

    One node gets no pipeline: its links are fast enough to shard, which divides the same memory and leaves no GPU idle.
    """

    def divisors(n: int, most: int, name: str) -> list[int]:
        return [i for i in range(1, min(n, most) + 1) if n % i == 0 and fixed.get(name, i) == i]

    most = 1 if cut.config.train.precision == "fp8" else per_node  # token ranks have no products in fp8
    deepest = cut.model.layers if gpus > per_node or "pipeline" in fixed else 1
    for token in divisors(gpus, most, "token"):
        for pipeline in divisors(gpus // token, deepest, "pipeline"):
            for shard in divisors(gpus // token // pipeline, gpus, "shard"):
                d = Degrees(pipeline, gpus // token // pipeline // shard, shard, token)
                try:
                    check(cut.model, d, cut.config.parallel)
                except UserError:
                    continue
                if fixed.get("replicate", d.replicate) == d.replicate:
                    yield d


def variants(cut: Cut, d: Degrees, fixed: Mapping[str, Any]) -> Iterator[Cut]:
    """Yield the config with every micro-batch, recomputation and place of gradients that these degrees allow."""
    c, data = cut.config, d.replicate * d.shard
    assert c.batch is not None
    share = c.batch // data if c.batch % data == 0 else 0
    sizes = [n for n in range(1, min(share, LARGEST) + 1) if share % n == 0 and share // n % d.pipeline == 0]
    micros = [n for n in sizes if n == min(fixed["micro_batch"], share)] if fixed.get("micro_batch") else sizes
    recomputed = [fixed["activation_checkpointing"]] if "activation_checkpointing" in fixed else ["none", "full"]
    chosen = fixed.get("accumulate", "auto")
    kept = [(True, chosen), (False, chosen)]  # ZeRO-3 and ZeRO-2
    if d.pipeline == 1 and "accumulate" not in fixed:
        kept.append((True, "whole"))
    if d.shard == 1:
        kept = [(c.parallel.reshard_after_forward, c.parallel.accumulate)]
    for micro, recompute, (reshard, accumulate) in itertools.product(micros, recomputed, kept):
        if fixed.get("reshard_after_forward", reshard) != reshard:
            continue
        if d.shard > 1 and accumulate != chosen and micro == share:
            continue  # with one micro-batch there is nothing to add up

        def make(micro=micro, recompute=recompute, reshard=reshard, accumulate=accumulate) -> Config:
            train = dataclasses.replace(c.train, activation_checkpointing=recompute)
            parallel = dataclasses.replace(c.parallel, reshard_after_forward=reshard, accumulate=accumulate)
            return dataclasses.replace(c, micro_batch=micro, train=train, parallel=parallel)

        yield cut.replaced(cut.remember(("config", micro, recompute, reshard, accumulate), make))


def choose(
    config: Config, gpus: int, hardware: Hardware, fixed: Mapping[str, Any] | None = None, spare: float = 0.1
) -> tuple[list[Estimate], Estimate | None]:
    """Return the best estimate of each layout, the fastest first and those that do not fit last, and which to use.

    That is, of those that fit and are about as fast as the fastest, the simplest; a pipeline must be much faster.
    `fixed`: what is decided already (SEARCHED). `spare`: the share of the memory that stays free. A layout that does
    not fit is shown with the least memory that it can do with.
    """
    cut, room, found = Cut(config), hardware.memory * 1e9 * (1 - spare), []
    fixed = {name: value for name, value in (fixed or {}).items() if value not in (None, -1)}
    for d in layouts(cut, gpus, hardware.per_node, fixed):
        every = [estimate(one, d, hardware) for one in variants(cut, d, fixed)]
        fits = [e for e in every if e.total <= room]
        if every:
            found.append(min(fits, key=lambda e: e.seconds) if fits else min(every, key=lambda e: e.total))
    if not found:
        named = "".join(f"has {SEARCHED[name]}={n} and " for name, n in fixed.items())
        raise UserError(f"no layout of {gpus} GPUs {named}divides the batch of {config.batch}: change one of them")
    found.sort(key=lambda e: (e.total > room, e.seconds, e.degrees.token, e.total))
    worth = {id(e): e.seconds * (PIPELINE if e.degrees.pipeline > 1 else 1) for e in found if e.total <= room}
    near = [e for e in found if id(e) in worth and worth[id(e)] <= EQUAL * min(worth.values())]
    near.sort(key=lambda e: _simplicity(e.degrees, hardware.per_node))
    return found, near[0] if near else None


def _simplicity(d: Degrees, per_node: int) -> tuple:
    """Return what is least for the layout that is easiest to run: copies, else shard groups of about a node."""
    return d.pipeline, d.token, d.shard > 1, abs(math.log2(d.shard * d.token / per_node))


def reason(e: Estimate, room: float) -> str:
    """Say what the time of a layout is spent on, or what does not fit in `room` bytes."""
    if e.total > room:
        most = sorted(e.memory.items(), key=lambda item: -item[1])[:2]
        held = ", ".join(f"{name} {n / 1e9:.0f}" for name, n in most)
        return f"does not fit: {(e.total - room) / 1e9:.0f} GB too much ({held})"
    shares = sorted(((n / e.seconds, name) for name, n in e.time.items()), reverse=True)
    said = [f"{SPENT[name]} {share:.0%}" for share, name in shares if share >= 0.005]
    return ", ".join(said[:3])


def settings_of(e: Estimate, config: Config) -> list[str]:
    """Return a layout as settings of `train` beside a config."""
    degrees = {name: getattr(e.degrees, name) for name in DEGREES}
    kept = {name: getattr(e.config.parallel, name) for name in KEPT if e.degrees.shard > 1}
    found = {"replicate": degrees.pop("replicate")} | _changed(degrees | kept, config)
    again = e.config.train.activation_checkpointing
    return [*_written(found), f"micro_batch={e.config.micro_batch}", f"train.activation_checkpointing={again}"]


def _changed(values: Mapping[str, Any], config: Config) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value != getattr(config.parallel, name)}


def _written(values: Mapping[str, Any]) -> list[str]:
    return [f"parallel.{name}={str(value).lower()}" for name, value in values.items()]


def sharding(e: Estimate) -> str:
    """Name what a shard group splits: with ZeRO-3 parameters are gathered for each use, with ZeRO-2 once per step."""
    if e.degrees.shard == 1:
        return "none"
    p, stage = e.config.parallel, 3 if e.config.parallel.reshard_after_forward else 2
    return f"ZeRO-{stage}" + ("" if p.accumulate == "auto" else f", {p.accumulate}")


def trades(best: Estimate, hardware: Hardware) -> list[str]:
    """Say what other places of the recommended layout's parameters and gradients would cost or save."""
    cut, d, said = Cut(best.config), best.degrees, []
    for one in variants(cut, d, {"micro_batch": best.config.micro_batch}) if d.shard > 1 else ():
        e = estimate(one, d, hardware)
        if e.config.train == best.config.train and (e.memory, e.sent) != (best.memory, best.sent):
            keys = _written(_changed({name: getattr(e.config.parallel, name) for name in KEPT}, best.config))
            memory, sent = (e.total - best.total) / 1e9, (e.traffic - best.traffic) / 1e9
            changed = f"{memory:+.1f} GB of memory, {sent:+.1f} GB sent, {1e3 * (e.seconds - best.seconds):+.0f} ms"
            said.append(f"{' '.join(keys)}: {changed} per step")
    return said
