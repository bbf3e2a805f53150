"""Image folders: a folder per class, image files below it."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tokenformer.data.images.stored import Files
from tokenformer.errors import UserError
from tokenformer.parsing import shown

ENDINGS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm")


def open_folder(root: Path, classes: Sequence[str] | None = None) -> Files:
    """Open the images below `root`; the classes are its folders in alphabetical order, or the given ones."""
    found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise UserError(f"{root} has no folders: put the images of each class into a folder of its name")
    numbers = {name: number for number, name in enumerate(classes or found)}
    names, sizes, labels = [], [], []
    for folder in found:
        before = len(names)
        for name, size in images_below(root, folder):
            names.append(name)
            sizes.append(size)
        if len(names) == before:
            continue
        if folder not in numbers:
            raise UserError(
                f"{root / folder} is none of the {len(numbers):,} classes ({shown(list(numbers))}): "
                "move it away, or name its class"
            )
        labels += [numbers[folder]] * (len(names) - before)
    if not names:
        raise UserError(f"no folder in {root} has images ({', '.join(ENDINGS)}): check the path")
    return Files(str(root), names, sizes, np.array(labels, np.int64), list(numbers))


def images_below(root: Path, folder: str) -> Iterator[tuple[str, int]]:
    """Yield name below `root` and size of the images in a folder and in the folders below it, in order of names."""
    for entry in sorted(os.scandir(root / folder), key=lambda entry: entry.name):
        name = f"{folder}/{entry.name}"
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from images_below(root, name)
        elif entry.name.lower().rpartition(".")[2] in ENDINGS and entry.is_file():
            yield name, entry.stat().st_size
