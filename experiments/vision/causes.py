"""Why a TokenFormer is behind a ViT on the subset: one thing changed at a time, on held-back images.

  python experiments/vision/causes.py --data DATA [--seconds 540] [--compute 0.5] [--only NAME …] [--out O]

Writes O/causes.jsonl, one line for each variant: top-1 and loss on held-back images with the averaged weights, and the
loss on augmented training images of the last 20 steps. A variant that is there is not run again.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import training
from run import STUDY, _begin
from training import Arm, Learner, Leg, Size, config_of, endless, factor, read, steps_of

from tokenformer.config import load
from tokenformer.config_data import DRAWS
from tokenformer.config_train import OptimizerConfig
from tokenformer.models import ImageModel
from tokenformer.models.cost import cost
from tokenformer.train.optim import Optimizer


@dataclass(frozen=True)
class Variant:
    """What is unlike `main`'s arms."""

    kind: str = "tokenformer"
    rate: float = 4e-3
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)  # ending of names → factor of the first values
    size: dict[str, Any] = field(default_factory=dict)
    backend: str = ""
    dtype: str = "bfloat16"


PLAIN = {"randaugment_ops": 0, "smoothing": 0.0}  # and not mixed
VARIANTS = {
    "tokenformer": Variant(),
    "vit": Variant("vit", 2e-3),
    "reference": Variant(backend="reference"),
    "fp32": Variant(dtype="float32", backend="reference"),
    "rotary": Variant(model={"positions": "rotary"}),
    "vit rotary": Variant("vit", 2e-3, {"positions": "rotary"}),
    "centred": Variant(model={"init": "centred"}),
    "wide attention": Variant(model={"qkv_tokens": 288, "proj_tokens": 288, "ffn_tokens": 384}),
    "wide ffn": Variant(model={"qkv_tokens": 96, "proj_tokens": 96, "ffn_tokens": 1152}),
    "adamw": Variant(rate=1e-3, optimizer={"kind": "adamw"}),
    "adamw ×3": Variant(rate=3e-3, optimizer={"kind": "adamw"}),
    "vit adamw": Variant("vit", 1e-3, optimizer={"kind": "adamw"}),
    "gelu_l2_norm": Variant(model={"theta": "gelu_l2_norm"}),
    "small branches": Variant(scale={"proj.segments.0.value_tokens": 0.1, "ffn.segments.0.value_tokens": 0.1}),
    "sharp": Variant(model={"tau": {w: [2 * n**0.5] for w, n in (("qkv", 192), ("proj", 192), ("ffn", 768))}}),
    "flat": Variant(model={"tau": {w: [0.5 * n**0.5] for w, n in (("qkv", 192), ("proj", 192), ("ffn", 768))}}),
    "narrow": Variant(model={"dim": 192, "heads": 3, "qkv_tokens": 256, "proj_tokens": 256, "ffn_tokens": 1024}),
    "mean pooling": Variant(model={"pool": "mean"}),
    "plain images": Variant(images=PLAIN),
    "vit plain images": Variant("vit", 2e-3, images=PLAIN),
    "no drop path": Variant(size={"drop_path": 0.0}),
    "decay 0.02": Variant(optimizer={"weight_decay": 0.02}),
}


def branches(by: float, kind: str = "tokenformer", rate: float = 4e-3, **others: Any) -> Variant:
    """Give what the two branches of a block add to the stream first values that are smaller."""
    ends = ("proj.segments.0.value_tokens", "ffn.segments.0.value_tokens", "proj.weight", "down.weight")
    return Variant(kind, rate, scale=dict.fromkeys(ends, by), **others)


for by, rate in ((0.1, 4e-3), (0.1, 2e-3), (0.0, 4e-3), (0.3, 4e-3), (0.1, 8e-3), (0.0, 2e-3)):
    VARIANTS[f"branches ×{by:g} rate {rate:g}"] = branches(by, rate=rate)
for by, rate in ((0.1, 2e-3), (0.1, 4e-3), (0.0, 2e-3)):
    VARIANTS[f"vit branches ×{by:g} rate {rate:g}"] = branches(by, "vit", rate)
