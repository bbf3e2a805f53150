"""Training arms quickly: whole steps as CUDA graphs, growth inside the run, common beginnings of arms computed once.

Unusual: there is one machine (model, optimizer, graph) per shape; an arm loads its state into it, so a graph is
captured once however many arms use it. A state is known by a digest of everything that led to it (data order, shapes,
the rate of each step): an arm continues from the latest state whose digest is also its own.
"""

import contextlib
import dataclasses
import gc
import json
import lzma
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import RATE, Plan, Stage, flops, show

from tokenformer.config import ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.config_train import OptimizerConfig, TrainConfig
from tokenformer.growth.make import make_tensors
from tokenformer.growth.plan import plan_growth
from tokenformer.growth.state import grow_state
from tokenformer.models import LanguageModel
from tokenformer.parallel.layout import Layout
from tokenformer.train.health import Guard
from tokenformer.train.optim import Optimizer
from tokenformer.train.rules.adamw import AdamW

Tensors = dict[str, torch.Tensor]


# --- What is used of the package ------------------------------------------------------------------------------------


def build(config: ModelConfig, seed: int) -> LanguageModel:
    return LanguageModel(config, seed=seed)


def optimizer_for(model: LanguageModel, shares: dict[str, torch.Tensor]) -> Optimizer:
    optimizer = Optimizer(Layout(model), OptimizerConfig(kind="muon", rate=RATE), shares)
    for rule in optimizer.rules:
        for group in rule.torch.param_groups if isinstance(rule, AdamW) else ():
            group["capturable"] = next(model.parameters()).is_cuda
    return optimizer


def grow(config: ModelConfig, tensors: Tensors, state: dict, stage: Stage, seed: int, number: int):
    """(config, tensors, optimizer state) after a growth."""
    if stage.rule == "split":
        return split(config, tensors, state, stage)
    sizes = dict(zip(("qkv_tokens", "proj_tokens", "ffn_tokens"), stage.size, strict=True))
    rule = "segment" if stage.rule == "copy" else stage.rule
    how = {"layers": stage.layers} if stage.layers else {}
    asked = Growth(**sizes, **how, new_tokens=rule)
    plan = plan_growth(config, list(tensors), asked, ends=LanguageModel.ends, seed=seed, number=number)
    grown = dict(make_tensors(plan, tensors))
    if stage.rule == "copy":
        copy_keys(tensors, grown, stage.noise, seed)
    return plan.config, grown, grow_state(plan, state)


# --- Growth rules that the package does not have --------------------------------------------------------------------


def copy_keys(old: Tensors, new: Tensors, noise: float, seed: int) -> None:
    """Keys of new segments become copies of old keys, those with the longest values first, plus noise."""
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in new if name not in old and name.endswith("key_tokens")]:
        head = name.split(".segments.")[0] + ".segments."
        segments = sorted(n for n in old if n.startswith(head) and n.endswith("key_tokens"))
        keys = torch.cat([old[n] for n in segments])
        values = torch.cat([old[n.replace("key_tokens", "value_tokens")] for n in segments])
        order = values.norm(dim=1).argsort(descending=True)
        rows = keys[order[torch.arange(len(new[name]), device=keys.device) % len(order)]]
        random = torch.randn(rows.shape, generator=generator).to(rows)
        new[name] = rows + noise * rows.square().mean().sqrt() * random


