"""How many value tokens could be left unread? S = Θ(x·Kᵀ) is known before V is: where S says nothing, V could be left.

  python experiments/skip/run.py demo                                     # on a CPU, some minutes
  python experiments/skip/run.py 15m 150m --data DATA                     # on a GPU; DATA holds enwik8.xz
  python experiments/skip/run.py --model RUN --text book.txt              # any model, on any text
  python experiments/skip/run.py --check                                  # all of it at toy size

Trains each model named (an interrupted training is resumed), then measures on text that it has not seen: how S is
distributed in each projection of each layer, and the loss if tokens whose S is near a typical value count as that:

  plain     |S| < t counts as 0
  constant  a < S < b counts as c, the mean of such S: y = Σ (S − c)·V + c·ΣV, where ΣV is known; a and b are where a
            given share of tokens differs least from its mean (gelu puts half of them between −0.17 and 0)
  token     a < S < b counts as cₙ, the mean of such S of token n
  energy    |S − (a + b)/2|·‖Vₙ‖ < t counts as cₙ

with one threshold for all layers, or one per projection of each layer so that each skips the same share. Thresholds and
means come from the text that was trained on. Results: OUT/arms.jsonl, a line each as it is measured; what is there is
not measured again. The tables come last.
"""

import argparse
import itertools
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sparse import Study
from torch import Tensor

from tokenformer.config import load
from tokenformer.data.text.indexed import Indexed
from tokenformer.data.text.parts import part_edges
from tokenformer.data.text.prepare import prepare
from tokenformer.hub.open import open_model
from tokenformer.train.trainer import Trainer

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "examples" / "demo"
Made = tuple[Any, Tensor, Tensor]  # a model, and tokens (B, T) that it has and has not seen


@dataclass(frozen=True)
class Recipe:
    """What is trained: a config with overrides, a text (a file of DATA or of the demo) and its tokenizer."""

    config: str | Path
    text: str
    tokenizer: str
    held_out: int  # tokens
    overrides: tuple[str, ...] = ()


SHORT = ("data.split=[90,5,5]", "schedule.kind=wsd", "schedule.decay=0.3")
RECIPES = {
    "tiny": Recipe(DEMO / "demo.yml", "tinyshakespeare.txt", "byte", 1024, (
        "growth=[]", "model.layers=2", "model.dim=32", "model.ffn_tokens=64", "steps=3", "batch=2")),
    "demo": Recipe(DEMO / "demo.yml", "tinyshakespeare.txt", "byte", 1 << 16),
    "cpu": Recipe(DEMO / "demo.yml", "enwik8.xz", "byte", 1 << 15, (  # 1.1 M parameters, 1.6 bytes for each
        *SHORT, "growth=[]", "model.dim=128", "model.qkv_tokens=128", "model.proj_tokens=128", "model.ffn_tokens=512",
        "steps=800", "schedule.warmup=50", "checkpoint.every=200", "validation.every=400", "validation.generate=0")),
    "15m": Recipe("lm/150m", "enwik8.xz", "byte", 1 << 20, (  # 14 M parameters, 20 bytes for each
        *SHORT, "model.vocab=384", "model.layers=6", "model.dim=384", "model.heads=6", "model.qkv_tokens=384",
        "model.proj_tokens=384", "model.ffn_tokens=1536", "model.context=512", "steps=4400", "batch=128",
        "micro_batch=null", "optimizer.rate=4e-3", "schedule.warmup=100", "checkpoint.every=1100")),
    "150m": Recipe("lm/150m", "enwik8.xz", "gpt-neox-20b", 1 << 19, (  # early: 52 M tokens
        *SHORT, "steps=400", "batch=64", "micro_batch=16", "schedule.warmup=40", "checkpoint.every=200")),
}  # fmt: skip


def rows(ids: Tensor, context: int, count: int) -> Tensor:
    """Return windows (B, context + 1) of at most `count` tokens in all."""
    context = min(context, len(ids) - 1)
    starts = range(0, max(1, min(count, len(ids) - 1) // context) * context, context)
    return torch.stack([ids[start : start + context + 1] for start in starts])


def train(name: str, data: Path | None, out: Path) -> Made:
    """Train the model of a name, or resume that."""
    recipe, run = RECIPES[name], out / "models" / name
    text = next((path for root in (DEMO, data) if root for path in root.rglob(recipe.text)), None)
    if text is None:
        raise SystemExit(f"{name} needs {recipe.text}: say with --data in which folder it is")
    made = run.with_name(f"data-{Path(recipe.text).stem}-{recipe.tokenizer}")
    prefix = made / "text_text_document"
    if not prefix.with_suffix(".idx").is_file():
        prepare([text], made, "text", tokenizer=recipe.tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = load(recipe.config, overrides=[*recipe.overrides, f"data.path={prefix}", f"train.device={device}"])
    if Trainer(config, run, resume=True).run() is not None:
        raise SystemExit(130)  # interrupted, and saved
    stored = Indexed(prefix)
    parts = itertools.pairwise(part_edges(stored, config.data.split)[0][:3])
    model = open_model(run, device=device, dtype="float32").model.eval()
    spans = [stored.span(at, min(end, at + recipe.held_out + 1)).astype("int64") for at, end in parts]
    return model, *(rows(torch.from_numpy(ids), model.config.context, recipe.held_out).to(device) for ids in spans)


def given(source: str, text: Path, count: int) -> Made:
    """Open a model, and take the two halves of a text as what it has and has not seen."""
    opened = open_model(source, device=None, dtype="float32")
    ids = torch.tensor(opened.tokenizer.encode(text.read_text(encoding="utf-8")))
    model = opened.model.eval()
    return model, *(rows(half, model.config.context, count).to(opened.device) for half in ids.chunk(2))


def study(name: str, made: Made, out: Path) -> Study:
    found = Study(name, *made, out / "arms.jsonl")
    found.run()
    found.report()
    return found


def check() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        first = study("tiny", train("tiny", None, out), out)
        lines = (out / "arms.jsonl").read_text()
        again = study("tiny", train("tiny", None, out), out)
        assert (out / "arms.jsonl").read_text() == lines  # neither trained nor measured a second time
        none = again.skipping("token", "each", 0.0)
        assert none["skipped"] < 1e-2 and abs(none["loss"] - first.done["whole"]["loss"]) < 1e-4
        assert abs(first.done["constant each 0.5"]["skipped"] - 0.5) < 0.1
        other = study("given", given(str(out / "models" / "tiny"), DEMO / "sonnet.txt", 512), out)
        print(f"all is well: {len(first.done) + len(other.done)} measurements")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to train: {', '.join(RECIPES)}")
    parser.add_argument("--data", type=Path, help="a folder that holds enwik8.xz, in folders below it if need be")
    parser.add_argument("--out", type=Path, default=HERE, help="where results and models go")
    parser.add_argument("--model", help="a trained model, with --text")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--check", action="store_true", help="all of it at toy size, on a CPU")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*cut by tokens")
    if args.check:
        return check()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        study(name, train(name, args.data, args.out), args.out)
    if args.model:
        study(args.model, given(args.model, args.text, 1 << 17), args.out)


if __name__ == "__main__":
    main()
