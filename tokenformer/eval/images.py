"""How well an image model names the classes of images: loss, top-1, top-5, for each class, and what it confuses."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tokenformer.config_data import IGNORED, DataConfig, ImagesConfig
from tokenformer.data.images.opening import Part, open_images, some_of
from tokenformer.data.images.samples import batches
from tokenformer.data.images.stored import Images, Some
from tokenformer.errors import UserError
from tokenformer.eval.ranks import spread
from tokenformer.infer.images import classify, normalise, reading
from tokenformer.parsing import is_file, parse_json, read_text

ZERO_SHOT = Path(__file__).parent / "zero_shot"  # NAME.names.txt, NAME.templates.txt


class Answer(NamedTuple):
    """What the model said of an image; `label` is IGNORED where it is damaged, and then `damage` says why."""

    index: int
    label: int
    likeliest: int
    among_five: bool
    loss: float
    damage: str = ""


def known_file(given: Path, what: str) -> Path:
    """Return a file of `names` of classes or of `templates`: the given one, or this package's if it has that name.

    >>> known_file(Path("cifar10"), "names").read_text().split()[:3]
    ['airplane', 'automobile', 'bird']
    """
    files = {path.name.partition(".")[0]: path for path in sorted(ZERO_SHOT.glob(f"*.{what}.txt"))}
    if is_file(given) or given.suffix or given.parent != Path():
        return given
    if given.name not in files:
        raise UserError(f"there is no file {given}: give one, or the name of known {what} ({', '.join(files)})")
    return files[given.name]


def read_class_index(path: Path) -> tuple[list[str], list[str]]:
    """Return folders and names of the classes, in the order of the model's.

    The file is ImageNet's JSON ({"0": ["n01440764", "tench"], …}), its lines (`n01440764 tench, Tinca tinca`), or a
    name per line, which is then the folder too; or one of this package's (imagenet, cifar10, cifar100).
    """
    path = known_file(path, "names")
    text = read_text(path)
    if path.suffix == ".json":
        raw = parse_json(text, str(path))
        rows: list[Any] = [raw.get(str(number)) for number in range(len(raw))] if isinstance(raw, dict) else []
        if not rows or not all(
            isinstance(r, list) and len(r) == 2 and all(isinstance(w, str) for w in r) for r in rows
        ):
            raise UserError(f'{path} is no class index: it should look like {{"0": ["n01440764", "tench"], …}}')
        pairs = [(folder, name) for folder, name in rows]
    else:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        found = [re.fullmatch(r"(n\d{8})\s+(.+)", line) for line in lines]
        pairs = [(m[1], m[2]) if m else (line, line) for m, line in zip(found, lines, strict=True)]
    folders = [folder for folder, _ in pairs]
    if len(set(folders)) < len(folders) or not folders:
        raise UserError(f"{path} names {'a class twice' if folders else 'no classes'}: give one line for each class")
    return folders, [name for _, name in pairs]


def open_labelled(
    data: DataConfig, part: Part | None, classes: Sequence[str] | None, open_part: Callable[..., Images] = open_images
) -> tuple[Images, str]:
    """Open the part of an image set that was asked for; else its validation or test images, where it has some, or all.

    Return the images, and which part they are.
    """
    if part is None:
        images = open_part(data, "validation", classes)
        if len(images):
            return images, "validation"
    images = open_part(data, part or "train", classes)
    if not len(images):
        raise UserError(f"{data.path} has no images of the part {part}: leave --part out, or check the path")
    return images, part or "all"


def sample_pixels(model: Any, path: str, count: int) -> torch.Tensor:
    """Return images of a set as the model reads them (B, 3, size, size); damaged ones are left out."""
    settings, size = reading(model)
    data = DataConfig(path=path, images=dataclasses.replace(settings, damaged="skip"))
    images = some_of(open_labelled(data, None, model.images.get("classes"))[0], count)
    parts = [pixels[labels != IGNORED] for _, pixels, labels, _ in batches(images, data.images or settings, size, 64)]
    return normalise(torch.from_numpy(np.concatenate(parts)).permute(0, 3, 1, 2), settings)


def answers(
    model: Any, images: Images, settings: ImagesConfig, size: int, batch: int, advance: Callable[[float], None]
) -> list[Answer]:
    """Return what the model says of every image; under torchrun each process takes its share of them."""

    def work(indices: Sequence[int]) -> list[Answer]:
        found: list[Answer] = []
        for first, pixels, labels, damage in batches(Some(images, np.array(indices)), settings, size, batch):
            logits = classify(model, pixels, settings).cpu()
            label = torch.from_numpy(labels)
            losses = torch.nn.functional.cross_entropy(logits, label, ignore_index=IGNORED, reduction="none")
            best = logits.argsort(descending=True, stable=True)[:, :5]  # of equal ones the first class
            five = (best == label[:, None]).any(1)
            rows = zip(labels.tolist(), best[:, 0].tolist(), five.tolist(), losses.tolist(), strict=True)
            found += [Answer(indices[first + r], *row, damage.get(r, "")) for r, row in enumerate(rows)]
            advance(len(labels))
        return found

    return spread(range(len(images)), work)


def summary(found: Sequence[Answer], names: Sequence[str]) -> dict[str, Any]:
    """Return images, damaged ones, loss, top-1, top-5, the same for each class, and the counts of [class][answer].

    >>> summary([Answer(0, 1, 0, True, 2.0), Answer(1, 1, 1, True, 0.5)], ["ant", "bee"])["top1"]
    0.5
    """
    good = [a for a in found if a.label != IGNORED]
    if not good:
        raise UserError("no image could be decoded, so there is nothing to measure: check the images")
    confusion = np.zeros((len(names), len(names)), np.int64)
    np.add.at(confusion, ([a.label for a in good], [a.likeliest for a in good]), 1)
    five = np.bincount([a.label for a in good if a.among_five], minlength=len(names))
    classes: dict[int, dict[str, Any]] = {}
    for number in np.nonzero(confusion.sum(1))[0].tolist():
        count, right = int(confusion[number].sum()), int(confusion[number, number])
        others = np.where(np.arange(len(names)) == number, 0, confusion[number])
        classes[number] = {"class": names[number], "images": count, "top1": right / count}
        classes[number]["top5"] = int(five[number]) / count
        classes[number]["taken_for"] = names[int(others.argmax())] if others.any() else None
    return {
        "images": len(good),
        "damaged": len(found) - len(good),
        "loss": sum(a.loss for a in good) / len(good),
        "top1": sum(a.likeliest == a.label for a in good) / len(good),
        "top5": sum(a.among_five for a in good) / len(good),
        "classes": classes,
        "confusion": confusion.tolist(),
    }
