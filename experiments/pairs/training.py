"""Training of small pairs on one device: all icons and the ids of their captions lie there, and a step draws its batch.

Unusual: an arm is one run or two; between the two a tower may grow. Nothing is read from disk between steps.
"""

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from icons import READING, Icons
from PIL import Image
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.config_data import ImagesConfig
from tokenformer.config_growth import Growth
from tokenformer.config_train import OptimizerConfig
from tokenformer.data.images.captions import encode_captions
from tokenformer.eval.images import known_file
from tokenformer.growth.model import apply_plan, plan_for
from tokenformer.infer.pairs import ZeroShot
from tokenformer.models import PairModel
from tokenformer.models.cost import equal_transformer
from tokenformer.models.pair import LARGEST
from tokenformer.ops.augment import normalise
from tokenformer.ops.contrastive import sigmoid_loss, softmax_loss
from tokenformer.ops.retrieval import recalls
from tokenformer.parallel.layout import Layout
from tokenformer.train.optim import Optimizer

WARMUP = 0.1
TOKENS = ("qkv_tokens", "proj_tokens", "ffn_tokens")
SMALL = 8  # so many times fewer tokens has a small tower
MOVE = 0.2  # of half an icon's side
SETTINGS = ImagesConfig(mean=READING["mean"], std=READING["std"])


@dataclass(frozen=True)
class Arm:
    """One run; with `then` a second one on its result, in which the tower `grows` (if any) has ×3 tokens.

    A `small` image tower has an eighth of the tokens at first, and grows to all of them (×8).
    """

    kind: str = "tokenformer"
    rate: float = 2e-3
    seed: int = 0
    on: str = "validation"  # or test: then it is trained on the validation part too
    loss: str = "softmax"
    variants: bool = False  # icons of other skin tones are trained on too
    then: float = 0.0  # the rate of the second run; 0: there is none
    grows: str = ""
    small: bool = False

    @property
    def name(self) -> str:
        words = [self.kind, "small" if self.small else "", self.loss, "with variants" if self.variants else ""]
        words += [f"rate {self.rate:g}"]
        words += [f"then rate {self.then:g}" if self.then else "", f"grown {self.grows}" if self.grows else ""]
        return " ".join([word for word in words if word] + [f"seed {self.seed}", self.on])


@dataclass(frozen=True)
class Size:
    """How large everything is: the study, or the check."""

    model: ModelConfig
    steps: int
    more: int  # steps of a second run
    batch: int
    decay: float = 0.1


