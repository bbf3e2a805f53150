"""Names of held-out icons, and drawings: how well small models read and draw icons that they were not trained on.

python experiments/draw/run.py --check
python experiments/draw/run.py --data DATA --out experiments/draw [--phase captions drawings]

`arms.jsonl` gets a line for each arm; a finished arm is not run again.
"""

import functools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(1, str(Path(__file__).parents[1] / "pairs"))
sys.path.insert(1, str(Path(__file__).parents[1]))

import icons
from learning import Arm, Size, train
from study import Arms, arguments, best_of_grid

from tokenformer.config import ModelConfig

SEEDS = (0, 1, 2)
RATES = {"captions": (2e-3, 4e-3, 8e-3), "drawings": (3e-3, 6e-3, 1.2e-2)}
ICONS = {"size": 32, "captions": 32, "context": 48}
# names are scored by words, so rare ones are spelled
TOKENS = {"captions": {"spelled": True}, "drawings": {"vocab": 1024}}
COLOURS = 16


def models(dim: int, layers: tuple[int, int], vocab: int, colours: int) -> dict[str, ModelConfig]:
    """Return the model that reads icons and the one that draws them; `layers`: of each language model."""
    tokens = {"dim": dim, "heads": dim // 16, "qkv_tokens": 3 * dim // 4, "proj_tokens": 3 * dim // 4, "init": "zero"}
    image = ModelConfig(
        of="image", layers=2, ffn_tokens=3 * dim, image_size=32, patch=8, classes=0, pool="mean", **tokens
    )
    switch = {"ffn_tokens": [2 * dim, dim], "switch": {"ffn": ["", "image"]}}
    text = ModelConfig(layers=layers[0], context=64, vocab=vocab, **switch, **tokens)
    switch = {"ffn_tokens": [2 * dim, dim], "switch": {"ffn": ["", "draw"]}, "rotary_fraction": 1.0}
    added = {"added_vocab": colours + 1, "added_switch": "draw"}
    draw = ModelConfig(layers=layers[1], vocab=vocab, **added, **switch, **tokens)
    return {"caption": ModelConfig(of="caption", trunks={"image": image, "text": text}), "draw": draw}


class Study:
    """The arms of the study."""

    extensions = 3  # of a grid of rates

    def __init__(self, size: Size, data: icons.Icons, out: Path, seconds: float = 1e9) -> None:
        self.size, self.data, self.device = size, data, "cuda" if torch.cuda.is_available() else "cpu"
        self.arms = Arms(out, lambda entry: f"{entry['what']} {score(entry):.4f}", seconds)

    def result(self, arm: Arm) -> dict:
        def work(arm: Arm) -> dict:
            return train(arm, self.size, self.data, self.device)

        return self.arms.once(arm.name, {}, work, arm, lambda: self.arms.pace(lambda entry: entry["cpu_seconds"], 0.0))

    def best_rate(self, what: str, rates: Sequence[float]) -> Arm:
        """Choose a rate on validation icons; the grid is extended until its best is inside."""

        def losses(grid: list[float]) -> list[float]:
            return [-score(self.result(Arm(what, rate))) for rate in grid]

        return Arm(what, best_of_grid(rates, losses, self.extensions))

    def phase(self, what: str, rate: float | None = None, seeds: Sequence[int] = SEEDS) -> None:
        """Choose the rate, unless it is given, and test it; drawings with one seed, in two sizes."""
        arm = Arm(what, rate) if rate else self.best_rate(what, RATES[what])
        for seed in seeds if what == "captions" else seeds[:1]:
            self.result(replace(arm, seed=seed, on="test"))
        if what == "drawings":
            self.result(replace(arm, on="test", double=True))

    def phases(self, what: str, *how: Any) -> None:
        self.arms.phases({what: functools.partial(self.phase, what, *how)})


def score(entry: dict) -> float:
    """Return what a rate is chosen by."""
    return entry["shared"]["first"] if entry["what"] == "captions" else -entry["bits"]


def check() -> None:
    """Run every phase at toy size on made icons, and assert what the study rests on."""
    Study.extensions, ran = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for what, tokens in (*TOKENS.items(), *TOKENS.items()):
            made = icons.made(60, **ICONS, **(tokens if "spelled" in tokens else {"vocab": 300}))
            toy = {"steps": {"captions": 3, "drawings": 2}, "batch": dict.fromkeys(RATES, 16), "side": 8}
            study = Study(Size(**models(32, (1, 1), made.vocab, 4), **toy), made, Path(folder))
            study.phases(what)
            ran.append(len(study.arms.ran))
        assert ran == [6, 5, 0, 0], "a finished arm was run again"
        from report import tables

        print(tables(list(study.arms.done.values())))
    print(f"all is well: {sum(ran)} arms")


def main() -> None:
    parser = arguments(__file__, __doc__, RATES)
    parser.add_argument("--rate", type=float, help="chosen before: only the test arms are run")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    args = parser.parse_args()
    if args.check:
        return check()
    if args.data is None:
        parser.error("say with --data where the icons are")
    args.out.mkdir(parents=True, exist_ok=True)
    steps, batch = {"captions": 600, "drawings": 250}, {"captions": 128, "drawings": 32}
    for what in args.phase:
        data = icons.read(args.data, **ICONS, **TOKENS[what])
        size = Size(**models(64, (2, 2), data.vocab, COLOURS), steps=steps, batch=batch)
        Study(size, data, args.out, args.seconds).phases(what, args.rate, args.seeds)


if __name__ == "__main__":
    main()
