"""Draws picture.svg of README.md: a Linear beside a Pattention, and the loss where a model grows.

The curves are those of experiments/growth-rules (arms.jsonl). The colours follow a light or dark screen.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
  .card { fill: #ffffff; stroke: #d5dbe3 } text { font: 13px system-ui, sans-serif; fill: #1c2128 }
  .head { font-weight: 600; font-size: 15px } .soft { fill: #5b6572 } .line { stroke: #8a94a3; fill: none }
  .old { fill: #9fc3ee; stroke: #0b6bcb } .new { fill: #ffd0b8; stroke: #d1480f; stroke-dasharray: 3 2 }
  .base { stroke: #5b6572 } .exact { stroke: #0b6bcb } .random { stroke: #d1480f }
  .curve { fill: none; stroke-width: 2 } .t-exact { fill: #0b6bcb } .t-random { fill: #d1480f }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #30363d } text { fill: #e6e9ee } .soft { fill: #a3adba }
    .old { fill: #1d4470; stroke: #6db3ff } .new { fill: #5b2a13; stroke: #ff9666 }
    .base { stroke: #a3adba } .exact { stroke: #6db3ff } .random { stroke: #ff9666 }
    .t-exact { fill: #6db3ff } .t-random { fill: #ff9666 }
  }"""
WIDTH, HEIGHT = 1040, 350
ARROW = '<marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">' + (
    '<path d="M0,0L8,4L0,8z" fill="#8a94a3"/></marker>'
)


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{css}" text-anchor="{anchor}">{words}</text>'


def rows(x: float, y: float, count: int, css: str) -> str:
    return "".join(f'<rect class="{css}" x="{x}" y="{y + 12 * i}" width="84" height="9" rx="2"/>' for i in range(count))


def arrow(x: float, y: float, length: float = 30) -> str:
    return f'<path class="line" marker-end="url(#to)" d="M{x},{y}h{length}"/>'


def layers() -> list[str]:
    grid = "".join(
        f'<rect class="old" x="{92 + 15 * c}" y="{66 + 15 * r}" width="12" height="12" rx="2"/>'
        for r in range(4)
        for c in range(6)
    )
    return [
        text(24, 34, "nn.Linear", "head"),
        *(text(40, 99, "x"), arrow(54, 95), grid, arrow(186, 95), text(224, 99, "y")),
        text(250, 88, "as many weights", "soft"),
        text(250, 106, "as the width asks for", "soft"),
        text(24, 166, "Pattention", "head"),
        *(text(40, 236, "x"), arrow(54, 232), rows(92, 184, 5, "old"), rows(92, 244, 3, "new")),
        *(arrow(182, 232, 22), text(212, 237, "Θ", "head"), arrow(228, 232, 22)),
        *(rows(258, 184, 5, "old"), rows(258, 244, 3, "new"), arrow(348, 232), text(386, 237, "y")),
        text(134, 298, "n keys", "soft", "middle"),
        text(300, 298, "n values", "soft", "middle"),
        text(24, 317, "n is free, and can grow in a trained model (dashed: new)", "soft"),
    ]


def losses() -> list[str]:
    """Training loss over compute, of the base and of two ways to make it three times as large."""
    lines = [json.loads(line) for line in (HERE.parent / "experiments/growth-rules/arms.jsonl").open(encoding="utf-8")]
    runs = {line["arm"]: line for line in lines}
    left, right, top, bottom, low, high, end = 520, 1015, 56, 270, 1.0, 1.6, 2.7e15
    parts = [text(480, 34, "Loss of a model that becomes three times as large", "head")]

    def place(flops: float, loss: float) -> tuple[float, float]:
        x = left + (right - left) * flops / end
        return round(x, 1), round(bottom - (bottom - top) * (min(loss, high) - low) / (high - low), 1)

    for loss in (1.0, 1.2, 1.4, 1.6):
        y = place(0, loss)[1]
        parts += [
            f'<path class="line" opacity=".35" d="M{left},{y}H{right}"/>',
            text(left - 8, y + 4, f"{loss:.1f}", "soft", "end"),
        ]
    base = runs["base tokenformer, seed 0"]
    for arm, css, spent in (
        ("base tokenformer, seed 0", "base", 0),
        ("random, rate ×1, seed 0", "random", base["flops"]),
        ("segment, rate ×1, seed 0", "exact", base["flops"]),
    ):
        run = runs[arm]
        points = [(spent + run["flops"] * (i + 0.5) / len(run["curve"]), y) for i, y in enumerate(run["curve"])]
        if css != "base":  # from the base's last loss to the one right after growth, both held out
            points = [(spent, base["loss"]), (spent, run["loss_before"]), *points]
        d = "L".join("{},{}".format(*place(*p)) for p in points if p[1] < high or p[0] >= base["flops"])
        parts.append(f'<path class="curve {css}" d="M{d}"/>')
    at = place(base["flops"], low)[0]
    parts += [
        f'<path class="line" stroke-dasharray="4 3" d="M{at},{top}V{bottom}"/>',
        text(at - 8, 76, "grown here", "soft", "end"),
        text(at + 14, 84, "official rule: 1.18 → 2.67", "t-random"),
        text(at + 14, 104, "a segment: 1.18 → 1.18, then up:", "t-exact"),
        text(at + 14, 122, "new tokens get the full rate", "t-exact"),
        text((left + right) / 2, 292, "compute", "soft", "middle"),
        text(
            480,
            317,
            "0.8 → 2.4 M parameters, bytes of enwik8, nats per byte.",
            "soft",
        ),
        text(480, 335, "Lines: loss in training. Numbers: held-out text, before and after the growth.", "soft"),
    ]
    return parts


def draw() -> str:
    body = "\n".join([*layers(), *losses()])
    card = f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    return f"{svg}\n<style>{STYLE}\n</style>\n<defs>{ARROW}</defs>\n{card}\n{body}\n</svg>\n"


if __name__ == "__main__":
    (HERE / "picture.svg").write_text(draw(), encoding="utf-8")
