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
from safetensors.torch import load_file, save_file

from tokenformer.config import ModelConfig
from tokenformer.config_train import OptimizerConfig, TrainConfig
from tokenformer.growth import apply, plan
from tokenformer.growth.net2net import widen
from tokenformer.models import LanguageModel, cost
from tokenformer.train.health import Guard
from tokenformer.train.optim import Optimizer

CONTEXT, BATCH, VOCAB = 256, 256, 384
SHAPE = {"layers": 4, "dim": 128, "heads": 4, "context": CONTEXT, "vocab": VOCAB}
SMALL = ModelConfig(**SHAPE, qkv_tokens=96, proj_tokens=96, ffn_tokens=384)
BIG = {"qkv_tokens": 288, "proj_tokens": 288, "ffn_tokens": 1152}
TRANSFORMER = ModelConfig(**SHAPE, kind="transformer")
RATE = 4e-3  # of the bases; the arms search around it
TOKENS_A_PARAMETER, GROWN_STEPS, WARMUP, DECAY = 320, 1200, 20, 0.25
RULES = ("segment", "segment, joint Muon", "zero_key", "zero_value", "random", "net2net")
ARMS = (*RULES, "scratch, equal total", "scratch, equal additional", "small goes on")
FACTORS, EXTENSIONS, SEEDS = (1.0, 0.5, 2.0), 2, (0, 1, 2)


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


def train(model: LanguageModel, optimizer: Optimizer, rates: torch.Tensor, text: Text, seed: int) -> list[float]:
    """One step a rate. Data order belongs to the seed. Returns the loss, averaged over every twenty steps."""
    device = rates.device
    generator = torch.Generator(device).manual_seed(seed)
    offsets = torch.randint(len(text.train) - CONTEXT, (len(rates), BATCH), generator=generator, device=device)
    counter = torch.zeros(1, dtype=torch.long, device=device)
    losses, guard, one = (
        torch.zeros(len(rates), device=device),
        Guard(TrainConfig(), rates.device),
        torch.ones((), device=device),
    )
    for group in optimizer.adamw.param_groups:
        group["capturable"] = device.type == "cuda"

    def step() -> None:
        tokens = text.windows(text.train, offsets.index_select(0, counter)[0])
        out = model(tokens[:, :-1], labels=tokens[:, 1:])
        loss = out.loss_sum / out.count
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        divisor, skip, _ = guard.check(gradients, loss, one)
        optimizer.step(rates.index_select(0, counter)[0], divisor, skip)
        optimizer.zero_grad()
        losses.index_copy_(0, counter, loss.detach()[None])
        counter.add_(1)

    if device.type != "cuda":
        for _ in rates:
            step()
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # the first steps, which also compile
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(len(rates) - 3):
            graph.replay()
        torch.cuda.synchronize()
    assert int(counter) == len(rates)
    return [round(float(part.mean()), 5) for part in losses.split(20)]


def prepare(model: LanguageModel, device: str) -> LanguageModel:
    model = model.to(device)
    if device == "cuda":
        model.compute_dtype = torch.bfloat16
        for block in model.blocks:
            block.compile(dynamic=False)
    return model


