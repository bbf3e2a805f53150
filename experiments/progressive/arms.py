"""What is trained: settings (shapes and budgets), arms (one run each), and plans, which say what an arm does in each
step.
"""

import hashlib
import json
import math
from dataclasses import astuple, dataclass, replace

import numpy as np

from tokenformer.config import ModelConfig
from tokenformer.models.cost import cost, equal_transformer

VOCAB, RATE, WARMUP = 384, 4e-3, 20
Size = tuple[int, int, int]  # parameter tokens: qkv, proj, ffn


def flops(config: ModelConfig, sequences: int) -> int:
    """FLOPs of one training step; attention and the output head are counted."""
    return cost(config).training_flops(config.context) * config.context * sequences


@dataclass(frozen=True)
class Setting:
    """A shape of model and step. `scale` multiplies budgets (the tiny setting trains for less)."""

    name: str
    layers: int
    dim: int
    heads: int
    final: int  # parameter tokens of q, k, v and proj each; the feed-forward layer has four times as many
    context: int = 256
    sequences: int = 256
    scale: float = 1.0

    def config(self, size: Size, layers: int | None = None) -> ModelConfig:
        qkv, proj, ffn = size
        shape = {"layers": layers or self.layers, "dim": self.dim, "heads": self.heads, "context": self.context}
        return ModelConfig(**shape, vocab=VOCAB, qkv_tokens=qkv, proj_tokens=proj, ffn_tokens=ffn).resolved()

    def whole(self) -> ModelConfig:
        return self.config(size(self.final))

    def transformer(self) -> ModelConfig:
        return equal_transformer(self.whole())

    def budget(self, tokens_per_parameter: float) -> int:
        """FLOPs of the final model on so many tokens per matmul parameter."""
        tokens = tokens_per_parameter * self.scale * cost(self.whole()).matmul_parameters
        return round(tokens / (self.context * self.sequences)) * flops(self.whole(), self.sequences)


SETTINGS = {
    s.name: s
    for s in (
        Setting("7m", layers=4, dim=128, heads=4, final=864),
        Setting("32m", layers=6, dim=256, heads=4, final=1296),
        Setting("tiny", layers=2, dim=32, heads=2, final=36, context=32, sequences=8, scale=0.02),
        Setting("tiny-large", layers=2, dim=32, heads=2, final=36, context=32, sequences=8, scale=0.02),
    )
}


def size(n: int) -> Size:
    return (n, n, 4 * n)


@dataclass(frozen=True)
class Stage:
    """A growth: when (share of the arm's compute), to what, by which rule, and how the rate goes on.

    `ramp` (what, from, steps): the rate of "new" segments or of "all" begins at `from` times the rate and goes by a
    line to the rate itself; "hold": new segments stay at `from` for so many steps.
    """

    at: float
    size: Size
    rule: str = "segment"
    noise: float = 0.2  # of copied keys, as a share of their RMS
    ramp: tuple[str, float, int] | None = None
    layers: int | None = None

    def __str__(self) -> str:
        text = f"{show(self.size)} at {100 * self.at:g} %"
        text += f" {self.rule}" if self.rule != "segment" else ""
        text += f" noise {self.noise:g}" if self.rule == "copy" else ""
        text += f" {self.layers} layers" if self.layers else ""
        return text + (" {} ×{:g} for {}".format(*self.ramp) if self.ramp else "")


def show(size: Size) -> str:
    return str(size[0]) if size == (size[0], size[0], 4 * size[0]) else "/".join(map(str, size))


@dataclass(frozen=True)
class Arm:
    """One training run. The rate is `factor` × 4e-3, `decay` the share of the compute in which it falls to 0."""

    setting: str = "7m"
    text: str = "enwik8"
    budget: float = 20  # tokens per matmul parameter of the final model, trained from scratch
    times: float = 1.0  # of that compute
    equal_tokens: bool = False  # as many tokens as scratch has, instead of as much compute
    kind: str = "tokenformer"
    start: Size | None = None  # of the first model; None: the final one, from scratch
    start_layers: int | None = None
    stages: tuple[Stage, ...] = ()
    factor: float = 1.0
    decay: float = 0.25
    batch: float = 1.0
    init: str = "official"  # or zero: blocks add nothing at first
    seed: int = 0

    @property
    def recipe(self) -> str:
        if self.kind == "transformer":
            return "transformer"
        if self.start is None:
            return "scratch"
        layers = f" {self.start_layers} layers" if self.start_layers else ""
        return " → ".join([show(self.start) + layers, *map(str, self.stages)])

    @property
    def name(self) -> str:
        budget = f"{self.budget:g} per parameter" + (f" ×{self.times:g}" if self.times != 1 else "")
        equal = ", equal tokens" if self.equal_tokens else ""
        rest = f"rate ×{self.factor:.4g}, decay {100 * self.decay:g} %, batch ×{self.batch:g}, seed {self.seed}"
        rest += ", init zero" if self.init == "zero" else ""
        return f"{self.setting} {self.text}, {budget}{equal}: {self.recipe}, {rest}"


