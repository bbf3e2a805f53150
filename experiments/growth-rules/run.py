"""Which growth rule learns best? A small base, grown ×3 by each rule, beside training from scratch and going on small.

  python experiments/growth-rules/run.py --text enwik8.xz [--seconds 500] [--out experiments/growth-rules]

Finished arms are skipped and each arm is written as it ends, so the study can be done in parts. On a GPU a whole step
(data, forward, backward, update) is one CUDA graph: nothing of such small models waits for the host.
"""

import argparse
import dataclasses
import json
import lzma
import time
from pathlib import Path

import numpy as np
import torch
from rivals import widen
from safetensors.torch import load_file, save_file

from tokenformer.config import ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.config_train import OptimizerConfig, TrainConfig
from tokenformer.growth.make import make_tensors
from tokenformer.growth.plan import plan_growth
from tokenformer.growth.state import grow_state
from tokenformer.models import LanguageModel, build, cost
from tokenformer.parallel.layout import Layout
from tokenformer.train.health import Guard
from tokenformer.train.optim import Optimizer
from tokenformer.train.rules.adamw import AdamW

CONTEXT, BATCH, VOCAB = 256, 256, 384
SHAPE = {"layers": 4, "dim": 128, "heads": 4, "context": CONTEXT, "vocab": VOCAB}
SMALL = ModelConfig(**SHAPE, qkv_tokens=96, proj_tokens=96, ffn_tokens=384)
BIG = {"qkv_tokens": 288, "proj_tokens": 288, "ffn_tokens": 1152}
TRANSFORMER = ModelConfig(**SHAPE, kind="transformer")
RATE = 4e-3  # of the bases; the arms search around it
TOKENS_A_PARAMETER, GROWN_STEPS, WARMUP, DECAY = 320, 1200, 20, 0.25
RULES = ("segment", "segment, joint Muon", "zero_key", "zero_value", "random", "net2net")
ARMS = (*RULES, "scratch, equal total", "scratch, equal additional", "small goes on")
FACTORS, EXTENSIONS, SEEDS, AT_ONCE = (1.0, 0.5, 2.0), 2, (0, 1, 2), 3


def flops(config: ModelConfig) -> int:
    return cost(config).training_flops(CONTEXT) * CONTEXT * BATCH  # of one step


def base_steps(config: ModelConfig) -> int:
    """As many tokens a matmul parameter for each kind of base."""
    return TOKENS_A_PARAMETER * cost(config).matmul_parameters // (CONTEXT * BATCH)


ADDED = GROWN_STEPS * flops(dataclasses.replace(SMALL, **BIG))  # FLOPs that every arm may add to its base


