"""Curves of one or several runs, read from metrics.jsonl, as a PNG (matplotlib, extra `plot`); page.py makes a page.

Unusual: the fall at the beginning does not stretch the loss axis; what lies above it is cut off.
"""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer.errors import UserError
from tokenformer.train.report import grown, read_rows, unit_of

COLOURS = ("#0b6bcb", "#d1480f", "#1a7f4b", "#8a3ffc", "#b28600", "#0d8599", "#c2185b", "#5f6b7a")
COMPUTE = "training FLOPs"  # the label of the axis `compute`; other axes are called what they are


@dataclass
class Growth:
    """A growth of a run: where on the axis, to how many parameters, and the held-out loss before and after it."""

    x: float
    to: str
    losses: list[float]

    @property
    def label(self) -> str:
        moved = ", loss {:.3f} → {:.3f}".format(*self.losses) if len(self.losses) == 2 else ""
        return f"grown{f' to {self.to}' if self.to else ''}{moved}"


@dataclass
class Curve:
    """What is drawn of one run: training loss, validation loss, and where it grew, over one axis."""

    name: str
    unit: str  # what the run counts: tokens, images, …
    train: list[tuple[float, float]]
    validation: list[tuple[float, float]]
    growths: list[Growth] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    sample: str = ""
    begins: float = 0.0  # where on the axis

    @property
    def ends(self) -> float:
        return max(x for x, _ in self.train)


def in_a_row(curves: list[Curve]) -> list[Curve]:
    """Return the curves of runs that continue each other: each begins where the one before it ends."""
    found: list[Curve] = []
    for curve in curves:
        by = found[-1].ends if found else 0.0
        train, validation = ([(x + by, y) for x, y in line] for line in (curve.train, curve.validation))
        growths = [replace(growth, x=growth.x + by) for growth in curve.growths]
        found.append(replace(curve, train=train, validation=validation, growths=growths, begins=by))
    return found


def read_curve(run: str | Path, axis: str = "step", name: str | None = None) -> Curve:
    """Read a run's curve from its metrics.jsonl. `axis` is step, hours, compute, or what the run counts (tokens, …)."""
    run = Path(run)
    if not (run / "metrics.jsonl").is_file():
        raise UserError(f"{run} has no metrics.jsonl: give the folder of a run")
    try:
        return _curve(run, read_rows(run), axis, name)
    except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError):
        raise UserError(f"{run / 'metrics.jsonl'} has rows that no run writes: mend it or move it away") from None


