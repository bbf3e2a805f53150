"""What training in fp8 costs in loss and gains in time, beside bf16, and beside bf16 against itself.

  tokenformer prepare enwik8.xz --tokenizer gpt-neox-20b/tokenizer.json --out data --name enwik8
  python experiments/fp8/run.py --data data/enwik8_text_document [--models 150m 450m] [--seconds 540] [--out O]
  python experiments/fp8/run.py --check          # all of it at toy size on a CPU, in half a minute

Presets lm/150m and lm/450m, 500 steps of 65,536 tokens, Muon at the preset's rate, two seeds; each in bf16, in bf16
once more (two runs of one seed differ on a GPU), and in fp8 in every shape, whether or not it is faster. Every arm
leaves a JSON line in O/arms.jsonl and is skipped when it is there; one that is stopped by --seconds goes on in the next
call. The losses are means over the last 100 steps; in fp8 they hold the noise of rounding, which the held-out loss,
computed in bf16 after the last step, does not: it stands beside. What a difference is worth: steps that would buy it
back, by the slope of bf16's last 200 steps; the gain is the ratio of speeds × (1 − these steps' share of the run).
"""

import argparse
import json
import math
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenformer.config import Config, load
from tokenformer.train.report import read_rows
from tokenformer.train.trainer import Trainer

RUN = ["data.split=[98, 2, 0]", "validation={every: 0, samples: 256, generate: 0}", "checkpoint={every: 0, keep: 1}"]
RUN += ["steps=500", "batch=32", "log.every=10"]
TOY = "{layers: 2, dim: 32, heads: 2, qkv_tokens: 24, proj_tokens: 24, ffn_tokens: 96, vocab: 384, context: 32}"
MODELS = {  # preset, and what is laid over it and RUN
    "150m": ("lm/150m", ["micro_batch=32"]),
    "450m": ("lm/450m", ["micro_batch=16"]),
    "toy": ("lm/150m", [f"model={TOY}", "batch=8", "micro_batch=4", "steps=30", "log.every=1", "train.device=cpu"]),
}
KINDS = {"bf16": ["train.precision=bf16"], "bf16 again": ["train.precision=bf16"]}
KINDS["fp8"] = ["train.precision=fp8", "train.fp8=all"]
SEEDS = (0, 1)
ENOUGH = 0.003  # a difference of loss that is allowed


class OutOfTime(Exception):
    """The call's seconds are spent; the arm under way is saved."""


class Timed(Trainer):
    """Saves and leaves at a time."""

    until = math.inf

    def stopping(self) -> bool:
        self.asked = signal.SIGTERM if time.monotonic() > self.until else 0
        return super().stopping()


def config_of(model: str, kind: str, seed: int, data: str) -> Config:
    preset, keys = MODELS[model]
    return load(preset, overrides=[*RUN, *keys, *KINDS[kind], f"seed={seed}", f"data.path={data}"])


def train(model: str, kind: str, seed: int, data: str, folder: Path, until: float) -> dict[str, Any]:
    """Train one arm, or go on with it, and return what its log says."""
    trainer = Timed(config_of(model, kind, seed, data), folder, resume=True)
    trainer.until = until
    if trainer.run() is not None:
        raise OutOfTime
    rows = {row["step"]: row for row in read_rows(folder) if row["kind"] == "train"}
    steps = trainer.config.steps
    ends = sorted(rows)  # a row has the mean since the one before; a stop cuts one in two
    counts = {end: end - begin for begin, end in zip([0, *ends], ends, strict=False)}
    last, late = ([end for end in ends if end > steps * share] for share in (0.6, 0.8))
    loss = np.average([rows[end]["loss"] for end in late], weights=[counts[end] for end in late])
    slope = np.polyfit(last, [rows[end]["loss"] for end in last], 1, w=[counts[end] ** 0.5 for end in last])[0]
    validation = [row["loss"] for row in read_rows(folder) if row["kind"] == "validation"][-1]
    speed = statistics.median(row["tokens_per_second"] for row in rows.values())
    device = torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu"
    facts = {"model": model, "kind": kind, "seed": seed, "steps": steps}
    facts |= {"loss": float(loss), "slope": float(slope)}
    return {**facts, "validation": validation, "tokens_per_second": speed, "device": device, "torch": torch.__version__}


def study(models: list[str], data: str, out: Path, until: float) -> list[str]:
    """Run the arms that are not done, and return their names."""
    out.mkdir(parents=True, exist_ok=True)
    file, ran = out / "arms.jsonl", []
    done = {name_of(arm) for arm in arms_of(file)}
    for model in models:
        for seed in SEEDS:
            for kind in KINDS:
                if (name := f"{model}, {kind}, seed {seed}") in done:
                    continue
                if time.monotonic() > until:
                    raise OutOfTime
                print(f"begun: {name}", flush=True)
                arm = train(model, kind, seed, data, out / "runs" / name.replace(", ", "-").replace(" ", "-"), until)
                with open(file, "a") as lines:
                    lines.write(json.dumps(arm) + "\n")
                ran.append(name)
                print(f"{name}: loss {arm['loss']:.4f}, {arm['tokens_per_second']:,.0f} tokens/s", flush=True)
    return ran


