"""GPU seconds until a held-out loss: the official formulation and recipe, ours, and ours with growth: progressive.

  tokenformer prepare enwik8.xz --tokenizer byte --out data --name bytes
  python benchmarks/time_to_loss.py --case 15m --data data/bytes_text_document --out times [--seconds 540] [--arms …]
  python benchmarks/time_to_loss.py --check        # all of it at toy size on a CPU, in a minute

Cases: `150m`, lm/150m on 33 M tokens (only the beginning of a run), and `15m`, 15 M matmul parameters on 20 bytes each.
A step has 65,536 tokens. Official: AdamW, warm-up 1 %, cosine to 10 %, every layer checkpointed; at its documented rate
and at the best of four, which are compared on a fifth of the length. Ours and ours grown: as `tokenformer train` does
it, at three budgets, each with its own decay; the seconds to a loss lie on lines in log seconds between them.

Seconds are steps × the median step (of each model that a run passes through), so compilation, validation and saving do
not count; what was spent beyond stands beside as `other_seconds`. Every arm leaves a JSON line in OUT/arms.jsonl, and
is skipped when it is there; one that is stopped by --seconds goes on in the next call.
"""

import argparse
import contextlib
import itertools
import json
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from step import Official, commit
from torch import Tensor, nn

from tokenformer.config import Config, load
from tokenformer.config_train import ScheduleConfig
from tokenformer.models import build
from tokenformer.parallel.mesh import Place
from tokenformer.train.language import LanguageTask
from tokenformer.train.report import read_rows
from tokenformer.train.run import with_batch_sizes
from tokenformer.train.schedule import factor
from tokenformer.train.trainer import Trainer

DOCUMENTED, RATES = 6e-4, (6e-4, 1.2e-3, 2.4e-3, 4.8e-3)
BUDGETS = (0.25, 0.4, 0.65)  # of the official run's tokens, each a run with its own decay
WINDOW = 20  # steps between two looks at the clock
RUN = ["data.split=[98, 2, 0]", "validation={every: 0, samples: 256, generate: 0}", "checkpoint={every: 0, keep: 1}"]
SMALL = "{layers: 6, dim: 192, heads: 6, qkv_tokens: 816, proj_tokens: 816, ffn_tokens: 3264, vocab: 384, context: 512}"
TOY = "{layers: 2, dim: 32, heads: 2, qkv_tokens: 24, proj_tokens: 24, ffn_tokens: 96, vocab: 384, context: 32}"
CASES: dict[str, tuple[list[str], int]] = {  # what is laid over lm/150m, and tokens of the official run
    "150m": (["batch=32", "micro_batch=32"], 33_000_000),
    "15m": ([f"model={SMALL}", "batch=128", "micro_batch=128", "train.compile=auto"], 300_800_000),
    "toy": ([f"model={TOY}", "batch=8", "micro_batch=8", "train={device: cpu, precision: fp32}"], 256 * 100),
}


class OutOfTime(Exception):
    """The call's seconds are spent; the arm under way is saved."""


def config_of(case: str, data: str, share: float, *more: str) -> Config:
    """The run of a case on a share of its tokens."""
    keys, tokens = CASES[case]
    shape = load("lm/150m", overrides=keys)
    assert shape.batch is not None
    steps = max(3, round(share * tokens / (shape.batch * shape.model.context)))
    made = load("lm/150m", overrides=[*keys, *RUN, f"data.path={data}", f"steps={steps}", f"log.every={WINDOW}", *more])
    return with_batch_sizes(made, 1)


# --- ours: the trainer as users have it ---


class Timed(Trainer):
    """Saves and leaves at a time."""

    until = math.inf

    def stopping(self) -> bool:
        self.asked = signal.SIGTERM if time.monotonic() > self.until else 0
        return super().stopping()


