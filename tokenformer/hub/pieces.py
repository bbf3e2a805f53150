"""Pieces of files, known by their digest: whole files and the tensors of safetensors files, wherever they lie."""

import contextlib
import hashlib
import operator
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenformer.errors import UserError
from tokenformer.parsing import JSON_BYTES, parse_json


class Piece(NamedTuple):
    """Bytes of a file of the folder, and their sha256."""

    file: str
    start: int
    size: int
    sha256: str


class Place(NamedTuple):
    """Where bytes lie on this disk."""

    path: Path
    start: int
    size: int


def spans(beginning: bytes, size: int) -> dict[str, tuple[int, int]]:
    """Return from where to where the tensors of a safetensors file lie, which begins with its header.

    Nothing is returned unless they fill the file, of `size` bytes, without a gap.
    """
    at = len(beginning)
    try:
        entries = parse_json(beginning[8:].decode(), "the header")
        offsets = {name: entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"}
        found = {name: (at + operator.index(a), at + operator.index(b)) for name, (a, b) in offsets.items()}
    except (UserError, UnicodeDecodeError, AttributeError, KeyError, TypeError, ValueError):
        return {}
    for start, end in sorted(found.values()):
        if start != at or end < start:
            return {}
        at = end
    return found if at == size else {}


def find(folders: Iterable[Path], wanted: Iterable[Place]) -> dict[str, Place]:
    """Return, by digest, files and tensors of local folders that are as large as what is wanted."""
    sizes, found = {place.size for place in wanted}, {}
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        with contextlib.suppress(OSError):  # what cannot be read is fetched
            size, beginning = path.stat().st_size, b""
            with open(path, "rb") as file:
                end = 8 + int.from_bytes(file.read(8), "little")
                if path.suffix == ".safetensors" and end <= min(size, JSON_BYTES):
                    file.seek(0)
                    beginning = file.read(end)
            places = [Place(path, a, b - a) for a, b in ((0, size), *spans(beginning, size).values())]
            found |= {digest(place): place for place in places if place.size in sizes}
    return found


def _read(place: Place) -> Iterator[bytes]:
    with open(place.path, "rb") as file:
        file.seek(place.start)
        left = place.size
        while left and (chunk := file.read(min(left, 1 << 20))):
            left -= len(chunk)
            yield chunk


def digest(place: Place) -> str:
    """Return the sha256 of bytes."""
    found = hashlib.sha256()
    for chunk in _read(place):
        found.update(chunk)
    return found.hexdigest()


def copy(source: Place, target: Place) -> None:
    """Copy bytes into a file that is there."""
    if source == target:
        return
    with open(target.path, "r+b") as file:
        file.seek(target.start)
        for chunk in _read(source):
            file.write(chunk)
