"""Training many small image models on one device: all images lie there, and an epoch is augmented at once.

Unusual: an arm is a list of legs, each a size of the model and a share of compute; between two legs the model grows.
The rate is a function of compute and not of steps, so that arms of different sizes are compared at equal cost.
"""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.config_data import DRAWS, OPERATIONS, ImagesConfig
from tokenformer.config_growth import Growth
from tokenformer.config_train import OptimizerConfig
from tokenformer.growth.model import apply_plan, plan_for
from tokenformer.growth.state import grow_state
from tokenformer.models import ImageModel
from tokenformer.models.cost import cost, equal_transformer, training_flops_per_sample
from tokenformer.ops.augment import augment, normalise
from tokenformer.parallel.layout import Layout
from tokenformer.train.average import Average
from tokenformer.train.optim import Optimizer

PADDING, WARMUP = 4, 0.05
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SETTINGS = ImagesConfig(  # what `vision/cifar` has, but for mean and deviation, which are CIFAR's
    randaugment_ops=2,
    mixup=0.8,
    cutmix=1.0,
    smoothing=0.1,
    mean=[0.4914, 0.4822, 0.4465],
    std=[0.2470, 0.2435, 0.2616],
)


@dataclass(frozen=True)
class Leg:
    """A part of a run: the tokens of the model as a multiple of the first size, and its compute in units."""

    times: int
    compute: float


@dataclass(frozen=True)
class Arm:
    """One run. A unit of compute is what the first size of TokenFormer needs for all steps of a plain run."""

    kind: str = "tokenformer"
    theta: str = "l2_norm_gelu"
    init: str = "official"  # or zero: a block adds nothing at first
    rate: float = 2e-3
    base_rate: float | None = None  # of the first leg, where it is another
    legs: tuple[Leg, ...] = (Leg(1, 1.0),)
    restart: bool = False  # each leg has its own schedule, and begins from the averaged weights; else one for all
    seed: int = 0
    on: str = "held back"  # or test: trained on all training images, and measured on the test images at its end

    @property
    def name(self) -> str:
        legs = "+".join(f"x{leg.times}:{leg.compute:g}" for leg in self.legs)
        words = [self.kind, self.theta if self.kind == "tokenformer" else "", "zero" if self.init == "zero" else ""]
        words += [legs, "restart" if self.restart else ""]
        words.append(f"base rate {self.base_rate:g}" if self.base_rate else "")
        return " ".join([w for w in words if w] + [f"rate {self.rate:g}", f"seed {self.seed}", self.on])


@dataclass(frozen=True)
class Size:
    """How large everything is: the study, or the check."""

    model: ModelConfig
    steps: int  # of a unit
    batch: int
    held_back: int
    ema: float = 0.999
    drop_path: float = 0.1


class Pictures:
    """CIFAR's images and labels on the device. Held-back images are chosen from the training images, once for all."""

    def __init__(self, parts: dict[str, tuple[np.ndarray, np.ndarray]], held_back: int, device: str) -> None:
        pixels, labels = parts["train"]
        order = np.random.default_rng(20241023).permutation(len(labels))
        chosen = {"held back": np.sort(order[:held_back]), "rest": np.sort(order[held_back:])}
        found = {name: (pixels[rows], labels[rows]) for name, rows in chosen.items()} | parts
        self.device = device
        self.parts = {name: tuple(torch.from_numpy(a).to(device) for a in pair) for name, pair in found.items()}

    def training(self, arm: Arm) -> tuple[Tensor, Tensor]:
        return self.parts["train" if arm.on == "test" else "rest"]

    def epoch(self, arm: Arm, number: int, batch: int) -> tuple[Tensor, Tensor]:
        """Return all training images of an epoch in its order, augmented, with their soft targets."""
        pixels, labels = self.training(arm)
        rng = np.random.default_rng([arm.seed, number])
        count = len(labels) // batch * batch
        order = torch.from_numpy(rng.permutation(len(labels))[:count]).to(self.device)
        images = padded_crops(pixels[order], torch.from_numpy(rng.integers(0, 2 * PADDING + 1, (2, count))))
        batch_of = {"pixels": images, "label": labels[order], "draws": draw(count, rng)}
        return augment(batch_of, SETTINGS, len(CLASSES))


