"""Pairs on held-out icons: TokenFormer towers beside Transformer towers of equal parameters, and a tower that grows.

  python experiments/pairs/run.py --data DATA [--cifar CIFAR] [--phase main grow] [--seconds 540] [--out O]
  python experiments/pairs/run.py --check          # all phases at toy size on a CPU, in half a minute

DATA is the folder of the icons, CIFAR that of the subset of CIFAR-10. Finished arms are skipped, and each is written to
O/arms.jsonl as it ends: the study can be done in parts, a stop loses the arm under way. Models are kept in O/models,
since the arms that grow begin from those of the main phase.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import baseline
import icons
import numpy as np
import torch
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
    """Runs arms that are not done yet, and remembers what they gave."""

    extensions = 3  # of a grid of rates, at most

    def __init__(self, size: Size, pairs: Pairs, out: Path, seconds: float = 1e9, cifar: Cifar | None = None) -> None:
        self.size, self.pairs, self.cifar, self.out, self.end = size, pairs, cifar, out, time.monotonic() + seconds
        self.file, self.ran = out / "arms.jsonl", list[str]()
        lines = self.file.read_text().splitlines(keepends=True) if self.file.exists() else []
        if lines and not lines[-1].endswith("\n"):  # cut by a kill
            self.file.write_text("".join(lines := lines[:-1]))
        self.done: dict[str, dict] = {entry["name"]: entry for entry in map(json.loads, lines)}

    def result(self, arm: Arm) -> dict:
        if arm.name in self.done:
            return self.done[arm.name]
        longest = max((entry["seconds"] for entry in self.done.values()), default=0.0)
        if time.monotonic() + longest > self.end:
            raise SystemExit(f"out of time before {arm.name}: start it again to go on")
        begun, base = time.monotonic(), self.base(arm)
        model, facts = train(arm, self.size, self.pairs, base, self.cifar)
        if not arm.then:
            model.images, model.tokenizer_json = icons.READING, self.pairs.icons.tokenizer.to_json()
            save(model, self.folder(arm), force=True)
        entry = {"name": arm.name, **dataclasses.asdict(arm), **facts}
        entry |= {"seconds": time.monotonic() - begun, "device": self.pairs.device}
        with open(self.file, "a") as file:
            file.write(json.dumps(entry) + "\n")
        self.done[arm.name] = entry
        self.ran.append(arm.name)
        recall, seconds = facts["mean_recall"], entry["seconds"]
        print(f"{arm.name}: mean recall {recall:.2%}, loss {facts['loss']:.4f}, {seconds:.0f} s", flush=True)
        return entry

    def folder(self, arm: Arm) -> Path:
        return self.out / "models" / arm.name.replace(" ", "-")

    def base(self, arm: Arm) -> PairModel | None:
        """Return the model that a second run begins from; it is trained where it is not kept."""
        if not arm.then:
            return None
        first = replace(arm, then=0.0, grows="")
        if not self.folder(first).exists():
            self.done.pop(first.name, None)
        self.result(first)
        return load(self.folder(first)).to(self.pairs.device)

    def best_rate(self, arm: Arm, key: str, rates: Sequence[float]) -> Arm:
        """Choose a rate by the mean recall on validation icons; the grid is extended until its best is inside."""
        grid = sorted(rates)
        for _ in range(self.extensions + 1):
            tried = [replace(arm, **{key: rate}, on="validation", seed=0) for rate in grid]
            found = [self.result(one)["mean_recall"] for one in tried]
            best = grid[int(np.argmax(found))]
            if best not in (grid[0], grid[-1]):
                break
            grid = sorted([*grid, best * 2 if best == grid[-1] else best / 2])
        return replace(arm, **{key: best})

    def test(self, arm: Arm) -> list[dict]:
        return [self.result(replace(arm, seed=seed, on="test")) for seed in SEEDS]


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
    if "baseline" not in study.done:
        entry = {"name": "baseline", "on": "test", "kind": "baseline", "seconds": 0.0}
        entry |= baseline.chosen(study.pairs.icons)
        with open(study.file, "a") as file:
            file.write(json.dumps(entry) + "\n")
        study.done["baseline"] = entry


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
        first, again = (Study(size, pairs, Path(folder)) for _ in range(2))
        for phase in PHASES.values():
            phase(first)
        floor(first)
        again = Study(size, pairs, Path(folder))
        for phase in PHASES.values():
            phase(again)
        assert first.ran and not again.ran, "a finished arm was run again"
        moved = [entry["growth"]["largest_change"] for entry in first.done.values() if "growth" in entry]
        assert moved and max(moved) < 1e-6, moved
        from report import tables

        print(tables(list(first.done.values())))
    print(f"all is well: {len(first.ran)} arms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--phase", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--seconds", type=float, default=1e9, help="an arm that would not end in time is not begun")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--check", action="store_true")
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
    for name in args.phase:
        PHASES[name](study)


if __name__ == "__main__":
    main()