def optimizer_for(model: LanguageModel, joint: bool = False) -> Optimizer:
    config = OptimizerConfig(kind="muon", rate=RATE, segments="joint" if joint else "apart")
    return Optimizer(model.named_parameters(), config)


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

    def base(self, config: ModelConfig, seed: int) -> tuple[LanguageModel, dict]:
        """The trained base and its optimizer's state, in the stable phase: no decay yet."""
        name = f"base {config.kind}, seed {seed}"
        path = self.out / "bases" / f"{config.kind}-{seed}.safetensors"
        if not path.exists():
            start = time.monotonic()
            model = prepare(LanguageModel(config, seed=seed), self.device)
            optimizer = optimizer_for(model)
            curve = train(model, optimizer, schedule(base_steps(config), RATE, 0, self.device), self.text, seed)
            state = optimizer.state_by_name()
            flat = {f"model/{n}": p.detach() for n, p in model.named_parameters()}
            flat |= {f"{key}/{n}": t for n, entry in state.items() for key, t in entry.items()}
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({n: t.cpu().contiguous().clone() for n, t in flat.items()}, path)
            facts = {"steps": len(curve) * 20, "rate": RATE, "flops": base_steps(config) * flops(config)}
            self.record(
                name, seed=seed, loss=validate(model, self.text), seconds=time.monotonic() - start, **facts, curve=curve
            )
        tensors, state = {}, {}
        for name, tensor in load_file(path, device=self.device).items():
            key, parameter = name.split("/", 1)
            if key == "model":
                tensors[parameter] = tensor
            else:
                state.setdefault(parameter, {})[key] = tensor
        return tensors, state

    def run(self, rule: str, factor: float, seed: int) -> dict | None:
        """One arm, unless it was run before or the time is up."""
        arm = f"{rule}, rate ×{factor:g}, seed {seed}"
        if arm in self.done:
            return self.done[arm]
        if time.monotonic() > self.end:
            return None
        start = time.monotonic()
        config, state, spent = SMALL, None, 0
        big = dataclasses.replace(SMALL, **BIG)
        if rule.startswith("scratch"):
            model = LanguageModel(big, seed=seed)
        else:
            config = TRANSFORMER if rule == "net2net" else SMALL
            tensors, state = self.base(config, seed)
            spent = base_steps(config) * flops(config)
            if rule == "net2net":
                small = LanguageModel(config)
                small.load_state_dict(tensors)
                model, state = widen(small, dim=2 * config.dim), None
            elif rule == "small goes on":
                model = LanguageModel(config)
                model.load_state_dict(tensors)
            else:
                grown = apply(plan(config, tensors, **BIG, new_tokens=rule.split(",")[0], seed=seed), tensors, state)
                model = LanguageModel(grown.config)
                model.load_state_dict(grown.tensors)
                state = grown.state
        model = prepare(model, self.device)
        one = flops(model.config)
        budget = ADDED + (base_steps(SMALL) * flops(SMALL) if rule == "scratch, equal total" else 0)
        steps, decay = budget // one, int(DECAY * (budget + spent) / one)
        optimizer = optimizer_for(model, joint="joint" in rule)
        if state is not None:
            optimizer.load_state_by_name(state)
        before = validate(model, self.text)
        rates = schedule(steps, RATE * factor, decay, self.device)
        curve = train(model, optimizer, rates, self.text, seed + 1000)
        facts = {"rule": rule, "factor": factor, "seed": seed, "rate": RATE * factor, "steps": steps, "decay": decay}
        facts |= {
            "flops": steps * one,
            "flops_total": steps * one + spent,
            "parameters": cost(model.config).matmul_parameters,
        }
        facts |= {"loss_before": before, "loss": validate(model, self.text), "seconds": time.monotonic() - start}
        return self.record(arm, **facts, curve=curve)

    def search(self, rule: str) -> float | None:
        """The best factor on seed 0: the grid, then further where the best lies at its edge."""
        losses: dict[float, float] = {}
        for factor in FACTORS:
            result = self.run(rule, factor, 0)
            if result is None:
                return None
            losses[factor] = result["loss"]
        for _ in range(EXTENSIONS):
            best = min(losses, key=losses.__getitem__)
            further = best * 2 if best == max(losses) else best / 2 if best == min(losses) else None
            if further is None:
                break
            result = self.run(rule, further, 0)
            if result is None:
                return None
            losses[further] = result["loss"]
        return min(losses, key=losses.__getitem__)

    def all(self) -> bool:
        best = {rule: self.search(rule) for rule in ARMS}
        if None in best.values():
            return False
        losses = {rule: self.done[f"{rule}, rate ×{factor:g}, seed 0"]["loss"] for rule, factor in best.items()}
        other = min((r for r in RULES if r not in ("segment", "net2net")), key=losses.__getitem__)
        repeated = ("segment", other, "scratch, equal total", "scratch, equal additional", "small goes on")
        return all(self.run(rule, best[rule], seed) is not None for seed in SEEDS[1:] for rule in repeated)


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
