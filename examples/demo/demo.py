"""`make demo`: train a tiny TokenFormer that grows twice on Shakespeare, and a model of its final size from scratch.

Everything is written to runs/demo: the run itself, runs/demo/scratch, and report.html. An interrupted demo is resumed.
"""

import itertools
import json
import sys
import time
import warnings
from pathlib import Path

from tokenformer.config import Config, load
from tokenformer.data.text.prepare import prepare
from tokenformer.growth.stages import chain
from tokenformer.models.cost import cost
from tokenformer.terminal import table
from tokenformer.train.page import write_page
from tokenformer.train.plot import read_curve
from tokenformer.train.trainer import Trainer

HERE, RUN = Path(__file__).parent, Path("runs/demo")
TOKENS = ("qkv_tokens", "proj_tokens", "ffn_tokens")


def arms(data: Path) -> dict[str, tuple[Path, Config]]:
    """The two runs, with their folders: the same text, recipe and steps."""
    settings = [f"data.path={data}"]
    grown = load(HERE / "demo.yml", overrides=settings)
    last = grown.growth[-1]
    large = [f"model.{name}={getattr(last, name)}" for name in TOKENS]
    scratch = load(HERE / "demo.yml", overrides=[*settings, "growth=[]", *large])
    return {"grown twice": (RUN, grown), "from scratch, final size": (RUN / "scratch", scratch)}


def main() -> None:
    begin = time.monotonic()
    warnings.filterwarnings("ignore", message=".*cut by tokens")  # the trainer prints it
    prefix = Path("runs/demo-data/shakespeare_text_document")
    if not prefix.with_suffix(".idx").is_file():
        prepare([HERE / "tinyshakespeare.txt"], prefix.parent, "shakespeare", tokenizer="byte", workers=1, say=print)
    curves, runs = [], arms(prefix)
    for name, (folder, config) in runs.items():
        sizes = " → ".join(f"{cost(model).parameters:,}" for model in chain(config.model, config.growth))
        print(f"\n{name}: {sizes} parameters into {folder}")
        if Trainer(config, folder, resume=True).run() is not None:
            sys.exit(130)  # interrupted, and saved
        curves.append(read_curve(folder, name=name))
    notes = [
        *jumps(),
        *(f"{c.name}: validation loss {c.facts['validation loss']:.3f} nats per token (here a byte)." for c in curves),
    ]
    notes.append(saved(*(config for _, config in runs.values())))
    write_page(RUN / "report.html", curves, title="A TokenFormer that grows, on tiny Shakespeare", notes=notes)
    print()
    table(["run", "validation loss", "tokens/s"],
          [[c.name, f"{c.facts['validation loss']:.4f}", f"{c.facts['tokens/s']:,.0f}"] for c in curves])  # fmt: skip
    print("", *notes, f"\nThe grown model writes:\n{curves[0].sample}\n", sep="\n")
    print(f"curves: {RUN / 'report.html'}  numbers: {RUN / 'metrics.jsonl'}  ({time.monotonic() - begin:.0f} s)")


def jumps() -> list[str]:
    """What each growth did to the validation loss, as the run recorded it."""
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [row for row in rows if row.get("what") == "growth"]
    return [
        f"Growth to {row['to']} parameters at step {row['step']}: validation loss {row['losses'][0]:.6f} before, "
        f"{row['losses'][1]:.6f} after."
        for row in found
    ]


def saved(grown: Config, scratch: Config) -> str:
    """The compute of the grown run, as a share of training the large model from the start."""
    starts = [0, *(int(stage.at["step"]) for stage in grown.growth), grown.steps]
    models = chain(grown.model, grown.growth)
    spent = sum(
        (end - start) * cost(model).training_flops(model.context)
        for model, (start, end) in zip(models, itertools.pairwise(starts), strict=True)
    )
    share = spent / (scratch.steps * cost(scratch.model).training_flops(scratch.model.context))
    return f"The grown run took {100 * share:.0f} % of the compute of the other. One seed each, so this ranks nothing."


if __name__ == "__main__":
    main()
