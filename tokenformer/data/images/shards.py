"""Shards of images: which files a pattern or a folder has, where the images lie in them, and webdataset tars.

Unusual: a shard is read through once. Where its images lie is kept in a small file beside it, or in `data.cache`.
"""

import contextlib
import glob
import hashlib
import itertools
import os
import re
import tarfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer import files
from tokenformer.data.images.folders import ENDINGS, OTHERS, say_passed
from tokenformer.data.images.stored import Pieces, renumbered
from tokenformer.errors import UserError
from tokenformer.parsing import is_file, is_folder, parse_json, shown
from tokenformer.terminal import progress

PARTS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev", "test"),  # test images: where there are no others
    "test": ("test",),
}
MOST_SHARDS = 100_000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")
Index = dict[str, np.ndarray]
About = Callable[[Path, str, dict[str, tuple[int, int]]], Any]  # tar, key, ending → place of each of its files


def expand(pattern: str) -> list[str]:
    """Return the names that a brace range stands for.

    >>> expand("a-{08..10}.tar"), expand("{train,val}.tar")
    (['a-08.tar', 'a-09.tar', 'a-10.tar'], ['train.tar', 'val.tar'])
    """
    if pattern.startswith("pipe:") or "://" in pattern:
        raise UserError(f"{shown(pattern)} is no local file: fetch the shards first, and give their path")
    pieces, end, count = [], 0, 1
    for found in _RANGE.finditer(pattern):
        first, last, words = found.groups()
        if words is None:
            if not (len(last) < 10 and int(first) <= int(last) and int(last) - int(first) < MOST_SHARDS):
                raise UserError(f"{found[0]} is no range of at most {MOST_SHARDS:,} shards: write such as {{000..146}}")
            choices = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
        else:
            choices = words.split(",")
        pieces += [[pattern[end : found.start()]], choices]
        end, count = found.end(), count * len(choices)
        if count > MOST_SHARDS:
            raise UserError(f"{shown(pattern)} stands for more than {MOST_SHARDS:,} shards: give fewer")
    return ["".join(words) for words in itertools.product(*pieces, [pattern[end:]])]


def shard_files(pattern: str, part: str | None, ending: str) -> list[str]:
    """Return the shards of a part (None: all), which the names of the files or of their folders say.

    Of a folder they are sorted, and where some are of a part, those of none are not read. Those that a pattern names
    without a part are trained on.
    """
    if is_folder(pattern):
        depths = ("*", "*/*", "*/*/*")
        every = [
            str(p) for p in sorted(p for depth in depths for p in Path(pattern).glob(depth + ending) if is_file(p))
        ]
    else:
        found = [sorted(glob.glob(name)) if any(c in name for c in "*?[") else [name] for name in expand(pattern)]
        every = [name for some in found for name in some]
        for name in every:
            if not is_file(name):
                raise UserError(f"there is no shard {shown(name)}: check data.path")
    parts = [part_of(name, pattern) for name in every]
    if part is None or (part == "train" and not any(parts)):
        return every
    left = [name for name, own in zip(every, parts, strict=True) if own is None]
    if left and any(parts) and is_folder(pattern):
        do = "name it after one (train…, val…, dev…, test…)"
        warnings.warn(f"{left[0]} is of no part, so it is not read: {do}", stacklevel=2)
    wanted = [part, None] if part == "train" and not is_folder(pattern) else [part]
    if part == "validation" and part not in parts:
        wanted = ["test"]
    return [name for name, own in zip(every, parts, strict=True) if own in wanted]


