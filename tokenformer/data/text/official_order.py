"""The sample order of GPT-NeoX: documents of all epochs shuffled as one list, cut into samples, the samples shuffled.

Unusual: the order depends on how many samples are asked for, and it is one sample short, as in GPT-NeoX. Its arrays
(documents, where each begins, shuffle) are built once into memory-mapped files that all ranks share.
"""

import contextlib
import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from tokenformer.data.text.indexed import Indexed
from tokenformer.errors import UserError

_CHUNK = 1 << 22
NAMES = ("documents", "starts", "shuffle")


class OfficialOrder:
    """The order of samples made of items `first` … `last`-1 of a set, for a run that asks for `samples` of them."""

    def __init__(
        self, source: Indexed, first: int, last: int, context: int, samples: int, seed: int, cache: Path
    ) -> None:
        self.source, self.context = source, context
        self._tokens = int(source.sizes[first:last].sum(dtype=np.int64))
        self.epochs = -(-(samples * context + 1) // self._tokens) if self._tokens else 0
        made_of = (1, source.fingerprint, first, last, context, samples, seed)
        folder = cache / f"{source.prefix.name}.order-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"
        if self._tokens:
            self._build_once(folder, first, last, seed)
            self.documents_shuffled, self.starts, self.shuffle = (_load(folder / f"{name}.npy") for name in NAMES)
        else:
            self.documents_shuffled = self.starts = self.shuffle = np.empty(0, np.int64)
        self.count = max(0, len(self.shuffle) - 1)  # one short, as official

    def _build_once(self, folder: Path, first: int, last: int, seed: int) -> None:
        if folder.is_dir():
            return
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with open(f"{folder}.lock", "w") as lock:
                with contextlib.suppress(OSError):  # on a file system without locks each rank builds the same
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not folder.is_dir():
                    self._build(folder, first, last, seed)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{folder}.lock")
        except OSError as error:
            raise UserError(
                f"the index of order official cannot be written to {folder.parent} ({error.strerror}): "
                "name a folder with room in data.cache"
            ) from None

    def _build(self, folder: Path, first: int, last: int, seed: int) -> None:
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            random = np.random.RandomState(seed)
            length = self.epochs * (last - first)
            documents = _new(beside, "documents", np.int32, length)
            documents.reshape(self.epochs, -1)[:] = np.arange(first, last)
            random.shuffle(documents)
            starts, end = _new(beside, "starts", np.int64, length), 0
            for i in range(0, length, _CHUNK):
                sizes = self.source.sizes[documents[i : i + _CHUNK]].astype(np.int64)
                ends = end + np.cumsum(sizes)
                starts[i : i + _CHUNK] = ends - sizes
                end = int(ends[-1])
            samples = (self.epochs * self._tokens - 1) // self.context
            shuffle = _new(beside, "shuffle", np.uint32 if samples < 2**32 - 2 else np.int64, samples)
            for i in range(0, samples, _CHUNK):
                shuffle[i : i + _CHUNK] = np.arange(i, min(i + _CHUNK, samples))
            random.shuffle(shuffle)
            os.chmod(beside, 0o755)
            if not folder.is_dir():
                os.rename(beside, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def locate(self, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where unshuffled samples begin: the place in `documents_shuffled`, and the offset in that document."""
        place = np.asarray(sample, np.int64) * self.context
        row = np.searchsorted(self.starts, place, side="right") - 1
        row = np.where(place == 0, 0, row)  # the first sample begins at the first document, even an empty one
        return row, place - self.starts[row]

    def pieces(self, indices: np.ndarray) -> list[list[tuple[int, int]]]:
        """Return where the tokens of samples are in the stream, one piece per document."""
        rows, offsets = self.locate(self.shuffle[indices])
        return [self._pieces(row, offset) for row, offset in zip(rows.tolist(), offsets.tolist(), strict=True)]

    def _pieces(self, row: int, offset: int) -> list[tuple[int, int]]:
        wanted, out = self.context + 1, []
        while wanted:
            document = self.documents_shuffled[row]
            begin = int(self.source.pointers[document]) // self.source.dtype.itemsize + offset
            length = min(wanted, int(self.source.sizes[document]) - offset)
            if length:
                out.append((begin, begin + length))
            wanted, row, offset = wanted - length, row + 1, 0
        return out

    def documents(self, pieces: list[tuple[int, int]]) -> np.ndarray:
        """Return the number (0, 1, …) of the document that each token of a sample belongs to."""
        return np.repeat(np.arange(len(pieces)), [b - a for a, b in pieces])


def _load(path: Path) -> np.ndarray:
    mapped = np.load(path, mmap_mode="r")
    mapped._mmap.madvise(mmap.MADV_RANDOM)  # random access: do not read megabytes ahead
    return mapped.view(np.ndarray)


def _new(folder: Path, name: str, dtype: type, length: int) -> np.ndarray:
    created = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (length,))
    return created.view(np.ndarray)  # `shuffle` is fast on a plain array alone; the memory stays the file's
