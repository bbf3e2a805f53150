"""Images that lie somewhere: files of their own, or pieces of larger files. Both say their labels and read one item.

Unusual: what is kept in memory is arrays and one block of names, so that a million images travel to worker processes
in a moment. An item is the bytes of an image file, or pixels (uint8) where the format has no more than those.
"""

import functools
import hashlib
import os
import re
import stat
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from tokenformer.data.compressed import decompress
from tokenformer.data.images.decode import MOST_BYTES, Damaged
from tokenformer.errors import UserError
from tokenformer.parsing import shown


class Images(Protocol):
    """What an image set answers."""

    classes: list[str]
    labels: np.ndarray  # int64, a number for each image
    fingerprint: str  # changes with the images' names, sizes, labels and order

    def __len__(self) -> int: ...
    def item(self, index: int) -> bytes | np.ndarray: ...
    def name(self, index: int) -> str: ...


_MARKS = re.compile(r"^\.?(.+?)(\.[0-9a-f]{8}){1,2}(?=\.images$)")  # of an unpacked file: of its place and its columns


class Files:
    """A file per image, below `root`."""

    def __init__(self, root: str, names: Sequence[str], sizes: Sequence[int], labels: np.ndarray, classes: list[str]):
        self.root, self.labels, self.classes = root, labels, classes
        encoded = [os.fsencode(name) for name in names]
        self._names, self._ends = b"".join(encoded), np.cumsum([len(name) for name in encoded], dtype=np.int64)
        self.fingerprint = fingerprint(self._names, self._ends, np.array(sizes, np.int64), labels)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return os.path.join(self.root, os.fsdecode(self._names[start : self._ends[index]]))

    def item(self, index: int) -> bytes:
        try:
            if not stat.S_ISREG(os.stat(self.name(index)).st_mode):  # a named pipe would be waited for
                raise Damaged("it is no file")
            with open(self.name(index), "rb") as file:
                return file.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:  # a name with a null byte, in a table of paths
            raise Damaged(f"it cannot be read ({getattr(error, 'strerror', error)})") from None


class Pieces:
    """Images at places inside of files: `places` has a row of file, offset and size for each."""

    def __init__(
        self,
        files: Sequence[str],
        places: np.ndarray,
        labels: np.ndarray,
        classes: list[str],
        shape: tuple[int, ...] | None = None,  # of raw pixels: (3, height, width) or (height, width)
    ) -> None:
        self.files, self.places, self.labels, self.classes, self.shape = list(files), places, labels, classes, shape
        self._stamps = [os.stat(file).st_mtime_ns for file in files]  # a file that was replaced is opened anew
        names = "\0".join(_MARKS.sub(r".\1", Path(file).name) for file in files).encode()
        self.fingerprint = fingerprint(names, places, labels)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Return what a person finds the image by: its name in a tar, which stands right before it; else its number."""
        file, offset, _ = self.places[index].tolist()
        path = self.files[file]
        if path.endswith(".tar"):
            head = _read_at(path, self._stamps[file], max(0, offset - 512), 100).split(b"\0")[0]
            return f"{head.decode('utf-8', 'replace')} in {path}"
        return f"image {index - int(np.searchsorted(self.places[:, 0], file)) + 1} of {path}"

    def item(self, index: int) -> bytes | np.ndarray:
        file, offset, size = self.places[index].tolist()
        try:
            data = _read_at(self.files[file], self._stamps[file], offset, min(size, MOST_BYTES + 1))
        except OSError as error:
            raise Damaged(f"it cannot be read ({error.strerror})") from None
        if len(data) < min(size, MOST_BYTES + 1):
            raise Damaged(f"only {len(data):,} of its {size:,} bytes are there")
        if self.shape is None:
            return data
        pixels = np.frombuffer(data, np.uint8).reshape(self.shape)
        return np.ascontiguousarray(pixels.transpose(1, 2, 0)) if pixels.ndim == 3 else pixels


class Some:
    """A choice of the images of a set."""

    def __init__(self, images: Images, chosen: np.ndarray) -> None:
        self.images, self.chosen, self.classes = images, chosen, images.classes
        self.labels = images.labels[chosen]
        self.fingerprint = fingerprint(images.fingerprint.encode(), chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def name(self, index: int) -> str:
        return self.images.name(int(self.chosen[index]))

    def item(self, index: int) -> bytes | np.ndarray:
        return self.images.item(int(self.chosen[index]))


def renumbered(labels: np.ndarray, own: Sequence[str], classes: Sequence[str], path: str) -> np.ndarray:
    """Return labels as numbers of `classes`: by name, where the data name their own classes and these are known.

    >>> renumbered(np.array([0, 1, 1]), ["bee", "ant"], ["ant", "bee", "cat"], "set").tolist()
    [1, 0, 0]
    """
    numbers = {alike(name): number for number, name in enumerate(classes)}
    known = {number: numbers[alike(name)] for number, name in enumerate(own) if alike(name) in numbers}
    if labels.max(initial=0) >= len(own) or all(number == new for number, new in known.items()):
        return labels
    missing = [own[number] for number in sorted(set(labels.tolist()) - known.keys())]
    if missing:
        raise UserError(f"{path} has the class {shown(missing[0])}, which the model's classes lack: give data of these")
    return np.array([known.get(number, 0) for number in range(len(own))], np.int64)[labels]


def alike(name: str) -> str:
    """Return a name of a class as names are compared: macOS writes an é as two characters.

    >>> len("e\u0301"), len(alike("e\u0301"))
    (2, 1)
    """
    return unicodedata.normalize("NFC", name)


def fingerprint(*parts: bytes | np.ndarray) -> str:
    """Return a short text that changes with any of the parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def _read_at(path: str, stamp: int, offset: int, size: int) -> bytes:
    if path.endswith(".gz"):
        return _unpacked(path, stamp)[offset : offset + size]
    return os.pread(_opened(path, stamp).fileno(), size, offset)


@functools.lru_cache(maxsize=4)
def _unpacked(path: str, stamp: int) -> bytes:
    with open(path, "rb") as file:
        return decompress(file, ".gz").read(MOST_BYTES)


@functools.lru_cache(maxsize=128)
def _opened(path: str, stamp: int) -> BinaryIO:
    return open(path, "rb", buffering=0)  # closed when it leaves the cache