def part_of(name: str, pattern: str) -> str | None:
    """Return the part that a file is of by a word of its name, or by those of the folders that `pattern` leaves open.

    >>> part_of("x/Val/train-0.tar", "x"), part_of("x/test-0.tar", "x/*.tar"), part_of("val/a/0.tar", "val/*/0.tar")
    ('validation', 'test', None)
    >>> part_of("imagenet1k-validation-00.tar", "*.tar"), part_of("coco_train2017.tar", "*.tar")
    ('validation', 'train')
    """
    root = Path(pattern)
    if not is_folder(pattern):
        fixed = itertools.takewhile(lambda piece: not any(c in piece for c in "*?[{"), root.parts[:-1])
        root = Path(*fixed)
    *folders, file = Path(name).relative_to(root).parts
    own = [word.rstrip("0123456789") for word in re.split(r"[-_.]", file)]
    words = [*folders, *own, *([] if folders else [root.name])]
    return next((part for word in words if (part := part_of_word(word))), None)


def part_of_word(word: str) -> str | None:
    """Return the part that a word names, in capitals too.

    >>> [part_of_word(word) for word in ("Train", "dev", "TEST", "cat")]
    ['train', 'validation', 'test', None]
    """
    return next((part for part in ("train", "test", "validation") if word.lower() in PARTS[part]), None)


def open_tars(names: Sequence[str], cache: str | None, classes: Sequence[str] | None) -> Pieces:
    """Open the images of webdataset tars: `key.jpg` (or another image) beside `key.cls` or `key.json`."""
    return join(names, classes, index_tars(names, cache, "index", _label))


def index_tars(names: Sequence[str], cache: str | None, ending: str, about: About) -> list[Index]:
    """Return where the images of tars lie, and what `about` says of each; `ending` is that of the kept files."""
    with progress("indexing shards", len(names), " shards") as advance:
        indices = [_indexed(Path(name), cache, ending, about, advance) for name in names]
    passed = [index.get("passed", np.array([], str)).tolist() for index in indices]  # which old ones lack
    first = next((name for name, some in zip(names, passed, strict=True) if some), "")
    say_passed(first if sum(map(bool, passed)) == 1 else f"{first} and others", Counter(itertools.chain(*passed)))
    return indices


def join(
    names: Sequence[str], classes: Sequence[str] | None, indices: list[Index], given: Sequence[str] | None = None
) -> Pieces:
    """Return the images of several shards as one set; `classes` names the labels (absent: the first shard does).

    `given`: the files of a person, where `names` are made of them.
    """
    given = given or names
    counts = [len(index["labels"]) for index in indices]
    numbers = np.repeat(np.arange(len(names)), counts)
    places = np.column_stack([numbers, np.concatenate([index["places"] for index in indices])])
    labels = np.concatenate([index["labels"] for index in indices]).astype(np.int64)
    if not len(labels):
        raise UserError(f"{given[0]} has no images: check data.path")
    declared = indices[0].get("classes", np.array([], str)).tolist()
    known = list(classes or declared)
    known = known or [str(n) for n in range(int(labels.max(initial=0)) + 1)]
    labels = renumbered(labels, declared, known, given[0])
    for number, name in enumerate(given):
        own = labels[numbers == number]
        if own.size and own.max() >= len(known):
            raise UserError(
                f"{name} has the label {own.max()}, but there are {len(known):,} classes: "
                "give the names of all with data.images.classes"
            )
    return Pieces(names, places.astype(np.int64), labels, known)


def kept_at(path: Path, cache: str | None, ending: str) -> Path:
    """Return where something about a shard is kept."""
    if cache is None:
        return path.parent / f".{path.name}.{ending}"
    mark = hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()  # others may have the same name
    return Path(cache) / f"{path.name}.{mark}.{ending}"


def stamp_of(path: Path) -> np.ndarray:
    """Return what changes when a file changes."""
    about = path.stat()
    return np.array([about.st_size, about.st_mtime_ns], np.int64)


def load_index(place: Path, stamp: np.ndarray) -> Index | None:
    """Return an index that was kept, unless the shard has changed since or the file is not whole."""
    try:
        with np.load(place, allow_pickle=False) as kept:
            index = dict(kept)
        places, labels = index["places"], index["labels"]
        whole = places.shape == (len(labels), 2) and min(places.min(initial=0), labels.min(initial=0)) >= 0
        whole = whole and index.get("texts", places).shape == places.shape
        return index if whole and np.array_equal(index["stamp"], stamp) else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def save_index(place: Path, index: Index) -> None:
    arrays: Any = index
    with files.atomic_file(place) as beside, open(beside, "wb") as file:
        np.savez(file, **arrays)


