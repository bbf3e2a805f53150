"""Vision TokenFormer on a subset of CIFAR-10: beside a ViT of equal parameters, with other Θ, and grown.

  python experiments/vision/run.py --data DATA [--phase main theta late early] [--seconds 540] [--processes 4] [--out O]
  python experiments/vision/run.py --check          # all phases at toy size on a CPU, in half a minute

DATA is the folder of the subset: 12,000 training and 3,000 test images. Finished arms are skipped, and each is written
to O/arms.jsonl as it ends: the study can be done in parts, a stop loses the arm under way.
"""

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(1, str(Path(__file__).parents[1]))

from study import Arms, arguments, best_of_grid, each
from training import CLASSES, Arm, Leg, Pictures, Size, config_of, flops_of, read, steps_of, train, unit

from tokenformer.config import ModelConfig, load
from tokenformer.models.cost import cost

STUDY = {"steps": 2300, "batch": 512, "held_back": 1200}  # 98 epochs of 12,000 images
FIRST = 60  # seconds that a unit of compute is thought to need before one was measured
RATES, SEEDS = (1e-3, 2e-3, 4e-3), (0, 1, 2, 3, 4)
THETAS = ("softmax", "l1_norm_gelu")
TOY = ModelConfig(of="image", layers=2, dim=32, heads=2, image_size=32, patch=8, classes=10,
                  qkv_tokens=24, proj_tokens=24, ffn_tokens=96)  # fmt: skip
Parts = dict[str, tuple[np.ndarray, np.ndarray]]
READY: dict[str, Any] = {}  # of a worker process: what all arms share


class Study:
    """The arms of the study. Phases are threads that wait for theirs."""

    extensions = 3  # of a grid of rates, at most

    def __init__(self, size: Size, parts: Parts, out: Path, seconds: float, processes: int, device: str) -> None:
        self.size, self.device, given = size, device, (size, parts, device)
        self.arms = Arms(out, _told, seconds, processes, _begin, given)

    def result(self, arm: Arm) -> dict:
        def needed() -> float:
            pace = self.arms.pace(lambda entry: entry["seconds"] / entry["flops"], FIRST / unit(self.size))
            return 30 + flops_of(self.size, arm) * pace

        return self.arms.once(arm.name, dataclasses.asdict(arm) | {"device": self.device}, _work, arm, needed)

    def run(self, arms: Sequence[Arm]) -> list[dict]:
        """Return what arms gave, in their order. What is not done yet runs at once, as far as there are processes."""
        return each(arms, self.result)

    def best_rates(self, arms: Sequence[Arm], rates: Sequence[float] = RATES) -> list[Arm]:
        """Choose the rate of each arm by the loss on held-back images; a grid is extended until its best is inside."""

        def best(arm: Arm) -> Arm:
            def losses(grid: list[float]) -> list[float]:
                return [entry["loss"] for entry in self.run([replace(tried, rate=rate) for rate in grid])]

            tried = replace(arm, on="held back", seed=0)
            return replace(arm, rate=best_of_grid(rates, losses, self.extensions))

        return each(arms, best)

    def best(self, kind: str) -> Arm:
        """Choose rate and first values of a plain model, by the loss on held-back images."""
        both = self.best_rates([Arm(kind=kind, init=init) for init in ("official", "zero")])
        return min(both, key=lambda arm: self.result(replace(arm, on="held back", seed=0))["loss"])

    def test(self, arms: Sequence[Arm], seeds: Sequence[int]) -> list[dict]:
        return self.run([replace(arm, seed=seed, on="test") for seed in seeds for arm in arms])

    def phases(self, names: Sequence[str]) -> None:
        self.arms.phases({name: functools.partial(PHASES[name], self) for name in names}, at_once=True)


def _told(entry: dict) -> str:
    return f"top-1 {entry['top1']:.2%}, loss {entry['loss']:.4f}"


def _begin(size: Size, parts: Parts, device: str) -> None:
    """Make a worker ready: all images on the device."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else later models would silently run uncompiled
    READY.update(size=size, pictures=Pictures(parts, size.held_back, device))


def _work(arm: Arm) -> dict:
    return train(arm, READY["size"], READY["pictures"])


def main_phase(study: Study) -> None:
    """TokenFormer and a ViT of equal parameters, five seeds each, at equal compute."""
    study.test(each(("tokenformer", "vit"), study.best), SEEDS)


def theta(study: Study) -> None:
    """Softmax and L1 beside L2, which `main` has: rates chosen for each, three seeds."""
    init = study.best("tokenformer").init
    study.test(study.best_rates([Arm(theta=name, init=init) for name in THETAS]), SEEDS[:3])


def late(study: Study) -> None:
    """A trained model grows ×3 by segments and is trained on; beside it the same model without growth."""
    base = study.best("tokenformer")
    both = [replace(base, base_rate=base.rate, legs=(Leg(1, 1.0), Leg(times, 1.0)), restart=True) for times in (3, 1)]
    study.test(study.best_rates(both, (base.rate / 2, base.rate, base.rate * 2)), SEEDS[:3])


def early(study: Study) -> None:
    """Growth inside of a run against the large size from scratch, both with two units of compute."""
    (scratch,) = study.best_rates([replace(study.best("tokenformer"), legs=(Leg(3, 2.0),))])
    shares = [replace(scratch, legs=(Leg(1, 2 * share), Leg(3, 2 * (1 - share)))) for share in (0.1, 0.3)]
    losses = [entry["loss"] for entry in study.run(shares)]
    study.test([scratch, shares[losses.index(min(losses))]], SEEDS[:3])


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
        late, *studies = [Study(size, parts, Path(folder), seconds, 2, "cpu") for seconds in (1, 1e9)]
        Study.extensions = 1
        late.phases(list(PHASES))
        assert not late.arms.ran, "an arm was begun that would not end in time"
        studies[0].phases(list(PHASES))
        studies.append(Study(size, parts, Path(folder), 1e9, 2, "cpu"))
        studies[1].phases(list(PHASES))
        first, again = (study.arms for study in studies)
        assert first.ran and not again.ran, "a finished arm was run again"
        assert len(first.ran) == len(set(first.ran)), "an arm was run twice"
        for entry in first.done.values():
            if entry.get("growth"):
                assert entry["growth"]["same_predictions"] == 1.0 and entry["growth"]["largest_change"] < 1e-4, entry
            assert np.isfinite(entry["loss"]), entry
        arms = (Arm(legs=(Leg(3, 2.0),)), Arm(legs=(Leg(1, 0.6), Leg(3, 1.4))))
        large = replace(size, steps=1000)
        assert all(abs(flops_of(large, arm) / unit(large) / 2 - 1) < 1e-3 for arm in arms), "compute is not equal"
        assert steps_of(large, arms[1])[0] == 600
        from report import tables

        told = tables(list(first.done.values()))
        assert told.count("points (") == 5, told  # ViT, two Θ, both kinds of growth
        print(told)
    print(f"all is well: {len(first.ran)} arms")


def main() -> None:
    parser = arguments(__file__, __doc__, PHASES, processes=4)
    args = parser.parse_args()
    if args.check:
        return check()
    if args.data is None:
        parser.error("say with --data where the subset of CIFAR-10 is")
    args.out.mkdir(parents=True, exist_ok=True)
    size, device = Size(load("vision/cifar").model.resolved(), **STUDY), "cuda" if torch.cuda.is_available() else "cpu"
    Study(size, read(args.data), args.out, args.seconds, args.processes, device).phases(args.phase)


if __name__ == "__main__":
    main()
