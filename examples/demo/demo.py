"""`make demo`: train a tiny TokenFormer that begins small and grows on Shakespeare, and the final size from scratch.

Everything is written to runs/demo: the run itself, runs/demo/scratch, and report.html. An interrupted demo is resumed.
"""

import sys
import time
import warnings
from pathlib import Path

from tokenformer.config import Config, load
from tokenformer.data.text.prepare import prepare
from tokenformer.growth.progressive import resolve
from tokenformer.growth.stages import chain
from tokenformer.models.cost import cost
from tokenformer.terminal import table
from tokenformer.train.page import write_page
from tokenformer.train.plot import Curve, read_curve
from tokenformer.train.report import read_rows
from tokenformer.train.trainer import Trainer

HERE, RUN = Path(__file__).parent, Path("runs/demo")
WHAT = (
    "Two small language models learn to write like Shakespeare, letter by letter, on the same text. One has its final "
    "size from the beginning. The other begins smaller and gets the rest of its parameters on the way, at the dashed "
    "line. The lower a line, the better the model guesses the next letter; across is what the training has cost so far."
)
SEED = (
    "One seed each, and a toy of one token per parameter: this shows how growth goes, not what it is worth at a real "
    "size (experiments/progressive)."
)


def arms(data: Path) -> dict[str, tuple[Path, Config]]:
    """The two runs, with their folders: the same text, recipe, final size and compute."""
    settings = [f"data.path={data}"]
    grown = load(HERE / "demo.yml", overrides=settings)
    scratch = load(HERE / "demo.yml", overrides=[*settings, "growth=[]"])
    return {"grown on the way": (RUN, grown), "from scratch": (RUN / "scratch", scratch)}


def main() -> None:
    begin = time.monotonic()
    warnings.filterwarnings("ignore", message=".*cut by tokens")  # the trainer says it
    prefix = Path("runs/demo-data/shakespeare_text_document")
    if not prefix.with_suffix(".idx").is_file():
        prepare([HERE / "tinyshakespeare.txt"], prefix.parent, "shakespeare", tokenizer="byte", workers=1, say=print)
    curves = []
    for name, (folder, config) in arms(prefix).items():
        resolved, stages = resolve(config)
        sizes = " → ".join(f"{cost(model).parameters:,}" for model in chain(resolved.model, stages))
        print(f"\n{name}: {sizes} parameters into {folder}")
        if Trainer(config, folder, resume=True).run() is not None:
            sys.exit(130)  # interrupted, and saved
        curves.append(read_curve(folder, "compute", name=name))
    notes = [WHAT, *jumps(), compared(*curves)]
    title = "A language model that grows while it learns"
    write_page(RUN / "report.html", curves, "compute", title=title, notes=notes)
    print()
    rows = [[c.name, f"{c.facts['validation loss']:.4f}", f"{c.facts['steps']:,}", f"{flops(c):.3g}"] for c in curves]
    table(["run", "validation loss", "steps", "FLOPs"], rows)
    print("", *notes, f"\nThe grown model writes:\n{curves[0].sample}\n", sep="\n")
    print(f"curves: {RUN / 'report.html'}  numbers: {RUN / 'metrics.jsonl'}  ({time.monotonic() - begin:.0f} s)")


def jumps() -> list[str]:
    """What each growth did to the validation loss, from the run's own record."""
    found = [row for row in read_rows(RUN) if row.get("what") == "growth"]
    return [
        f"At step {row['step']} the model grows to {row['to']} parameters. Its loss on text that it has not seen is "
        f"{row['losses'][0]:.6f} just before (the ring) and {row['losses'][1]:.6f} just after (the dot)."
        for row in found
    ]


def flops(curve: Curve) -> float:
    """What a run spent: where its curve ends."""
    return max(x for x, _ in curve.train)


def compared(grown: Curve, scratch: Curve) -> str:
    """The two losses at equal compute, and what one seed of each is worth."""
    ours, theirs = (curve.facts["validation loss"] for curve in (grown, scratch))
    return (
        f"In the end, for {flops(grown) / flops(scratch):.3f} times the compute of training from scratch: {ours:.3f} "
        f"nats per letter grown on the way, {theirs:.3f} from scratch. {SEED}"
    )


if __name__ == "__main__":
    main()
