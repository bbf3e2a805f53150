"""Megatron's memory-mapped set: `<prefix>.bin` holds the tokens, `<prefix>.idx` where items and documents begin.

Unusual: opening a set proves that every read stays inside the file (items must lie one after another, as every writer
of this format leaves them). Beside a set of ours stands a description with checksums; official files have none.
"""

import difflib
import hashlib
import json
import mmap
import os
import struct
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from tokenformer import files
from tokenformer.config_data import Verify
from tokenformer.errors import UserError
from tokenformer.parsing import is_file, read_json

SUFFIX = "_text_document"
MAGIC = b"MMIDIDX\0\0"
CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are floats: no tokens
_HEADER = struct.Struct("<QBQQ")  # version, code of the type, items, length of the document index
_CHUNK = 1 << 20
_TOKENIZER = {"name": str, "sha256": str, "vocab_size": int, "end_of_document": int}  # in a description
SMALL = 4 << 30  # bytes of a set whose checksums verify=auto compares on every opening: some seconds


def find_prefix(path: str | Path) -> Path:
    """Find the prefix of a set, given any of its file names, its prefix or its short name."""
    text = str(path)
    for ending in (".bin", ".idx", ".json"):
        text = text.removesuffix(ending)
    for prefix in (text, text + SUFFIX):
        if is_file(prefix + ".idx") or is_file(prefix + ".bin"):
            return Path(prefix)
    folder = text if os.path.isdir(text) else os.path.dirname(text) or "."
    names = sorted(os.listdir(folder))[:1000] if os.path.isdir(folder) else []
    sets = [name.removesuffix(".idx").removesuffix(SUFFIX) for name in names if name.endswith(".idx")]
    close = sets if folder == text else difflib.get_close_matches(os.path.basename(text), sets, n=1, cutoff=0.7)
    hint = f"did you mean {os.path.normpath(os.path.join(folder, close[0]))}?" if close else ""
    hint = hint or "make one with `tokenformer prepare`"
    raise UserError(f"there is no prepared set '{path}' ({text}.idx is missing): {hint}")


def set_files(prefix: str | Path) -> dict[str, Path]:
    """Return where the files of a set stand; the last two only beside a set of ours."""
    name = str(prefix).removesuffix(SUFFIX)
    endings = {"tokens": f"{prefix}.bin", "index": f"{prefix}.idx"}
    endings |= {"tokenizer": f"{name}.tokenizer.json", "description": f"{name}.json"}
    return {file: Path(path) for file, path in endings.items()}


