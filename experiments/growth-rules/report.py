"""The study's table (printed, Markdown) and its curves (curves.png), from arms.jsonl alone."""

import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RULES = ("segment", "segment, joint Muon", "zero_value", "random", "zero_key", "net2net")
ARMS = (*RULES, "scratch, equal total", "scratch, equal additional", "small goes on")
STEP_TOKENS = 65_536


def main() -> None:
    lines = [json.loads(line) for line in (HERE / "arms.jsonl").read_text().splitlines()]
    runs = [r for r in lines if "rule" in r]
    print(
        "| arm | rate | loss right after growth | at the end, seed 0 | all seeds: mean ± deviation | losses by rate |"
    )
    print("|---|---|---|---|---|---|")
    best = {}
    for rule in ARMS:
        grid = {r["factor"]: r["loss"] for r in runs if r["rule"] == rule and r["seed"] == 0}
        factor = min(grid, key=grid.__getitem__)
        best[rule] = [r for r in runs if r["rule"] == rule and r["factor"] == factor]
        losses = [r["loss"] for r in best[rule]]
        spread = f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else "–"
        tried = ", ".join(f"×{f:g} {loss:.4f}" for f, loss in sorted(grid.items()))
        print(f"| {rule} | ×{factor:g} | {best[rule][0]['loss_before']:.4f} | {losses[0]:.4f} | {spread} | {tried} |")
    draw(lines, best)


def draw(lines: list[dict], best: dict[str, list[dict]]) -> None:
    """Training loss over all the compute that led to a model, its base included."""
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    base = next(r for r in lines if r["arm"] == "base tokenformer, seed 0")
    other = next(r for r in lines if r["arm"] == "base transformer, seed 0")
    for run, label, colour in ((base, "base, TokenFormer", "0.35"), (other, "base, Transformer", "0.7")):
        axes.plot(_compute(run, 0), run["curve"], color=colour, lw=1, label=label)
    for i, rule in enumerate(ARMS):
        run = best[rule][0]
        spent = run["flops_total"] - run["flops"]
        style = ":" if rule.startswith("scratch") else "-"
        axes.plot(_compute(run, spent), run["curve"], style, color=f"C{i}", lw=1.2, label=f"{rule}: {run['loss']:.4f}")
    axes.set_ylim(1.02, 1.45)
    axes.set_xlabel("training compute, base included (PFLOPs)")
    axes.set_ylabel("training loss (nats a byte)")
    axes.set_title("enwik8: 0.79 M → 2.36 M matmul parameters; held-out loss at the end in the legend", fontsize=10)
    axes.legend(fontsize=8, ncol=2)
    figure.savefig(HERE / "curves.png", dpi=130)


def _compute(run: dict, spent: float) -> list[float]:
    points = len(run["curve"])
    return [(spent + run["flops"] * (i + 0.5) / points) / 1e15 for i in range(points)]


if __name__ == "__main__":
    main()