def _indexed(path: Path, cache: str | None, ending: str, about: About, advance: Callable[[int], object]) -> Index:
    place, stamp = kept_at(path, cache, ending), stamp_of(path)
    index = load_index(place, stamp)
    if index is None:
        index = {**scan_tar(path, about), "stamp": stamp}
        with contextlib.suppress(OSError):  # where nothing can be written, the next process looks for itself
            save_index(place, index)
    advance(1)
    return index


def scan_tar(path: Path, about: About) -> Index:
    """Return where the images of a tar lie, and what `about` says of them: labels, or places of their texts.

    Where it says None there is no text; those without image or text are counted, and what the first lacks is said.
    """
    places, found_about, missing, passed = [], [], [], list[str]()
    try:
        with tarfile.open(path, "r:") as tar:
            for key, members in itertools.groupby(_members(tar), lambda member: member[0]):
                found = {ending: (offset, size) for _, ending, offset, size in members}
                image = next((ending for ending in ENDINGS if ending in found), None)
                said = about(path, key, found) if image else None
                if image is None or said is None:
                    passed += [ending for ending in found if ending in OTHERS]
                    missing.append(f"{key.lstrip('/')} in {path.name} has no {'text in UTF-8' if image else 'image'}")
                    continue
                found_about.append(said)
                places.append(found[image])
    except (tarfile.TarError, OSError) as error:
        raise UserError(
            f"{path} is not a whole, uncompressed tar ({error}): get it anew, or unpack what compresses it"
        ) from None
    index = {"places": np.array(places, np.int64).reshape(-1, 2)}
    if about is _label:
        return {**index, "labels": np.array(found_about, np.int64), "passed": np.array(passed, str)}
    return {**index, **text_index(found_about, missing)}


def text_index(places: list[tuple[int, int]], missing: list[str]) -> Index:
    """Return what the index of a file of pairs has beside the places of its images."""
    texts = np.array(places, np.int64).reshape(-1, 2)
    about = {"missing": np.array(len(missing)), "first": np.array(missing[0] if missing else "")}
    return {"labels": np.zeros(len(texts), np.int64), "texts": texts, **about}


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, int, int]]:
    """Yield key, ending, offset and size of the plain files; the key ends at the first dot of the file's name."""
    while member := tar.next():
        vars(tar)["members"].clear()  # a shard may have a million, and each is kept otherwise
        folder, _, name = member.name.rpartition("/")
        key, dot, ending = name.partition(".")
        if member.isreg() and not member.issparse() and dot and key:
            yield f"{folder}/{key}", ending.lower(), member.offset_data, member.size
    handle: Any = tar.fileobj
    if os.pread(handle.fileno(), 512, tar.offset) != bytes(512):  # tarfile takes what is no header for the end
        raise tarfile.ReadError(f"it breaks off at byte {tar.offset:,}")


def _label(path: Path, key: str, found: dict[str, tuple[int, int]]) -> int:
    for ending in ("cls", "json"):
        if ending not in found:
            continue
        offset, size = found[ending]
        with open(path, "rb") as file:
            data = os.pread(file.fileno(), min(size, 1 << 20), offset)
        try:
            value: Any = parse_json(data.decode(), f"{key.lstrip('/')}.{ending} in {path}")
            if isinstance(value, dict):
                value = value.get("label", value.get("cls"))
            if type(value) is int and 0 <= value < 1 << 31:
                return value
        except UnicodeDecodeError:
            pass
        raise UserError(f"{key.lstrip('/')}.{ending} in {path} holds no number of a class: mend it")
    raise UserError(f"{key.lstrip('/')} in {path} has no label: put its number into {key.rpartition('/')[2]}.cls")
