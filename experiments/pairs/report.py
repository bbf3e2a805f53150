"""Tables of experiments/pairs/arms.jsonl: recall on held-out icons, mean ± standard deviation over seeds.

python experiments/pairs/report.py [--out experiments/pairs]
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))

from study import percent, report

WAYS = {"image_to_text": "image finds text", "text_to_image": "text finds image"}
FIGURES = [f"{way}_r{k}" for way in WAYS for k in (1, 5, 10)]


def what(entry: dict) -> str:
    """Return the name of an arm without its seed."""
    if entry["kind"] == "baseline":
        return f"nearest {entry['nearest']} training icons by pixels, their words"
    name = {"tokenformer": "TokenFormer", "transformer": "Transformer"}[entry["kind"]]
    small = entry.get("small", False)
    name += ", small image tower" if small else ""
    if not entry["then"]:
        return name
    grown = f"image tower grown ×{8 if small else 3}" if entry["grows"] else "not grown"
    return f"{name}, trained on at {entry['then']:g}, {grown}"


def tables(entries: list[dict]) -> str:
    heads = " | ".join(f"{name}, R@{k}" if k == 1 else f"R@{k}" for name in WAYS.values() for k in (1, 5, 10))
    lines = [f"| | parameters | seeds | {heads} | mean |", "|---|---|---|" + 7 * "---|"]
    groups: dict[str, list[dict]] = {}
    for entry in (e for e in entries if e["on"] == "test"):
        groups.setdefault(what(entry), []).append(entry)
    for name, arms in groups.items():
        if "chance" in arms[0]:
            chance = [arms[0]["chance"][figure] for figure in FIGURES]
            cells = " | ".join(f"{100 * value:.1f}" for value in [*chance, statistics.mean(chance)])
            lines.append(f"| chance | | | {cells} |")
        cells = " | ".join(percent([arm[figure] for arm in arms]) for figure in [*FIGURES, "mean_recall"])
        size = f"{arms[0]['parameters']:,}" if "parameters" in arms[0] else ""
        lines.append(f"| {name} | {size} | {len(arms) if size else ''} | {cells} |")
    for name, arms in groups.items():
        if "cifar10" in arms[0]:
            lines += ["", f"CIFAR-10 by the names of its classes (chance 10 %), {name}: "
                      f"{percent([arm['cifar10'] for arm in arms])} %"]  # fmt: skip
    lines += ["", "Rates, by the mean recall on validation icons (one seed):", ""]
    lines += [
        f"- {what(e)}{'' if e['then'] else ', rate ' + format(e['rate'], 'g')}: "
        f"{e['mean_recall']:.2%} (loss {e['loss']:.3f})"
        for e in entries
        if e["on"] == "validation"
    ]
    moved = [e["growth"]["largest_change"] for e in entries if e.get("growth")]
    if moved:
        lines += ["", f"Growth: no feature of {len(moved)} models moved by more than {max(moved):.1e}."]
    return "\n".join(lines)


if __name__ == "__main__":
    report(__file__, __doc__, tables)
