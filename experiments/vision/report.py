"""Tables and a figure of experiments/vision/arms.jsonl: top-1 on the test images, mean ± standard error over seeds.

python experiments/vision/report.py [--out experiments/vision] [--figure top1.png]
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))

from study import report, summary

L2 = "l2_norm_gelu"


def groups(entries: list[dict]) -> dict[str, list[dict]]:
    """Return the test arms that differ in their seed alone, by what they are."""
    found: dict[str, list[dict]] = {}
    for entry in entries:
        if entry["on"] == "test":
            legs = " → ".join(f"×{leg['times']} for {leg['compute']:g}" for leg in entry["legs"])
            what = "ViT" if entry["kind"] == "vit" else f"TokenFormer, {entry['theta']}"
            what += ", zero" if _init(entry) == "zero" else ""
            found.setdefault(f"{what}, {legs}{' (anew)' if entry['restart'] else ''}", []).append(entry)
    return found


def differences(entries: list[dict]) -> list[str]:
    """Return how far arms are from what they are compared with, in points of top-1; seeds are paired."""

    def some(**keys: object) -> dict[int, float]:
        """Return top-1 of the test arms with these values, by seed; `shape` is the size of each leg."""
        found = [e for e in entries if e["on"] == "test"]
        for name, value in keys.items():
            found = [e for e in found if READ.get(name, lambda e: e[name])(e) == value]  # noqa: B023
        return {e["seed"]: 100 * e["top1"] for e in found}

    inits = {kind: _best_init([e for e in entries if e["kind"] == kind]) for kind in ("tokenformer", "vit")}
    mine = {"kind": "tokenformer", "theta": L2, "shape": [1]}
    plain, large = some(**mine, init=inits["tokenformer"]), some(shape=[3])
    pairs = [("TokenFormer against ViT", plain, some(kind="vit", init=inits["vit"]))]
    pairs.append(("first values zero against official", some(**mine, init="zero"), some(**mine, init="official")))
    pairs += [(f"{L2} against {theta}", plain, some(theta=theta)) for theta in ("softmax", "l1_norm_gelu")]
    pairs.append(("trained and grown ×3 against trained as long without growth", some(shape=[1, 3], restart=True),
                  some(shape=[1, 1])))  # fmt: skip
    pairs.append(("grown ×3 inside of the run against ×3 from scratch", some(shape=[1, 3], restart=False), large))
    lines = []
    for name, one, other in pairs:
        apart = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
        if apart:
            mean, error = summary(apart)
            lines.append(f"- {name}: {mean:+.2f} ± {error:.2f} points ({len(apart)} seeds)")
    return lines


def _shape(entry: dict) -> list[int]:
    return [leg["times"] for leg in entry["legs"]]


def _init(entry: dict) -> str:
    return entry.get("init", "official")


def _best_init(entries: list[dict]) -> str:
    """Return the first values that `run.py` chose: those of the plain arm with the lowest loss on held-back images."""
    found = [(e["loss"], _init(e)) for e in entries if e["on"] != "test" and _shape(e) == [1] and e["theta"] == L2]
    return min(found, default=(0.0, "official"))[1]


READ = {"shape": _shape, "init": _init}


def tables(entries: list[dict]) -> str:
    lines = ["| arm | parameters | rate | seeds | top-1 on the test images | loss |", "|---|---|---|---|---|---|"]
    for name, arms in groups(entries).items():
        top1, loss = (summary([arm[key] for arm in arms]) for key in ("top1", "loss"))
        figures = f"{100 * top1[0]:.2f} ± {100 * top1[1]:.2f} % | {loss[0]:.4f} ± {loss[1]:.4f}"
        lines.append(f"| {name} | {arms[0]['parameters']:,} | {arms[0]['rate']:g} | {len(arms)} | {figures} |")
    lines += ["", "Differences of top-1, mean ± standard error of the differences of seeds:", "", *differences(entries)]
    lines += ["", "Rates, by the loss on held-back images:", ""]
    lines += [f"- {e['name']}: {e['loss']:.4f}, {e['top1']:.2%}" for e in entries if e["on"] != "test"]
    moved = [e["growth"] for e in entries if e.get("growth")]
    if moved:
        change, same = max(m["largest_change"] for m in moved), min(m["same_predictions"] for m in moved)
        lines += ["", f"Growth: the largest change of a logit was {change:.1e}; {same:.2%} of predictions stayed."]
    return "\n".join(lines)


def draw(entries: list[dict], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = groups(entries)
    figure = Figure(figsize=(9, 1 + 0.4 * len(found)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, arms in enumerate(found.values()):
        mean, error = summary([100 * arm["top1"] for arm in arms])
        axes.errorbar(mean, place, xerr=error, fmt="o", capsize=4)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set(xlabel="top-1 in % on 3,000 test images of CIFAR-10 (trained on 12,000); mean and standard error")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path)


if __name__ == "__main__":
    report(__file__, __doc__, tables, draw)