class Plan:
    """What an arm does, step by step: its legs (one per model), the rate of each step, where it may be forked."""

    def __init__(self, arm: Arm, total: float | None = None) -> None:
        setting = SETTINGS[arm.setting]
        self.arm, self.setting, self.sequences = arm, setting, max(1, round(setting.sequences * arm.batch))
        budget = setting.budget(arm.budget)
        if arm.equal_tokens and total is None:
            total = self._equal_tokens(arm, budget)
        self.total = total = arm.times * budget if total is None else total
        if arm.kind == "transformer":
            configs, self.sizes = [setting.transformer()], [None]
        else:
            self.sizes = [arm.start or size(setting.final), *(s.size for s in arm.stages)]
            configs = [
                setting.config(s, n)
                for s, n in zip(
                    self.sizes, [arm.start_layers, *(t.layers or arm.start_layers for t in arm.stages)], strict=True
                )
            ]
        configs = [replace(config, init=arm.init).resolved() for config in configs]
        self.costs = [flops(config, self.sequences) for config in configs]
        ends = [stage.at * total for stage in arm.stages]
        self.legs: list[tuple[int, int]] = []  # first and last step (exclusive) of each model
        spent, before = 0.0, []
        for one, end in zip(self.costs, [*ends, None], strict=True):
            steps = math.floor((total - spent) / one) if end is None else max(1, round((end - spent) / one))
            first = self.legs[-1][1] if self.legs else 0
            self.legs.append((first, first + steps))
            before.append(spent + one * np.arange(steps))
            spent += steps * one
        self.spent, done = spent, np.concatenate(before)
        self.first, self.steps = configs[0], self.legs[-1][1]
        warmup = WARMUP / arm.batch
        shape = np.minimum((np.arange(self.steps) + 1) / warmup, (total - done) / (arm.decay * total))
        self.decay_from = int(np.argmax((total - done) < arm.decay * total))
        self.shares = np.ones(self.steps)  # of the rate, for segments that the last growth added
        shape = np.minimum(shape, 1)
        for stage, (begin, end) in zip(arm.stages, self.legs[1:], strict=True):
            if stage.ramp:
                what, low, length = stage.ramp
                k = np.arange(min(length, end - begin))
                line = np.full(len(k), low) if what == "hold" else low + (1 - low) * k / length
                (shape if what == "all" else self.shares)[begin : begin + len(k)] *= line
        self.rates = (RATE * arm.factor * shape).astype(np.float32)
        self.shares = self.shares.astype(np.float32)
        self.tokens = self.steps * self.sequences * setting.context
        self.at = 0  # how far a run of it is

    def _equal_tokens(self, arm: Arm, budget: int) -> float:
        wanted = budget / flops(self.setting.whole(), self.setting.sequences) * self.setting.sequences * arm.times
        low, high = 0.0, arm.times * budget * 1.0
        for _ in range(40):
            middle = (low + high) / 2
            plan = Plan(arm, middle)
            low, high = (middle, high) if plan.steps * plan.sequences <= wanted else (low, middle)
        return low

    def digest(self, step: int) -> str:
        """Of everything that led to the state after `step` steps, before a growth that comes there."""
        a = self.arm
        facts = [a.setting, a.text, a.kind, a.init, a.seed, self.sequences, a.start, a.start_layers]
        done = [(begin, astuple(s)[1:]) for s, (begin, _) in zip(a.stages, self.legs[1:], strict=True)]
        facts.append([(begin, s) for begin, s in done if begin < step])
        h = hashlib.sha256(json.dumps(facts).encode())
        h.update(self.rates[:step].tobytes() + self.shares[:step].tobytes())
        return h.hexdigest()

    def marks(self) -> list[int]:
        """Steps whose state is kept: ends of legs, and where related arms (other budgets, decays, growths) leave."""
        found = {self.legs[i][1] for i in range(len(self.legs) - 1)} | {self.decay_from}
        constant = (1 - d for d in (0.25, 0.5))
        scratch = self.total / self.arm.times / self.costs[-1]
        for share in constant:
            for times in (0.5, 1, 1.3, 1.7, 3.5):
                spent = share * times * scratch * self.costs[-1] - sum(
                    (end - begin) * one for (begin, end), one in zip(self.legs[:-1], self.costs[:-1], strict=True)
                )
                found.add(self.legs[-1][0] + math.ceil(spent / self.costs[-1]))
        if self.arm.stages:
            for share in (0.01, 0.02, 0.03, 0.04, 0.05, 0.08, 0.1, 0.15, 0.2):
                found.add(max(1, round(share * self.total / self.costs[0])))
        return sorted(s for s in found if 0 < s <= self.decay_from or s in [end for _, end in self.legs])
