"""Vision TokenFormer on a subset of CIFAR-10: beside a ViT of equal parameters, with other Θ, and grown.

  python experiments/vision/run.py --data DATA [--phase main theta late early] [--seconds 540] [--out OUT]
  python experiments/vision/run.py --check          # all phases at toy size on a CPU, in a minute

DATA is the folder of the subset: 12,000 training and 3,000 test images. Finished arms are skipped, and each is written
to OUT/arms.jsonl as it ends: the study can be done in parts, a stop loses the arm under way.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from training import CLASSES, Arm, Leg, Pictures, Size, config_of, flops_of, read, steps_of, train, unit

from tokenformer.config import ModelConfig, load
from tokenformer.models.cost import cost

STUDY = {"steps": 2300, "batch": 512, "held_back": 1200}  # 98 epochs of 12,000 images
RATES, SEEDS = (1e-3, 2e-3, 4e-3), (0, 1, 2, 3, 4)
THETAS = ("softmax", "l1_norm_gelu")
TOY = ModelConfig(of="image", layers=2, dim=32, heads=2, image_size=32, patch=8, classes=10,
                  qkv_tokens=24, proj_tokens=24, ffn_tokens=96)  # fmt: skip


class OutOfTime(Exception):
    pass


class Study:
    """Runs arms that are not done yet, and remembers what they gave."""

    def __init__(self, size: Size, pictures: Pictures, out: Path, seconds: float) -> None:
        self.size, self.pictures, self.file, self.end = size, pictures, out / "arms.jsonl", time.monotonic() + seconds
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.done: dict[str, dict] = {entry["name"]: entry for entry in map(json.loads, lines)}
        self.ran: list[str] = []

    def run(self, arms: Sequence[Arm]) -> list[dict]:
        for arm in arms:
            if arm.name not in self.done:
                self.start(arm)
        return [self.done[arm.name] for arm in arms]

    def start(self, arm: Arm) -> None:
        pace = [e["seconds"] / e["flops"] for e in self.done.values()]
        needed = 30 + flops_of(self.size, arm) * max(pace, default=0.0)
        if needed > self.end - time.monotonic():
            print(f"not begun, {needed:.0f} s are needed: {arm.name}", flush=True)
            raise OutOfTime
        facts = train(arm, self.size, self.pictures)
        entry = {"name": arm.name, **dataclasses.asdict(arm), **facts, "device": self.pictures.device}
        with open(self.file, "a") as file:
            file.write(json.dumps(entry) + "\n")
        self.done[arm.name] = entry
        self.ran.append(arm.name)
        print(f"{arm.name}: top-1 {facts['top1']:.2%}, loss {facts['loss']:.4f}, {facts['seconds']:.0f} s", flush=True)

    def best_rate(self, arm: Arm, rates: Sequence[float] = RATES, most: int = 3) -> Arm:
        """Choose the rate by the loss on held-back images; the grid is extended until the best is not at its edge."""
        rates = sorted(rates)
        for _ in range(most + 1):
            arms = [dataclasses.replace(arm, rate=rate, on="held back", seed=0) for rate in rates]
            losses = [entry["loss"] for entry in self.run(arms)]
            best = rates[int(np.nanargmin(losses))]
            if best not in (rates[0], rates[-1]):
                break
            rates = sorted([*rates, best * 2 if best == rates[-1] else best / 2])
        return dataclasses.replace(arm, rate=best)

    def test(self, arm: Arm, seeds: Sequence[int]) -> list[dict]:
        return self.run([dataclasses.replace(arm, seed=seed, on="test") for seed in seeds])


def main_phase(study: Study) -> Arm:
    """TokenFormer and a ViT of equal parameters, five seeds each, at equal compute."""
    ours, vit = (study.best_rate(Arm(kind=kind)) for kind in ("tokenformer", "vit"))
    for arm in (ours, vit):
        study.test(arm, SEEDS)
    return ours


def theta(study: Study) -> None:
    """Softmax and L1 beside L2, which `main` has: rates chosen for each, three seeds."""
    for name in THETAS:
        study.test(study.best_rate(Arm(theta=name)), SEEDS[:3])
    main_phase(study)


def late(study: Study) -> None:
    """A trained model grows ×3 by segments and is trained on; beside it the same model without growth."""
    base = main_phase(study)
    for times in (3, 1):
        arm = dataclasses.replace(base, base_rate=base.rate, legs=(Leg(1, 1.0), Leg(times, 1.0)), restart=True)
        study.test(study.best_rate(arm, (base.rate / 2, base.rate, base.rate * 2)), SEEDS[:3])


def early(study: Study) -> None:
    """Growth inside of a run against the large size from scratch, both with two units of compute."""
    scratch = study.best_rate(Arm(legs=(Leg(3, 2.0),)))
    shares = [dataclasses.replace(scratch, legs=(Leg(1, 2 * share), Leg(3, 2 * (1 - share)))) for share in (0.1, 0.3)]
    losses = [entry["loss"] for entry in study.run(shares)]
    chosen = shares[losses.index(min(losses))]
    for arm in (scratch, chosen):
        study.test(arm, SEEDS[:3])


PHASES = {"main": main_phase, "theta": theta, "late": late, "early": early}


def check() -> None:
    """Run every phase at toy size on made images, and assert what the study rests on."""
    rng = np.random.default_rng(0)
    parts = {}
    for part, count in (("train", 160), ("test", 40)):
        labels = rng.integers(0, len(CLASSES), count)
        noise = rng.integers(0, 60, (count, 32, 32, 3))
        parts[part] = (noise + 18 * labels[:, None, None, None]).astype(np.uint8), labels.astype(np.int64)
    size = Size(TOY.resolved(), steps=3, batch=32, held_back=32, ema=0.9)
    pictures = Pictures(parts, size.held_back, "cpu")
    held, rest = (pictures.parts[name][0].flatten(1) for name in ("held back", "rest"))
    assert len(held) == 32 and not (held.unsqueeze(1) == rest).all(2).any(), "a held-back image is trained on"
    sizes = [cost(config_of(size, Arm(kind=kind), 1)).parameters for kind in ("tokenformer", "vit")]
    assert abs(sizes[0] / sizes[1] - 1) < 0.02, sizes
    once, again = (pictures.epoch(Arm(seed=3), 1, 32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        study = Study(size, pictures, Path(folder), 1e9)
        for phase in PHASES.values():
            phase(study)
        second = Study(size, pictures, Path(folder), 1e9)
        for phase in PHASES.values():
            phase(second)
        assert study.ran and not second.ran, "a finished arm was run again"
        for entry in study.done.values():
            if entry.get("growth"):
                assert entry["growth"]["same_predictions"] == 1.0 and entry["growth"]["largest_change"] < 1e-4, entry
            assert np.isfinite(entry["loss"]), entry
        arms = (Arm(legs=(Leg(3, 2.0),)), Arm(legs=(Leg(1, 0.6), Leg(3, 1.4))))
        large = dataclasses.replace(size, steps=1000)
        assert all(abs(flops_of(large, arm) / unit(large) / 2 - 1) < 1e-3 for arm in arms), "compute is not equal"
        assert steps_of(large, arms[1])[0] == 600
        from report import tables

        print(tables(list(study.done.values())))
    print(f"all is well: {len(study.ran)} arms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--phase", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--seconds", type=float, default=1e9, help="an arm that would not end in time is not begun")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        return check()
    if args.data is None:
        parser.error("say with --data where the subset of CIFAR-10 is")
    torch.set_float32_matmul_precision("high")
    size = Size(load("vision/cifar").model.resolved(), **STUDY)
    pictures = Pictures(read(args.data), size.held_back, "cuda" if torch.cuda.is_available() else "cpu")
    study = Study(size, pictures, args.out, args.seconds)
    try:
        for phase in args.phase:
            PHASES[phase](study)
    except OutOfTime:
        print("out of time: start it again to go on", flush=True)


if __name__ == "__main__":
    main()
