"""Pairs of images and texts: CSV and JSON lines with paths of images, Parquet with images in it, webdataset tars.

Unusual: a set of pairs is an image set whose labels are the numbers of its pairs, so that all that is known of image
sets (parts, held-back ones, damaged images that another one replaces) holds for pairs. An image may have several
captions: lines of `key.txt` in a tar, a list in JSON lines and Parquet, rows of the same path in CSV.
"""

import codecs
import csv
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.data.images.opening import Part, find_shards, none_of, open_part, refuse_compressed, refuse_shared
from tokenformer.data.images.shards import Index, expand, index_tars
from tokenformer.data.images.stored import Files, Images, Pieces, Some, fingerprint
from tokenformer.data.images.tables import captions_of, unpack_tables
from tokenformer.errors import UserError
from tokenformer.parsing import parse_json, read_text, shown

KINDS = {".tar": "tar", ".parquet": "parquet", ".jsonl": "jsonl", ".csv": "csv", ".tsv": "csv"}
MOST_BYTES = 1 << 32  # of a table


class Texts(Protocol):
    """What lies beside images: the captions of one in one piece, a line each."""

    fingerprint: str

    def item(self, index: int) -> Any: ...


class Lines:
    """Captions in memory, as one block of bytes that travels to worker processes in a moment."""

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = [text.encode() for text in texts]
        self._bytes, self._ends = b"".join(encoded), np.cumsum([len(text) for text in encoded], dtype=np.int64)
        self.fingerprint = fingerprint(self._bytes, self._ends)

    def item(self, index: int) -> bytes:
        return self._bytes[self._ends[index - 1] if index else 0 : self._ends[index]]


class Pairs:
    """Images with their captions; as an image set (`Images`) its labels are the numbers of its pairs."""

    def __init__(self, images: Images, texts: Texts) -> None:
        self.images, self.texts = images, texts
        self.labels, self.classes = np.arange(len(images)), list[str]()
        self.fingerprint = fingerprint(images.fingerprint.encode(), texts.fingerprint.encode())

    def __len__(self) -> int:
        return len(self.images)

    def item(self, index: int) -> bytes | np.ndarray:
        return self.images.item(index)

    def name(self, index: int) -> str:
        return self.images.name(index)

    def captions(self, index: int) -> list[str]:
        lines = self.texts.item(index).decode("utf-8-sig", "replace").split("\n")
        return [line.strip() for line in lines if line.strip()]


def open_pairs(data: DataConfig, part: Part) -> Images:
    """Open a part of a set of pairs: a `Pairs`, or `Some` of one; `pairs_of` gives the whole one."""
    settings = data.images or ImagesConfig()
    return open_part(data, part, lambda path, part: _open(path, part, data.cache, settings))


def open_pair_parts(data: DataConfig) -> tuple[Images, Images]:
    """Open what is trained on and what is validated on; refuse to validate on files that are trained on."""
    train, held = open_pairs(data, "train"), open_pairs(data, "validation")
    refuse_shared(data, pairs_of(train).images, pairs_of(held).images if len(held) else held)
    return train, held


def pairs_of(images: Images) -> Pairs:
    """Return the whole set that images were chosen from: their labels are numbers of its pairs."""
    while isinstance(images, Some):
        images = images.images
    return cast(Pairs, images)


def _open(path: str, part: Part | None, cache: str | None, settings: ImagesConfig) -> Images:
    shards = find_shards(path, part, settings.format, KINDS)
    if shards is None:
        known = "CSV, JSON lines (.jsonl), Parquet or webdataset tars"
        if not (there := os.path.exists(path)):
            expand(path)  # an address is refused as one
        refuse_compressed(path)
        if not there:
            raise UserError(f"there is no file or folder {shown(path)}: check the path ({known} are read)")
        raise UserError(f"{shown(path)} has no pairs of images and texts: give {known}, or a folder of these")
    kind, names = shards
    if not names:
        return none_of(_open(path, "train", cache, settings))
    image, caption = settings.image_column, settings.caption_column
    if kind in ("csv", "jsonl"):
        read = _csv_rows if kind == "csv" else _json_rows
        rows = [(Path(name).parent, row) for name in names for row in read(name, image, caption)]
        return _joined(rows, names[0], settings)
    if kind == "tar":
        files, indices = list(names), index_tars(names, cache, "pairs", _text_place)
    else:
        files, indices = unpack_tables(names, cache, image, caption, texts=True)
    return _pieces(files, indices, settings)