def ours(case: str, data: str, folder: Path, until: float, share: float, growth: str) -> dict[str, Any]:
    config = config_of(case, data, share, f"growth={growth}")
    trainer = Timed(config, folder, resume=True)
    trainer.until = until
    if trainer.run() is not None:
        raise OutOfTime
    rows = read_rows(folder)
    per_step, edges = trainer.task.units_per_step, [0, *trainer.grown.steps, trainer.config.steps]
    seconds = 0.0
    for begin, end in itertools.pairwise(edges):
        speeds = [r["tokens_per_second"] for r in rows if r["kind"] == "train" and begin < r["step"] <= end]
        seconds += (end - begin) * per_step / statistics.median(speeds)
    loss = [row["loss"] for row in rows if row["kind"] == "validation"][-1]
    spent = 3600 * trainer.totals.hours
    facts = {"loss": loss, "value": seconds, "other_seconds": spent - seconds, "steps": trainer.config.steps}
    return {**facts, "tokens": trainer.totals.units, "flops": trainer.totals.flops}


# --- the official formulation, in a loop of its own on the same data ---


class Scored(nn.Module):
    """What a language task asks of a model."""

    def __init__(self, official: Official) -> None:
        super().__init__()
        self.official = official

    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor | None = None) -> SimpleNamespace:
        counts = labels.flatten() >= 0
        losses = self.official.losses(ids, labels.clamp(min=0))
        return SimpleNamespace(loss_sum=(losses * counts).sum(), count=counts.sum())


def official_model(config: Config, device: torch.device) -> Official:
    """With the first values of our model of the same seed, which follow the official initialisation."""
    mine = dict(build(config.model, config.seed).named_parameters())
    model = Official(config.model, "checkpointed")
    with torch.no_grad():
        model.embedding.weight.copy_(mine["embedding.weight"])
        for i, block in enumerate(model.blocks):
            for part in ("query", "key", "value", "proj", "ffn"):
                inside = f"attention.{part}" if part != "ffn" else part
                for theirs, half in (("keys", "key_tokens"), ("values", "value_tokens")):
                    getattr(getattr(block, part), theirs).copy_(mine[f"blocks.{i}.{inside}.segments.0.{half}"])
    model.rotary = [t.to(device) for t in model.rotary]
    return model.to(device)


