"""What is done with prepared sets: merge, split, verify, describe; and the tokenizer that belongs to one."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tokenformer import files
from tokenformer.data.text import indexed
from tokenformer.data.text.indexed import Indexed
from tokenformer.data.text.journal import disk
from tokenformer.data.text.parts import PARTS, part_edges
from tokenformer.data.text.tokenizer import FileTokenizer, Tokenizer, fingerprint, load_tokenizer, same_tokenizer
from tokenformer.errors import UserError
from tokenformer.parsing import read_text

_COUNTS = ("documents", "tokens", "text_bytes", "special_tokens_in_text", "empty_documents", "skipped_documents")
_BLOCK = 1 << 24  # tokens copied or checked at a time


def merge(paths: Sequence[str | Path], out: str | Path, seen: Callable[[int], object] = lambda count: None) -> Path:
    """Merge sets in the given order; shards of `prepare` must all be there and are put in order.

    The merged shards are, byte for byte, what `prepare` makes without shards. `out` is a path with the new name.
    """
    files.refuse_same(paths)
    prefixes = list(dict.fromkeys(indexed.find_prefix(p).resolve() for p in paths))  # a set's files name it once
    files.refuse_same(indexed.set_files(prefix)["index"] for prefix in prefixes)
    sets = [Indexed(p) for p in _shards_in_order(prefixes)]
    for other in sets[1:]:
        if other.dtype != sets[0].dtype:
            raise UserError(f"{other.prefix} holds {other.dtype}, {sets[0].prefix} {sets[0].dtype}: one type is needed")
    about: dict = {"documents": 0, "tokens": sum(len(s.tokens) for s in sets)}
    known = [s.description for s in sets if s.description]
    if len(known) == len(sets):
        for other, description in zip(sets, known, strict=True):
            if description["tokenizer"] != known[0]["tokenizer"]:
                names = f"{other.prefix} and {sets[0].prefix}"
                raise UserError(f"{names} were prepared with different tokenizers: prepare one anew")
        about = {name: sum(d.get(name, 0) for d in known) for name in _COUNTS}
        about["tokenizer"] = known[0]["tokenizer"]
    return _copy([(s, 0, len(s.tokens)) for s in sets], out, about, seen)


def _shards_in_order(prefixes: list[Path]) -> list[Path]:
    matches = [re.fullmatch(rf"(.+)-(\d+)-of-(\d+){indexed.SUFFIX}", p.name) for p in prefixes]
    shards = {(m[1], int(m[2]), int(m[3])): p for m, p in zip(matches, prefixes, strict=True) if m}
    names = {(name, total) for name, _, total in shards}
    if len(shards) < len(prefixes) or len(names) != 1:
        return prefixes  # not the shards of one set: the order is the caller's
    [(name, total)] = names
    missing = [i for i in range(1, total + 1) if (name, i, total) not in shards]
    if missing:
        raise UserError(f"shard {missing[0]} of {total} of {name} is not among the sets: prepare it, or name it too")
    return [shards[name, i, total] for i in range(1, total + 1)]


def split(
    path: str | Path, shares: Sequence[float], out: str | Path, seen: Callable[[int], object] = lambda count: None
) -> dict[str, Path]:
    """Write the parts of a set as sets of their own, `<name>-train` and so on, cut as the loader cuts them."""
    source = Indexed(path)
    name = source.prefix.name.removesuffix(indexed.SUFFIX)
    edges, _ = part_edges(source, shares)
    ranges = {part: (a, b) for part, a, b in zip(PARTS, edges, edges[1:], strict=False) if b > a}
    targets = {part: Path(out) / f"{name}-{part}" for part in ranges}
    for target in targets.values():
        _free_files(target)
    made = {}
    for part, (start, stop) in ranges.items():
        about: dict = {"documents": 0, "tokens": stop - start}
        if source.description:
            about["tokenizer"] = source.description["tokenizer"]
        made[part] = _copy([(source, start, stop)], targets[part], about, seen)
    return made


def _free_files(out: Path) -> dict[str, Path]:
    """Return where the files of a new set will stand. Refuse to replace any that is there."""
    targets = indexed.set_files(out.parent / (out.name.removesuffix(indexed.SUFFIX) + indexed.SUFFIX))
    for target in targets.values():
        files.refuse_existing(target)
    return targets


def _copy(ranges: list[tuple[Indexed, int, int]], out: str | Path, about: dict, seen: Callable[[int], object]) -> Path:
    """Write a new set from ranges of tokens of others; a document that a range cuts is cut."""
    targets, first = _free_files(Path(out)), ranges[0][0]
    prefix = targets["tokens"].with_suffix("")
    with disk(prefix.parent):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{prefix.name}.", dir=prefix.parent))
        try:
            sizes, marks, items = [], [np.zeros(1, np.int64)], 0
            with open(work / "tokens", "wb") as file:
                for source, start, stop in ranges:
                    for place in range(start, stop, _BLOCK):
                        block = source.span(place, min(place + _BLOCK, stop))
                        file.write(block.tobytes())
                        seen(len(block))
                    lengths, ends = _items_inside(source, start, stop)
                    sizes.append(lengths)
                    marks.append(items + ends)
                    items += len(lengths)
            doc_idx = np.concatenate(marks)
            indexed.write_index(work / "index", first.dtype, np.concatenate(sizes), doc_idx)
            if first.files["tokenizer"].is_file():
                shutil.copyfile(first.files["tokenizer"], work / "tokenizer")
            text = indexed.describe(prefix, work, {**about, "documents": len(doc_idx) - 1})
            (work / "description").write_text(text, encoding="utf-8")
            for name in os.listdir(work):
                files.sync(work / name)
                (work / name).replace(targets[name])
            files.sync(prefix.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return prefix


def _items_inside(source: Indexed, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sizes of the items in a range of tokens, cut at its ends, and how many items end each document."""
    if start == 0 and stop == len(source.tokens):
        return source.sizes, source.doc_idx[1:]
    begins = source.pointers // source.dtype.itemsize
    ends = begins + source.sizes
    first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(begins, stop, side="left")
    lengths = np.minimum(ends[first:last], stop) - np.maximum(begins[first:last], start)
    inside = source.doc_idx[(source.doc_idx > first) & (source.doc_idx < last)]
    return lengths.astype(np.int32), np.append(inside, last) - first