def arms_of(file: Path) -> list[dict]:
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def name_of(arm: dict) -> str:
    return f"{arm['model']}, {arm['kind']}, seed {arm['seed']}"


def report(arms: list[dict]) -> list[dict]:
    """One line per model whose arms are all there."""
    found = []
    for model in dict.fromkeys(arm["model"] for arm in arms):
        by = {kind: [a for a in arms if a["model"] == model and a["kind"] == kind] for kind in KINDS}
        if any(len(each) < len(SEEDS) for each in by.values()):
            continue
        loss = {kind: statistics.mean(a["loss"] for a in each) for kind, each in by.items()}
        speed = {kind: statistics.mean(a["tokens_per_second"] for a in each) for kind, each in by.items()}
        base = (loss["bf16"] + loss["bf16 again"]) / 2
        held = {kind: statistics.mean(a["validation"] for a in each) for kind, each in by.items()}
        held_out = 2 * held["fp8"] / (held["bf16"] + held["bf16 again"]) - 1
        slope = statistics.mean(a["slope"] for a in (*by["bf16"], *by["bf16 again"]))
        noise = max(
            abs(one["loss"] / other["loss"] - 1)
            for one, other in zip(*(sorted(by[k], key=lambda a: a["seed"]) for k in list(KINDS)[:2]), strict=True)
        )
        more = max(0.0, (loss["fp8"] - base) / -slope) / by["fp8"][0]["steps"] if slope < 0 else math.inf
        ratio = 2 * speed["fp8"] / (speed["bf16"] + speed["bf16 again"])
        found.append({
            "name": "training in fp8", "model": model, "value": loss["fp8"] / base - 1, "unit": "of loss",
            "rival": "bf16", "rival_value": noise, "loss_bf16": base, "loss_fp8": loss["fp8"], "ratio": ratio,
            "share_of_steps": more, "gain": ratio * (1 - more), "within": loss["fp8"] / base - 1 <= ENOUGH,
            "held_out": held_out,
            "device": by["fp8"][0]["device"],
        })  # fmt: skip
    return found


def table(lines: list[dict]) -> str:
    rows = [
        "| model | bf16 | fp8 | difference | bf16 against itself | held out | speed | steps to buy it back | gain |"
    ]
    rows += ["|---|---|---|---|---|---|---|---|---|"]
    for r in lines:
        losses = f"{r['loss_bf16']:.4f} | {r['loss_fp8']:.4f} | {r['value']:+.2%} | {r['rival_value']:.2%}"
        more = f"{r['held_out']:+.2%} | {r['ratio']:.3f} × | {r['share_of_steps']:.1%} | {r['gain']:.3f} ×"
        rows.append(f"| {r['model']} | {losses} | {more} |")
    return "\n".join(rows)


def check() -> None:
    """Run the study at toy size, stopped once, and assert what it rests on."""
    from tokenformer.data.text.prepare import prepare

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        out, text = Path(folder), Path(folder) / "text.txt"
        text.write_text("\n".join(f"{n} times {n} is {n * n}, and {n} more is {n * n + n}." for n in range(3000)))
        data = str(prepare([text], out / "set", "sums", tokenizer="byte", workers=1))
        stopped = 0
        while True:  # calls of a second each: arms are stopped and go on
            try:
                study(["toy"], data, out / "short", time.monotonic() + 1)
                break
            except OutOfTime:
                stopped += 1
        ran = study(["toy"], data, out / "long", math.inf)
        assert len(ran) == len(KINDS) * len(SEEDS) and not study(["toy"], data, out / "long", math.inf)
        short, long = (arms_of(out / name / "arms.jsonl") for name in ("short", "long"))
        assert [arm["loss"] for arm in short] == [arm["loss"] for arm in long], "a stop changed a loss"
        (line,) = report(long)
        print(table([line]))
        assert line["rival_value"] == 0, "on a CPU bf16 is the same each time"
        assert 0 < abs(line["value"]) < 0.05 and line["gain"] <= line["ratio"], line
    print(f"all is well: {len(ran)} arms, stopped {stopped} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a prepared set, such as data/enwik8_text_document")
    parser.add_argument("--models", nargs="+", choices=["150m", "450m"], default=["150m", "450m"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="then what is under way is saved")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        return check()
    if args.data is None:
        parser.error("say with --data which prepared set to train on")
    try:
        study(args.models, args.data, args.out, time.monotonic() + args.seconds)
    except OutOfTime:
        print("out of time: start it again to go on", flush=True)
    lines = report(arms_of(args.out / "arms.jsonl"))
    print(*map(json.dumps, lines), table(lines), sep="\n")


if __name__ == "__main__":
    main()