def split(config: ModelConfig, tensors: Tensors, state: dict, stage: Stage):
    """Every token becomes several whose values share its value 1:2:1:2…; exact in one segment with τ = √n.

    The first copy keeps the optimizer's state, the others begin with none.
    """
    sizes = dict(zip(("qkv_tokens", "proj_tokens", "ffn_tokens"), stage.size, strict=True))
    new_config = dataclasses.replace(config, **sizes, tau={}, layer_overrides={}).resolved()
    shapes = {name: tuple(p.shape) for name, p in on_meta(new_config).named_parameters()}
    new, kept = {}, {}
    for name, tensor in tensors.items():
        ratio, rest = divmod(shapes[name][0], len(tensor))
        assert not rest, f"{name}: {shapes[name][0]} is no multiple of {len(tensor)}"
        weights = [1.0] * ratio
        if name.endswith("value_tokens"):
            weights = [1.0 + i % 2 for i in range(ratio)]
            weights = [w / sum(weights) for w in weights]
        new[name] = torch.cat([tensor * w for w in weights])
        if name in state:
            kept[name] = {
                k: torch.cat([t, t.new_zeros(len(tensor) * (ratio - 1), *t.shape[1:])]) if t.ndim else t
                for k, t in state[name].items()
            }
    return new_config, new, kept


