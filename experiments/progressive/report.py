"""The study's tables (printed, Markdown) and its figure (frontiers.png), from arms.jsonl alone.

python experiments/progressive/report.py [--out experiments/progressive]
"""

import argparse
import json
import statistics
from pathlib import Path

from run import compute_to_same_loss, frontier_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of arms.jsonl")
    args = parser.parse_args()
    arms = [json.loads(line) for line in (args.out / "arms.jsonl").read_text().splitlines()]
    groups = sorted({(a["setting"], a["text"], a["budget"]) for a in arms})
    for group in groups:
        here = [a for a in arms if (a["setting"], a["text"], a["budget"]) == group]
        print("\n### {}, {}, {:g} tokens per parameter\n".format(*group))
        tables(here)
    draw(arms, groups, args.out / "frontiers.png")


def recipes(arms: list[dict]) -> dict[tuple, list[dict]]:
    """Arms that differ in the seed alone."""
    found: dict[tuple, list[dict]] = {}
    for a in arms:
        key = (a["recipe"], a["factor"], a["decay"], a["batch"], a["times"], a["equal_tokens"])
        found.setdefault(key, []).append(a)
    return found


def best_scratch(arms: list[dict], kind: str = "scratch") -> tuple | None:
    """Settings of the best scratch at the whole budget, by its first seed; those that were repeated come first."""
    found = {k: v for k, v in recipes(arms).items() if k[0] == kind and k[4] == 1 and not k[5]}
    return min(found, key=lambda k: first(found[k])["loss"]) if found else None


def first(arms: list[dict]) -> dict:
    return min(arms, key=lambda a: a["seed"])


def mean(arms: list[dict]) -> float:
    return statistics.mean(a["loss"] for a in arms)


def scratch_frontier(arms: list[dict]) -> dict[float, float]:
    """Scratch's loss over compute (times of the budget) at its best settings."""
    best = best_scratch(arms)
    if best is None:
        return {}
    losses: dict[float, dict[int, float]] = {}
    for a in arms:
        if a["recipe"] == "scratch" and (a["factor"], a["decay"], a["batch"]) == best[1:4]:
            losses.setdefault(a["times"], {})[a["seed"]] = a["loss"]
    return frontier_of(losses)


def tables(arms: list[dict]) -> None:
    frontier = scratch_frontier(arms)
    if len(frontier) > 1:
        print("Scratch over compute:", ", ".join(f"×{t:g} {loss:.4f}" for t, loss in sorted(frontier.items())), "\n")
    for equal in (False, True):
        rows = {k: v for k, v in recipes(arms).items() if k[5] is equal}
        if not rows:
            continue
        print(f"Equal {'tokens' if equal else 'compute'}:\n")
        print("| arm | rate | decay | batch | loss, seed 0 | seeds: mean ± deviation | compute to the same loss | "
              "PFLOP | GPU s | M tokens |\n|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
        for (recipe, factor, decay, batch, times, _), group in sorted(rows.items(), key=lambda r: mean(r[1])):
            losses, one = [a["loss"] for a in group], first(group)
            spread = f"{mean(group):.4f} ± {statistics.stdev(losses):.4f} ({len(losses)})" if len(losses) > 1 else "–"
            same = "–"
            if recipe != "scratch" and len(frontier) > 1:
                share = compute_to_same_loss(frontier, mean(group)) * one["budget_flops"] / whole(arms)
                outside = mean(group) < frontier[max(frontier)] or mean(group) > frontier[min(frontier)]
                same = f"{share:.3f}" + (" (extrapolated)" if outside else "")
            what = recipe + (f", ×{times:g} of the compute" if times != 1 else "")
            print(f"| {what} | ×{factor:.3g} | {100 * decay:g} % | ×{batch:g} | {losses[0]:.4f} | {spread} | {same} | "
                  f"{one['flops'] / 1e15:.3f} | {one['gpu_seconds']:.1f} | {one['tokens'] / 1e6:.0f} |")  # fmt: skip
        print()


def whole(arms: list[dict]) -> float:
    """The compute of the budget ×1."""
    return next(a["budget_flops"] / a["times"] for a in arms if not a["equal_tokens"])


def draw(arms: list[dict], groups: list[tuple], path: Path) -> None:
    """Held-out loss at the end over compute: scratch's frontier, and every grown arm."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(groups), figsize=(4.6 * len(groups), 4.2), layout="constrained", squeeze=False)
    for axis, group in zip(axes[0], groups, strict=True):
        here = [a for a in arms if (a["setting"], a["text"], a["budget"]) == group]
        unit, frontier = whole(here), scratch_frontier(here)
        axis.plot(*zip(*sorted(frontier.items()), strict=True), "o-", color="0.3", label="from scratch, tuned")
        for label, colour, wanted in (
            ("from scratch, other settings", "0.75", lambda a: a["recipe"] == "scratch"),
            ("Transformer", "C1", lambda a: a["kind"] == "transformer"),
            ("grown", "C0", lambda a: a["start"] is not None),
        ):
            points = [(a["flops"] / unit, a["loss"]) for a in here if wanted(a)]
            if points:
                axis.plot(*zip(*points, strict=True), ".", color=colour, label=label, zorder=1)
        low = min(a["loss"] for a in here)
        axis.set(xscale="log", ylim=(low - 0.005, low + 0.08), xlabel="compute (of the budget)")
        axis.set(ylabel="held-out loss (nats per byte)")
        axis.set_title("{}, {}, {:g} tokens per parameter".format(*group), fontsize=9)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
