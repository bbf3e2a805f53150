"""Every random choice about a sample, from (seed, epoch, sample) alone: its crop, and what augmentation does."""

import hashlib
import math

import numpy as np

from tokenformer.config_data import DRAWS, OPERATIONS, ImagesConfig
from tokenformer.data.images.decode import CROP_DRAWS

ERASE_AREA, ERASE_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)  # of the published recipe (Zhong et al., 2017)


def generator(*words: object) -> np.random.Generator:
    """Return random numbers that depend on these words alone.

    >>> generator(1, 2).random() == generator(1, 2).random() != generator(1, 3).random()
    True
    """
    key = hashlib.blake2b("|".join(map(str, words)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8")))


def width(settings: ImagesConfig) -> int:
    """Return how many numbers `draws` has per sample."""
    return len(DRAWS) + 2 * settings.randaugment_ops


def draw(settings: ImagesConfig, size: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the crop and those of augmentation (data/images/__init__.py says what each means)."""
    s = settings
    crop = random.random(CROP_DRAWS)
    flip, erase, mix, which, row, column = random.random(6).tolist()
    rectangle = _rectangle(size, random.random((10, 4))) if erase < s.erase else (0, 0, 0, 0)
    noise = int(random.integers(1 << 24)) if erase < s.erase else 0
    kind = 0
    if s.mixes and mix < s.mix_probability:
        kind = 1 if s.mixup and (not s.cutmix or which < 0.5) else 2
    alpha = (0.0, s.mixup, s.cutmix)[kind]
    share = random.beta(alpha, alpha) if kind else 1.0
    found = [float(flip < s.flip), *rectangle, noise, kind, share, row, column]
    for _ in range(s.randaugment_ops):
        chance, operation, sign = random.random(3).tolist()
        level = min(10.0, max(0.0, random.normal(s.randaugment_level, s.randaugment_deviation)))
        applied = chance < s.randaugment_probability
        found += [int(operation * len(OPERATIONS)) if applied else -1, level if sign < 0.5 else -level]
    return crop, np.array(found, np.float32)


def _rectangle(size: int, draws: np.ndarray) -> tuple[int, int, int, int]:
    """Return top, left, height and width of what is erased; nothing where ten tries do not fit."""
    low, high = (math.log(ratio) for ratio in ERASE_RATIO)
    for area, ratio, top, left in draws.tolist():
        area = size * size * (ERASE_AREA[0] + (ERASE_AREA[1] - ERASE_AREA[0]) * area)
        ratio = math.exp(low + (high - low) * ratio)
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < height < size and 0 < width < size:
            return int(top * (size - height + 1)), int(left * (size - width + 1)), height, width
    return 0, 0, 0, 0
