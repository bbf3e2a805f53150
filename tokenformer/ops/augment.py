"""What is done to a batch of images on the device: flip, RandAugment, random erasing, mixup, cutmix, soft targets.

Unusual: nothing is drawn here. `draws` says for each image what happens to it (data/images/__init__.py). It lies on the
host, so that images with the same operation are worked on together and nothing waits for the device. RandAugment works
on bytes, as Pillow does, and nothing is summed in floating point: an image has the same bits in any micro-batch.

B batch, C red, green and blue, H height, W width, N classes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.config_data import DRAWS, OPERATIONS, ImagesConfig

_MASK = (1 << 32) - 1


def augment(batch: Mapping[str, Any], settings: ImagesConfig, classes: int) -> tuple[Tensor, Tensor]:
    """Return normalised pixels (B, 3, H, W) and soft targets (B, N), which are 0 in rows that hold no image.

    A batch without `draws` is one of evaluation: its targets are not smoothed.

    >>> batch = {"pixels": torch.zeros(2, 4, 4, 3, dtype=torch.uint8), "label": torch.tensor([1, -100])}
    >>> x, targets = augment(batch, ImagesConfig(mean=[0.5] * 3, std=[0.5] * 3), 3)
    >>> x.shape, x.max().item(), targets.tolist()
    (torch.Size([2, 3, 4, 4]), -1.0, [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    """
    x, d = augment_pixels(batch, settings)
    if d is None:
        return x, soft_targets(batch["label"], classes)
    return mix(x, soft_targets(batch["label"], classes, settings.smoothing), d)


def augment_pixels(batch: Mapping[str, Any], settings: ImagesConfig) -> tuple[Tensor, dict[str, np.ndarray] | None]:
    """Return normalised pixels (B, 3, H, W), not mixed yet, and what was drawn, by name; None in evaluation."""
    x, draws = batch["pixels"].permute(0, 3, 1, 2).contiguous(), batch.get("draws")
    if draws is None:
        return normalise(x, settings), None
    draws = draws.cpu().numpy() if isinstance(draws, Tensor) else np.asarray(draws)
    d = {name: draws[:, number] for number, name in enumerate(DRAWS)}
    x = _where(d["flip"] == 1, lambda rows: x.flip(-1), x)
    fill = [round(255 * mean) for mean in settings.mean]
    for place in range(len(DRAWS), draws.shape[1], 2):
        x = randaugment(x, draws[:, place], draws[:, place + 1], fill)
    return _erase(normalise(x, settings), d), d


def normalise(x: Tensor, settings: ImagesConfig) -> Tensor:
    """Return bytes (B, 3, H, W) as floating point numbers around 0."""
    mean, std = (torch.tensor(v, device=x.device).view(3, 1, 1) for v in (settings.mean, settings.std))
    return (x / 255 - mean) / std


def soft_targets(label: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Return one row per label that adds up to 1; `smoothing` of it belongs to all classes alike."""
    target_BN = F.one_hot(label.clamp(min=0), classes).float() * (1 - smoothing) + smoothing / classes
    return target_BN * (label >= 0).unsqueeze(1)


def mix(x: Tensor, targets: Tensor, draws: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return images and targets mixed with their partners: row r with row r XOR 1, as row r - r mod 2 says."""
    kind, share, row, column = (draws[name][::2] for name in ("mix", "mix_share", "cut_row", "cut_column"))
    if not (kind > 0).any():
        return x, targets
    height, width = x.shape[-2:]
    side = np.sqrt(1 - np.where(kind == 2, share, 1.0))  # of the rectangle, as a share of the image's
    box = [_edges(row, side, height), _edges(column, side, width)]
    area = (box[0][1] - box[0][0]) * (box[1][1] - box[1][0])
    share = np.where(kind == 1, share, 1.0)  # of mixup; cutmix takes whole pixels …
    counts = np.where(kind == 2, 1 - area / (height * width), share)  # … and its share is what it left
    inside = _inside(x, *(np.repeat(edge, 2) for edges in box for edge in edges))
    share_B, counts_B = (_on(np.repeat(v, 2).astype(np.float32), x) for v in (share, counts))
    other, own = _partner(x), share_B.view(-1, 1, 1, 1)
    x = torch.where(inside, other, own * x + (1 - own) * other)
    return x, counts_B.view(-1, 1) * targets + (1 - counts_B.view(-1, 1)) * _partner(targets)


def _edges(centre: np.ndarray, side: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where rectangles begin and end along one axis, cut off at the image's."""
    middle, half = np.floor(centre * size), np.floor(side * size) / 2
    return np.clip(np.floor(middle - half), 0, size), np.clip(np.floor(middle + half), 0, size)


def _inside(x: Tensor, top: np.ndarray, bottom: np.ndarray, left: np.ndarray, right: np.ndarray) -> Tensor:
    """Return (B, 1, H, W): whether a pixel lies in its row's rectangle."""
    y, z = (torch.arange(size, device=x.device) for size in x.shape[-2:])
    t, b, le, r = (_on(edge.astype(np.int64), x).view(-1, 1) for edge in (top, bottom, left, right))
    return (((y >= t) & (y < b)).unsqueeze(2) & ((z >= le) & (z < r)).unsqueeze(1)).unsqueeze(1)


def _partner(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def _on(array: np.ndarray, x: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(x.device, non_blocking=True)


def _where(chosen: np.ndarray, make: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return x with what `make` gives for all rows, in the chosen ones."""
    return torch.where(_on(chosen, x).view(-1, 1, 1, 1), make(x), x) if chosen.any() else x


def _erase(x: Tensor, draws: Mapping[str, np.ndarray]) -> Tensor:
    """Return images with a rectangle of noise (mean 0, deviation 1) that key and place of a pixel alone decide."""
    rows = np.nonzero(draws["erase_height"] > 0)[0]
    if not len(rows):
        return x
    top, left, height, width, key = (draws[f"erase_{n}"][rows] for n in ("top", "left", "height", "width", "key"))
    at = _on(rows, x)
    some, pixels = x[at], math.prod(x.shape[1:])
    number = _on(key.astype(np.int64), x).view(-1, 1) * 0x9E3779B1 + torch.arange(pixels, device=x.device) * 0x85EBCA6B
    for factor in (0xC2B2AE3D, 0x27D4EB2F):
        number = number & _MASK
        number = (number ^ (number >> 15)) * factor
    number = (number ^ (number >> 13)) & _MASK
    four = number & 255
    for shift in (8, 16, 24):
        four = four + ((number >> shift) & 255)  # the sum of four bytes is nearly normal
    noise = ((four - 510) / math.sqrt((256**2 - 1) / 3)).view(some.shape)
    return x.index_copy(0, at, torch.where(_inside(some, top, top + height, left, left + width), noise, some))


def randaugment(x: Tensor, operation: np.ndarray, level: np.ndarray, fill: list[int]) -> Tensor:
    """Return images (bytes) after one operation each: its number in OPERATIONS (-1: none), its level -10 to 10.

    Strengths are those of timm's "increasing" operations; `fill` is the colour that moves in from outside.
    """
    x = x.clone()
    moving = operation >= OPERATIONS.index("rotate")
    for number in [*range(OPERATIONS.index("rotate")), None]:
        rows = np.nonzero(moving if number is None else operation == number)[0]
        if not len(rows):
            continue
        at = _on(rows, x)
        some, strength = x[at], level[rows]
        if number is None:
            names = [OPERATIONS[int(n)] for n in operation[rows]]
            x[at] = _move(some, _matrices(names, strength, *some.shape[-2:]), fill)
        else:
            x[at] = _COLOURS[OPERATIONS[number]](some, strength)
    return x


def _lookup(x: Tensor, table_BCV: Tensor) -> Tensor:
    """Return each byte replaced by its entry in the 256 of its image (and channel)."""
    table = table_BCV.to(torch.uint8).expand(*x.shape[:2], 256)
    return table.gather(2, x.flatten(2).long()).view(x.shape)


def _values(x: Tensor) -> Tensor:
    return torch.arange(256, device=x.device)


def _autocontrast(x: Tensor, level: np.ndarray) -> Tensor:
    flat = x.flatten(2)
    low, high = (v.long().unsqueeze(2) for v in (flat.amin(2), flat.amax(2)))
    stretched = ((_values(x) - low) * 255).div((high - low).clamp(min=1), rounding_mode="floor").clamp(0, 255)
    return _lookup(x, torch.where(high > low, stretched, _values(x)))


def _equalize(x: Tensor, level: np.ndarray) -> Tensor:
    flat = x.flatten(2).long()
    counts = torch.zeros(*x.shape[:2], 256, dtype=torch.long, device=x.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last).div(255, rounding_mode="floor")
    spread = (counts.cumsum(2) - counts + step // 2).div(step.clamp(min=1), rounding_mode="floor").clamp(0, 255)
    return _lookup(x, torch.where(step > 0, spread, _values(x)))


def _posterize(x: Tensor, level: np.ndarray) -> Tensor:
    bits = np.maximum(1, 4 - (np.abs(level) * 0.4).astype(np.int64))  # 0 bits would be a black image
    return x & _on((256 - (1 << (8 - bits))).astype(np.uint8), x).view(-1, 1, 1, 1)


def _solarize(x: Tensor, level: np.ndarray) -> Tensor:
    limit = _on(256 - (np.abs(level) * 25.6).astype(np.int64), x).view(-1, 1, 1, 1)
    return torch.where(x < limit, x, 255 - x)


def _solarize_add(x: Tensor, level: np.ndarray) -> Tensor:
    more = _on(np.minimum(128, np.abs(level) * 11).astype(np.int64), x).view(-1, 1, 1)
    return _lookup(x, torch.where(_values(x) < 128, (_values(x) + more).clamp(max=255), _values(x)))


def _blend(x: Tensor, plain: Tensor | float, level: np.ndarray) -> Tensor:
    """Return x moved away from `plain`, or towards it where the level is negative."""
    factor = _on(np.maximum(0.1, 1 + level * 0.09).astype(np.float32), x).view(-1, 1, 1, 1)
    return (plain + factor * (x.float() - plain)).clamp(0, 255).to(torch.uint8)


def _grey(x: Tensor) -> Tensor:
    red, green, blue = x.long().unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16).unsqueeze(1)  # of 65536, as Pillow has it


def _contrast(x: Tensor, level: np.ndarray) -> Tensor:
    grey = _grey(x).flatten(1)
    mean = (2 * grey.sum(1) + grey.shape[1]).div(2 * grey.shape[1], rounding_mode="floor")
    return _blend(x, mean.view(-1, 1, 1, 1).float(), level)


def _sharpness(x: Tensor, level: np.ndarray) -> Tensor:
    total = x.long()
    total = sum(
        total[..., i : total.shape[-2] - 2 + i, j : total.shape[-1] - 2 + j] for i in range(3) for j in range(3)
    )
    total = total + 4 * x[..., 1:-1, 1:-1].long()
    smooth = x.float()
    smooth[..., 1:-1, 1:-1] = (2 * total + 13).div(26, rounding_mode="floor").float()
    return _blend(x, smooth, level)


_COLOURS: dict[str, Callable[[Tensor, np.ndarray], Tensor]] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "invert": lambda x, level: 255 - x,
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "color": lambda x, level: _blend(x, _grey(x).float(), level),
    "contrast": _contrast,
    "brightness": lambda x, level: _blend(x, 0.0, level),
    "sharpness": _sharpness,
}


def _matrices(names: list[str], level: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return (rows, 2, 3): where each pixel of the result comes from, in pixels from the top left corner."""
    found = np.tile(np.array([[1.0, 0, 0], [0, 1, 0]]), (len(names), 1, 1))
    for matrix, name, strength in zip(found, names, level.astype(np.float64) / 10, strict=True):
        if name == "rotate":
            angle = -math.radians(30 * strength)
            cos, sin, x, y = math.cos(angle), math.sin(angle), width / 2, height / 2
            matrix[:] = [[cos, sin, x - cos * x - sin * y], [-sin, cos, y + sin * x - cos * y]]
        elif name == "shear_x":
            matrix[0, 1] = 0.3 * strength
        elif name == "shear_y":
            matrix[1, 0] = 0.3 * strength
        elif name == "translate_x":
            matrix[0, 2] = 0.45 * strength * width
        else:
            matrix[1, 2] = 0.45 * strength * height
    return found


def _move(x: Tensor, matrices: np.ndarray, fill: list[int]) -> Tensor:
    height, width = x.shape[-2:]
    across = torch.arange(width, device=x.device, dtype=torch.float32).view(1, 1, -1) + 0.5
    down = torch.arange(height, device=x.device, dtype=torch.float32).view(1, -1, 1) + 0.5
    m = _on(matrices.astype(np.float32), x).view(-1, 6, 1, 1).unbind(1)
    places = [(m[i] * across + m[i + 1] * down + m[i + 2]) * (2 / size) - 1 for i, size in ((0, width), (3, height))]
    colour = torch.tensor(fill, device=x.device, dtype=torch.float32).view(3, 1, 1)
    moved = F.grid_sample(x - colour, torch.stack(places, -1), align_corners=False)
    return (moved + colour + 0.5).clamp(0, 255).to(torch.uint8)
