"""Curves of one or several runs, read from metrics.jsonl, as a PNG (matplotlib, extra `plot`); page.py makes a page.

Unusual: the first three percent of a run do not stretch the axis; what lies above it is cut off, not squeezed in.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenformer.errors import UserError
from tokenformer.train.report import grown, read_rows, unit_of

COLOURS = ("#0b6bcb", "#d1480f", "#1a7f4b", "#8a3ffc", "#b28600", "#0d8599", "#c2185b", "#5f6b7a")
LOSS = "loss (nats a token)"
AXES = {"step": "step", "tokens": "tokens", "hours": "hours", "compute": "training FLOPs"}


@dataclass
class Curve:
    """What is drawn of one run: training loss, validation loss, and where it grew, over one axis."""

    name: str
    train: list[tuple[float, float]]
    validation: list[tuple[float, float]]
    growths: list[tuple[float, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    sample: str = ""


def read_curve(run: str | Path, axis: str = "step", name: str | None = None) -> Curve:
    """A run's curve from its metrics.jsonl."""
    run = Path(run)
    if not (run / "metrics.jsonl").is_file():
        raise UserError(f"{run} has no metrics.jsonl: give the folder of a run")
    rows = read_rows(run)
    train = [row for row in rows if row["kind"] == "train" and row.get("loss") is not None]
    if not train:
        raise UserError(f"{run / 'metrics.jsonl'} has no training rows yet: wait for the first log line")
    key = "flops" if axis == "compute" else axis
    known = sorted((row["step"], float(row[key])) for row in train if row.get(key) is not None)
    if not known:
        raise UserError(f"{run / 'metrics.jsonl'} says nothing about {axis}: draw over another axis")

    def at(step: int) -> float:
        """Where a step lies on the axis: between the two log lines around it."""
        (s0, x0), (s1, x1) = next(
            ((a, b) for a, b in zip([(0, 0.0), *known], known, strict=False) if step <= b[0]), (known[-1], known[-1])
        )
        return x1 if s1 == s0 else x0 + (x1 - x0) * (step - s0) / (s1 - s0)

    validation = [row for row in rows if row["kind"] == "validation" and row.get("loss") is not None]
    growths = [row for row in rows if grown(row)]
    samples = [row["text"] for row in rows if row["kind"] == "sample" and "text" in row]
    last, unit = train[-1], unit_of(train[-1])
    facts = {
        "steps": last["step"],
        unit: last[unit],
        "training loss": last["loss"],
        "validation loss": validation[-1]["loss"] if validation else None,
        f"{unit}/s": sorted(row[f"{unit}_per_second"] for row in train)[len(train) // 2],
        "skipped steps": sum(row["kind"] == "event" and row.get("what") == "skipped" for row in rows),
    }
    return Curve(
        name or run.name,
        [(at(row["step"]), row["loss"]) for row in train],
        [(at(row["step"]), row["loss"]) for row in validation],
        [(at(row["step"]), str(row.get("to", ""))) for row in growths],
        facts,
        samples[-1] if samples else "",
    )


def bounds(curves: list[Curve]) -> tuple[float, float, float]:
    """(right end, lowest loss, highest loss worth showing) of several curves."""
    right = max(x for c in curves for x, _ in c.train + c.validation) or 1.0
    values = [y for c in curves for x, y in c.train + c.validation]
    later = [y for c in curves for x, y in c.train + c.validation if x > 0.03 * right] or values
    low, high = min(values), max(later)
    edge = 0.05 * (high - low or abs(high) or 1.0)
    return right, low - edge, high + edge


def draw_png(curves: list[Curve], path: str | Path, axis: str = "step", title: str = "") -> None:
    """Loss curves as a picture."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "drawing a PNG needs matplotlib: pip install 'tokenformer[plot]', or give --out x.html"
        ) from None
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    right, low, high = bounds(curves)
    for colour, curve in zip(COLOURS * len(curves), curves, strict=False):
        axes.plot(*zip(*curve.train, strict=True), color=colour, linewidth=1.1, alpha=0.55 if curve.validation else 1.0)
        label = curve.name
        if curve.validation:
            style = {"color": colour, "linewidth": 1.8, "marker": "o", "markersize": 3.5}
            axes.plot(*zip(*curve.validation, strict=True), label=label, **style)
        else:
            axes.lines[-1].set_label(label)
        for x, what in curve.growths:
            axes.axvline(x, color=colour, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.8)
            style = {"fontsize": 8, "color": colour, "rotation": 90, "va": "top", "clip_on": True}
            label = f"grown to {what}" if what else "grown"
            axes.annotate(label, (x, high), (4, -4), textcoords="offset points", **style)
    axes.set(xlim=(0, right), ylim=(low, high), xlabel=AXES[axis], ylabel=LOSS, title=title or None)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="line with dots: validation" if any(c.validation for c in curves) else None)
    figure.savefig(path)