def read(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return pixels (N, 32, 32, 3) and labels of the subset, whose files hold 500 images below each other."""
    from PIL import Image

    about, found = json.loads((folder / "labels.json").read_text()), {}
    for part in ("train", "test"):
        files = sorted(folder.glob(f"{part}-*.webp"))
        pixels = np.concatenate([np.asarray(Image.open(f).convert("RGB")).reshape(-1, 32, 32, 3) for f in files])
        labels = np.array(about[part]["labels"], np.int64)
        assert len(pixels) == len(labels), f"{part}: {len(pixels)} images, {len(labels)} labels"
        found[part] = pixels, labels
    return found


def padded_crops(pixels: Tensor, places: Tensor) -> Tensor:
    """Return each image, with a black border, cut at its own place (top, left in 0 … 2 · PADDING)."""
    count, side = pixels.shape[:2]
    wide = torch.nn.functional.pad(pixels, (0, 0, PADDING, PADDING, PADDING, PADDING))
    top, left = places.to(pixels.device).unsqueeze(2) + torch.arange(side, device=pixels.device)
    rows = torch.arange(count, device=pixels.device).view(-1, 1, 1)
    return wide[rows, top.unsqueeze(2), left.unsqueeze(1)]


def draw(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return `draws` of data/images/__init__.py for many images at once."""
    s, found = SETTINGS, np.zeros((count, len(DRAWS) + 2 * SETTINGS.randaugment_ops), np.float32)
    at = {name: column for column, name in enumerate(DRAWS)}
    found[:, at["flip"]] = rng.random(count) < s.flip
    kind = np.where(rng.random(count) < 0.5, 1, 2)
    found[:, at["mix"]] = kind
    found[:, at["mix_share"]] = np.where(kind == 1, rng.beta(s.mixup, s.mixup, count), rng.beta(1, 1, count))
    found[:, at["cut_row"]], found[:, at["cut_column"]] = rng.random((2, count))
    for column in range(len(DRAWS), found.shape[1], 2):
        applied = rng.random(count) < s.randaugment_probability
        found[:, column] = np.where(applied, rng.integers(0, len(OPERATIONS), count), -1)
        level = rng.normal(s.randaugment_level, s.randaugment_deviation, count).clip(0, 10)
        found[:, column + 1] = np.where(rng.random(count) < 0.5, level, -level)
    return found


def config_of(size: Size, arm: Arm, times: int) -> ModelConfig:
    c = dataclasses.replace(size.model, init=arm.init)
    if arm.kind == "vit":
        return equal_transformer(c)
    return dataclasses.replace(c, theta=arm.theta, **tokens(c, times)).resolved()


def tokens(c: ModelConfig, times: int) -> dict[str, int]:
    return {name: times * int(getattr(c, name)) for name in ("qkv_tokens", "proj_tokens", "ffn_tokens")}


def unit(size: Size) -> float:
    """FLOPs of a unit of compute."""
    return training_flops_per_sample(size.model) * size.batch * size.steps


def steps_of(size: Size, arm: Arm) -> list[int]:
    """Return the steps of each leg: as many as its compute pays for."""
    each = [training_flops_per_sample(config_of(size, arm, leg.times)) * size.batch for leg in arm.legs]
    return [max(1, round(leg.compute * unit(size) / flops)) for leg, flops in zip(arm.legs, each, strict=True)]


def flops_of(size: Size, arm: Arm) -> float:
    costs = [training_flops_per_sample(config_of(size, arm, leg.times)) * size.batch for leg in arm.legs]
    return sum(count * flops for count, flops in zip(steps_of(size, arm), costs, strict=True))


def factor(share: float) -> float:
    """Return the rate at a share of the compute: up by a line, down to 0 by a cosine."""
    if share < WARMUP:
        return (share + 1e-3) / (WARMUP + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP)))


class Learner:
    """A model with its optimizer and average."""

    def __init__(self, model: ImageModel, size: Size, rate: float, state: dict | None = None) -> None:
        self.model, self.size, self.layout = model, size, Layout(model)
        config = OptimizerConfig(kind="muon", rate=rate, weight_decay=0.1)
        self.optimizer = Optimizer(self.layout, config)
        if state:
            self.optimizer.load_state_by_name(state)
        self.average = Average(size.ema, self.layout)
        if next(model.parameters()).is_cuda:
            model.compute_dtype = torch.bfloat16
            for block in model.blocks:
                block.compile(dynamic=False)

    def step(self, x: Tensor, targets: Tensor, rate: float, number: int, random: torch.Generator) -> None:
        layers, device = self.model.config.layers, x.device
        stay = (1 - torch.linspace(0, self.size.drop_path, layers, device=device)).view(-1, 1, 1)
        drop = (torch.rand(layers, 2, len(x), generator=random, device=device) < stay) / stay
        logits = self.model(x, drop=drop).float()
        (-(targets * logits.log_softmax(-1)).sum() / len(x)).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.optimizer.step(rate, norm.clamp(min=1.0), (~norm.isfinite()).float())
        self.average.update(number)
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def measure(self, pixels: Tensor, labels: Tensor, batch: int = 1000) -> dict[str, float]:
        """Return loss and top-1 with the averaged weights."""
        self.model.eval()
        with self.average.in_place(), torch.compiler.set_stance("force_eager"):  # other shapes are not compiled for
            logits = logits_of(self.model, pixels, batch)
        self.model.train()
        loss = torch.nn.functional.cross_entropy(logits, labels).item()
        return {"loss": loss, "top1": (logits.argmax(1) == labels).float().mean().item()}


