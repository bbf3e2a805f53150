"""Pairs on held-out icons: TokenFormer towers beside Transformer towers of equal parameters, and a tower that grows.

  python experiments/pairs/run.py --data DATA [--cifar CIFAR] [--phase main grow] [--seconds 540] [--out O]
  python experiments/pairs/run.py --check          # all phases at toy size on a CPU, in half a minute

DATA is the folder of the icons, CIFAR that of the subset of CIFAR-10. Finished arms are skipped, and each is written to
O/arms.jsonl as it ends: the study can be done in parts, a stop loses the arm under way. Models are kept in O/models,
since the arms that grow begin from those of the main phase.
"""

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).parents[1]))

import baseline
import icons
from study import Arms, arguments, best_of_grid
from training import Arm, Cifar, Pairs, Size, config_of, train

from tokenformer import load, save
from tokenformer.config import ModelConfig
from tokenformer.models import PairModel
from tokenformer.models.cost import cost

RATES, SEEDS = (1e-3, 2e-3, 4e-3), (0, 1, 2)
ICONS = {"size": 32, "captions": 32, "context": 16}


def towers(dim: int, layers: tuple[int, int], vocab: int) -> ModelConfig:
    """Return a pair whose towers are `dim` wide; their parameter tokens make them as large as Transformers."""
    tokens = 3 * dim // 4
    both = {"dim": dim, "heads": dim // 16, "init": "zero", "pool": "mean"}
    both |= {"qkv_tokens": tokens, "proj_tokens": tokens, "ffn_tokens": 4 * tokens}
    image = ModelConfig(of="image", layers=layers[0], image_size=32, patch=8, classes=0, **both)
    text = ModelConfig(of="text", layers=layers[1], context=16, vocab=vocab, **both)
    return ModelConfig(of="pair", embed=dim, trunks={"image": image, "text": text}).resolved()


class Study:
    """The arms of the study, and the models of those that others begin from."""

    extensions = 3  # of a grid of rates, at most

    def __init__(self, size: Size, pairs: Pairs, out: Path, seconds: float = 1e9, cifar: Cifar | None = None) -> None:
        self.size, self.pairs, self.cifar, self.out = size, pairs, cifar, out
        self.arms = Arms(out, lambda e: f"mean recall {e['mean_recall']:.2%}, loss {e['loss']:.4f}", seconds)

    def result(self, arm: Arm) -> dict:
        keys, longest = (
            dataclasses.asdict(arm) | {"device": self.pairs.device},
            self.arms.pace(lambda e: e["seconds"], 0.0),
        )
        return self.arms.once(arm.name, keys, self.train, arm, lambda: longest)

    def train(self, arm: Arm) -> dict:
        model, facts = train(arm, self.size, self.pairs, self.base(arm), self.cifar)
        if not arm.then:
            model.images, model.tokenizer_json = icons.READING, self.pairs.icons.tokenizer.to_json()
            save(model, self.folder(arm), force=True)
        return facts

    def folder(self, arm: Arm) -> Path:
        return self.out / "models" / arm.name.replace(" ", "-")

    def base(self, arm: Arm) -> PairModel | None:
        """Return the model that a second run begins from, which `test` has trained."""
        return load(self.folder(first(arm))).to(self.pairs.device) if arm.then else None

    def best_rate(self, arm: Arm, key: str, rates: Sequence[float]) -> Arm:
        """Choose a rate by the mean recall on validation icons; the grid is extended until its best is inside."""

        def losses(grid: list[float]) -> list[float]:
            tried = [replace(arm, **{key: rate}, on="validation", seed=0) for rate in grid]
            return [-self.whole(one)["mean_recall"] for one in tried]

        return replace(arm, **{key: best_of_grid(rates, losses, self.extensions)})

    def whole(self, arm: Arm) -> dict:
        """Return what an arm gave; the model that it begins from is trained before where it is not kept."""
        if arm.then and arm.name not in self.arms.done:
            if not self.folder(first(arm)).exists():
                self.arms.done.pop(first(arm).name, None)
            self.result(first(arm))
        return self.result(arm)

    def test(self, arm: Arm) -> list[dict]:
        return [self.whole(replace(arm, seed=seed, on="test")) for seed in SEEDS]

    def phases(self, names: Iterable[str]) -> None:
        self.arms.phases({name: functools.partial(PHASES[name], self) for name in names})


def first(arm: Arm) -> Arm:
    """Return the arm whose model another begins from."""
    return replace(arm, then=0.0, grows="")


def main_phase(study: Study) -> None:
    """TokenFormer and Transformer towers: the rate of each is chosen, then three seeds are tested."""
    for kind in ("tokenformer", "transformer"):
        study.test(study.best_rate(Arm(kind=kind), "rate", RATES))


def grow_phase(study: Study) -> None:
    """The image tower of a trained pair grows, and all trains on; beside it without growth, at the rate that is best
    for that, and at the rate of the grown one. First the pair of the main phase, then one with a small image tower.
    """
    base = study.best_rate(Arm(), "rate", RATES)
    rates = [base.rate * 2.0**n for n in range(-1, 4)]
    for small in (False, True):
        begun = replace(base, small=small)
        study.test(begun)
        grown, alone = (study.best_rate(replace(begun, grows=grows), "then", rates) for grows in ("image.", ""))
        for arm in (grown, alone, replace(grown, grows="")):
            study.test(arm)


PHASES = {"main": main_phase, "grow": grow_phase}


def floor(study: Study) -> None:
    """Write what chance and the simplest baseline give on the test icons."""
    if "baseline" not in study.arms.done:
        keys = {"name": "baseline", "on": "test", "kind": "baseline", "seconds": 0.0}
        study.arms.add(keys | baseline.chosen(study.pairs.icons))


def check() -> None:
    """Run every phase at toy size on made icons, and assert what the study rests on."""
    made = icons.made(60, **ICONS)
    assert not {icons.group_of(name) for name in made.names(made.rows("test", variants=True))} & {
        icons.group_of(name) for name in made.names(made.rows("train", "validation", variants=True))
    }, "a group is held out and trained on"
    assert not made.variant[made.rows("test")].any(), "a variant of skin tone is asked for"
    size, pairs = Size(towers(32, (1, 1), made.vocab), steps=3, more=2, batch=16), Pairs(made, "cpu")
    sizes = [cost(config_of(size, Arm(kind=kind))).parameters for kind in ("tokenformer", "transformer")]
    assert abs(sizes[0] / sizes[1] - 1) < 0.02, sizes
    with tempfile.TemporaryDirectory() as folder:
        Study.extensions = 1
        study = Study(size, pairs, Path(folder))
        study.phases(PHASES)
        floor(study)
        again, arms = Study(size, pairs, Path(folder)), study.arms
        again.phases(PHASES)
        assert arms.ran and not again.arms.ran, "a finished arm was run again"
        moved = [entry["growth"]["largest_change"] for entry in arms.done.values() if "growth" in entry]
        assert moved and max(moved) < 1e-6, moved
        from report import tables

        print(tables(list(arms.done.values())))
    print(f"all is well: {len(arms.ran)} arms")


def main() -> None:
    parser = arguments(__file__, __doc__, PHASES)
    parser.add_argument("--cifar", type=Path)
    args = parser.parse_args()
    if args.check:
        return check()
    if args.data is None:
        parser.error("say with --data where the icons are")
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = icons.read(args.data, **ICONS)
    size = Size(towers(64, (2, 1), found.vocab), steps=600, more=300, batch=128)
    cifar = Cifar.read(args.cifar, device) if args.cifar else None
    study = Study(size, Pairs(found, device), args.out, args.seconds, cifar)
    floor(study)
    study.phases(args.phase)


if __name__ == "__main__":
    main()
