"""The study's tables (printed, Markdown) and its figure (frontiers.png), from arms.jsonl alone.

python experiments/progressive/report.py [--out experiments/progressive]
"""

import argparse
import json
import statistics
from pathlib import Path

from arms import SETTINGS
from run import BUDGETS, compute_to_same_loss, frontier_of

OTHER = "other ways to grow, one seed each"
RECIPE = "96/96/3456 → 864 at 10 %"  # the best at 20 tokens per parameter


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
    draw(arms, args.out / "frontiers.png")


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


def draw(arms: list[dict], path: Path) -> None:
    """Held-out loss at the end over compute, one picture per size and text: scratch, grown, and never grown."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator

    groups = sorted({(a["setting"], a["text"]) for a in arms})
    figure, axes = plt.subplots(1, len(groups), figsize=(6.4 * len(groups), 4.6), layout="constrained", squeeze=False)
    for axis, (setting, text) in zip(axes[0], groups, strict=True):
        here = [a for a in arms if (a["setting"], a["text"]) == (setting, text) and not a["equal_tokens"]]
        best = {budget: best_scratch([a for a in here if a["budget"] == budget]) for budget in BUDGETS}
        tuned = [a for a in here if (b := best[a["budget"]]) and (a["factor"], a["decay"], a["batch"]) == b[1:4]]
        lines: dict[str, dict[float, list[float]]] = {}
        for a in tuned:
            lines.setdefault(label(a), {}).setdefault(a["flops"] / 1e15, []).append(a["loss"])
        for name, points in lines.items():
            xs = sorted(points)
            means = [statistics.mean(points[x]) for x in xs]
            spread = [[m - min(points[x]) for m, x in zip(means, xs, strict=True)]]
            spread += [[max(points[x]) - m for m, x in zip(means, xs, strict=True)]]
            if name == OTHER:
                axis.plot(
                    [x for x in xs for _ in points[x]], [y for x in xs for y in points[x]], ".", c="C0", alpha=0.3
                )
                axis.lines[-1].set_label(name)
            else:
                axis.errorbar(xs, means, spread, capsize=3, label=name, **STYLES[name])
        ticks = [
            x
            for x in (1, 2, 3, 5, 7, 10, 15, 20, 30)
            if min(a["flops"] for a in tuned) < 1.1e15 * x < 1.2 * max(a["flops"] for a in tuned)
        ]
        axis.set(xscale="log", xlabel="compute (PFLOP)", ylabel="held-out loss (nats per byte)")
        axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_minor_formatter(NullFormatter())
        final = SETTINGS[setting].final
        axis.set_title(
            f"final model {final}/{final}/{4 * final} parameter tokens ({setting.upper()}), {text}", fontsize=10
        )
        order = [*STYLES, OTHER]
        shown = sorted(zip(*axis.get_legend_handles_labels(), strict=True), key=lambda pair: order.index(pair[1]))
        axis.legend(*zip(*shown, strict=True), fontsize=8, title="qkv/proj/ffn tokens", title_fontsize=8)
    figure.savefig(path, dpi=130)


STYLES = {
    "from scratch, final size": {"marker": "o", "color": "0.3"},
    "grown to the final size: the recipe": {"marker": "s", "color": "C0", "zorder": 3},
    "never grown, 288/288/3456": {"marker": "^", "color": "C2"},
    "never grown, 432/432/1728": {"marker": "v", "color": "C1"},
    "never grown, 288/288/1152": {"marker": "D", "color": "C3"},
    "never grown, 96/96/3456": {"marker": "+", "markersize": 13, "color": "C5", "linestyle": "", "zorder": 4},
    "Transformer": {"marker": "x", "color": "C4"},
}


def label(arm: dict) -> str:
    if arm["kind"] == "transformer":
        return "Transformer"
    if arm["start"] is None:
        return "from scratch, final size"
    if not arm["stages"]:
        sizes = str(arm["recipe"])  # one number: of qkv and proj, with four times as many for ffn
        return f"never grown, {f'{sizes}/{sizes}/{4 * int(sizes)}' if sizes.isdigit() else sizes}"
    return "grown to the final size: the recipe" if arm["recipe"] == RECIPE else OTHER


if __name__ == "__main__":
    main()
