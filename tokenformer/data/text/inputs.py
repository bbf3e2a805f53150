"""Where text comes from: files, folders, globs, archives and standard input, opened as unpacked streams.

Unusual: members of a plain .tar and of a .zip are inputs of their own, so that work can be shared out and resumed
between them; other archives (.tar.gz and the like) are read through from the front.
"""

import glob
import io
import os
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, TypeVar

from tokenformer.data import compressed
from tokenformer.errors import UserError
from tokenformer.files import refuse_same
from tokenformer.parsing import is_file, is_folder

Item = TypeVar("Item")
STDIN = "-"
DAMAGE = (*compressed.DAMAGE, tarfile.ReadError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Input:
    """One stream of text: a file, standard input, or a member of an archive."""

    path: str
    bytes: int = 0  # on disk
    stamp: int = 0  # when the file was changed last, in ns
    member: str = ""
    offset: int = 0  # where the data of a member of a .tar begin

    @property
    def name(self) -> str:
        path = "standard input" if self.path == STDIN else self.path
        return f"{path}: {self.member}" if self.member else path


def find_inputs(inputs: Sequence[str | Path]) -> list[Input]:
    """Find the inputs that files, folders, globs or '-' name; folders and globs in the order of their names."""
    found: list[str] = []
    for given in map(str, inputs):
        if given == STDIN:
            found.append(STDIN)
        elif is_file(Path(given)):
            found.append(str(Path(given)))  # a Path leaves out the end of `text.txt/.`
        elif is_folder(given):
            inside = sorted(p for p in Path(given).rglob("*") if p.is_file() and not _hidden(p.relative_to(given)))
            found += map(str, inside)
        elif os.path.exists(given):
            raise UserError(f"{given} is neither a file nor a folder: give one, or pass it by standard input ('-')")
        else:
            matches = sorted(p for p in glob.glob(given, recursive=True) if Path(p).is_file())
            if not matches:
                raise UserError(f"there is no file, folder or match for '{given}': check the path")
            found += matches
    if not found:
        raise UserError(f"there are no files in {', '.join(map(str, inputs))}: give a folder that has some")
    if found.count(STDIN) > 1:
        raise UserError("standard input ('-') is named twice: it can be read once")
    refuse_same(path for path in found if path != STDIN)
    return [s for path in found for s in ([Input(STDIN)] if path == STDIN else _members(path))]


def take_shard(files: Sequence[Item], shard: tuple[int, int] | None) -> list[Item]:
    """Return what belongs to shard i of n (counted from 1): neighbours, so that merged shards are the whole.

    >>> take_shard(["a", "b", "c", "d", "e"], (2, 2))
    ['c', 'd', 'e']
    """
    if shard is None:
        return list(files)
    i, n = shard
    if len(files) < n:
        raise UserError(f"{len(files)} files cannot be shared out over {n} shards: give at most {len(files)} shards")
    return list(files[(i - 1) * len(files) // n : i * len(files) // n])


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts) or "__MACOSX" in path.parts


def _members(path: str) -> list[Input]:
    """Return the file as one input, or the members of a plain .tar or .zip as inputs of their own."""
    state = os.stat(path)
    try:
        if path.endswith(".tar"):
            with tarfile.open(path, "r:") as tar:
                inside = [m for m in tar if m.isreg() and not m.issparse() and not _hidden(Path(m.name))]
            return [Input(path, m.size, state.st_mtime_ns, m.name, m.offset_data) for m in inside]
        if path.endswith(".zip"):
            entries = [z for z in _zip(path).infolist() if not z.is_dir() and not _hidden(Path(z.filename))]
            return [Input(path, z.compress_size, state.st_mtime_ns, z.filename) for z in entries]
    except (*DAMAGE, OSError) as error:
        raise UserError(f"{path} is damaged or cut off ({error}): get it anew") from None
    return [Input(path, state.st_size, state.st_mtime_ns)]


@lru_cache(maxsize=1)
def _zip(path: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


class _Counted(io.FileIO):
    """A file, or a range of it, that reports how many bytes were read."""

    def __init__(self, path: str | int, seen: Callable[[int], object], start: int = 0, size: int | None = None) -> None:
        super().__init__(path, "rb", closefd=not isinstance(path, int))
        self._seen, self._start, self._size = seen, start, size
        if start:
            super().seek(start)

    def readinto(self, buffer) -> int | None:
        view = memoryview(buffer)
        if self._size is not None:
            view = view[: max(0, self._size - self.tell())]
        count = super().readinto(view)
        self._seen(count or 0)
        return count

    def tell(self) -> int:
        return super().tell() - self._start

    def seek(self, place: int, whence: int = 0) -> int:
        if whence == 2 and self._size is not None:
            place, whence = self._size + place, 0
        return super().seek(place + self._start * (whence == 0), whence) - self._start


def open_input(given: Input, seen: Callable[[int], object] = lambda count: None) -> Iterator[tuple[BinaryIO, str]]:
    """Yield the streams of an input, unpacked, with their names. `seen` is called with the bytes read from the disk."""
    if given.path == STDIN:
        raw = io.BufferedReader(_Counted(sys.stdin.fileno(), seen), 1 << 20)
        yield from unpack(raw, "")
    elif given.path.endswith(".zip") and given.member:
        with _zip(given.path).open(given.member) as inner:
            seen(given.bytes)
            yield from unpack(inner, given.member)  # type: ignore[arg-type]
    else:
        size = given.bytes if given.member else None
        with io.BufferedReader(_Counted(given.path, seen, given.offset, size), 1 << 20) as raw:
            yield from unpack(raw, given.member or given.path)


def unpack(stream: BinaryIO, name: str) -> Iterator[tuple[BinaryIO, str]]:
    """Unpack what the endings of a name say (.gz, .xz, .zst, .bz2, .tar, .zip), one after another."""
    name = name.removesuffix(".tgz") + ".tar.gz" if name.endswith(".tgz") else name
    inner, ending = os.path.splitext(name)
    if ending in compressed.ENDINGS:
        yield from unpack(compressed.decompress(stream, ending), inner)
    elif ending == ".tar":
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                if member.isreg() and not _hidden(Path(member.name)):
                    yield from unpack(tar.extractfile(member), member.name)  # type: ignore[arg-type]
    elif ending == ".zip":
        with zipfile.ZipFile(seekable(stream)) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and not _hidden(Path(entry.filename)):
                    yield from unpack(archive.open(entry), entry.filename)  # type: ignore[arg-type]
    else:
        yield stream, name


def seekable(stream: BinaryIO) -> BinaryIO:
    """Return the stream itself, or a copy of it in a temporary file if it cannot seek."""
    if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, _Counted) and stream.seekable():
        return stream
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (whoever reads it keeps it open)
    while block := stream.read(1 << 20):
        copy.write(block)
    copy.seek(0)
    return copy  # type: ignore[return-value]
