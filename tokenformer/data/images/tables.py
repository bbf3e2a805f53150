"""Parquet files with a column of images.

Unusual: Parquet cannot be read at random, so the images are unpacked once, into a file beside it or in `data.cache`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer import files
from tokenformer.data.images.shards import Index, join, kept_at, load_index, save_index, stamp_of, text_index
from tokenformer.data.images.stored import Pieces
from tokenformer.data.parquet import open_parquet, rows
from tokenformer.errors import UserError
from tokenformer.parsing import is_file, shown
from tokenformer.terminal import progress


def open_tables(
    names: Sequence[str], cache: str | None, classes: Sequence[str] | None, image: str, label: str
) -> Pieces:
    """Open the images of Parquet files, by the names of their two columns."""
    found, indices = unpack_tables(names, cache, image, label)
    return join(found, classes, indices, names)


def unpack_tables(
    names: Sequence[str], cache: str | None, image: str, label: str, texts: bool = False
) -> tuple[list[str], list[Index]]:
    """Return the files of unpacked images, and their indices. With `texts` the column `label` holds these."""
    found: list[str] = []
    with progress("unpacking Parquet", len(names), " files") as advance:
        return found, [_unpacked(Path(name), cache, image, label, texts, found, advance) for name in names]


def _unpacked(
    path: Path,
    cache: str | None,
    image: str,
    label: str,
    texts: bool,
    found: list[str],
    advance: Callable[[int], object],
) -> Index:
    """Return the index of a Parquet file, and append the file of its unpacked images to `found`."""
    # other columns have other files, which may be read at the same time
    mark = hashlib.blake2b("\0".join([image, label, str(texts)]).encode(), digest_size=4).hexdigest()
    place, target = (
        kept_at(path, cache, f"{mark}.{what}") for what in ("index", "images")
    )  # others read other columns
    stamp = stamp_of(path)
    found.append(str(target))

    def kept() -> Index | None:
        index = load_index(place, stamp)
        if index is None or not is_file(target):
            return None
        return index if target.stat().st_size == index["bytes"] else None

    index = kept()
    if index is None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(place.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks wait, and then find it
                index = kept() or _unpack(path, target, place, image, label, texts)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(lock.name)
        except OSError as error:
            raise UserError(
                f"the images of {path} cannot be unpacked into {place.parent} ({error.strerror}): "
                "name a folder with data.cache"
            ) from None
    advance(1)
    return index


def _unpack(path: Path, target: Path, place: Path, image: str, label: str, texts: bool) -> Index:
    free, size = shutil.disk_usage(place.parent).free, path.stat().st_size
    if free < 1.1 * size:
        raise UserError(
            f"unpacking {path} takes {size / 1e9:.1f} GB, but {place.parent} has {free / 1e9:.1f} free: "
            "name another folder with data.cache"
        )
    places, labels, end, missing = [], [], 0, []
    with open(path, "rb") as stream, open_parquet(stream, str(path)) as table, files.atomic_file(target) as beside:
        names = table.schema_arrow.names
        for column, what in ((image, "image"), (label, "caption" if texts else "label")):
            if column not in names:
                raise UserError(
                    f"{path} has no column '{column}': name the right one with data.images.{what}_column "
                    f"({', '.join(names)})"
                )
        with open(beside, "wb") as file:
            for number, (data, value) in enumerate(rows(table, [image, label]), 1):
                data = data.get("bytes") if isinstance(data, dict) else data
                text = "\n".join(captions_of(value)).encode() if texts else b""
                if texts and not (isinstance(data, bytes) and text):
                    lacks = f"text in '{label}'" if isinstance(data, bytes) else f"bytes of an image in '{image}'"
                    missing.append(f"row {number} of {path.name} has no {lacks}")
                    continue
                if not isinstance(data, bytes):
                    raise UserError(f"{path}, row {number}, has no image in '{image}': name the right column")
                if not texts and isinstance(value, str):
                    raise UserError(
                        f"{path}, row {number}, has the text {shown(value)} in '{label}', and labels are whole numbers "
                        "here: give their numbers, from 0, such as Hugging Face's ClassLabel does"
                    )
                if not texts and (type(value) is not int or not 0 <= value < 1 << 31):
                    raise UserError(f"{path}, row {number}, has no number of a class in '{label}': name the right one")
                places.append((end, len(data)))
                labels.append((end + len(data), len(text)) if texts else value)
                end += file.write(data + text)
    index = {"places": np.array(places, np.int64).reshape(-1, 2)}
    index |= text_index(labels, missing) if texts else {"labels": np.array(labels, np.int64)}
    index |= {"bytes": np.array(end), "stamp": stamp_of(path)}
    index["classes"] = np.array(_class_names(table, label), str)
    save_index(place, index)
    return index


def captions_of(value: Any) -> list[str]:
    """Return the captions that a field holds, a text or a list of them, each in one line; empty ones are none.

    >>> captions_of(["a cat", " ", "two\\nlines"]), captions_of(None)
    (['a cat', 'two lines'], [])
    """
    found = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    lines = [" ".join(text.split()) for text in found if isinstance(text, str)]
    return [line for line in lines if line]


def _class_names(table: Any, label: str) -> list[str]:
    """Return the names that Hugging Face's datasets write into a Parquet file; none where they are absent."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        names = json.loads(table.schema_arrow.metadata[b"huggingface"])["info"]["features"][label]["names"]
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    return []