class Indexed:
    """A set, opened for reading; `tokens` is the whole stream, `document(i)` document i.

    `verify` says whether checksums are compared; `seen` is called with the number of bytes that were.
    """

    def __init__(
        self,
        path: str | Path,
        verify: Verify = "auto",
        vocab: int | None = None,
        seen: Callable[[int], object] | None = None,
    ) -> None:
        self.prefix = find_prefix(path)
        self.files, self.description = set_files(self.prefix), read_description(self.prefix)
        if self.description:
            check_description(self.prefix, self.description, verify, seen)
        raw = _map(self.files["index"])
        self._need(len(raw) >= 34 and raw[:9] == MAGIC, "is not an index of this format")
        version, code, items, entries = _HEADER.unpack_from(raw, 9)
        self._need(version == 1, f"has version {version}, and 1 is known")
        self._need(code in CODES, f"names a type of ids ({code}) that cannot hold tokens")
        self._need(len(raw) == 34 + 12 * items + 8 * entries, f"has {len(raw):,} bytes, not what its header says")
        self.dtype = np.dtype(CODES[code]).newbyteorder("<")
        self.sizes = np.frombuffer(raw, "<i4", items, 34)
        self.pointers = np.frombuffer(raw, "<i8", items, 34 + 4 * items)
        self.doc_idx = np.frombuffer(raw, "<i8", entries, 34 + 12 * items)
        stream = _map(self.files["tokens"])
        self._check_items(len(stream))
        self.tokens = np.frombuffer(stream, self.dtype)
        self._maps = raw, stream
        self.vocab = vocab or (self.description or {}).get("tokenizer", {}).get("vocab_size")

    def _need(self, holds: bool, what: str) -> None:
        if not holds:
            raise UserError(f"{self.files['index']} {what}: restore it or prepare the set anew")

    def _check_items(self, stream_bytes: int) -> None:
        end = 0
        for i in range(0, len(self.sizes), _CHUNK):  # in chunks: an index may have hundreds of millions of items
            sizes = self.sizes[i : i + _CHUNK].astype(np.int64) * self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            good = sizes.min() >= 0 and np.array_equal(ends - sizes, self.pointers[i : i + _CHUNK])
            self._need(bool(good), "has items that do not lie one after another")
            end = int(ends[-1])
        self._need(end == stream_bytes, f"describes {end:,} bytes, but the .bin beside it has {stream_bytes:,}")
        marks = self.doc_idx
        self._need(len(marks) > 0 and marks[0] == 0 and marks[-1] == len(self.sizes), "has a broken document index")
        for i in range(0, len(marks) - 1, _CHUNK):
            rising = bool((np.diff(marks[i : i + _CHUNK + 1]) >= 0).all())
            self._need(rising, "has a document index that goes backwards")

    def __len__(self) -> int:
        """Return the number of items; a document has one or more."""
        return len(self.sizes)

    @property
    def documents(self) -> int:
        return len(self.doc_idx) - 1

    def document_start(self, number: int) -> int:
        """Return the place in the stream where a document begins; `number` may be one past the last."""
        item = int(self.doc_idx[number])
        return len(self.tokens) if item == len(self) else int(self.pointers[item]) // self.dtype.itemsize

    def document(self, number: int) -> np.ndarray:
        if not 0 <= number < self.documents:
            raise IndexError(number)
        return self.span(self.document_start(number), self.document_start(number + 1))

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens from `start` to `stop`. Refuse those outside the vocabulary, where one is known."""
        ids = self.tokens[start:stop]
        highest = int(ids.max()) if self.vocab and len(ids) else 0
        lowest = int(ids.min()) if self.dtype.kind == "i" and len(ids) else 0
        if lowest < 0 or highest >= (self.vocab or 1):
            bad = lowest if lowest < 0 else highest
            raise UserError(
                f"{self.files['tokens']} holds token {bad} between places {start:,} and {stop:,}, outside the "
                f"vocabulary of {self.vocab or 'any tokenizer'}: use the tokenizer it was prepared with"
            )
        return ids

    def read_at_random(self) -> None:
        """Advise the system of random access: it then reads what is asked for, not megabytes around it."""
        for part in self._maps:
            if isinstance(part, mmap.mmap):
                part.madvise(mmap.MADV_RANDOM)

    def fetch(self, start: int, stop: int) -> None:
        """Ask the system to read a span from the disk, without waiting for it."""
        stream = self._maps[1]
        if isinstance(stream, mmap.mmap):
            begin = start * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            stream.madvise(mmap.MADV_WILLNEED, begin, stop * self.dtype.itemsize - begin)

    @cached_property
    def fingerprint(self) -> str:
        """A short digest of the contents: of the description's checksums, else of the index and some of the tokens."""
        digest = hashlib.sha256()
        if self.description:
            digest.update("".join(f["sha256"] for f in self.description["files"].values()).encode())
        else:
            digest.update(files.sha256(self.files["index"]).encode())
            step = max(1, len(self.tokens) // 64)
            for start in range(0, len(self.tokens), step):
                digest.update(self.tokens[start : start + 2048].tobytes())
        return digest.hexdigest()[:16]


def _map(path: Path) -> mmap.mmap | bytes:
    if path.exists() and not is_file(path):
        raise UserError(f"{path} is no plain file: restore it or prepare the set anew")
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    except FileNotFoundError:
        raise UserError(f"{path} is missing: restore it or prepare the set anew") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore it or prepare the set anew") from None


def write_index(path: Path, dtype: np.dtype, sizes: np.ndarray, doc_idx: np.ndarray | None = None) -> None:
    """Write an `.idx`; without `doc_idx` every item is a document. Arrays may be memory-mapped: it works in chunks."""
    dtype = np.dtype(dtype)
    code = next(c for c, t in CODES.items() if np.dtype(t) == dtype.newbyteorder("="))
    entries = len(sizes) + 1 if doc_idx is None else len(doc_idx)
    with open(path, "wb") as file:
        file.write(MAGIC + _HEADER.pack(1, code, len(sizes), entries))
        for i in range(0, len(sizes), _CHUNK):
            file.write(sizes[i : i + _CHUNK].astype("<i4").tobytes())
        start = 0
        for i in range(0, len(sizes), _CHUNK):
            lengths = sizes[i : i + _CHUNK].astype(np.int64) * dtype.itemsize
            ends = start + np.cumsum(lengths)
            file.write((ends - lengths).astype("<i8").tobytes())
            start = int(ends[-1])
        for i in range(0, entries, _CHUNK):
            marks = np.arange(i, min(i + _CHUNK, entries)) if doc_idx is None else doc_idx[i : i + _CHUNK]
            file.write(marks.astype("<i8").tobytes())


# The description: sizes and checksums of the two files, and what is known about the set.


def describe(prefix: Path, folder: Path, about: dict, checksum: str | None = None) -> str:
    """Return the description of a set that lies in a folder as `tokens` (of this sha256, if known) and `index`."""
    paths, known = {".bin": folder / "tokens", ".idx": folder / "index"}, {".bin": checksum}
    entries = {
        prefix.name + ending: {"bytes": path.stat().st_size, "sha256": known.get(ending) or files.sha256(path)}
        for ending, path in paths.items()
    }
    return _seal({"format": 1, "files": entries, **about})


def _seal(description: dict) -> str:
    body = json.dumps({k: v for k, v in description.items() if k != "checksum"}, indent=1)
    sealed = {**json.loads(body), "checksum": hashlib.sha256(body.encode()).hexdigest()}
    return json.dumps(sealed, indent=1) + "\n"


def read_description(prefix: Path) -> dict | None:
    """Read the description beside a set; None where there is none."""
    path = set_files(prefix)["description"]
    if not path.is_file():
        return None
    description = read_json(path)
    entries = description.get("files")
    names = {prefix.name + ".bin", prefix.name + ".idx"}
    if description.get("format") != 1 or not isinstance(entries, dict) or set(entries) != names:
        if description and not {"checksum", "format"} & description.keys():
            return None  # some other file of that name
        raise UserError(f"{path} does not describe {prefix.name}: restore it, or delete it to do without its checks")
    known = all(_has(entry, bytes=int, sha256=str) for entry in entries.values())
    if not known or ("tokenizer" in description and not _has(description["tokenizer"], **_TOKENIZER)):
        raise UserError(f"{path} is not as we write it: restore it, or delete it to do without its checks")
    return description


def _has(entry: object, **kinds: type) -> bool:
    return isinstance(entry, dict) and all(type(entry.get(name)) is kind for name, kind in kinds.items())


def check_description(prefix: Path, description: dict, verify: Verify, seen: Callable[[int], object] | None) -> None:
    """Refuse a set whose files are not those of its description: by size, and as `verify` says by checksum."""
    path = set_files(prefix)["description"]
    if path.read_bytes() != _seal(description).encode():
        raise UserError(f"{path} was changed after it was written: restore it, or delete it to do without its checks")
    entries = {prefix.parent / name: entry for name, entry in description["files"].items()}
    for file in entries:
        if not file.is_file():
            raise UserError(f"{file} is missing: restore it or prepare the set anew")
    large = sum(file.stat().st_size for file in entries) > SMALL
    for file, entry in entries.items():
        wrong = file.stat().st_size != entry["bytes"]
        if not wrong and (verify == "full" or (verify == "auto" and not large)):
            wrong = files.sha256(file, seen) != entry["sha256"]
        if wrong:
            raise UserError(f"{file} is not the file that {path.name} describes: restore it or prepare the set anew")
    if verify == "auto" and large:
        warnings.warn(
            f"{prefix.name} is large, so its sizes and structure were checked but not its checksums: "
            "`tokenformer data verify`, or data.verify=full, does that",
            stacklevel=3,
        )