class Text:
    """Bytes as the byte tokenizer numbers them, on the device."""

    def __init__(self, path: Path, device: str) -> None:
        with lzma.open(path) as file:
            raw = np.frombuffer(file.read(), dtype=np.uint8)
        self.train = torch.tensor(raw[:90_000_000], device=device)
        self.held_out = torch.tensor(raw[90_000_000:91_048_577], device=device)

    def windows(self, data: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return data[offsets[:, None] + torch.arange(CONTEXT + 1, device=data.device)].long() + 1


@torch.no_grad()
def validate(model: LanguageModel, text: Text) -> float:
    """Nats a byte over a million held-out bytes."""
    total = count = 0.0
    for offsets in torch.arange(0, len(text.held_out) - CONTEXT, CONTEXT, device=text.held_out.device).split(BATCH):
        tokens = text.windows(text.held_out, offsets)
        out = model(tokens[:, :-1], labels=tokens[:, 1:])
        total, count = total + out.loss_sum.double(), count + out.count
    return float(total / count)


class Job:
    """A model in training: one step for each rate, data in an order that belongs to the seed, nothing on the host."""

    def __init__(self, model: LanguageModel, optimizer: Optimizer, rates: torch.Tensor, text: Text, seed: int) -> None:
        self.model, self.optimizer, self.rates, self.text = model, optimizer, rates, text
        device = rates.device
        generator = torch.Generator(device).manual_seed(seed)
        shape = (len(rates), BATCH)
        self.offsets = torch.randint(len(text.train) - CONTEXT, shape, generator=generator, device=device)
        self.counter = torch.zeros(1, dtype=torch.long, device=device)
        self.losses, self.one = torch.zeros(len(rates), device=device), torch.ones((), device=device)
        self.guard, self.graph, self.stream = Guard(TrainConfig(), device), None, None
        for rule in optimizer.rules:
            for group in rule.torch.param_groups if isinstance(rule, AdamW) else ():
                group["capturable"] = device.type == "cuda"
        if device.type == "cuda":
            self.capture()

    def step(self) -> None:
        tokens = self.text.windows(self.text.train, self.offsets.index_select(0, self.counter)[0])
        out = self.model(tokens[:, :-1], labels=tokens[:, 1:])
        loss = out.loss_sum / out.count
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        divisor, skip, _ = self.guard.check(norm, loss, self.one)
        self.optimizer.step(self.rates.index_select(0, self.counter)[0], divisor, skip)
        self.model.zero_grad()
        self.losses.index_copy_(0, self.counter, loss.detach()[None])
        self.counter.add_(1)

    def capture(self) -> None:
        """Three real steps, which also compile, then one step as a CUDA graph on a stream of its own."""
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.step()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.step()

    def replay(self) -> None:
        if self.graph is None or self.stream is None:
            self.step()
        else:
            with torch.cuda.stream(self.stream):
                self.graph.replay()

    def curve(self) -> list[float]:
        """The loss, averaged over every twenty steps."""
        assert int(self.counter) == len(self.rates)
        return [round(float(part.mean()), 5) for part in self.losses.split(20)]


def train(jobs: list[Job]) -> None:
    """All of them at once: kernels of one fill the gaps of another."""
    left = [(job, len(job.rates) - (3 if job.graph else 0)) for job in jobs]
    for step in range(max(n for _, n in left)):
        for job, n in left:
            if step < n:
                job.replay()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prepare(model: LanguageModel, device: str) -> LanguageModel:
    model = model.to(device)
    if device == "cuda":
        model.compute_dtype = torch.bfloat16
        for block in model.blocks:
            block.compile(dynamic=False)
    return model


def optimizer_for(model: LanguageModel, joint: bool = False) -> Optimizer:
    config = OptimizerConfig(kind="muon", rate=RATE, segments="joint" if joint else "apart")
    return Optimizer(Layout(model), config)


def schedule(steps: int, rate: float, decay: int, device: str) -> torch.Tensor:
    """Warm-up, stable, then down by a line to 0 over the last `decay` steps."""
    step = torch.arange(steps, dtype=torch.float64)
    shape = (
        torch.minimum((step + 1) / WARMUP, (steps - step) / max(1, decay)).clamp(max=1)
        if decay
        else ((step + 1) / WARMUP).clamp(max=1)
    )
    return (rate * shape).float().to(device)


class Study:
    def __init__(self, out: Path, text: Text, device: str, seconds: float) -> None:
        self.out, self.text, self.device = out, text, device
        self.end = time.monotonic() + seconds
        self.file = out / "arms.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.done = {r["arm"]: r for r in map(json.loads, lines)}

    def record(self, arm: str, **facts) -> dict:
        self.done[arm] = {"arm": arm, **facts}
        with open(self.file, "a") as file:
            file.write(json.dumps(self.done[arm]) + "\n")
        print(arm, {k: v for k, v in facts.items() if k != "curve"}, flush=True)
        return self.done[arm]

    def base_path(self, config: ModelConfig, seed: int) -> Path:
        return self.out / "bases" / f"{config.kind}-{seed}.safetensors"

    def make_bases(self, wanted: set[tuple[str, int]]) -> None:
        """Trained, in the stable phase: no decay yet. Weights and the optimizer's state are kept."""
        configs = {"tokenformer": SMALL, "transformer": TRANSFORMER}
        missing = [(configs[k], s) for k, s in sorted(wanted) if not self.base_path(configs[k], s).exists()]
        start, jobs = time.monotonic(), []
        for config, seed in missing:
            model = prepare(build(config, seed), self.device)
            rates = schedule(base_steps(config), RATE, 0, self.device)
            jobs.append(Job(model, optimizer_for(model), rates, self.text, seed))
        if jobs:
            train(jobs)
        for (config, seed), job in zip(missing, jobs, strict=True):
            flat = {f"model/{n}": p.detach() for n, p in job.model.named_parameters()}
            state = job.optimizer.state_by_name()
            flat |= {f"{key}/{n}": t for n, entry in state.items() for key, t in entry.items()}
            path = self.base_path(config, seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({n: t.cpu().contiguous().clone() for n, t in flat.items()}, path)
            facts = {"rate": RATE, "steps": len(job.rates), "flops": len(job.rates) * flops(config)}
            facts |= {"loss": validate(job.model, self.text), "seconds": time.monotonic() - start}
            self.record(f"base {config.kind}, seed {seed}", seed=seed, **facts, curve=job.curve())

    def read_base(self, config: ModelConfig, seed: int) -> tuple[dict, dict]:
        tensors: dict = {}
        state: dict = {}
        for name, tensor in load_file(self.base_path(config, seed), device=self.device).items():
            key, parameter = name.split("/", 1)
            if key == "model":
                tensors[parameter] = tensor
            else:
                state.setdefault(parameter, {})[key] = tensor
        return tensors, state

    def start(self, rule: str, seed: int) -> tuple[LanguageModel, dict | None, int]:
        """Where an arm begins: its model, the optimizer's state, FLOPs spent before."""
        if rule.startswith("scratch"):
            return build(dataclasses.replace(SMALL, **BIG), seed=seed), None, 0
        config = TRANSFORMER if rule == "net2net" else SMALL
        tensors, state = self.read_base(config, seed)
        spent = base_steps(config) * flops(config)
        if rule in RULES and rule != "net2net":
            growth = Growth(**BIG, new_tokens=rule.split(",")[0])
            plan = plan_growth(config, tensors, growth, ends=LanguageModel.ends, seed=seed)
            config, tensors, state = plan.config, dict(make_tensors(plan, tensors)), grow_state(plan, state)
        model = build(config)
        model.load_state_dict(tensors)
        if rule == "net2net":  # the moments of a divided weight are not those of the whole: it begins without any
            return widen(model, 2 * config.dim, seed=seed), {}, spent
        return model, state, spent

    def run(self, pairs: list[tuple[str, float]], seed: int) -> bool:
        """These (rule, factor) arms, a few at a time, but those that were run before; False when the time is up."""
        pairs = [(rule, factor) for rule, factor in pairs if name(rule, factor, seed) not in self.done]
        self.make_bases({(base_of(rule), seed) for rule, _ in pairs if base_of(rule)})
        for i in range(0, len(pairs), AT_ONCE):
            if time.monotonic() > self.end:
                return False
            self.run_group(pairs[i : i + AT_ONCE], seed)
        return True

    def run_group(self, pairs: list[tuple[str, float]], seed: int) -> None:
        begin, jobs, facts = time.monotonic(), [], []
        for rule, factor in pairs:
            model, state, spent = self.start(rule, seed)
            model = prepare(model, self.device)
            one = flops(model.config)
            budget = ADDED + (base_steps(SMALL) * flops(SMALL) if rule == "scratch, equal total" else 0)
            steps, decay = budget // one, int(DECAY * (budget + spent) / one)
            optimizer = optimizer_for(model, joint="joint" in rule)
            if state is not None:
                optimizer.load_state_by_name(state)
            sizes = {"parameters": cost(model.config).matmul_parameters, "flops": steps * one}
            sizes |= {"flops_total": steps * one + spent, "loss_before": validate(model, self.text)}
            facts.append({"rule": rule, "factor": factor, "seed": seed, "steps": steps, "decay": decay, **sizes})
            rates = schedule(steps, RATE * factor, decay, self.device)
            jobs.append(Job(model, optimizer, rates, self.text, seed + 1000))
        ready = time.monotonic()
        train(jobs)
        times = {"setup_seconds": ready - begin, "train_seconds": time.monotonic() - ready, "at_once": len(jobs)}
        for job, fact in zip(jobs, facts, strict=True):
            arm = name(fact["rule"], fact["factor"], seed)
            self.record(arm, **fact, loss=validate(job.model, self.text), **times, curve=job.curve())

    def losses(self, rule: str) -> dict[float, float]:
        return {r["factor"]: r["loss"] for r in self.done.values() if r.get("rule") == rule and r["seed"] == 0}

    def best(self, rule: str) -> float:
        losses = self.losses(rule)
        return min(losses, key=losses.__getitem__)

    def all(self) -> bool:
        """The grid on seed 0; further where the best lies at its edge; then the other seeds at the best rates."""
        if not self.run([(rule, factor) for rule in ARMS for factor in FACTORS], 0):
            return False
        for _ in range(EXTENSIONS):
            edges = [(rule, self.best(rule), set(self.losses(rule))) for rule in ARMS]
            further = [(rule, b * 2 if b == max(f) else b / 2) for rule, b, f in edges if b in (max(f), min(f))]
            if not self.run(further, 0):
                return False
        rules = [rule for rule in RULES if not rule.startswith("segment") and rule != "net2net"]
        other = min(rules, key=lambda rule: self.losses(rule)[self.best(rule)])
        repeated = [(rule, self.best(rule)) for rule in ("segment", other, *ARMS[len(RULES) :])]
        return all(self.run(repeated, seed) for seed in SEEDS[1:])


def name(rule: str, factor: float, seed: int) -> str:
    return f"{rule}, rate ×{factor:g}, seed {seed}"


def base_of(rule: str) -> str | None:
    return None if rule.startswith("scratch") else "transformer" if rule == "net2net" else "tokenformer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="enwik8.xz")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no arm after this time")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.config.recompile_limit = 64
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    study = Study(args.out, Text(args.text, device), device, args.seconds)
    print("complete" if study.all() else "to be continued: run the same command again", flush=True)


if __name__ == "__main__":
    main()