@torch.no_grad()
def logits_of(model: ImageModel, pixels: Tensor, batch: int = 1000) -> Tensor:
    parts = [model(normalise(some.permute(0, 3, 1, 2), SETTINGS)).float() for some in pixels.split(batch)]
    return torch.cat(parts)


def grown(learner: Learner, arm: Arm, times: int, pixels: Tensor) -> tuple[Learner, dict[str, float]]:
    """Return a learner with more tokens, and how far what it says of some training images moved.

    With `restart` the averaged weights grow and the optimizer begins anew; else weights, state and average go on.
    """
    size, model = learner.size, learner.model
    with torch.no_grad():
        if arm.restart:
            for name, tensor in learner.average.tensors.items():
                learner.layout.named[name].copy_(tensor)
    compute, model.compute_dtype = model.compute_dtype, None  # what rounding adds is not the rule's
    plain = uncompiled(model)
    if times == 1:
        bigger, state, moved = plain, None, {}
    else:
        plan = plan_for(plain, Growth(**tokens(size.model, times)), seed=arm.seed)
        bigger = apply_plan(plain, plan)
        before, after = logits_of(plain, pixels), logits_of(bigger, pixels)
        state = grow_state(plan, learner.optimizer.state_by_name())
        same = (before.argmax(1) == after.argmax(1)).float().mean().item()
        moved = {"largest_change": (after - before).abs().max().item(), "same_predictions": same}
    bigger.compute_dtype = compute
    made = Learner(bigger, size, arm.rate, None if arm.restart else state)
    if not arm.restart:
        made.average = Average(size.ema, made.layout, learner.average.tensors)
    return made, moved


def uncompiled(model: ImageModel) -> ImageModel:
    """Return a model with the same parameters, none of whose blocks is compiled."""
    with torch.device("meta"):
        fresh = ImageModel(model.config)
    fresh.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()}, assign=True)
    fresh.history = model.history
    return fresh


def train(arm: Arm, size: Size, pictures: Pictures) -> dict:
    """Train an arm and return what it gave."""
    begun, device = time.monotonic(), pictures.device
    counts, random = steps_of(size, arm), torch.Generator(device).manual_seed(arm.seed)
    model = ImageModel(config_of(size, arm, arm.legs[0].times), seed=arm.seed).to(device)
    learner, facts, spent, number = Learner(model, size, arm.rate), {}, 0.0, 0
    total, batches = flops_of(size, arm), endless(arm, size, pictures)
    for leg, (part, steps) in enumerate(zip(arm.legs, counts, strict=True)):
        if leg:
            learner, facts["growth"] = grown(learner, arm, part.times, pictures.training(arm)[0][:1000])
            number = 0 if arm.restart else number
        flops = training_flops_per_sample(learner.model.config) * size.batch
        for step in range(steps):
            share = step / steps if arm.restart else spent / total
            rate = arm.base_rate if arm.base_rate and not leg else arm.rate
            learner.step(*next(batches), rate * factor(share), number, random)
            spent, number = spent + flops, number + 1
        if arm.on != "test":  # the test images are looked at once, at the end
            facts[f"leg{leg}"] = learner.measure(*pictures.parts[arm.on])
    facts |= learner.measure(*pictures.parts[arm.on])
    facts |= {"parameters": cost(learner.model.config).parameters, "steps": sum(counts), "flops": spent}
    return facts | {"seconds": time.monotonic() - begun}


def endless(arm: Arm, size: Size, pictures: Pictures) -> Iterator[tuple[Tensor, Tensor]]:
    epoch = 0
    while True:
        yield from zip(*(t.split(size.batch) for t in pictures.epoch(arm, epoch, size.batch)), strict=True)
        epoch += 1
