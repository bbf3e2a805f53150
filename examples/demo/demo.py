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
    "size. That is measured in experiments/progressive of the repository."
)
PAPER = (
    "Both are TokenFormers (https://arxiv.org/abs/2410.23168). `make demo` of the package tokenformer made this page."
)


def arms(data: Path) -> dict[str, tuple[Path, Config]]:
    """The two runs, with their folders: the same text, recipe, final size and compute."""
    settings = [f"data.path={data}"]
    grown = load(HERE / "demo.yml", overrides=settings)
    scratch = load(HERE / "demo.yml", overrides=[*settings, "growth=[]"])
    return {"grown on the way": (RUN, grown), "from scratch": (RUN / "scratch", scratch)}


def sizes_of(config: Config) -> list[int]:
    """Parameters of the models that a run passes through."""
    resolved, stages = resolve(config)
    return [cost(model).parameters for model in chain(resolved.model, stages)]


def main() -> None:
    begin = time.monotonic()
    warnings.filterwarnings("ignore", message=".*cut by tokens")  # the trainer says it
    prefix = Path("runs/demo-data/shakespeare_text_document")
    if not prefix.with_suffix(".idx").is_file():
        prepare([HERE / "tinyshakespeare.txt"], prefix.parent, "shakespeare", tokenizer="byte", workers=1, say=print)
    curves = []
    for name, (folder, config) in arms(prefix).items():
        sizes = sizes_of(config)
        print(f"\n{name}: {' → '.join(f'{size:,}' for size in sizes)} parameters into {folder}")
        if Trainer(config, folder, resume=True).run() is not None:
            sys.exit(130)  # interrupted, and saved
        curve = read_curve(folder, "compute", name=name)
        curve.facts.pop("tokens/s")  # says more about what else the machine did
        curves.append(curve)
    notes = [WHAT, *jumps(sizes_of(arms(prefix)["grown on the way"][1])), compared(*curves), PAPER]
    title = "A language model that grows while it learns"
    write_page(RUN / "report.html", curves, "compute", title=title, notes=notes)
    print()
    rows = [[c.name, f"{c.facts['validation loss']:.4f}", f"{c.facts['steps']:,}", f"{c.ends:.3g}"] for c in curves]
    table(["run", "validation loss", "steps", "FLOPs"], rows)
    print("", *notes, f"\nThe grown model writes:\n{curves[0].sample}\n", sep="\n")
    print(f"curves: {RUN / 'report.html'}  numbers: {RUN / 'metrics.jsonl'}  ({time.monotonic() - begin:.0f} s)")


def jumps(before: list[int]) -> list[str]:
    """What each growth did to the validation loss, from the run's own record."""
    found = [row for row in read_rows(RUN) if row.get("what") == "growth"]
    return [
        f"At step {row['step']} the model grows from {size:,} to {row['to']} parameters. Its loss on text that it has "
        f"not seen is {row['losses'][0]:.6f} just before (the ring) and {row['losses'][1]:.6f} just after (the dot): "
        "nothing is forgotten."
        for row, size in zip(found, before, strict=False)
    ]


def compared(grown: Curve, scratch: Curve) -> str:
    """The two losses at equal compute, and what one seed of each is worth."""
    ours, theirs = (curve.facts["validation loss"] for curve in (grown, scratch))
    share = grown.ends / scratch.ends
    compute = "the same compute" if abs(share - 1) < 0.005 else f"{share:.2f} times the compute"
    return (
        f"In the end, for {compute} as training from scratch: {ours:.3f} grown on the way, {theirs:.3f} from scratch "
        f"(nats per token; here a token is a letter). {SEED}"
    )


if __name__ == "__main__":
    main()
