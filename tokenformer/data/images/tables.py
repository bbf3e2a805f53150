"""Parquet files with a column of images.

Unusual: Parquet cannot be read at random, so the images are unpacked once, into a file beside it or in `data.cache`.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer import files
from tokenformer.data.images.shards import Index, join, kept_at, load_index, save_index, stamp_of
from tokenformer.data.images.stored import Pieces
from tokenformer.data.parquet import open_parquet, rows
from tokenformer.errors import UserError
from tokenformer.parsing import is_file
from tokenformer.terminal import progress


def open_tables(
    names: Sequence[str], cache: str | None, classes: Sequence[str] | None, image: str, label: str
) -> Pieces:
    """Open the images of Parquet files, by the names of their two columns."""
    found: list[str] = []
    with progress("unpacking Parquet", len(names), " files") as advance:
        indices = [_unpacked(Path(name), cache, image, label, found, advance) for name in names]
    return join(found, classes, indices)


def _unpacked(
    path: Path, cache: str | None, image: str, label: str, found: list[str], advance: Callable[[int], object]
) -> Index:
    """Return the index of a Parquet file, and append the file of its unpacked images to `found`."""
    place, target, stamp = kept_at(path, cache, "index"), kept_at(path, cache, "images"), stamp_of(path)
    found.append(str(target))

    def kept() -> Index | None:
        index = load_index(place, stamp)
        if index is None or not np.array_equal(index.get("columns", []), [image, label]) or not is_file(target):
            return None
        return index if target.stat().st_size == index["bytes"] else None

    index = kept()
    if index is None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(place.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks wait, and then find it
                index = kept() or _unpack(path, target, place, image, label)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(lock.name)
        except OSError as error:
            raise UserError(
                f"the images of {path} cannot be unpacked into {place.parent} ({error.strerror}): "
                "name a folder with data.cache"
            ) from None
    advance(1)
    return index


def _unpack(path: Path, target: Path, place: Path, image: str, label: str) -> Index:
    free, size = shutil.disk_usage(place.parent).free, path.stat().st_size
    if free < 1.1 * size:
        raise UserError(
            f"unpacking {path} takes {size / 1e9:.1f} GB, but {place.parent} has {free / 1e9:.1f} free: "
            "name another folder with data.cache"
        )
    places, labels, end = [], [], 0
    with open(path, "rb") as stream, open_parquet(stream, str(path)) as table, files.atomic_file(target) as beside:
        names = table.schema_arrow.names
        for column, what in ((image, "image"), (label, "label")):
            if column not in names:
                raise UserError(
                    f"{path} has no column '{column}': name the right one with data.images.{what}_column "
                    f"({', '.join(names)})"
                )
        with open(beside, "wb") as file:
            for number, (data, value) in enumerate(rows(table, [image, label]), 1):
                data = data.get("bytes") if isinstance(data, dict) else data
                if not isinstance(data, bytes):
                    raise UserError(f"{path}, row {number}, has no image in '{image}': name the right column")
                if type(value) is not int or not 0 <= value < 1 << 31:
                    raise UserError(f"{path}, row {number}, has no number of a class in '{label}': name the right one")
                places.append((end, len(data)))
                labels.append(value)
                end += file.write(data)
    index = {"places": np.array(places, np.int64).reshape(-1, 2), "labels": np.array(labels, np.int64)}
    index |= {"columns": np.array([image, label]), "bytes": np.array(end), "stamp": stamp_of(path)}
    index["classes"] = np.array(_class_names(table, label), str)
    save_index(place, index)
    return index


def _class_names(table: Any, label: str) -> list[str]:
    """Return the names that Hugging Face's datasets write into a Parquet file; none where they are absent."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        names = json.loads(table.schema_arrow.metadata[b"huggingface"])["info"]["features"][label]["names"]
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    return []
