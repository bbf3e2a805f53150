"""Augmentation on the device: each operation against Pillow's, pairs, targets, and rows that do not see each other."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from tests.data.images import pictures as p
from tests.parallel.workers import default_dtype
from tokenformer.config_data import DRAWS, IGNORED, OPERATIONS, ImagesConfig
from tokenformer.data.images.drawing import draw, generator
from tokenformer.ops import augment as a

PLAIN = ImagesConfig(mean=[0.0, 0.0, 0.0], std=[1.0, 1.0, 1.0])
FILL = [128, 100, 7]


def by_pillow(image: Image.Image, name: str, level: float) -> Image.Image:
    """The same operation by Pillow, with the strengths that the recipes state for levels of 0 to 10."""
    part, width, height = level / 10, *image.size
    bend = max(0.1, 1 + 0.9 * part)
    add = min(128, int(11 * abs(level)))
    enhance = {"color": "Color", "contrast": "Contrast", "brightness": "Brightness", "sharpness": "Sharpness"}
    if name in enhance:
        return getattr(ImageEnhance, enhance[name])(image).enhance(bend)
    if name in ("autocontrast", "equalize", "invert"):
        return getattr(ImageOps, name)(image)
    if name == "posterize":
        return ImageOps.posterize(image, max(1, 4 - int(abs(part) * 4)))
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(abs(part) * 256))
    if name == "solarize_add":
        return image.point([min(255, v + add) if v < 128 else v for v in range(256)] * 3)
    how = {"resample": Image.Resampling.BILINEAR, "fillcolor": tuple(FILL)}
    if name == "rotate":
        return image.rotate(30 * part, **how)
    matrix = {
        "shear_x": (1, 0.3 * part, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * part, 1, 0),
        "translate_x": (1, 0, 0.45 * part * width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, 0.45 * part * height),
    }[name]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, **how)


def tensor(*images: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_does_what_pillow_does(name):
    """Six images at once, each with its own level. Edges of moved images are blended with the fill, not cut."""
    images = [p.picture(n, 40, 36).filter(ImageFilter.SHARPEN) for n in range(6)]
    levels = np.array([9.0, -9.0, 3.3, -0.7, 10.0, -10.0], np.float32)
    ours = a.randaugment(tensor(*images), np.full(6, OPERATIONS.index(name), np.float32), levels, FILL)
    for image, level, got in zip(images, levels.tolist(), ours, strict=True):
        want = tensor(by_pillow(image, name, level))[0].int()
        wrong = (got.int() - want).abs()
        if name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
            assert (wrong > 2).float().mean() < 0.06 and wrong.float().mean() < 2.5, (level, wrong.float().mean())
        else:
            # where Pillow computes with floating point numbers, a rounding may differ
            blended = name in (
                "autocontrast",
                "color",
                "contrast",
                "brightness",
                "sharpness",
            )
            assert wrong.max() <= blended, level
    assert not torch.equal(ours, tensor(*images))


def test_a_flat_image_stays_itself_where_nothing_can_be_stretched():
    flat = torch.full((1, 3, 8, 8), 77, dtype=torch.uint8)
    for name in ("autocontrast", "equalize", "contrast", "sharpness"):
        out = a.randaugment(flat, np.array([OPERATIONS.index(name)]), np.array([9.0]), FILL)
        assert torch.equal(out, flat), name


def drawn(count: int, size: int, **keys) -> tuple[ImagesConfig, np.ndarray]:
    settings = ImagesConfig(**keys)
    return settings, np.stack([draw(settings, size, generator("row", n))[1] for n in range(count)])


def batch_of(count: int, size: int, draws: np.ndarray) -> dict:
    pixels = torch.from_numpy(np.stack([np.asarray(p.picture(n, size, size)) for n in range(count)]))
    return {"pixels": pixels, "label": torch.arange(count) % 5, "draws": draws}


def test_a_row_has_the_same_bits_in_any_micro_batch():
    settings, draws = drawn(32, 24, randaugment_ops=2, erase=0.4, mixup=0.8, cutmix=1.0, smoothing=0.1)
    whole = batch_of(32, 24, draws)
    x, targets = a.augment(whole, settings, 5)
    for size in (2, 6):
        for start in range(0, 30, size):
            part = {name: value[start : start + size] for name, value in whole.items()}
            x_part, targets_part = a.augment(part, settings, 5)
            assert torch.equal(x_part, x[start : start + size]) and torch.equal(
                targets_part, targets[start : start + size]
            )
    on_device = {**whole, "draws": torch.from_numpy(draws)}
    assert torch.equal(a.augment(on_device, settings, 5)[0], x)
    assert x.dtype == targets.dtype == torch.float32 and torch.allclose(targets.sum(1), torch.ones(32))


def row(**values: float) -> np.ndarray:
    return np.array([{"mix_share": 1.0, **values}.get(name, 0.0) for name in DRAWS], np.float32)


def test_nothing_drawn_changes_nothing_but_the_scale():
    batch = batch_of(2, 16, np.stack([row(), row()]))
    x, targets = a.augment(batch, ImagesConfig(), 5)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (ImagesConfig().mean, ImagesConfig().std))
    want = (batch["pixels"].permute(0, 3, 1, 2) / 255 - mean) / std
    assert torch.equal(x, want) and targets.tolist() == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    evaluation = {name: value for name, value in batch.items() if name != "draws"}
    assert torch.equal(a.augment(evaluation, ImagesConfig(smoothing=0.3), 5)[1], targets)


def test_flip_mirrors_the_rows_that_drew_it():
    batch = batch_of(2, 16, np.stack([row(flip=1), row()]))
    x, _ = a.augment(batch, PLAIN, 5)
    plain = batch["pixels"].permute(0, 3, 1, 2) / 255
    assert torch.equal(x[0], plain[0].flip(-1)) and torch.equal(x[1], plain[1])


def test_pairs_are_mixed_as_their_even_row_says():
    draws = np.stack(
        [
            *(row(mix=1, mix_share=0.75), row(mix=2, mix_share=0.1)),  # what the odd row says does not count
            *(row(mix=2, mix_share=0.75, cut_row=0.5, cut_column=0.0), row()),
            *(row(), row(mix=1, mix_share=0.5)),
        ]
    )
    batch = batch_of(6, 16, draws)
    x, targets = a.augment(batch, PLAIN, 6)
    plain, one = batch["pixels"].permute(0, 3, 1, 2) / 255, torch.eye(6)
    labels = batch["label"]
    for r in (0, 1):
        assert torch.allclose(x[r], 0.75 * plain[r] + 0.25 * plain[r ^ 1], atol=1e-6)
        assert torch.allclose(targets[r], 0.75 * one[labels[r]] + 0.25 * one[labels[r ^ 1]])
    for r in (2, 3):  # √0.25 of 16: rows 4 … 11 and, cut off at the left edge, columns 0 … 3
        want = plain[r].clone()
        want[:, 4:12, :4] = plain[r ^ 1][:, 4:12, :4]
        assert torch.equal(x[r], want)
        assert torch.allclose(targets[r], (1 - 32 / 256) * one[labels[r]] + 32 / 256 * one[labels[r ^ 1]])
    assert torch.equal(x[4:], plain[4:]) and torch.equal(targets[4:], one[labels[4:]])


def test_an_erased_rectangle_is_noise_of_its_key_alone():
    box = {"erase_top": 3, "erase_left": 2, "erase_height": 40, "erase_width": 50}
    draws = np.stack([row(**box, erase_key=77), row(), row(**box, erase_key=78), row(**box, erase_key=77)])
    batch = batch_of(4, 64, draws)
    x, _ = a.augment(batch, PLAIN, 5)
    plain = batch["pixels"].permute(0, 3, 1, 2) / 255
    inside = torch.zeros(64, 64, dtype=torch.bool)
    inside[3:43, 2:52] = True
    assert torch.equal(x[1], plain[1]) and torch.equal(x[0][:, ~inside], plain[0][:, ~inside])
    noise = x[0][:, inside]
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.03 and noise.unique().numel() > 200
    assert torch.equal(noise, x[3][:, inside]) and not torch.equal(noise, x[2][:, inside])
    both = torch.corrcoef(torch.stack([noise.flatten(), x[2][:, inside].flatten()]))[0, 1]
    beside = torch.corrcoef(torch.stack([noise[0, :-1], noise[0, 1:]]))[0, 1]
    assert abs(both) < 0.05 and abs(beside) < 0.08


def test_smoothing_and_rows_without_an_image():
    targets = a.soft_targets(torch.tensor([2, IGNORED]), 4, 0.1)
    assert torch.allclose(targets[0], torch.tensor([0.025, 0.025, 0.925, 0.025])) and targets[1].sum() == 0
    filler = np.full((2, len(DRAWS) + 4), -1, np.float32)  # what the loader puts into rows that hold no image
    batch = {
        "pixels": torch.zeros(2, 8, 8, 3, dtype=torch.uint8),
        "label": torch.tensor([IGNORED] * 2),
        "draws": filler,
    }
    x, targets = a.augment(batch, ImagesConfig(randaugment_ops=2, mixup=0.5, smoothing=0.1), 4)
    assert (
        torch.isfinite(x).all()
        and not targets.any()
        and math.isclose(x[0, 0, 0, 0].item(), -0.485 / 0.229, rel_tol=1e-5)
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_randaugment_gives_the_same_bytes_under_another_default_type(name):
    x, number = tensor(p.picture(3), p.picture(4)), np.full(2, OPERATIONS.index(name))
    expected = a.randaugment(x, number, np.array([7.0, -4.0]), FILL)
    with default_dtype("float64"):
        assert torch.equal(a.randaugment(x, number, np.array([7.0, -4.0]), FILL), expected)
