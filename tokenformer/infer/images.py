"""The classes that an image model sees in pixels, normalised as images.json beside its weights says."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenformer.config_data import ImagesConfig
from tokenformer.errors import UserError
from tokenformer.ops.augment import normalise
from tokenformer.strict import build

LARGEST = 4096  # as data.images.size
HOW = ("size", "mean", "std", "crop_pct", "interpolation")  # what images.json says of pixels


def reading(model: Any, size: int | None = None) -> tuple[ImagesConfig, int]:
    """Return how images were read in training, and the side of the square that a model sees; `size`: another one."""
    c = model.config.trunks.get("image", model.config)
    settings = build(ImagesConfig, {k: model.images[k] for k in HOW if k in model.images}, "images.json")
    if model.config.of == "image" and not c.classes:
        raise UserError("the model has no head, so it knows no classes: train one first (model.classes)")
    rows, columns = c.grid
    size = settings.size if size is None else size
    if size is None and rows != columns:
        raise UserError(f"the model's images are {c.image_size}, but squares are read here: give --size")
    size = rows * c.patch if size is None else size
    most = max(LARGEST, rows * c.patch)
    if size % c.patch or not 1 <= size <= most:
        raise UserError(f"--size is {size:,}: give a multiple of the model's patch {c.patch}, {most:,} at most")
    return settings, size


def at_once(model: Any, asked: int | None) -> int:
    """Return how many images are computed together: so few on a CPU that progress is seen within seconds."""
    return asked or (64 if next(model.parameters()).is_cuda else 8)


def class_names(model: Any) -> list[str]:
    """Return a name for each class; those that images.json does not name are called after their number."""
    known = [str(name) for name in model.images.get("classes", [])]
    return [*known, *(f"class {number}" for number in range(len(known), model.config.classes))]


@torch.no_grad()
def classify(model: Any, pixels: np.ndarray, settings: ImagesConfig) -> Tensor:
    """Return the logits (B, classes) of bytes (B, size, size, 3), in single precision or better."""
    device = next(model.parameters()).device
    x = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)
    logits = model(normalise(x, settings))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
