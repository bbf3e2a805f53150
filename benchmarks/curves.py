"""Training curves with and without kernels: the same initial weights and data, once under AdamW and once under Muon.

  tokenformer prepare enwik8 enwik8.xz --out data
  python benchmarks/curves.py data/enwik8_text_document --out curves [--recipe adamw:6e-4 …] [KEY=VALUE …]

Each arm is a `tokenformer train lm/150m` of 500 steps of 65,536 tokens; a second seed with kernels beside. Prints
a JSON line a recipe: means of the last fifth of the steps, their relative differences, and how far the loss fell. Arms
that are there already are not run again. Leaves curves.png.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from step import parsed

RECIPES = ["adamw:6e-4", "muon:2e-3"]
ARMS = {"kernels": ("triton", 1234), "reference": ("reference", 1234), "kernels, second seed": ("triton", 5678)}


def train(folder: Path, recipe: str, arm: str, data: str, steps: int, settings: list[str]) -> list[tuple[int, float]]:
    """Losses by step."""
    kind, rate = recipe.split(":")
    path, seed = ARMS[arm]
    out = folder / f"{kind}-{path}-{seed}"
    if not (out / "done").exists():
        keys = [f"data.path={data}", "batch=32", "micro_batch=16", f"steps={steps}", f"seed={seed}"]
        keys += [f"optimizer.kind={kind}", f"optimizer.rate={rate}", "schedule.warmup=50", "log.every=5"]
        keys += ["checkpoint.every=0", "validation.every=0", *settings]
        command = [sys.executable, "-m", "tokenformer", "train", "lm/150m", *keys, "--out", str(out)]
        subprocess.run(command, check=True, env=os.environ | {"TOKENFORMER_PATTENTION": path}, stdout=sys.stderr)
        (out / "done").touch()
    rows = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]


def compare(recipe: str, curves: dict[str, list[tuple[int, float]]], steps: int) -> dict:
    late = {arm: [loss for step, loss in curve if step > 0.8 * steps] for arm, curve in curves.items()}
    mean = {arm: sum(losses) / len(losses) for arm, losses in late.items()}
    with_, without, second = (mean[arm] for arm in ARMS)
    return {
        "name": "training curve", "model": f"lm/150m, {recipe}", "value": round(with_, 5), "unit": "nats",
        "rival": "reference", "rival_value": round(without, 5), "ratio": round(with_ / without, 6),
        "second_seed": round(second, 5), "second_seed_ratio": round(second / with_, 6),
        "fell": round(curves["kernels"][0][1] - with_, 3), "steps": steps,
    }  # fmt: skip


def draw(path: Path, every: dict[str, dict[str, list[tuple[int, float]]]]) -> None:
    from matplotlib import pyplot

    shape = {"sharex": True, "squeeze": False, "height_ratios": [3, 2]}
    figure, (above, below) = pyplot.subplots(2, len(every), figsize=(6 * len(every), 6.4), **shape)
    for top, bottom, (recipe, curves) in zip(above, below, every.items(), strict=True):
        bottom.axhspan(-0.5, 0.5, color="0.9")
        kernels = [loss for _, loss in curves["kernels"]]
        for (arm, curve), style in zip(curves.items(), ("-C0", "--C1", ":C2"), strict=True):
            steps, losses = zip(*curve, strict=True)
            top.plot(steps, losses, style, label=arm)
            off = [100 * (loss / own - 1) for loss, own in zip(losses, kernels, strict=True)]
            recent = [off[max(0, i - 9) : i + 1] for i in range(len(off))]
            bottom.plot(steps, [sum(few) / len(few) for few in recent], style)
        top.set(title=f"lm/150m, {recipe}", ylabel="training loss, nats")
        top.legend()
        bottom.set(xlabel="step", ylabel="against kernels, %,\nmean of ten values", ylim=(-3, 3))
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a prepared set")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="for every arm")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", action="append", help=f"optimizer:rate (default: {' and '.join(RECIPES)})")
    parser.add_argument("--steps", type=int, default=500)
    args = parsed(parser)
    recipes = args.recipe or RECIPES
    for recipe in recipes:
        if not re.fullmatch(r"(adamw|muon):[\d.e-]+", recipe):
            parser.error(f"--recipe {recipe}: write optimizer:rate, such as adamw:6e-4")
    every = {}
    for recipe in recipes:
        every[recipe] = {arm: train(args.out, recipe, arm, args.data, args.steps, args.settings) for arm in ARMS}
        print(json.dumps(compare(recipe, every[recipe], args.steps)), flush=True)
    draw(args.out / "curves.png", every)


if __name__ == "__main__":
    main()
