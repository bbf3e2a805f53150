"""The figures and tables of growth.md, measured anew: one tiny base on real text, grown and shrunk by every rule.

python docs/growth_figures.py --text alice.txt    # two minutes on one core; writes docs/growth.png, prints the tables
"""

import argparse
import copy
import math
from pathlib import Path

import torch

from tokenformer import ModelConfig, grow, shrink
from tokenformer.config_growth import Growth
from tokenformer.config_train import OptimizerConfig
from tokenformer.growth.merge import merge_segments
from tokenformer.growth.model import apply_plan, plan_for
from tokenformer.growth.state import grow_state
from tokenformer.growth.verify import loss, verify
from tokenformer.models import build
from tokenformer.parallel.layout import Layout
from tokenformer.train.optim import Optimizer

BASE = ModelConfig(layers=3, dim=64, heads=4, qkv_tokens=48, proj_tokens=48, ffn_tokens=192, vocab=256, context=128)
SIZES = {"qkv_tokens": 144, "proj_tokens": 144, "ffn_tokens": 576}
STEPS, AFTER, WATCHED = 600, 150, (1, 2, 5, 10, 20, 40)
RECIPES = {
    "AdamW": OptimizerConfig(kind="adamw", rate=1e-3),
    "Muon per segment": OptimizerConfig(kind="muon", rate=3e-3),
    "Muon jointly": OptimizerConfig(kind="muon", rate=3e-3, segments="joint"),
}
RULES = ("segment", "zero_key", "zero_value", "random")


class Text:
    def __init__(self, path: Path) -> None:
        ids = torch.tensor(list(path.read_bytes()))
        self.train, self.held_out = ids[: int(0.87 * len(ids))], ids[int(0.87 * len(ids)) :]

    def batch(self, step: int, rows: int = 16, length: int = 64, held_out: bool = False) -> torch.Tensor:
        source = self.held_out if held_out else self.train
        first = torch.randint(len(source) - length - 1, (rows,), generator=torch.Generator().manual_seed(step))
        return torch.stack([source[i : i + length + 1] for i in first])


def train(model, optimizer, text, start, steps, watch=None) -> list[float]:
    """Losses of so many steps; `watch(before)` sees the parameters of before each update."""
    one, zero, losses = torch.ones(()), torch.zeros(()), []
    for step in range(start, start + steps):
        ids = text.batch(step)
        output = model(ids[:, :-1], labels=ids[:, 1:])
        model.zero_grad()
        (output.loss_sum / output.count).backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()} if watch else {}
        optimizer.step(optimizer.config.rate, one, zero)
        losses.append(output.loss_sum.item() / output.count.item())
        if watch:
            watch(before)
    return losses


def grown(base, optimizer, recipe, rule, text):
    """(certificate, losses after, ratios of RMS updates new : old by step) of one rule under one recipe."""
    growth = plan_for(base, Growth(**SIZES, new_tokens=rule))
    model = apply_plan(base, growth)
    certificate = verify(base, model, text.batch(7, 8, 128, held_out=True), growth)
    new = Optimizer(Layout(model), recipe)
    new.load_state_by_name(grow_state(growth, optimizer.state_by_name()))
    ratios = []

    def watch(before):
        sums = {(half, age): [0.0, 0] for half in ("key", "value") for age in ("old", "new")}
        for name, parameter in model.named_parameters():
            if name.endswith("_tokens"):
                moved, rows = parameter.detach() - before[name], growth.recipes[name].new_rows
                cut = len(moved) - rows
                for age, part in (("old", moved[:cut]), ("new", moved[cut:])):
                    entry = sums[name.rsplit(".", 1)[1].removesuffix("_tokens"), age]
                    entry[0], entry[1] = entry[0] + part.square().sum().item(), entry[1] + part.numel()
        rms = {which: math.sqrt(s / max(n, 1)) for which, (s, n) in sums.items()}
        ratios.append({half: rms[half, "new"] / rms[half, "old"] for half in ("key", "value")})

    losses = train(model, new, text, STEPS, max(WATCHED), watch)
    losses += train(model, new, text, STEPS + max(WATCHED), AFTER - max(WATCHED))
    return certificate, losses, ratios


