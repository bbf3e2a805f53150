"""`make demo`: train a tiny TokenFormer on Shakespeare, and a Transformer of the same size beside it; leave a page.

Everything lands in runs/demo: the run itself, runs/demo/transformer, and report.html. Started again it goes on.
"""

import sys
import time
import warnings
from pathlib import Path

from tokenformer.config import Config, load, to_dict
from tokenformer.data.prepare import prepare
from tokenformer.models.cost import cost, equal_transformer
from tokenformer.terminal import table
from tokenformer.train.page import write_page
from tokenformer.train.plot import read_curve
from tokenformer.train.trainer import Trainer

HERE, RUN = Path(__file__).parent, Path("runs/demo")


def arms(data: Path) -> dict[str, tuple[Path, Config]]:
    """What is trained, and where: the same text, recipe and steps for each."""
    settings = [f"data.path={data}"]
    ours = load(HERE / "demo.yml", overrides=settings)
    other = to_dict(equal_transformer(ours.model))
    plain = [f"model.{key}={other.get(key, 'null')}" for key in ("kind", "dim", "heads", "ffn_dim")]
    plain += [f"model.{which}_tokens=null" for which in ("qkv", "proj", "ffn")]
    return {
        "TokenFormer": (RUN, ours),
        "Transformer": (RUN / "transformer", load(HERE / "demo.yml", overrides=[*settings, *plain])),
    }


def main() -> None:
    begin = time.monotonic()
    warnings.filterwarnings("ignore", message=".*cut by tokens")  # the trainer says it
    data = HERE / "tinyshakespeare.txt"
    prefix = Path("runs/demo-data/shakespeare_text_document")
    if not prefix.with_suffix(".idx").is_file():
        prepare([data], prefix.parent, "shakespeare", tokenizer="byte", workers=1, say=print)
    curves = []
    for name, (folder, config) in arms(prefix).items():
        print(f"\n{name}: {cost(config.model).parameters:,} parameters into {folder}")
        if Trainer(config, folder, resume=True).run() is not None:
            sys.exit(130)  # interrupted, and saved
        curves.append(read_curve(folder, name=name))
    found = {curve.name: curve.facts["validation loss"] for curve in curves}
    notes = [f"{name} ends at a validation loss of {loss:.3f} nats a byte." for name, loss in found.items()]
    notes.append("Same text, same number of parameters, same recipe (Muon) and steps; one seed each, so no ranking.")
    write_page(RUN / "report.html", curves, title="TokenFormer on tiny Shakespeare", notes=notes)
    print()
    table(["run", "validation loss", "tokens/s"],
          [[c.name, f"{c.facts['validation loss']:.4f}", f"{c.facts['tokens/s']:,.0f}"] for c in curves])  # fmt: skip
    print(f"\nTokenFormer writes:\n{curves[0].sample}\n")
    print(f"curves: {RUN / 'report.html'}  numbers: {RUN / 'metrics.jsonl'}  ({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    main()