def _pieces(files: list[str], indices: list[Index], settings: ImagesConfig) -> Pairs:
    counts = [len(index["labels"]) for index in indices]
    numbers = np.repeat(np.arange(len(files)), counts)
    about = np.zeros(sum(counts), np.int64)
    images, texts = (
        Pieces(files, np.column_stack([numbers, np.concatenate([index[key] for index in indices])]), about, [])
        for key in ("places", "texts")
    )
    missing = [(int(index["missing"]), str(index["first"])) for index in indices if index["missing"]]
    _report(sum(count for count, _ in missing), missing[0][1] if missing else "", len(images), files[0], settings)
    return Pairs(images, texts)


def _joined(rows: list[tuple[Path, tuple[str, str, list[str]]]], first: str, settings: ImagesConfig) -> Pairs:
    """Return the pairs of tables of paths, the `first` of which is named; rows of one image are its captions."""
    captions: dict[str, list[str]] = {}
    missing = []
    for folder, (where, name, found) in rows:
        if not name or not found:
            missing.append(f"{where} has no {'caption' if name else 'image'}")
        else:
            captions.setdefault(os.path.normpath(os.path.join(folder, name)), []).extend(found)
    _report(len(missing), missing[0] if missing else "", len(captions), first, settings)
    sizes = [os.stat(path).st_size if os.path.isfile(path) else -1 for path in captions]
    images = Files("", list(captions), sizes, np.zeros(len(captions), np.int64), [])
    own = [os.path.relpath(path, rows[0][0]) for path in captions]  # where the folder lies does not count
    images.fingerprint = fingerprint(os.fsencode("\0".join(own)), np.array(sizes, np.int64))
    return Pairs(images, Lines(["\n".join(texts) for texts in captions.values()]))


def _report(missing: int, first: str, found: int, where: str, settings: ImagesConfig) -> None:
    """Refuse or report pairs without image or text; `first` says what one of them lacks."""
    if missing and settings.damaged == "refuse":
        raise UserError(
            f"{first}: mend or remove it, or set data.images.damaged=skip to leave such pairs out "
            f"({missing:,} of {missing + found:,})"
        )
    if missing:
        warnings.warn(
            f"{missing:,} of {missing + found:,} pairs have no image or no text in UTF-8: left out", stacklevel=2
        )
    if not found:
        raise UserError(f"{where} has no pairs of images and texts: check data.path")


def _csv_rows(name: str, image: str, caption: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield where a row is, the path of its image, and its caption. The header has tabs, or commas."""
    text = read_text(name, MOST_BYTES)
    tabs = "\t" in text.partition("\n")[0]
    try:
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if tabs else ",", strict=True)
        _check_columns(name, list(rows.fieldnames or []), image, caption)
        for row in rows:
            where = f"line {rows.line_num} of {name}"
            if None in row:
                raise UserError(f"{where} has more cells than the first line: put quotes around texts with commas")
            yield where, (row[image] or "").strip(), captions_of(row[caption])
    except csv.Error as error:
        raise UserError(f"{name} is not CSV ({error}): mend it, or write it anew") from None


def _json_rows(name: str, image: str, caption: str) -> Iterator[tuple[str, str, list[str]]]:
    checked = False
    for number, line in enumerate(read_text(name, MOST_BYTES).split("\n"), 1):
        if line.strip():
            where = f"line {number} of {name}"
            row = parse_json(line, where)
            if not isinstance(row, dict):
                raise UserError(f"{where} is no JSON object: write the fields {image} and {caption}")
            if not checked:
                _check_columns(name, list(row), image, caption)
            path, checked = row.get(image), True
            yield where, path.strip() if isinstance(path, str) else "", captions_of(row.get(caption))


def _check_columns(name: str, columns: list[str], image: str, caption: str) -> None:
    if not columns:
        raise UserError(f"{name} is empty: write the columns {image} and {caption}")
    for column, what in ((image, "image"), (caption, "caption")):
        if columns.count(column) > 1:
            raise UserError(f"{name} has several columns '{column}': rename all but one")
        if column not in columns:
            raise UserError(
                f"{name} has no column '{column}': name the right one with data.images.{what}_column "
                f"({shown(', '.join(columns))})"
            )


def _text_place(path: Path, _key: str, found: dict[str, tuple[int, int]]) -> tuple[int, int] | None:
    """Return where the text of a sample lies in a tar; None if it has none, or an empty one, or one not in UTF-8."""
    if "txt" not in found:
        return None
    offset, size = found["txt"]
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), min(size, 1 << 20), offset)
    try:
        text, _ = codecs.utf_8_decode(data, "strict", size == len(data))  # a longer one may be cut inside a character
    except UnicodeDecodeError:
        return None
    return (offset, size) if text.strip("\ufeff").strip() else None