def official(case: str, data: str, folder: Path, until: float, share: float, rate: float) -> dict[str, Any]:
    config, schedule = config_of(case, data, share), ScheduleConfig(kind="cosine", warmup=0.01, floor=0.1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = LanguageTask(config, Place(config.parallel), device)
    model = official_model(config, device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": model.norm.parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    saved, step, windows = folder / "state.pt", 0, []
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, windows, task.loader.samples_seen = state["step"], state["windows"], state["step"] * task.batch
    batches, wait = iter(task.loader), torch.cuda.synchronize if device.type == "cuda" else lambda: None
    scored = Scored(model)
    while step < config.steps:
        wait()
        begun, first = time.monotonic(), step
        while step < min(config.steps, first + WINDOW):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor(schedule, step, config.steps)
            task.gradients(scored, batches, torch.tensor(1 / task.units_per_step, device=device))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
        wait()
        windows.append([step - first, time.monotonic() - begun])
        if time.monotonic() > until and step < config.steps:
            folder.mkdir(parents=True, exist_ok=True)
            held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "windows": windows}
            torch.save(held, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)
            raise OutOfTime
    median = statistics.median(seconds / steps for steps, seconds in windows)
    with torch.no_grad():
        loss = task.measures(scored)["loss"]
    tokens = config.steps * task.units_per_step
    facts = {"loss": loss, "value": median * config.steps, "steps": config.steps, "tokens": tokens}
    return {**facts, "other_seconds": sum(s for _, s in windows) - median * config.steps, "rate": rate}


# --- which arms there are, and what they say together ---


def seconds_to(points: list[tuple[float, float]], loss: float) -> float | None:
    """By lines in log seconds between runs (seconds, loss); None where no run came so low.

    >>> round(seconds_to([(10.0, 3.0), (40.0, 2.0)], 2.5))
    20
    """
    points = sorted(points)
    if loss >= points[0][1]:
        return points[0][0]  # at most: the shortest run was there already
    for (s0, l0), (s1, l1) in itertools.pairwise(points):
        if l0 >= loss >= l1 and l0 > l1:
            return math.exp(math.log(s0) + (l0 - loss) / (l0 - l1) * math.log(s1 / s0))
    return None


class Table:
    """The arms of a case that are done, and running those that are not."""

    def __init__(self, case: str, data: str, out: Path, until: float) -> None:
        self.case, self.data, self.out, self.until = case, data, out, until
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / "arms.jsonl"
        lines = map(json.loads, self.file.read_text().splitlines()) if self.file.exists() else []
        self.done = {line["arm"]: line for line in lines if line["case"] == case}

    def run(self, arm: str, how: Callable[..., dict[str, Any]], share: float, given: Any) -> dict[str, Any]:
        if arm not in self.done:
            if time.monotonic() > self.until:
                raise OutOfTime
            folder = self.out / f"{self.case} {arm}".replace(" ", "-")
            found = how(self.case, self.data, folder, self.until, share, given)
            about = {"name": "training run", "case": self.case, "arm": arm, "unit": "s", "share": share, **found}
            line = {**about, "device": device_name(), "torch": torch.__version__, "commit": commit()}
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            self.done[arm] = line
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return self.done[arm]

    def official(self) -> None:
        self.run("official documented", official, 1.0, DOCUMENTED)
        tried = {rate: self.run(f"official fifth {rate:g}", official, 0.2, rate)["loss"] for rate in RATES}
        best = min(tried, key=lambda rate: tried[rate])
        line = self.done["official documented"] if best == DOCUMENTED else None
        self.done["official best"] = line or self.run(f"official {best:g}", official, 1.0, best)

    def frontier(self, name: str, growth: str) -> list[tuple[float, float]]:
        lines = [self.run(f"{name} {share:g}", ours, share, growth) for share in BUDGETS]
        return [(line["value"], line["loss"]) for line in lines]

    def conclude(self, frontiers: dict[str, list[tuple[float, float]]]) -> None:
        for rival in ("official documented", "official best"):
            theirs = self.done[rival]
            for name, points in frontiers.items():
                value = seconds_to(points, theirs["loss"])
                line = {"name": "time to loss", "case": self.case, "model": name, "value": value, "unit": "s"}
                line |= {"loss": theirs["loss"], "rival": rival, "rival_value": theirs["value"]}
                line |= {"ratio": round(theirs["value"] / value, 2) if value else None}
                line |= {"at_most": value == min(points)[0], "device": device_name()}
                print(json.dumps({**line, "commit": commit()}), flush=True)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES], default="15m")
    parser.add_argument("--data", help="a prepared set (its prefix): of bytes for 15m, of gpt-neox-20b's ids for 150m")
    parser.add_argument("--out", type=Path, default=Path("times"))
    parser.add_argument("--seconds", type=float, default=math.inf, help="save and leave after this time")
    parser.add_argument("--arms", nargs="+", choices=["official", "ours", "progressive"], help="only these")
    parser.add_argument("--check", action="store_true", help="everything at toy size on a CPU")
    args = parser.parse_args()
    with contextlib.ExitStack() as held:
        if args.check:
            from tokenformer.data.text.prepare import prepare

            folder, text = Path(held.enter_context(tempfile.TemporaryDirectory())), "demo/tinyshakespeare.txt"
            source = Path(__file__).parents[1] / "examples" / text
            args.case, args.out = "toy", folder / "times"
            args.data = str(prepare([source], folder / "data", "toy", tokenizer="byte", workers=1))
        if args.data is None:
            parser.error("--data is missing: give a prepared set, or --check")
        table = Table(args.case, args.data, args.out, time.monotonic() + args.seconds)
        asked, frontiers = args.arms or ["official", "ours", "progressive"], {}
        try:
            if args.check:  # leaves in the middle of an arm and goes on
                stopped = Table("toy", args.data, args.out, time.monotonic() + 1)
                with contextlib.suppress(OutOfTime):
                    stopped.run("official documented", official, 1.0, DOCUMENTED)
            if "official" in asked:
                table.official()
            for name, growth in (("ours", "[]"), ("progressive", "progressive")):
                if name in asked:
                    frontiers[name] = table.frontier(name, growth)
        except OutOfTime:
            print("to be continued: run the same command again", flush=True)
            return
        if "official" in asked and frontiers:
            table.conclude(frontiers)


if __name__ == "__main__":
    main()
