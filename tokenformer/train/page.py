"""A page with curves that needs nothing but a browser: SVG is made here, page.html has the style and a short script."""

import html
import itertools
import json
import math
import string
from collections.abc import Sequence
from pathlib import Path

from tokenformer.files import write_text
from tokenformer.train.plot import COLOURS, Curve, bounds, labels

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 430, 58, 18, 16, 42
MOST_POINTS = 1200  # of a curve; more are thinned evenly
UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def write_page(
    path: str | Path, curves: list[Curve], axis: str = "step", title: str = "Runs", notes: Sequence[str] = ()
) -> None:
    """Write a self-contained HTML file: notes (plain paragraphs), curves, a table, the last sample of each run."""
    body = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(note)}</p>" for note in notes)]
    facts = list(dict.fromkeys(name for curve in curves for name in curve.facts))
    rows = [[curve.name, *map(curve.facts.get, facts)] for curve in curves]
    body += [chart(curves, axis), table(["run", *facts], rows)]
    for curve in curves:
        if curve.sample:
            body += [f"<h2>Sample: {html.escape(curve.name)}</h2>", f"<pre>{html.escape(curve.sample)}</pre>"]
    write_text(path, page(title, body))


def page(title: str, body: Sequence[str]) -> str:
    """Return the text of a page: its parts in our style."""
    template = string.Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.substitute(title=html.escape(title), body="\n".join(body))


def chart(curves: list[Curve], axis: str) -> str:
    """Draw the loss: thin for training, thick with dots for validation; dashes, a ring and a dot where a model grew."""
    right, low, high = bounds(curves)
    across, upward = labels(curves, axis)

    def place(x: float, y: float) -> tuple[float, float]:
        down = TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * x / right, 1), round(down, 1)

    def path(points: list[tuple[float, float]], css: str, colour: str) -> str:
        line = "L".join("{},{}".format(*place(*p)) for p in points)
        return f'<path class="{css}" style="stroke:{colour}" d="M{line}"/>'

    def dot(x: float, y: float, radius: float, colour: str, fill: str = "") -> str:
        return f'<circle cx="{x}" cy="{y}" r="{radius}" style="fill:{fill or colour};stroke:{colour}"/>'

    parts = [f'<clipPath id="inside"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT + 4}" '
             f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>']  # fmt: skip
    for y in ticks(low, high, 7):
        x0, y0 = place(0, y)
        parts.append(f'<line class="grid" x1="{x0}" x2="{WIDTH - RIGHT}" y1="{y0}" y2="{y0}"/>')
        parts.append(f'<text x="{x0 - 8}" y="{y0 + 4}" text-anchor="end">{y:g}</text>')
    for x in ticks(0, right, 8):
        parts.append(f'<text x="{place(x, low)[0]}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{short(x)}</text>')
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{across}</text>')
    parts.append(f'<text transform="translate(14,{(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
                 f"{upward}</text>")  # fmt: skip
    legend, data, row = [], [], itertools.count()  # each growth has a row for what is said about it
    for number, curve in enumerate(curves):
        colour = f"var(--c{number % len(COLOURS)})"
        train, validation = thin(curve.train), thin(curve.validation)
        lines = [path(train, "train faint" if validation else "train", colour)]
        if validation:
            lines.append(path(validation, "valid", colour))
            lines += [dot(*place(*p), 3, colour) for p in validation] if len(validation) <= 60 else []
        for growth in curve.growths:  # the larger ring: before; the dot inside: after
            sizes = ((6, "var(--paper)"), (3, colour))
            lines += [
                dot(*place(growth.x, y), r, colour, fill) for y, (r, fill) in zip(growth.losses, sizes, strict=False)
            ]
        parts.append(f'<g clip-path="url(#inside)">{"".join(lines)}</g>')
        for growth in curve.growths:
            at, down = place(growth.x, high)[0], TOP + 12 + 16 * next(row)
            parts.append(
                f'<line class="grow" style="stroke:{colour}" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            )
            flip = at > 0.6 * WIDTH  # the label then stands on the left
            parts.append(
                f'<text x="{at - 9 if flip else at + 9}" y="{down}" style="fill:{colour}" '
                f'text-anchor="{"end" if flip else "start"}">{html.escape(growth.label)}</text>'
            )
        name = html.escape(curve.name)
        legend.append(f'<span><i class="thin" style="background:{colour}"></i>{name}, training</span>')
        if validation:
            legend.append(f'<span><i style="background:{colour}"></i>{name}, validation</span>')
        end = max(x for x, _ in curve.train + curve.validation)
        data.append({"name": name, "colour": colour, "end": end, "train": train, "validation": validation})
    about = {"width": WIDTH, "left": LEFT, "right": RIGHT, "to": right, "axis": across, "curves": data}
    held = html.escape(json.dumps(about, separators=(",", ":")), quote=True)
    rule = f'<line class="grid rule" style="display:none" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return (
        f'<div class="legend">{"".join(legend)}</div><div class="chart" data-curves="{held}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}{rule}</svg><div class="tip"></div></div>'
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [(head, "th"), *((row, "td") for row in rows)]
    cells = ["".join(f"<{tag}>{html.escape(show(cell))}</{tag}>" for cell in row) for row, tag in lines]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in cells) + "</table>"


def show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else "–" if value is None else str(value)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return about so many round numbers in a range.

    >>> ticks(0, 950, 5)
    [0, 200, 400, 600, 800]
    """
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def short(x: float) -> str:
    """Return a number in a few characters.

    >>> short(1500), short(40), short(2e9)
    ('1.5k', '40', '2G')
    """
    unit, letter = next(((u, s) for u, s in UNITS if abs(x) >= u), (1, ""))
    return f"{x / unit:g}{letter}"


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    every = max(1, -(-len(points) // MOST_POINTS))
    return points if every == 1 else [*points[:-1:every], points[-1]]
