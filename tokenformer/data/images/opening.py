"""Opening an image set by the config: its format, and which of its images are for training and for validation."""

import filecmp
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.data.images import binaries
from tokenformer.data.images.decode import need_pillow
from tokenformer.data.images.folders import has_folders, open_flat, open_folder
from tokenformer.data.images.shards import PARTS, expand, open_tars, part_of, part_of_word, shard_files
from tokenformer.data.images.stored import Files, Images, Some, renumbered
from tokenformer.data.images.tables import open_tables
from tokenformer.data.permutation import permute, round_keys
from tokenformer.errors import UserError
from tokenformer.parsing import is_folder, read_text, shown

Part = Literal["train", "validation", "test"]


class NoTraining(UserError):
    """A set whose images are all for validation or test."""


def open_images(data: DataConfig, part: Part, classes: Sequence[str] | None = None) -> Images:
    """Open a part of an image set; `classes` (those of the training part) decide which label is which class.

    Validation is what is held back of training, `data.images.validation`, or the val/ or test part of the data, and
    empty where there is none of these.
    """
    settings = data.images or ImagesConfig()
    if settings.classes and not classes:
        classes = [line.strip() for line in read_text(settings.classes).splitlines() if line.strip()]
    return open_part(data, part, lambda path, part: _open(path, part, data, settings, classes))


def open_part(data: DataConfig, part: Part, open_path: Callable[[str, Part | None], Images]) -> Images:
    """Open a part of what `data` names; `open_path` opens a path, of which None means all."""
    need_pillow()
    settings = data.images or ImagesConfig()
    if not isinstance(data.path, str):
        what = "is missing" if data.path is None else "is a blend"
        raise UserError(f"data.path {what}: give the path of one set of images")
    if part != "test" and settings.hold_back:
        return _held_back(open_path(data.path, "train"), settings.hold_back, part)
    if part != "train" and settings.validation:
        return open_path(settings.validation, None)
    return open_path(data.path, part)


def open_parts(data: DataConfig) -> tuple[Images, Images]:
    """Open what is trained on and what is validated on; refuse to validate on files that are trained on."""
    train = open_images(data, "train")
    held = open_images(data, "validation", train.classes)
    refuse_shared(data, train, held)
    return train, held


def refuse_shared(data: DataConfig, train: Images, held: Images) -> None:
    if len(held) and not (data.images and data.images.hold_back) and (shared := _shared(train, held)):
        give = "give other images to validate on, or set data.images.hold_back"
        raise UserError(f"{shared} is trained on and validated on: {give}")


def _shared(train: Images, held: Images) -> str | None:
    """Return a file of both sets: an image, or a tar or another file of many that is the same or has the same bytes."""
    if isinstance(train, Files) and isinstance(held, Files):
        roots = [os.path.realpath(images.root) for images in (train, held)]
        if os.path.commonpath(roots) not in roots:  # neither folder is, or lies in, the other
            return None
        first, second = (
            {os.path.join(root, images.name(i)[len(os.path.join(images.root, "")) :]) for i in range(len(images))}
            for root, images in zip(roots, (train, held), strict=True)
        )
        return min(first & second, default=None)
    sizes: dict[int, list[str]] = {}
    for path in getattr(train, "files", []):
        sizes.setdefault(os.stat(path).st_size, []).append(path)
    for path in getattr(held, "files", []):
        for other in sizes.get(os.stat(path).st_size, []):
            if os.path.samefile(path, other) or filecmp.cmp(path, other, shallow=False):
                return path
    return None


def some_of(images: Images, count: int) -> Images:
    """Return so many images at most, from anywhere, as classes may lie in order; the data alone decide which."""
    if count >= len(images):
        return images
    keys = round_keys("some", images.fingerprint)
    return Some(images, np.sort(permute(np.arange(count), len(images), keys)))


def none_of(images: Images) -> Images:
    return Some(images, np.array([], np.int64))