def on_meta(config: ModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(config)


# --- Data -----------------------------------------------------------------------------------------------------------


class Text:
    """Bytes as the byte tokenizer numbers them, on the device: a part to train on, and held-out parts."""

    def __init__(self, folder: Path, name: str, device: str, tiny: bool) -> None:
        raw = {n: read(folder, n, tiny) for n in (("enwik8", "books") if name == "blend" else (name,))}
        cut = {n: (enwik8 if n == "enwik8" else books)(data) for n, data in raw.items()}
        self.train = torch.tensor(np.concatenate([train for train, _ in cut.values()]), device=device)
        self.held_out = {n: torch.tensor(held, device=device) for n, (_, held) in cut.items()}


def read(folder: Path, name: str, tiny: bool) -> np.ndarray:
    with lzma.open(folder / {"enwik8": "enwik8.xz", "books": "books.txt.xz"}[name]) as file:
        return np.frombuffer(file.read(400_000 if tiny else -1), dtype=np.uint8)


def enwik8(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The usual 90 % to train on; 1 MiB of the next 5 %."""
    edge = len(raw) * 9 // 10
    return raw[:edge], raw[edge : edge + min(1 << 20, len(raw) // 20) + 1]


def books(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Held out: every 57th piece of 64 KiB, so something of every book (16 pieces, 1 MiB)."""
    length = 65536 if len(raw) > 10_000_000 else 4096
    pieces = np.split(raw, range(length, len(raw), length))
    held = [i % 57 == 28 for i in range(len(pieces))]
    train, out = ([p for p, h in zip(pieces, held, strict=True) if h is want] for want in (False, True))
    return np.concatenate(train), np.concatenate(out)


# --- Machines -------------------------------------------------------------------------------------------------------


@dataclass
class State:
    """Where an arm is: after `step` steps, in leg `leg`."""

    step: int
    leg: int
    config: ModelConfig
    tensors: Tensors
    optimizer: dict
    losses: torch.Tensor
    skipped: int = 0
    growths: tuple = ()  # (step, held-out loss before, after) of each


class Machine:
    """A model of one shape in training: every step is a replay of one CUDA graph; on the CPU, plain calls."""

    LONGEST = 1 << 15  # steps of an arm
    WINDOWS = 1 << 23  # sequences of an arm

    def __init__(self, config: ModelConfig, new: frozenset[str], sequences: int, text: Text, compiled: bool) -> None:
        begin = time.monotonic()
        self.config, self.text, self.sequences, self.device = config, text, sequences, text.train.device
        self.cuda, device = self.device.type == "cuda", self.device
        self.share = torch.ones((), device=device)
        self.model = build(config, 0).to(device)
        if self.cuda:
            self.model.compute_dtype = torch.bfloat16
        if self.cuda and compiled:
            for block in self.model.blocks:
                block.compile(dynamic=False)
        self.optimizer = optimizer_for(self.model, dict.fromkeys(sorted(new), self.share))
        self.guard = Guard(TrainConfig(), device)
        self.rates, self.shares, self.losses = (torch.zeros(self.LONGEST, device=device) for _ in range(3))
        self.offsets = torch.zeros(self.WINDOWS if self.cuda else 1 << 18, dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.long, device=device)
        self.skipped, self.one = torch.zeros((), device=device), torch.ones((), device=device)
        self.columns = torch.arange(config.context + 1, device=device)
        self.rows = torch.arange(sequences, device=device)
        self.stream, self.graph = (torch.cuda.Stream() if self.cuda else None), None
        self.queued: deque[torch.cuda.Event] = deque()
        with self.on_stream():
            for _ in range(2):  # compiles, and makes the optimizer's state
                self.train_step()
        if self.cuda:
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.train_step()
            torch.cuda.synchronize()
        ready = time.monotonic()
        count = 12 if self.cuda else 1
        self.steps(count)
        self.wait()
        self.step_seconds = (time.monotonic() - ready) / count  # alone: nothing else is running now
        self.setup_seconds = ready - begin

    def on_stream(self):
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def windows(self, data: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return data[offsets[:, None] + self.columns].long() + 1

    def train_step(self) -> None:
        at = self.offsets.index_select(0, self.counter * self.sequences + self.rows)
        tokens = self.windows(self.text.train, at)
        self.share.copy_(self.shares.index_select(0, self.counter)[0])
        out = self.model(tokens[:, :-1], labels=tokens[:, 1:])
        loss = out.loss_sum / out.count
        loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        divisor, skip, _ = self.guard.check(norm, loss, self.one)
        self.optimizer.step(self.rates.index_select(0, self.counter)[0], divisor, skip)
        self.model.zero_grad()
        self.losses.index_copy_(0, self.counter, loss.detach()[None])
        self.skipped.add_(skip)
        self.counter.add_(1)

    def steps(self, count: int) -> None:
        with self.on_stream():
            for _ in range(count):
                self.train_step() if self.graph is None else self.graph.replay()
        if self.stream is not None:  # not far ahead of the device, so that arms which train at once take turns
            self.queued.append(self.stream.record_event())
            if len(self.queued) > 2:
                self.queued.popleft().synchronize()

    @torch.no_grad()
    def load(self, state: State, plan: Plan, offsets: torch.Tensor) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())  # where growth and new models are computed
        with self.on_stream():
            self.rates[: plan.steps].copy_(torch.from_numpy(plan.rates))
            self.shares[: plan.steps].copy_(torch.from_numpy(plan.shares))
            need = plan.steps * self.sequences
            self.offsets[:need].copy_(offsets[:need])
            self.losses[: state.step].copy_(state.losses)
            self.counter.fill_(state.step)
            self.skipped.fill_(state.skipped)
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state.tensors[name])
            for name, entry in self.optimizer.state_by_name().items():
                for key, tensor in entry.items():
                    have = state.optimizer.get(name)
                    tensor.zero_() if have is None else tensor.copy_(have[key])

    def save(self, step: int, leg: int, growths: tuple) -> State:
        with self.on_stream():
            tensors = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            state = {n: {k: t.clone() for k, t in e.items()} for n, e in self.optimizer.state_by_name().items()}
            losses = self.losses[:step].clone()
        self.wait()
        assert int(self.counter) == step
        return State(step, leg, self.config, tensors, state, losses, int(self.skipped), growths)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Nats per byte on each held-out part."""
        found = {}
        with self.on_stream():
            for name, data in self.text.held_out.items():
                total = count = 0.0
                starts = torch.arange(0, len(data) - self.config.context, self.config.context, device=self.device)
                for offsets in starts.split(256):
                    tokens = self.windows(data, offsets)
                    out = self.model(tokens[:, :-1], labels=tokens[:, 1:])
                    total, count = total + out.loss_sum.double(), count + out.count
                found[name] = float(total / count)
        return found


# --- Running --------------------------------------------------------------------------------------------------------


class Harness:
    """Texts, orders of data, machines and states that arms have in common."""

    def __init__(self, folder: Path, device: str, tiny: bool, compiled: bool = False) -> None:
        self.folder, self.device, self.tiny, self.compiled = folder, device, tiny, compiled
        self.texts: dict[str, Text] = {}
        self.orders: dict[tuple[str, int], torch.Tensor] = {}
        self.free: dict[tuple, list[Machine]] = {}
        self.states: dict[str, State] = {}
        self.seconds: dict[tuple[str, int], float] = {}  # of a step alone, by (config, sequences)

    def text(self, name: str) -> Text:
        if name not in self.texts:
            self.texts[name] = Text(self.folder, name, self.device, self.tiny)
        return self.texts[name]

    def order(self, text: str, seed: int, context: int) -> torch.Tensor:
        """Where the sequences of a run begin: one list per text and seed, the same for every arm."""
        if (text, seed) not in self.orders:
            count = Machine.WINDOWS if self.device == "cuda" else 1 << 18
            random = np.random.Generator(np.random.Philox(key=seed + 1000))
            numbers = random.integers(0, len(self.text(text).train) - context, count, dtype=np.int32)
            self.orders[text, seed] = torch.tensor(numbers, device=self.device)
        return self.orders[text, seed]

    def machine(self, plan: Plan, state: State, old: frozenset[str]) -> tuple[tuple, Machine]:
        """A free machine for this state; segments that are not in `old` are new where the arm ramps their rate."""
        ramped = bool(state.leg) and (ramp := plan.arm.stages[state.leg - 1].ramp) and ramp[0] in ("new", "hold")
        new = frozenset(n for n in state.tensors if n not in old and ".segments." in n) if ramped else frozenset()
        key = (json.dumps(dataclasses.asdict(state.config)), new, plan.sequences, plan.arm.text)
        if not self.free.get(key):
            self.make_room()
            compiled = self.compiled or plan.arm.kind == "transformer"  # whose norms and GELU the compiler joins
            machine = Machine(state.config, new, plan.sequences, self.text(plan.arm.text), compiled)
            shape = plan.arm.kind if plan.arm.kind == "transformer" else show(plan.sizes[state.leg])
            tflops = flops(state.config, plan.sequences) / machine.step_seconds / 1e12
            print(
                f"  machine {shape}, {plan.sequences} sequences: {1e3 * machine.step_seconds:.2f} ms a step, "
                f"{tflops:.0f} TFLOP/s, set up in {machine.setup_seconds:.1f} s",
                flush=True,
            )
            self.free[key] = [machine]
            self.seconds.setdefault((str(state.config), plan.sequences), machine.step_seconds)
        return key, self.free[key].pop()

    def make_room(self) -> None:
        """Forget free machines where little memory is left: each graph keeps its own."""
        if self.device == "cuda" and (memory := torch.cuda.mem_get_info())[0] < 0.3 * memory[1]:
            self.free = {}
            gc.collect()
            torch.cuda.empty_cache()

    def latest(self, plan: Plan) -> State | None:
        steps = sorted({state.step for state in self.states.values() if state.step < plan.steps}, reverse=True)
        for step in steps:
            if found := self.states.get(plan.digest(step)):
                return found
        return None

    def fresh(self, plan: Plan) -> State:
        model = build(plan.first, plan.arm.seed).to(self.device)
        tensors = {name: p.detach() for name, p in model.named_parameters()}
        return State(0, 0, model.config, tensors, {}, torch.zeros(0, device=self.device))

    def run(self, plan: Plan) -> Iterator[dict[str, Any] | None]:
        """Train an arm; yields None every few steps, at last what was found."""
        begin = time.monotonic()
        state = self.latest(plan) or self.fresh(plan)
        plan.at = shared = state.step
        marks = plan.marks()
        order = self.order(plan.arm.text, plan.arm.seed, plan.setting.context)
        result: dict[str, float] = {}
        for leg, (_, end) in enumerate(plan.legs):
            if state.step > end or (state.step == end and state.leg == leg):
                continue
            old = frozenset(state.tensors)
            grown = state.leg < leg
            if grown:
                stage, before = plan.arm.stages[leg - 1], self.validate(plan, state, order)
                made = grow(state.config, state.tensors, state.optimizer, stage, plan.arm.seed, leg - 1)
                state = dataclasses.replace(state, leg=leg, config=made[0], tensors=made[1], optimizer=made[2])
            elif leg and plan.arm.stages[leg - 1].ramp:
                old = frozenset(n for n in old if not n.split(".segments.")[-1].startswith(f"{leg}."))
            key, machine = self.machine(plan, state, old)
            machine.load(state, plan, order)
            growths = state.growths
            if grown:
                growths = (*growths, (state.step, before, machine.validate()))
            at = state.step
            for mark in [*(m for m in marks if at < m < end), end]:
                while at < mark:
                    count = min(10, mark - at)
                    machine.steps(count)
                    plan.at = at = at + count
                    yield None
                machine.wait()
                if mark in marks or mark == end:
                    state = machine.save(mark, leg, growths)
                    if mark < plan.steps:
                        self.states[plan.digest(mark)] = state
            if leg + 1 == len(plan.legs):
                result = machine.validate()
            self.free.setdefault(key, []).append(machine)
        seconds = sum((e - b) * self.leg_seconds(plan, i) for i, (b, e) in enumerate(plan.legs))
        wall = time.monotonic() - begin
        yield self.facts(plan, state, result, seconds, shared, wall)

    def validate(self, plan: Plan, state: State, order: torch.Tensor) -> dict[str, float]:
        key, machine = self.machine(plan, state, frozenset(state.tensors))
        machine.load(state, plan, order)
        self.free.setdefault(key, []).append(machine)
        return machine.validate()

    def leg_seconds(self, plan: Plan, leg: int) -> float:
        """Seconds of a step alone; before it was measured, a guess from its FLOPs."""
        for (config, sequences), seconds in self.seconds.items():
            if sequences == plan.sequences and config == str(self.leg_config(plan, leg)):
                return seconds
        return plan.costs[leg] / 150e12 + 2e-3

    def leg_config(self, plan: Plan, leg: int) -> ModelConfig:
        """Of a leg, segments included."""
        config = plan.first
        for stage in plan.arm.stages[:leg]:
            if stage.rule == "split":
                sizes = dict(zip(("qkv_tokens", "proj_tokens", "ffn_tokens"), stage.size, strict=True))
                config = dataclasses.replace(config, **sizes, tau={}, layer_overrides={}).resolved()
                continue
            sizes = dict(zip(("qkv_tokens", "proj_tokens", "ffn_tokens"), stage.size, strict=True))
            rule = "segment" if stage.rule == "copy" else stage.rule
            how = {"layers": stage.layers} if stage.layers else {}
            config = plan_growth(config, [], Growth(**sizes, **how, new_tokens=rule)).config
        return config

    def expected(self, plan: Plan) -> float:
        """Seconds that an arm will still take, alone: from where it is, or from the latest known state."""
        state = None if plan.at else self.latest(plan)
        at = state.step if state else plan.at
        return sum(max(0, e - max(b, at)) * self.leg_seconds(plan, i) for i, (b, e) in enumerate(plan.legs))

    def facts(self, plan: Plan, state: State, result: dict, seconds: float, shared: int, wall: float) -> dict:
        every = max(1, plan.steps // 200)
        losses = state.losses.double().cpu()
        curve = [round(float(part.mean()), 4) for part in losses.split(every)]
        first = result.get(plan.arm.text, next(iter(result.values())))
        return {
            "loss": sum(result.values()) / len(result) if len(result) > 1 else first,
            "losses": result,
            "flops": plan.spent,
            "budget_flops": plan.total,
            "tokens": plan.tokens,
            "gpu_seconds": seconds,
            "steps": plan.steps,
            "legs": plan.legs,
            "leg_flops": plan.costs,
            "growths": state.growths,
            "skipped": state.skipped,
            "shared_steps": shared,
            "wall_seconds": wall,
            "curve_every": every,
            "curve": curve,
        }
