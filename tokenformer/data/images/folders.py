"""Image folders: a folder per class, image files below it; or all images in one folder, and a list of their labels."""

import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tokenformer.data.images.decode import need_pillow
from tokenformer.data.images.stored import Files, alike
from tokenformer.errors import UserError
from tokenformer.parsing import is_file, is_folder, read_text, shown
from tokenformer.terminal import progress

ENDINGS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm")
OTHERS = (  # images that are not read, which is said
    *("avif", "heic", "heif", "jfif", "jpe", "jp2", "j2k", "jpx", "jxl", "tga", "ico", "svg", "psd", "exr", "hdr"),
    *("dng", "cr2", "nef", "arw"),
)
MOST_BYTES = 1 << 28  # of a devkit's meta.mat, unpacked


def open_folder(root: Path, classes: Sequence[str] | None = None) -> Files:
    """Open the images below `root`; the classes are its folders in alphabetical order, or the given ones."""
    found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise UserError(
            f"{root} has no folders: put the images of each class into a folder of its name, or name a list of their "
            "labels with data.images.labels (eval: --labels)"
        )
    known = list(classes or found)
    numbers = {alike(name): number for number, name in enumerate(known)}
    if not classes and len(numbers) < len(found):
        both = next(name for number, name in enumerate(found) if numbers[alike(name)] != number)
        raise UserError(f"{root} has two folders that are both called {shown(alike(both))}: put their images into one")
    names, sizes, labels, empty, passed = [], [], [], [], Counter[str]()
    with progress(f"listing {root}", len(found), " folders") as advance:
        for folder in found:
            advance(1)
            some = list(images_below(root, folder, passed))
            if some and alike(folder) not in numbers:
                raise UserError(
                    f"{root / folder} is none of the {len(known):,} classes ({shown(known)}): "
                    "move it away, or name its class"
                )
            empty += [] if some else [folder]
            names += [name for name, _ in some]
            sizes += [size for _, size in some]
            labels += [numbers[alike(folder)]] * len(some) if some else []
    say_passed(root, passed)
    if not names:
        raise UserError(f"no folder in {root} has images ({', '.join(ENDINGS)}): check the path")
    if empty:
        others = f", nor have {len(empty) - 1:,} other folders: nothing is there of their classes"
        what = others if len(empty) > 1 else ": nothing is there of its class"
        warnings.warn(f"{root / empty[0]} has no images{what}", stacklevel=2)
    return Files(str(root), names, sizes, np.array(labels, np.int64), known)


def say_passed(where: object, passed: Counter[str]) -> None:
    """Say how many images are not read because their format is not; `passed` counts them by ending."""
    if count := passed.total():
        files = f"{count:,} files in {where} are" if count > 1 else f"1 file in {where} is"
        which = ", ".join(f".{ending}" for ending in sorted(passed))
        warnings.warn(f"{files} passed over: {which} ({', '.join(ENDINGS)} are read)", stacklevel=3)


def images_below(root: Path, folder: str, passed: Counter[str]) -> Iterator[tuple[str, int]]:
    """Yield name below `root` and size of the images in a folder and in the folders below it, in order of names.

    Images of formats that are not read are counted in `passed`.
    """
    for entry in sorted(os.scandir(root / folder), key=lambda entry: entry.name):
        name = f"{folder}/{entry.name}"
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from images_below(root, name, passed)
        elif (ending := entry.name.lower().rpartition(".")[2]) in ENDINGS and entry.is_file():
            yield name, entry.stat().st_size
        elif ending in OTHERS:
            passed[ending] += 1


def find_images(words: Sequence[str]) -> Files:
    """Return the images of a command line: files as they are named, and those of folders in order of their names."""
    need_pillow()
    found: list[tuple[str, int]] = []
    for word in words:
        if is_folder(word):
            passed = Counter[str]()
            some = list(images_below(Path(), word.rstrip("/") or "/", passed))
            say_passed(word, passed)
            if not some:
                raise UserError(f"{word} has no images ({', '.join(ENDINGS)}): give another folder, or files")
            found += some
        elif is_file(word):
            found.append((word, os.stat(word).st_size))
        else:
            raise UserError(f"there is no image and no folder {word}: check its name")
    names, sizes = zip(*found, strict=True)
    return Files("", names, sizes, np.zeros(len(names), np.int64), [])