def find_shards(path: str, part: Part | None, form: str, kinds: dict[str, str]) -> tuple[str, list[str]] | None:
    """Return which of these kinds (by the ending of their files) a path has, and its files of a part.

    There are none of the part validation where the path has no such part.
    """
    root = Path(path)
    there = [ending for ending in kinds if path.endswith(ending) or _holds(root, ending)]
    if form == "auto" and len({kinds[ending] for ending in there}) > 1:
        what = f"{shown(path)} has {' and '.join(there)} files, of which {there[0]} are read"
        warnings.warn(f"{what}: choose others with data.images.format={kinds[there[1]]}", stacklevel=2)
    for ending, kind in kinds.items():
        if form == kind or (form == "auto" and ending in there):
            if kind == "tar" and (packed := _compressed(path)):
                warnings.warn(f"{packed} is compressed, so it is not read: unpack it (gunzip)", stacklevel=2)
            names = shard_files(path, part, ending)
            if not names and part != "validation":
                where = f" for {part}" if part else ""
                parts = [(name, part_of(name, path)) for name in shard_files(path, None, ending)]
                other = next((f" ({name} is for {own})" for name, own in parts if own), "") if part == "train" else ""
                error = NoTraining if other else UserError
                raise error(f"{shown(path)} has no {ending} files{where}{other}: check the path")
            return kind, names
    return None


def refuse_compressed(path: str) -> None:
    """Refuse a path, of which nothing can be read, with a sentence that fits a compressed tar."""
    if packed := _compressed(path):
        raise UserError(f"{packed} is compressed, and shards are read at random: unpack it (gunzip)")


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
    if shards := find_shards(path, part, form, {".tar": "tar", ".parquet": "parquet"}):
        kind, names = shards
        if not names:
            return none_of(_open(path, "train", data, settings, classes))
        if kind == "tar":
            return open_tars(names, data.cache, classes)
        return open_tables(names, data.cache, classes, settings.image_column, settings.label_column)
    if not is_folder(root):
        expand(path)  # an address is refused as one
        refuse_compressed(path)
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
    folders = sorted((entry.name for entry in os.scandir(root) if entry.is_dir()), key=str.swapcase)  # val before Val
    own = next((root / name for word in PARTS[part or "validation"] for name in folders if name.lower() == word), None)
    if own is None and part == "validation":
        return none_of(_open(path, "train", data, settings, classes))
    if own is None and part == "test":
        raise UserError(f"{root} has no folder test: give another part, or check the path")
    if settings.labels and not has_folders(own or root):
        return open_flat(own or root, Path(settings.labels), classes)
    if not has_folders(root):
        refuse_compressed(path)
    images = open_folder(own or root, classes)
    if own is None:
        refuse_parts(images)
    return images


def refuse_parts(images: Files) -> None:
    """Refuse a folder of classes in which a folder is named after validation or test: its images are not to be trained
    on, and of `CLASS/val` it is not known whether all classes have one.
    """
    for folder in sorted({os.path.dirname(images.name(i)) for i in range(len(images))}):
        for place in itertools.accumulate(Path(folder).relative_to(images.root).parts[:2], os.path.join):
            part = part_of_word(os.path.basename(place))
            if part in ("validation", "test"):
                train, word = f"{images.root}/train", {"validation": "val", "test": "test"}[part]
                if os.sep in place:
                    do = f"lies in a class: put them into {images.root}/{word}/CLASS, the others into {train}/CLASS"
                else:
                    do = f"there is no {train}: put what is trained on into {train}/CLASS"
                where = os.path.join(images.root, place)
                raise UserError(f"{where} is called like images for {part}, but {do}, or rename it")


def _compressed(path: str) -> str | None:
    """Return a compressed tar that a path is, or has."""
    if path.endswith((".tar.gz", ".tgz")):
        return path
    return next((str(p) for ending in ("*.tar.gz", "*.tgz") for p in sorted(Path(path).glob(ending))), None)


def _holds(root: Path, ending: str) -> bool:
    return is_folder(root) and any(next(root.glob(depth + ending), None) for depth in ("*", "data/*", "*/*"))
