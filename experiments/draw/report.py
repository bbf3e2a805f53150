"""Tables of experiments/draw/arms.jsonl, and a sheet of drawings.

python experiments/draw/report.py [--out experiments/draw] [--figure drawings.png]
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))

from study import percent, report

WAYS = {"likelihood": "Σ log p(name)", "per_token": "per token", "ratio": "Σ log p(name) − Σ log p(name without image)"}
WAYS["marginal"] = "Σ log p(name) − log of the mean of p(name) over 512 training icons"
WAYS["shared"] = "the same over the words that two training groups share"


def tables(entries: list[dict]) -> str:
    lines = []
    for on in ("test", "validation"):
        arms = [e for e in entries if e["what"] == "captions" and e["on"] == on]
        lines += [
            f"Names of {on} icons, first among 100 (in percent):",
            "",
            "| score | rate | seeds | images | shuffled |",
        ]
        lines += ["|---|---|---|---|---|"]
        for way, said in WAYS.items():
            for rate in sorted({e["rate"] for e in arms}):
                some = [e[way] for e in arms if e["rate"] == rate]
                first, other = ([one[key] for one in some] for key in ("first", "shuffled"))
                lines.append(f"| {said} | {rate:g} | {len(some)} | {percent(first)} | {percent(other)} |")
        lines.append("")
    head = (
        "| drawings | rate | bits per code | order-2 counts | less | no text | shuffled text | gain of the right text |"
    )
    lines += [head, "|---|---|---|---|---|---|---|---|"]
    for e in (e for e in entries if e["what"] == "drawings"):
        less = 1 - e["bits"] / e["counts"]["bits"]
        gain = f"{e['gain']:.4f} ± {e['gain_95']:.4f}"
        cells = [
            e["on"] + (", twice the side" if e["double"] else ""),
            f"{e['rate']:g}",
            f"{e['bits']:.4f}",
            f"{e['counts']['bits']:.4f}",
            f"{less:.1%}",
        ]
        cells += [f"{e['bits_no_text']:.4f}", f"{e['bits_shuffled']:.4f}", gain]
        lines.append(f"| {' | '.join(cells)} |")
    for e in (e for e in entries if "copies" in e):
        lines += ["", f"{e['drawn']} drawings: {e['copies']:.1%} are exact copies of training icons (mirrored or not); "
                  f"{e['nearest']:.1%} of the pixels are those of the nearest training icon (held-out icons: "
                  f"{e['nearest_of_held_out']:.1%})"]  # fmt: skip
    return "\n".join(lines)


def sheet(entries: list[dict], path: Path) -> None:
    """Write the drawings of the first arm that has some, as they came."""
    import numpy as np

    from tokenformer.data.images.decode import png
    from tokenformer.infer.draw import grid

    entry = next(entry for entry in entries if "pictures" in entry)
    codes, palette = np.array(entry["pictures"]), np.array(entry["palette"], np.uint8)
    side = round(codes.shape[1] ** 0.5)
    path.write_bytes(png(grid(palette[codes].reshape(-1, side, side, 3), 8, 6)))


if __name__ == "__main__":
    report(__file__, __doc__, tables, sheet)
