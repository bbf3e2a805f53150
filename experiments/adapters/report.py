"""Tables and a figure of experiments/adapters/arms.jsonl: bits per byte gained on the new text, lost on the old one.

python experiments/adapters/report.py [--out experiments/adapters] [--figure forgetting.png]
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))

from methods import Arm
from study import report, summary
from training import OTHER

STYLES = {"segment": "C0", "lora": "C1", "chosen": "C2", "ia3": "C3", "last": "C4", "full": "0.3"}
KEYS = list(Arm.__dataclass_fields__)


def arm_of(entry: dict) -> Arm:
    return Arm(**{key: entry[key] for key in KEYS})


def moved(entry: dict, bases: dict[str, dict], part: str = "test") -> tuple[float, float]:
    """Return what tuning gained on the new text and lost on the old one, in bits per byte."""
    base, old = bases[entry["base"]]["bits"], entry["base"]
    new = OTHER[old]
    return base[new][part] - entry["bits"][new][part], entry["bits"][old][part] - base[old][part]


def confirmed(entries: list[dict]) -> dict[str, list[dict]]:
    """Return the arms that were run with several seeds, by what they are: their rate is the chosen one."""
    found: dict[tuple[str, float], list[dict]] = {}
    for entry in entries:
        found.setdefault((arm_of(entry).what, entry["rate"]), []).append(entry)
    groups = {what: sorted(some, key=lambda e: e["seed"]) for (what, _), some in found.items() if len(some) > 1}
    return dict(sorted(groups.items(), key=lambda group: place(group[1][0])))


def place(entry: dict) -> tuple:
    """Where an arm stands in tables: sizes together, the plain ones first."""
    plain = entry["keys"] + entry["place"] == "freshall"
    size = ("0.5", "1.3", "5", "").index(entry["share"])
    return entry["base"] != "enwik8", not plain, size, list(STYLES).index(entry["method"])


def tables(entries: list[dict]) -> str:
    bases = {e["name"].removeprefix("base "): e for e in entries if e["name"].startswith("base ")}
    arms = [e for e in entries if "method" in e]
    lines = []
    for name, base in bases.items():
        told = ", ".join(f"{text} {found['test']:.4f}" for text, found in base["bits"].items())
        lines.append(f"The base of {name} ({base['parameters']:,} parameters): {told} bits per byte.")
    lines += ["", "| method | learning parameters | rate | seeds | gained on the new text | forgotten of the old one | "
              "forgotten per bit gained |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    found = confirmed(arms)
    for what, some in found.items():
        share = some[0]["learning"] / bases[some[0]["base"]]["parameters"]
        gains, losses = zip(*(moved(e, bases) for e in some), strict=True)
        (gain, g), (loss, f) = summary(list(gains)), summary(list(losses))
        ratio = f"{loss / gain:.2f}" if gain > 0 else "–"
        lines.append(f"| {what} | {some[0]['learning']:,} ({share:.2%}) | {some[0]['rate']:g} | {len(some)} | "
                     f"{gain:.4f} ± {g:.4f} | {loss:.4f} ± {f:.4f} | {ratio} |")  # fmt: skip
    lines += ["", "Beside LoRA of the same size, mean ± standard error of the differences of seeds:", ""]
    for what, some in found.items():
        one = arm_of(some[0])
        rival = found.get(Arm("lora", one.share, base=one.base).what, [])
        pairs = [(moved(a, bases), moved(b, bases)) for a in some for b in rival if a["seed"] == b["seed"]]
        if one.method in ("segment", "chosen") and pairs:
            (gain, g), (loss, f) = (summary([a[i] - b[i] for a, b in pairs]) for i in (0, 1))
            lines.append(f"- {what}: gain {gain:+.4f} ± {g:.4f}, forgetting {loss:+.4f} ± {f:.4f}")
    lines += ["", "All rates (seed 0, by `dev`, which chose them): gained / forgotten", ""]
    by_what: dict[str, list[dict]] = {}
    for entry in sorted(arms, key=place):
        if entry["seed"] == 0:
            by_what.setdefault(arm_of(entry).what, []).append(entry)
    for what, some in by_what.items():
        told = ", ".join("{:g}: {:.4f} / {:.4f}".format(e["rate"], *moved(e, bases, "dev"))
                         for e in sorted(some, key=lambda e: e["rate"]))  # fmt: skip
        lines.append(f"- {what}: {told}")
    return "\n".join(lines)


def draw(entries: list[dict], path: Path) -> None:
    """Forgetting over gain: all rates of a method and size are a line, the chosen ones with error bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bases = {e["name"].removeprefix("base "): e for e in entries if e["name"].startswith("base ")}
    arms = [e for e in entries if "method" in e and e["base"] == "enwik8"]
    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    marks = {"0.5": "v", "1.3": "o", "5": "^", "": "s"}
    for what in dict.fromkeys(arm_of(e).what for e in arms):
        some = sorted((e for e in arms if arm_of(e).what == what and e["seed"] == 0), key=lambda e: e["rate"])
        points = [moved(e, bases, "dev") for e in some]
        colour = STYLES[some[0]["method"]]
        dash = "--" if (some[0]["keys"], some[0]["place"]) != ("fresh", "all") else "-"
        axes.plot(*zip(*points, strict=True), dash, c=colour, alpha=0.35)
    for what, some in confirmed(arms).items():
        gains, losses = zip(*(moved(e, bases) for e in some), strict=True)
        (gain, g), (loss, f) = summary(list(gains)), summary(list(losses))
        how = {"fmt": marks[some[0]["share"]], "color": STYLES[some[0]["method"]], "capsize": 3}
        axes.errorbar(gain, loss, f, g, label=what, **how)
    axes.set(xlabel="gained on the new text (bits per byte)", ylabel="forgotten of the old one (bits per byte)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    report(__file__, __doc__, tables, draw)