def verify(path: str | Path, vocab: int | None = None, seen: Callable[[int], object] = lambda count: None) -> Indexed:
    """Check everything that can be checked: description, checksums, structure, every token inside the vocabulary."""
    source = Indexed(path, "full", vocab, seen)
    for start in range(0, len(source.tokens), _BLOCK):
        seen(source.span(start, min(start + _BLOCK, len(source.tokens))).nbytes)
    return source


def stats(source: Indexed, shares: Sequence[float], context: int) -> list[tuple[str, object]]:
    """Describe a set, as rows of a table."""
    marks = np.append(source.pointers // source.dtype.itemsize, len(source.tokens))[source.doc_idx]
    lengths = np.diff(marks)
    about = source.description or {}
    rows: list[tuple[str, object]] = [
        ("documents", f"{source.documents:,}"),
        ("tokens", f"{len(source.tokens):,}"),
        ("type", str(source.dtype)),
    ]
    if len(lengths):
        rows.append(("tokens per document: mean", f"{lengths.mean():,.1f}"))
        low, median, high = np.percentile(lengths, [0, 50, 100])
        rows.append(("smallest, median, largest", f"{low:,.0f}, {median:,.0f}, {high:,.0f}"))
    if "tokenizer" in about:
        rows.append(("tokenizer", f"{about['tokenizer']['name']} ({about['tokenizer']['vocab_size']:,} ids)"))
    if about.get("text_bytes"):
        rows.append(("bytes of text per token", f"{about['text_bytes'] / max(1, len(source.tokens)):.2f}"))
    for name in ("special_tokens_in_text", "empty_documents", "skipped_documents"):
        if about.get(name):
            rows.append((name.replace("_", " "), f"{about[name]:,}"))
    edges, note = part_edges(source, shares)
    for part, start, stop in zip(PARTS[: len(shares)], edges, edges[1:], strict=False):
        count, tail = divmod(max(0, stop - start - 1), context)
        rows.append((f"{part}: tokens", f"{stop - start:,}"))
        rows.append((f"{part}: samples of {context}, tail", f"{count:,}, {tail:,}"))
    return [*rows, ("parts", note)] if note else rows


def check_set_tokenizer(source: Indexed, tokenizer: Tokenizer) -> None:
    """Refuse a set that another tokenizer made: its ids mean nothing to the model."""
    about = (source.description or {}).get("tokenizer")
    if about and about["sha256"] != fingerprint(tokenizer) and not same_tokenizer(set_tokenizer(source), tokenizer):
        raise UserError(
            f"{source.prefix} was prepared with the tokenizer {about['name']}, which is not that of the model: "
            "prepare the text with the model's own (prepare --tokenizer FOLDER), or give the set that belongs to it"
        )


def set_tokenizer(source: Indexed) -> Tokenizer:
    """Load the tokenizer that the description of a set names; a copy of any but the built-in ones stands beside it."""
    if not source.description or "tokenizer" not in source.description:
        raise UserError(f"{source.prefix.name} does not say its tokenizer: name it with data.tokenizer (--tokenizer)")
    about = source.description["tokenizer"]
    copy = source.files["tokenizer"]
    if copy.exists():
        found: Tokenizer = FileTokenizer(read_text(copy), about["name"], about["end_of_document"])
    else:
        found = load_tokenizer(about["name"])
    if fingerprint(found) != about["sha256"]:
        raise UserError(
            f"the tokenizer {about['name']} is not the one that {source.prefix.name} was prepared with: "
            f"restore {copy}, or name the right one with data.tokenizer (--tokenizer)"
        )
    return found