class Pairs:
    """The icons on a device."""

    def __init__(self, icons: Icons, device: str) -> None:
        self.icons, self.device = icons, device
        self.pixels, self.ids = (torch.from_numpy(a).to(device) for a in (icons.pixels, icons.ids))
        self.lengths = torch.from_numpy(icons.lengths).to(device)

    def training(self, arm: Arm) -> Tensor:
        parts = ("train", "validation") if arm.on == "test" else ("train",)
        return torch.from_numpy(self.icons.rows(*parts, variants=arm.variants)).to(self.device)

    def held_out(self, arm: Arm) -> Tensor:
        return torch.from_numpy(self.icons.rows(arm.on)).to(self.device)

    def batch(self, rows: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return pixels, ids and lengths: icons moved a little, perhaps mirrored, each with one of its captions."""
        count = len(rows)
        chosen = torch.randint(self.ids.shape[1], (count,), generator=random).to(self.device)
        lengths = self.lengths[rows, chosen]
        x = augmented(pixels_of(self.pixels[rows]), random)
        return x, self.ids[rows, chosen][:, : int(lengths.max())], lengths


def augmented(x: Tensor, random: torch.Generator) -> Tensor:
    """Return icons (white is 1) that are moved, mirrored, stretched, tilted and coloured a little differently."""
    count = len(x)
    wide, high = 0.75 + 0.5 * torch.rand(2, count, generator=random)
    tilt = (0.5 * torch.rand(count, generator=random) - 0.25).sin()
    mirror = torch.where(torch.rand(count, generator=random) < 0.5, -1.0, 1.0)
    move = MOVE * (2 * torch.rand(2, count, generator=random) - 1)
    rows = [mirror * wide, tilt * wide, move[0]], [-mirror * tilt * high, high, move[1]]
    grid = F.affine_grid(torch.stack([torch.stack(row, 1) for row in rows], 1), list(x.shape), align_corners=False)
    tint = (0.2 * torch.randn(count, 3, 1, 1, generator=random)).exp()
    return 1 + tint.to(x.device) * F.grid_sample(x - 1, grid.to(x.device), align_corners=False)


def pixels_of(x: Tensor) -> Tensor:
    return normalise(x.permute(0, 3, 1, 2), SETTINGS)


def config_of(size: Size, arm: Arm) -> ModelConfig:
    config = dataclasses.replace(size.model, loss=arm.loss)
    if arm.small:
        image = config.trunk("image.")
        tokens = {name: int(getattr(image, name)) // SMALL for name in TOKENS}
        config = config.with_trunk("image.", dataclasses.replace(image, tau={}, **tokens))
    return (equal_transformer(config) if arm.kind == "transformer" else config).resolved()


def factor(share: float) -> float:
    """Return the rate at a share of the steps: up by a line, down to 0 by a cosine."""
    if share < WARMUP:
        return (share + 1e-3) / (WARMUP + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP)))


def fit(model: PairModel, size: Size, arm: Arm, pairs: Pairs, random: torch.Generator) -> None:
    """Train a model. Each epoch shows every icon once, in another order."""
    rate, steps = (arm.then, size.more) if arm.then else (arm.rate, size.steps)
    optimizer = Optimizer(Layout(model), OptimizerConfig(kind="muon", rate=rate, weight_decay=size.decay))
    rows, order = pairs.training(arm), torch.empty(0, dtype=torch.long)
    for step in range(steps):
        if len(order) < size.batch:
            order = torch.randperm(len(rows), generator=random)
        chosen, order = rows[order[: size.batch].to(rows.device)], order[size.batch :]
        with torch.no_grad():
            model.scale.clamp_(max=LARGEST)
        made = model(*pairs.batch(chosen, random))
        found = _loss(model, *(part.detach() for part in made))
        torch.autograd.backward(made, (found.image / size.batch, found.text / size.batch))
        for number, slope in ((model.scale, found.scale), (model.bias, found.bias)):
            if number is not None:
                number.grad = slope / size.batch
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step(rate * factor(step / steps), norm.clamp(min=1.0), (~norm.isfinite()).float())
        model.zero_grad(set_to_none=True)


def _loss(model: PairModel, image: Tensor, text: Tensor) -> Any:
    if model.bias is None:
        return softmax_loss(image, text, model.scale)
    return sigmoid_loss(image, text, model.scale, model.bias)


@torch.no_grad()
def features(model: PairModel, pairs: Pairs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of icons and of their whole captions."""
    parts = [
        model(pixels_of(pairs.pixels[some]), pairs.ids[some, 0], pairs.lengths[some, 0]) for some in rows.split(256)
    ]
    image, text = (torch.cat(found).float() for found in zip(*parts, strict=True))
    return image, text


def measure(model: PairModel, pairs: Pairs, rows: Tensor) -> dict[str, float]:
    image, text = features(model, pairs, rows)
    loss = _loss(model, image, text).total / len(rows)
    found = recalls(image @ text.T, torch.arange(len(rows), device=image.device))
    return {"loss": loss.item(), **found, "mean_recall": sum(found.values()) / len(found)}


def grown(model: PairModel, arm: Arm, pairs: Pairs, rows: Tensor) -> tuple[PairModel, dict[str, float]]:
    """Return a model whose tower `arm.grows` has more tokens, and how far features of icons and texts moved."""
    on, times = arm.grows, SMALL if arm.small else 3
    tokens = {name: times * int(getattr(model.config.trunk(on), name)) for name in TOKENS}
    bigger = apply_plan(model, plan_for(model, Growth(on=on, **tokens)))
    before, after = (features(m, pairs, rows) for m in (model, bigger))
    change = max((one - other).abs().max().item() for one, other in zip(before, after, strict=True))
    return bigger, {"largest_change": change, "parameters": bigger.cost().parameters}


class Cifar:
    """Photos of ten classes: how well a pair names what it was never trained on."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, device: str) -> None:
        self.pixels, self.labels = (torch.from_numpy(array).to(device) for array in (pixels, labels))
        self.names = known_file(Path("cifar10"), "names").read_text().split()

    @classmethod
    def read(cls, folder: Path, device: str) -> "Cifar":
        """Read the test images of the subset, whose files hold 500 images below each other."""
        files = sorted(folder.glob("test-*.webp"))
        pixels = np.concatenate([np.asarray(Image.open(f).convert("RGB")).reshape(-1, 32, 32, 3) for f in files])
        return cls(pixels, np.array(json.loads((folder / "labels.json").read_text())["test"]["labels"]), device)

    @torch.no_grad()
    def top1(self, model: PairModel, icons: Icons) -> float:
        encode = partial(encode_captions, icons.tokenizer, context=icons.ids.shape[-1])
        named = ZeroShot(model, self.names, ["{}"], encode)
        found = torch.cat([named(pixels_of(some)).argmax(1) for some in self.pixels.split(500)])
        return (found == self.labels).float().mean().item()


def train(
    arm: Arm, size: Size, pairs: Pairs, base: PairModel | None = None, cifar: Cifar | None = None
) -> tuple[PairModel, dict[str, Any]]:
    """Train an arm; return the model and what it gave. Held-out icons are looked at when a run is over.

    A second run begins from `base`, the model of the first one.
    """
    begun, held, facts = time.process_time(), pairs.held_out(arm), dict[str, Any]()
    random = torch.Generator().manual_seed(arm.seed + (1000 if base else 0))
    model = base or PairModel(config_of(size, arm), seed=arm.seed).to(pairs.device)
    if arm.grows:
        model, facts["growth"] = grown(model, arm, pairs, held)
    fit(model, size, arm, pairs, random)
    facts |= measure(model, pairs, held)
    facts["steps"] = size.more if arm.then else size.steps
    facts |= {"icons": len(pairs.training(arm)), "held_out": len(held), "parameters": model.cost().parameters}
    if cifar and arm.on == "test":
        facts["cifar10"] = cifar.top1(model, pairs.icons)
    return model, facts | {"cpu_seconds": time.process_time() - begun}