VARIANTS["branches ×0.1 mean pooling"] = branches(0.1, model={"pool": "mean"})
VARIANTS["vit branches ×0.1 mean pooling"] = branches(0.1, "vit", 2e-3, model={"pool": "mean"})


SETTINGS, DRAW = training.SETTINGS, training.draw


def unmixed(*given: Any) -> Any:
    draws = DRAW(*given)
    draws[:, DRAWS.index("mix")] = 0
    return draws


def work(variant: str, compute: float) -> dict:
    from run import READY

    v = VARIANTS[variant]
    os.environ.pop("TOKENFORMER_PATTENTION", None)
    if v.backend:
        os.environ["TOKENFORMER_PATTENTION"] = v.backend
    pictures, size = READY["pictures"], READY["size"]
    own = dataclasses.replace(size.model, **{"init": "official", **v.model}).resolved()
    size = dataclasses.replace(size, model=own, **v.size)
    training.SETTINGS = dataclasses.replace(SETTINGS, **v.images)
    training.draw = unmixed if v.images else DRAW
    arm = Arm(kind=v.kind, rate=v.rate, theta=own.theta, init=own.init, legs=(Leg(1, compute),))
    config = config_of(size, arm, 1)
    model = ImageModel(config).to(pictures.device)
    with torch.no_grad():
        for parameter, by in (
            (p, by) for n, p in model.named_parameters() for e, by in v.scale.items() if n.endswith(e)
        ):
            parameter.mul_(by)
    learner, losses, begun = Learner(model, size, v.rate), [], time.monotonic()
    config_of_optimizer = OptimizerConfig(**({"kind": "muon", "rate": v.rate, "weight_decay": 0.1} | v.optimizer))
    learner.optimizer = Optimizer(learner.layout, config_of_optimizer)
    if model.compute_dtype is not None:
        model.compute_dtype = getattr(torch, v.dtype)
    (steps,), batches = steps_of(size, arm), endless(arm, size, pictures)
    random = torch.Generator(pictures.device).manual_seed(0)
    for step in range(steps):
        x, targets = next(batches)
        if step >= steps - 20:
            losses.append(learner_loss(learner, x, targets))
        learner.step(x, targets, v.rate * factor(step / steps), step, random)
    facts = learner.measure(*pictures.parts["held back"])
    facts |= {"training": torch.stack(losses).mean().item(), "parameters": cost(config).parameters, "steps": steps}
    return facts | {"seconds": time.monotonic() - begun}


@torch.no_grad()
def learner_loss(learner: Learner, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.compiler.set_stance("force_eager"):
        return -(targets * learner.model(x).float().log_softmax(-1)).sum(1).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS))
    parser.add_argument("--compute", type=float, default=0.5, help="units of compute")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    end, file = time.monotonic() + args.seconds, args.out / "causes.jsonl"
    done = {json.loads(line)["name"] for line in file.read_text().splitlines()} if file.exists() else set()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = Size(load("vision/cifar").model.resolved(), **STUDY)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, spawn, _begin, (size, read(args.data), device)) as pool:
        futures = {}
        for name in [n for n in args.only if f"{n} {args.compute:g}" not in done]:
            futures[name] = pool.submit(timed, name, args.compute, end)
        for name, future in futures.items():
            if (facts := future.result()) is None:
                print("no time:", name, flush=True)
                continue
            with open(file, "a") as out:
                line = {"name": f"{name} {args.compute:g}", **dataclasses.asdict(VARIANTS[name]), **facts}
                out.write(json.dumps(line) + "\n")
            told = f"top-1 {facts['top1']:.2%}, loss {facts['loss']:.4f}, training {facts['training']:.4f}"
            print(f"{name}: {told}, {facts['seconds']:.0f} s", flush=True)


def timed(name: str, compute: float, end: float) -> dict | None:
    try:
        return work(name, compute) if time.monotonic() + 60 * compute + 25 < end else None
    except Exception as error:  # the others go on
        print(f"{name} failed: {error!r}"[:600], flush=True)
        return None


if __name__ == "__main__":
    main()