def _curve(run: Path, rows: list[dict], axis: str, name: str | None) -> Curve:
    train = [row for row in rows if row["kind"] == "train" and row.get("loss") is not None]
    if not train:
        raise UserError(f"{run / 'metrics.jsonl'} has no training rows yet: wait for the first log line")
    last, unit = train[-1], unit_of(train[-1])
    if axis not in ("step", "hours", "compute", unit):
        raise UserError(f"{run} does not count {axis}: draw it over step, hours, compute or {unit}")
    key = "flops" if axis == "compute" else axis
    known = sorted((row["step"], float(row[key])) for row in train if row.get(key) is not None)
    if not known:
        raise UserError(f"{run / 'metrics.jsonl'} says nothing about {axis}: draw over another axis")

    def at(step: int) -> float:
        """Return where a step lies on the axis: between the two log lines around it."""
        return float(np.interp(step, [0, *(s for s, _ in known)], [0.0, *(x for _, x in known)]))

    validation = [row for row in rows if row["kind"] == "validation" and row.get("loss") is not None]
    growths = [row for row in rows if grown(row)]
    samples = [row["text"] for row in rows if row["kind"] == "sample" and "text" in row]
    facts = {
        "steps": last["step"],
        unit: last[unit],
        "training loss": float(last["loss"]),
        "validation loss": float(validation[-1]["loss"]) if validation else None,
        f"{unit}/s": sorted(float(row[f"{unit}_per_second"]) for row in train)[len(train) // 2],
    }
    if skipped := sum(row["kind"] == "event" and row.get("what") == "skipped" for row in rows):
        facts["skipped steps"] = skipped
    return Curve(
        name or run.name,
        unit,
        [(at(row["step"]), float(row["loss"])) for row in train],
        [(at(row["step"]), float(row["loss"])) for row in validation],
        [Growth(at(row["step"]), str(row.get("to", "")), list(map(float, row.get("losses") or []))) for row in growths],
        facts,
        str(samples[-1]) if samples else "",
    )


def bounds(curves: list[Curve]) -> tuple[float, float, float]:
    """Return (right end, lowest loss, highest loss worth showing) of several curves.

    What falls in the first tenth is left out, but for what lies around a growth.
    """
    points = [point for c in curves for point in c.train + c.validation]
    right, values = max(x for x, _ in points) or 1.0, [y for _, y in points]
    later = [y for x, y in points if x > 0.1 * right] or values
    later += [loss for c in curves for growth in c.growths for loss in growth.losses]
    low, high = min(values), max(later)
    edge = 0.05 * (high - low or abs(high) or 1.0)
    return right, low - edge, high + edge


def labels(curves: list[Curve], axis: str) -> tuple[str, str]:
    """Return what stands at the two axes."""
    loss = "loss (nats per token)" if all(curve.unit == "tokens" for curve in curves) else "loss"
    apart = " of each run" if len(curves) > 1 and not any(curve.begins for curve in curves) else ""
    return f"{COMPUTE}{apart}" if axis == "compute" else axis, loss


def draw_png(curves: list[Curve], path: str | Path, axis: str = "step", title: str = "") -> None:
    """Draw loss curves as a picture."""
    need_matplotlib(", or give --out x.html")
    figure, axes = _figure(9, 5)
    right, low, high = bounds(curves)
    row = itertools.count()
    for colour, curve in zip(COLOURS * len(curves), curves, strict=False):
        thin = {"color": colour, "linewidth": 1.1, "alpha": 0.55 if curve.validation else 1.0}
        axes.plot(*zip(*curve.train, strict=True), label=f"{curve.name}, training", **thin)
        if curve.validation:
            style = {"color": colour, "linewidth": 1.8, "marker": "o", "markersize": 3.5}
            axes.plot(*zip(*curve.validation, strict=True), label=f"{curve.name}, validation", **style)
        for growth in curve.growths:
            axes.axvline(growth.x, color=colour, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.8)
            for loss, inside in zip(growth.losses, ("white", colour), strict=False):  # the first dot: before
                style = {"markersize": 6.5 if inside == "white" else 3.5, "markerfacecolor": inside, "zorder": 5}
                axes.plot(growth.x, loss, "o", color=colour, **style)
            side = -1 if growth.x > 0.6 * right else 1
            style = {"fontsize": 8, "color": colour, "va": "top", "ha": "right" if side < 0 else "left"}
            at = (5 * side, -4 - 11 * next(row))  # each growth has a row for what is said about it
            axes.annotate(growth.label, (growth.x, high), at, textcoords="offset points", **style)
    axes.set(xlim=(0, right), ylim=(low, high), title=title or None)
    axes.set(**dict(zip(("xlabel", "ylabel"), labels(curves, axis), strict=True)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def draw_confusion(counts: np.ndarray, names: list[str], path: str | Path) -> None:
    """Draw which share of each class (row) was taken for which (column); up to 40 are named, with their counts."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    named = len(names) <= 40
    side = 2 + 0.35 * len(names) if named else 9
    figure, axes = _figure(side + 1, side)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, shrink=0.7, label="share of the class")
    axes.set(xlabel="the model's answer", ylabel="class")
    if named:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color=colour, fontsize=7)
    figure.savefig(path, format="png")


def need_matplotlib(otherwise: str = "") -> None:
    """Refuse where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UserError(f"drawing a PNG needs matplotlib: pip install 'tokenformer[plot]'{otherwise}") from None


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()
