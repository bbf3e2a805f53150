"""Vision TokenFormer on a subset of CIFAR-10: beside a ViT of equal parameters, with other Θ, and grown.

  python experiments/vision/run.py --data DATA [--phase main theta late early] [--seconds 540] [--processes 4] [--out O]
  python experiments/vision/run.py --check          # all phases at toy size on a CPU, in half a minute

DATA is the folder of the subset: 12,000 training and 3,000 test images. Finished arms are skipped, and each is written
to O/arms.jsonl as it ends: the study can be done in parts, a stop loses the arm under way.
"""

import argparse
import dataclasses
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
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


class OutOfTime(Exception):
    pass


class Study:
    """Runs arms that are not done yet in worker processes, and remembers what they gave.

    Small models leave most of a GPU idle, so several are trained at once. Phases are threads that wait for their arms.
    """

    extensions = 3  # of a grid of rates, at most

    def __init__(self, size: Size, parts: Parts, out: Path, seconds: float, processes: int, device: str) -> None:
        self.size, self.device, self.file, self.end = size, device, out / "arms.jsonl", time.monotonic() + seconds
        lines = self.file.read_text().splitlines(keepends=True) if self.file.exists() else []
        if lines and not lines[-1].endswith("\n"):  # cut by a kill
            self.file.write_text("".join(lines := lines[:-1]))
        self.done: dict[str, dict] = {entry["name"]: entry for entry in map(json.loads, lines)}
        self.asked: dict[str, Future] = {}
        self.ran: list[str] = []
        self.places, self.lock = threading.Semaphore(processes), threading.Lock()
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(processes, spawn, _begin, (size, parts, device))

    def run(self, arms: Sequence[Arm]) -> list[dict]:
        """Return what arms gave, in their order. What is not done yet runs at once, as far as there are processes."""
        with ThreadPoolExecutor(len(arms)) as threads:
            return list(threads.map(self.result, arms))

    def result(self, arm: Arm) -> dict:
        with self.lock:
            if arm.name in self.done:
                return self.done[arm.name]
            mine = arm.name not in self.asked
            future = self.asked.setdefault(arm.name, Future())
        if mine:  # another phase may want the same arm, and then waits for it
            try:
                future.set_result(self.start(arm))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def start(self, arm: Arm) -> dict:
        with self.places:
            pace = [entry["seconds"] / entry["flops"] for entry in self.done.values()]
            needed = 30 + flops_of(self.size, arm) * (1.5 * median(pace) if pace else FIRST / unit(self.size))
            if needed > self.end - time.monotonic():
                print(f"not begun, {needed:.0f} s are needed: {arm.name}", flush=True)
                raise OutOfTime
            print(f"begun: {arm.name}", flush=True)
            facts = self.pool.submit(_work, arm).result()
        entry = {"name": arm.name, **dataclasses.asdict(arm), **facts, "device": self.device}
        with self.lock:
            with open(self.file, "a") as file:
                file.write(json.dumps(entry) + "\n")
            self.done[arm.name] = entry
            self.ran.append(arm.name)
        print(f"{arm.name}: top-1 {facts['top1']:.2%}, loss {facts['loss']:.4f}, {facts['seconds']:.0f} s", flush=True)
        return entry

    def best_rates(self, arms: Sequence[Arm], rates: Sequence[float] = RATES) -> list[Arm]:
        """Choose the rate of each arm by the loss on held-back images; a grid is extended until its best is inside."""
        grids, best = {arm: sorted(rates) for arm in arms}, {}
        for _ in range(self.extensions + 1):
            tried = [replace(arm, rate=rate, on="held back", seed=0) for arm in arms for rate in grids[arm]]
            losses = iter([entry["loss"] if entry["loss"] < np.inf else np.inf for entry in self.run(tried)])
            for arm in arms:
                best[arm] = min((next(losses), rate) for rate in grids[arm])[1]
            edges = [arm for arm, grid in grids.items() if best[arm] in (grid[0], grid[-1])]
            for arm in edges:
                grid = grids[arm]
                grids[arm] = sorted([*grid, best[arm] * 2 if best[arm] == grid[-1] else best[arm] / 2])
            if not edges:
                break
        return [replace(arm, rate=best[arm]) for arm in arms]

    def best(self, kind: str) -> Arm:
        """Choose rate and first values of a plain model, by the loss on held-back images."""
        both = self.best_rates([Arm(kind=kind, init=init) for init in ("official", "zero")])
        return min(both, key=lambda arm: self.done[replace(arm, on="held back", seed=0).name]["loss"])

    def test(self, arms: Sequence[Arm], seeds: Sequence[int]) -> list[dict]:
        return self.run([replace(arm, seed=seed, on="test") for seed in seeds for arm in arms])

    def phases(self, names: Sequence[str]) -> None:
        """Run phases at the same time. When time is over, arms under way end and are kept."""
        with self.pool, ThreadPoolExecutor(len(names)) as threads:
            ended = [threads.submit(PHASES[name], self) for name in names]
        if any(isinstance(phase.exception(), OutOfTime) for phase in ended):
            print("out of time: start it again to go on", flush=True)
        for phase in ended:
            if not isinstance(phase.exception(), OutOfTime):
                phase.result()


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
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(study.best, ("tokenformer", "vit")))
    study.test(both, SEEDS)


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
        assert not late.ran, "an arm was begun that would not end in time"
        studies[0].phases(list(PHASES))
        studies.append(Study(size, parts, Path(folder), 1e9, 2, "cpu"))
        studies[1].phases(list(PHASES))
        study = studies[0]
        assert study.ran and not studies[1].ran, "a finished arm was run again"
        assert len(study.ran) == len(set(study.ran)), "an arm was run twice"
        for entry in study.done.values():
            if entry.get("growth"):
                assert entry["growth"]["same_predictions"] == 1.0 and entry["growth"]["largest_change"] < 1e-4, entry
            assert np.isfinite(entry["loss"]), entry
        arms = (Arm(legs=(Leg(3, 2.0),)), Arm(legs=(Leg(1, 0.6), Leg(3, 1.4))))
        large = replace(size, steps=1000)
        assert all(abs(flops_of(large, arm) / unit(large) / 2 - 1) < 1e-3 for arm in arms), "compute is not equal"
        assert steps_of(large, arms[1])[0] == 600
        from report import tables

        told = tables(list(study.done.values()))
        assert told.count("points (") == 5, told  # ViT, two Θ, both kinds of growth
        print(told)
    print(f"all is well: {len(study.ran)} arms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--phase", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--seconds", type=float, default=1e9, help="an arm that would not end in time is not begun")
    parser.add_argument("--processes", type=int, default=4, help="arms that are trained at once")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--check", action="store_true")
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
