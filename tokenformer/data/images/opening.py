"""Opening an image set by the config: its format, and which of its images are for training and for validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.data.images import binaries
from tokenformer.data.images.decode import need_pillow
from tokenformer.data.images.folders import has_folders, open_flat, open_folder
from tokenformer.data.images.shards import PARTS, expand, open_tars, shard_files
from tokenformer.data.images.stored import Images, Some, renumbered
from tokenformer.data.images.tables import open_tables
from tokenformer.data.permutation import permute, round_keys
from tokenformer.errors import UserError
from tokenformer.parsing import is_folder, read_text, shown

Part = Literal["train", "validation", "test"]


def open_images(data: DataConfig, part: Part, classes: Sequence[str] | None = None) -> Images:
    """Open a part of an image set; `classes` (those of the training part) decide which label is which class.

    Validation is what is held back of training, `data.images.validation`, or the val/ or test part of the data, and
    empty where there is none of these.
    """
    need_pillow()
    settings = data.images or ImagesConfig()
    if not isinstance(data.path, str):
        what = "is missing" if data.path is None else "is a blend"
        raise UserError(f"data.path {what}: give the path of one image set")
    if settings.classes and not classes:
        classes = [line.strip() for line in read_text(settings.classes).splitlines() if line.strip()]
    if part != "test" and settings.hold_back:
        return _held_back(_open(data.path, "train", data, settings, classes), settings.hold_back, part)
    if part != "train" and settings.validation:
        return _open(settings.validation, None, data, settings, classes)
    return _open(data.path, part, data, settings, classes)


def some_of(images: Images, count: int) -> Images:
    """Return so many images at most, from anywhere, as classes may lie in order; the data alone decide which."""
    if count >= len(images):
        return images
    keys = round_keys("some", images.fingerprint)
    return Some(images, np.sort(permute(np.arange(count), len(images), keys)))


def _held_back(images: Images, count: int, part: Part) -> Images:
    if count >= len(images):
        raise UserError(f"data.images.hold_back is {count:,}, but there are {len(images):,} images: give fewer")
    order = permute(np.arange(len(images)), len(images), round_keys("held back", images.fingerprint))
    return Some(images, np.sort(order[count:] if part == "train" else order[:count]))


def _open(path: str, part: Part | None, data: DataConfig, settings: ImagesConfig, classes: Any) -> Images:
    """Open a path; part None takes all of it, or its val/ or test part where it has one."""
    form, root = settings.format, Path(path)
    cifar = binaries.cifar_folder(root) if form in ("auto", "cifar") and is_folder(root) else None
    mnist = binaries.mnist_folder(root) if form in ("auto", "mnist") and is_folder(root) else None
    for ending, kind in ((".tar", "tar"), (".parquet", "parquet")):
        if form == kind or (form == "auto" and (path.endswith(ending) or _holds(root, ending))):
            names = shard_files(path, part, ending)
            if not names and part == "validation":
                return Some(_open(path, "train", data, settings, classes), np.array([], np.int64))
            if not names:
                raise UserError(f"{shown(path)} has no {ending} files{f' for {part}' if part else ''}: check data.path")
            if kind == "tar":
                return open_tars(names, data.cache, classes)
            return open_tables(names, data.cache, classes, settings.image_column, settings.label_column)
    if not is_folder(root):
        expand(path)  # an address is refused as one
        raise UserError(f"there is no folder {shown(path)}: check data.path")
    if cifar or mnist:
        found = (
            binaries.open_cifar(cifar, part or "test") if cifar else binaries.open_mnist(mnist or root, part or "test")
        )
        if classes and len(classes) < len(found.classes):
            raise UserError(
                f"{path} has {len(found.classes)} classes, but {len(classes)} are known: give the same data"
            )
        found.labels = renumbered(found.labels, found.classes, classes or found.classes, path)
        return found
    if form not in ("auto", "folder"):
        raise UserError(f"{shown(path)} has no binary files of {form.upper()}: check data.path, or data.images.format")
    own = next((root / word for word in PARTS[part or "validation"] if is_folder(root / word)), None)
    if own is None and part == "validation":
        return Some(_open(path, "train", data, settings, classes), np.array([], np.int64))
    if own is None and part == "test":
        raise UserError(f"{root} has no folder val or test: check data.path")
    if settings.labels and not has_folders(own or root):
        return open_flat(own or root, Path(settings.labels), classes)
    return open_folder(own or root, classes)


def _holds(root: Path, ending: str) -> bool:
    return is_folder(root) and any(next(root.glob(depth + ending), None) for depth in ("*", "data/*", "*/*"))