def smooth(losses: list[float], width: int = 10) -> list[float]:
    return [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(losses))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "growth.png")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text, curves, updates = Text(args.text), {}, {}
    bases = {}
    print("| optimizer | rule | change of a logit, relative | loss before → after |", end="")
    print(" new : old updates, keys at step 1 / 2 / 5 / 10 / 20 / 40 | values |\n|" + "---|" * 6)
    for name, recipe in RECIPES.items():
        if recipe.kind not in bases:
            base = build(BASE)
            optimizer = Optimizer(Layout(base), recipe)
            bases[recipe.kind] = base, optimizer, train(base, optimizer, text, 0, STEPS)
        base, optimizer, before = bases[recipe.kind]
        for rule in RULES if name != "Muon jointly" else ("segment",):
            c, losses, ratios = grown(base, optimizer, recipe, rule, text)
            curves[name, rule], updates[name, rule] = before + losses, ratios
            shown = {h: " / ".join(f"{ratios[s - 1][h]:.2f}" for s in WATCHED) for h in ("key", "value")}
            moved = f"{c.logit_relative:.1e} | {c.loss_before:.3f} → {c.loss_after:.3f}"
            print(f"| {name} | `{rule}` | {moved} | {shown['key']} | {shown['value']} |", flush=True)

    base = bases["muon"][0]
    calibration, held_out = text.batch(1, 32, 128), text.batch(2, 64, 128, held_out=True)
    print(f"\nThe base has loss {loss(base, held_out):.3f} on held-out text.\n")
    print("| kept | by | across | τ match | hold | sqrt_n |\n|" + "---|" * 6)
    for ratio in (0.75, 0.5, 0.25):
        for by, across in (("energy", "layer"), ("energy", "model"), ("newest", "layer")):
            found = [
                loss(shrink(base, calibration, ratio=ratio, by=by, across=across, tau=tau), held_out)
                for tau in ("match", "hold", "sqrt_n")
            ]
            print(f"| {ratio} | {by} | {across} | " + " | ".join(f"{x:.3f}" for x in found) + " |", flush=True)
    model = grow(copy.deepcopy(base), **SIZES)
    train(model, Optimizer(Layout(model), RECIPES["Muon per segment"]), text, STEPS, 300)
    one = merge_segments(model, calibration)
    print(f"\nmerged: {loss(model, held_out):.4f} → {loss(one, held_out):.4f} on held-out text")
    draw(curves, updates, args.out)


def draw(curves: dict, updates: dict, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    colours = dict(zip(RULES, ("#1b7837", "#2166ac", "#b2810c", "#b2182b"), strict=True))
    for rule in RULES:
        losses = curves["Muon per segment", rule]
        left.plot(range(STEPS - 100, STEPS), smooth(losses[:STEPS])[-100:], color="0.4", lw=1.2)
        after = losses[STEPS:]
        left.plot(range(STEPS, STEPS + len(after)), after, color=colours[rule], lw=1, label=rule)
    left.axvline(STEPS, color="0.7", lw=0.8, ls=":")
    left.set(xlabel="step (three times the tokens at 600)", ylabel="training loss, nats a byte", title="At growth")
    left.legend(frameon=False)
    for (name, rule), ratios in updates.items():
        if rule == "segment":
            for half, style in (("key", "-"), ("value", "--")):
                values = [max(r[half], 1e-2) for r in ratios]
                right.plot(range(1, len(values) + 1), values, style, lw=1.3, label=f"{name}, {half}s")
    right.axhspan(0.2, 2, color="0.93", zorder=0)
    right.set(xlabel="steps after growth by a segment", ylabel="RMS update, new : old", yscale="log", title="Updates")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main()