def has_folders(root: Path) -> bool:
    return any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(root))


def open_flat(root: Path, labels: Path, classes: Sequence[str] | None = None) -> Files:
    """Open the images that lie in one folder, as ImageNet's validation images do; a file says which class each is."""
    every = sorted((entry.name, entry) for entry in os.scandir(root) if not entry.name.startswith("."))
    endings = [name.lower().rpartition(".")[2] for name, _ in every]
    say_passed(root, Counter(ending for ending in endings if ending in OTHERS))
    files = [(n, e.stat().st_size) for (n, e), ending in zip(every, endings, strict=True) if ending in ENDINGS]
    if not files:
        raise UserError(f"{root} has no images ({', '.join(ENDINGS)}): check the path")
    names, sizes = zip(*files, strict=True)
    words = _labels(labels, names)
    if not classes:
        numbered = all(word.isdecimal() for word in words)
        classes = [str(n) for n in range(max(map(int, words)) + 1)] if numbered else sorted(set(words))
    numbers = {str(n): n for n in range(len(classes))} | {alike(name): n for n, name in enumerate(classes)}
    unknown = next((word for word in words if alike(word) not in numbers), None)
    if unknown is not None:
        raise UserError(
            f"{labels} has the label {shown(unknown)}, which is none of the {len(classes):,} classes "
            f"({shown(list(classes))}): say which class is which (eval --class-index)"
        )
    return Files(str(root), names, sizes, np.array([numbers[alike(word)] for word in words], np.int64), list(classes))


def _labels(path: Path, names: Sequence[str]) -> list[str]:
    """Return the label of each file, as a list has it: a line `FILE LABEL` each, Kaggle's CSV (the label and boxes), or
    labels alone in the order of the files' names; numbers alone are those of ImageNet's devkit.
    """
    lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    lines = lines[1:] if lines[:1] == ["ImageId,PredictionString"] else lines
    rows = [re.split(r"\s*[,\s]\s*", line, maxsplit=1) for line in lines]
    if all(len(row) == 1 for row in rows):
        if len(rows) != len(names):
            raise UserError(f"{path} has {len(rows):,} labels for {len(names):,} images: give the list of these images")
        words = [word for (word,) in rows]
        return _synsets(path, words) if all(word.isdecimal() for word in words) else words
    known = {row[0]: row[1].split()[0] for row in rows if len(row) == 2 and row[1]}
    found = [known.get(name, known.get(name.rpartition(".")[0], "")) for name in names]
    if "" in found:
        raise UserError(f"{path} has no label of {names[found.index('')]}: add its line")
    return found


def _synsets(path: Path, numbers: list[str]) -> list[str]:
    """Return the synsets of the devkit's numbers, which count in the order of its meta.mat and not as models do."""
    about = path.with_name("meta.mat")
    if not is_file(about):
        raise UserError(
            f"{path} has numbers alone, as in ImageNet's devkit, and no meta.mat beside it says what they mean: put it "
            "there, or give lines of file and class"
        )
    data, start, text = about.read_bytes(), 128, b""
    while start + 8 <= len(data):  # MATLAB 5: elements of type, size and content; type 15 is compressed
        kind, size = (int.from_bytes(data[at : at + 4], "little") for at in (start, start + 4))
        part = data[start + 8 : start + 8 + size]
        try:
            text += zlib.decompressobj().decompress(part, MOST_BYTES) if kind == 15 else part
        except zlib.error:
            break
        start += 8 + size
    found = [word.decode() for word in re.findall(rb"n\d{8}", text.replace(b"\0", b""))]
    if not 1 <= min(map(int, numbers)) <= max(map(int, numbers)) <= len(found) or len(set(found)) < len(found):
        raise UserError(f"{about} does not name the synsets of the numbers in {path}: get both anew")
    return [found[int(number) - 1] for number in numbers]
