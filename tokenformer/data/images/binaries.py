"""The binary files of CIFAR-10, CIFAR-100 and MNIST (Fashion-MNIST, KMNIST), as their authors publish them."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tokenformer.data.compressed import DAMAGE, decompress
from tokenformer.data.images.decode import MOST_BYTES
from tokenformer.data.images.stored import Pieces
from tokenformer.errors import UserError
from tokenformer.parsing import is_file, read_text

CIFAR_PIXELS = 3 * 32 * 32


def cifar_folder(root: Path) -> Path | None:
    """Return the folder with CIFAR's binary files: `root`, or one in it."""
    for folder in (root, root / "cifar-10-batches-bin", root / "cifar-100-binary"):
        if any(is_file(folder / name) for name in ("data_batch_1.bin", "test_batch.bin", "train.bin", "test.bin")):
            return folder
    for folder in (root, root / "cifar-10-batches-py", root / "cifar-100-python"):
        if any(is_file(folder / name) for name in ("data_batch_1", "test_batch", "meta")):
            raise UserError(f"{folder} holds CIFAR as Python pickles, which may run programs: get the binary version")
    return None


def open_cifar(folder: Path, part: str) -> Pieces:
    """Open a part of CIFAR-10 or CIFAR-100 (its fine labels)."""
    hundred = is_file(folder / "train.bin") or is_file(folder / "test.bin")
    if hundred:
        names, front, meta = ["train.bin" if part == "train" else "test.bin"], 2, "fine_label_names.txt"
    else:
        batches = sorted(folder.glob("data_batch_*.bin"), key=lambda p: (len(p.name), p.name))
        names = [p.name for p in batches] if part == "train" else ["test_batch.bin"]
        front, meta = 1, "batches.meta.txt"
    given = read_text(folder / meta).split() if is_file(folder / meta) else []
    classes = given or [str(n) for n in range(100 if hundred else 10)]
    record, places, labels = front + CIFAR_PIXELS, [], []
    paths = [str(folder / name) for name in names]
    for number, path in enumerate(paths):
        data = np.fromfile(_there(path), np.uint8)
        if len(data) % record or not len(data):
            raise UserError(f"{path} has {len(data):,} bytes, which are no records of {record:,}: get it anew")
        labels.append(data[front - 1 :: record].astype(np.int64))
        if labels[-1].max() >= len(classes):
            raise UserError(f"{path} has the label {labels[-1].max()} of {len(classes)} classes: get it anew")
        places.append([(number, start + front, CIFAR_PIXELS) for start in range(0, len(data), record)])
    if not paths:
        raise UserError(f"{folder} has no data_batch_1.bin: get CIFAR anew")
    return Pieces(paths, np.concatenate(places).astype(np.int64), np.concatenate(labels), classes, (3, 32, 32))


def mnist_folder(root: Path) -> Path | None:
    """Return the folder with MNIST's files: `root`, or where torchvision puts them."""
    for folder in (root, root / "raw", root / "MNIST" / "raw"):
        if any(_mnist_file(folder, part, "images", 3) for part in ("train", "t10k")):
            return folder
    return None


def open_mnist(folder: Path, part: str) -> Pieces:
    """Open a part of MNIST; every image is grey."""
    prefix = "train" if part == "train" else "t10k"
    images, labels = _mnist_file(folder, prefix, "images", 3), _mnist_file(folder, prefix, "labels", 1)
    if images is None or labels is None:
        what = "images-idx3" if images is None else "labels-idx1"
        raise UserError(f"{folder} has no {prefix}-{what}-ubyte: get it from where the others are")
    count, height, width = _idx_shape(images, 3)
    (named,) = _idx_shape(labels, 1)
    if named != count:
        raise UserError(f"{labels} has {named:,} labels for {count:,} images: get both anew")
    numbers = np.frombuffer(_bytes(labels)[8:], np.uint8).astype(np.int64)
    offsets = 16 + height * width * np.arange(count)
    places = np.column_stack([np.zeros(count, np.int64), offsets, np.full(count, height * width)])
    classes = [str(n) for n in range(max(10, int(numbers.max(initial=0)) + 1))]
    return Pieces([str(images)], places, numbers, classes, (height, width))


def _there(path: str | Path) -> Path:
    if not is_file(path):
        raise UserError(f"{path} is missing: get it from where the others are")
    return Path(path)


def _mnist_file(folder: Path, prefix: str, what: str, axes: int) -> Path | None:
    names = [f"{prefix}-{what}{dot}idx{axes}-ubyte{zipped}" for zipped in ("", ".gz") for dot in "-."]
    return next((folder / name for name in names if is_file(folder / name)), None)


def _bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    try:
        with open(path, "rb") as file:
            return (decompress(file, ".gz") if path.suffix == ".gz" else file).read(most)
    except (*DAMAGE, OSError) as error:
        raise UserError(f"{path} is no whole gzip file ({error}): get it anew") from None


def _idx_shape(path: Path, axes: int) -> Sequence[int]:
    """Return the shape that an IDX file of bytes states, after comparing it with the size of the file."""
    data = _bytes(path)
    head = struct.unpack(f">{1 + axes}I", data[: 4 + 4 * axes]) if len(data) >= 4 + 4 * axes else (0,)
    if head[0] != 0x800 + axes:
        raise UserError(f"{path} is no IDX file of bytes with {axes} axes: get it anew")
    size = math.prod(head[1:])
    if size != len(data) - 4 - 4 * axes or not size:
        raise UserError(f"{path} states {size:,} bytes but has {len(data) - 4 - 4 * axes:,}: get it anew")
    return head[1:]
