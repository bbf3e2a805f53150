"""Fetches a folder of ours from a server: of every file only the pieces that are not here yet.

A piece is a tensor, whose digest stands in tensors.json, or a whole file, whose digest stands in the manifest. It is
known by its digest alone, so it may lie in any local folder, in any file, under any name. What came is kept in
`.NAME.pull` beside the folder, where a pull that was broken off or killed continues: the file of the piece that is
coming, and the files of the folder, into which pieces are copied once they are proven. These take the folder's place
when all of them are those of the manifest.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenformer.errors import UserError
from tokenformer.files import (
    MANIFEST,
    TENSORS,
    check_manifest,
    listed,
    refuse_existing,
    rename_folder,
    sha256,
    sync,
    writing,
)
from tokenformer.hub.pieces import Piece, Place, copy, digest, find, spans
from tokenformer.hub.ranges import Server, ServerChanged
from tokenformer.parsing import JSON_BYTES, is_file, parse_json, read_json
from tokenformer.terminal import in_words, progress

CARD = "README.md"  # which people edit on the hub, where the manifest is not written anew


class Pulled(NamedTuple):
    """What a pull did. `left_out`: files that are not those of the manifest, and that no model needs."""

    moved: int  # bytes that came
    total: int  # bytes of the folder
    fetched: int  # pieces that came
    pieces: int
    left_out: list[str]


def pull(server: Server, out: str | Path, have: Iterable[str | Path] = (), force: bool = False) -> Pulled:
    """Make `out` equal to the folder on the server; what it and the folders `have` hold already is not fetched.

    A folder `out` must be one of ours. Files in it that its manifest does not list are refused, with `force` removed.
    """
    out = Path(os.path.abspath(out))
    _refuse(out, force)
    manifest = server.text(MANIFEST, JSON_BYTES)
    files = _files(manifest, server)
    total = len(manifest) + sum(entry["bytes"] for entry in files.values())
    root = out.with_name(f".{out.name}.pull")
    same = is_file(out / MANIFEST) and (out / MANIFEST).read_bytes() == manifest
    if same and _is_whole(out) and not any(_foreign(out)):
        if root.is_dir():  # of another version that did not come wholly
            with _locked(root, out):
                shutil.rmtree(root)
        return Pulled(server.moved, total, 0, len(files), [])
    with writing(out, "choose another place; what came is kept"), _locked(root, out):
        work = root / hashlib.sha256(manifest).hexdigest()[:16]  # of another manifest it is another folder
        earlier = [path for path in root.iterdir() if path.is_dir()]
        room = shutil.disk_usage(root).free + sum(p.stat().st_blocks * 512 for p in root.rglob("*"))
        if room < total:
            raise UserError(f"{out} takes {in_words(total)}, but its disk has {in_words(room)} left: make room")
        pieces = list(_lay_out(server, files, work))
        if not server.ranges:
            print(f"{server.source} sends no ranges: files that differ are fetched whole", file=sys.stderr)
        own = {piece.sha256: Place(work / piece.file, piece.start, piece.size) for piece in pieces}
        here = find([out, *map(Path, have), *(path for path in earlier if path != work)], own.values())
        if work in earlier:
            here |= {name: place for name, place in own.items() if digest(place) == name}
        missing = {piece.sha256: piece for piece in pieces if piece.sha256 not in here}
        left_out = _fetch(server, sorted(missing.values()), work)
        for piece in (piece for piece in pieces if piece.file not in left_out):
            copy(here.get(piece.sha256, own[piece.sha256]), Place(work / piece.file, piece.start, piece.size))
        for name, entry in files.items():
            if name not in left_out and sha256(work / name) != entry["sha256"]:
                raise server.changed(name)
        (work / MANIFEST).write_bytes(manifest)
        for path in (work, *work.rglob("*")):
            sync(path)
        rename_folder(work, out, force=True)
        shutil.rmtree(root)
    return Pulled(server.moved, total, len(missing), len(pieces), left_out)


def _is_whole(folder: Path) -> bool:
    try:
        check_manifest(folder)
    except UserError:
        return False
    return True


def _refuse(out: Path, force: bool) -> None:
    """Refuse a place that is not ours to replace, before anything is fetched."""
    if out in (here := Path.cwd(), *here.parents):
        raise UserError(f"{out} would be replaced, but you are in it: go elsewhere, and name it from there")
    refuse_existing(out, force=True)
    if force or not is_file(out / MANIFEST):
        return
    for path in _foreign(out):
        raise UserError(f"{path} is not in the folder's {MANIFEST} and would be lost: move it away, or give --force")


def _foreign(out: Path) -> Iterator[Path]:
    """Yield the files of a folder of ours that its manifest does not list."""
    known = {MANIFEST, *listed(read_json(out / MANIFEST), str(out / MANIFEST), "give --force to replace the folder")}
    yield from (path for path in out.rglob("*") if not path.is_dir() and str(path.relative_to(out)) not in known)


def _files(manifest: bytes, server: Server) -> dict[str, dict]:
    """Return the files that the server's manifest lists."""
    where = f"{server.source}: {MANIFEST}"
    found = _parsed(manifest, where)
    files = listed(found if isinstance(found, dict) else {}, where)
    for name, entry in files.items():
        plain = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", name) and name != MANIFEST
        if not plain or entry["bytes"] < 0 or not _is_sha256(entry["sha256"]):
            raise UserError(f"{where} has an entry {name[:80]!r} that we would not write: give another address")
    return files


def _parsed(text: bytes, where: str) -> object:
    try:
        return parse_json(text.decode(), where)
    except UnicodeDecodeError:
        raise UserError(f"{where} is not a text file in UTF-8: give another address") from None


def _is_sha256(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) is not None


@contextlib.contextmanager
def _locked(root: Path, out: Path) -> Iterator[None]:
    """Hold the folder of what came; refuse while another process does."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process pulls into {out} at the moment: wait for it") from None
        yield


def _lay_out(server: Server, files: dict[str, dict], work: Path) -> Iterator[Piece]:
    """Make all files at their size, or keep what they hold; yield their pieces."""
    digests, beginnings = {}, {}  # by name of the file
    if TENSORS in files:
        beginnings[TENSORS] = server.text(TENSORS, JSON_BYTES)
        if hashlib.sha256(beginnings[TENSORS]).hexdigest() != files[TENSORS]["sha256"]:
            raise server.changed(TENSORS)
        found = _parsed(beginnings[TENSORS], f"{server.source}: {TENSORS}")
        digests = found if isinstance(found, dict) else {}
    for name, entry in files.items():
        tensors, known = {}, digests.get(name)
        if not isinstance(known, dict) or not all(map(_is_sha256, known.values())):
            known = {}
        if known and entry["bytes"] > 8:
            length = b"".join(server.read(name, 0, 8))
            end = 8 + int.from_bytes(length, "little")
            if server.ranges and end <= min(entry["bytes"], JSON_BYTES):
                beginnings[name] = length + b"".join(server.read(name, 8, end))
                tensors = spans(beginnings[name], entry["bytes"])
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        with open(work / name, "r+b" if (work / name).exists() else "w+b") as file:
            file.truncate(entry["bytes"])
            file.write(beginnings.get(name, b""))
        if tensors and tensors.keys() == known.keys():
            yield from (Piece(name, a, b - a, known[tensor]) for tensor, (a, b) in tensors.items())
        elif name != TENSORS:
            yield Piece(name, 0, entry["bytes"], entry["sha256"])


def _fetch(server: Server, missing: list[Piece], work: Path) -> list[str]:
    """Fetch pieces into their places, those that lie side by side by one request; return the files left out."""
    runs: list[list[Piece]] = []
    for piece in missing:
        last = runs[-1][-1] if runs else Piece("", 0, 0, "")
        if (last.file, last.start + last.size) != (piece.file, piece.start):
            runs.append([])
        runs[-1].append(piece)
    left_out = []
    with progress(f"fetching {server.name}", sum(piece.size for piece in missing), " bytes") as advance:
        for run in runs:
            try:
                _fetch_run(server, run, work, advance)
            except ServerChanged:
                if run[0].file != CARD:
                    raise
                (work / CARD).unlink()
                left_out.append(CARD)
    return left_out


def _fetch_run(server: Server, run: list[Piece], work: Path, advance: Callable[[float], None]) -> None:
    """Fetch pieces that lie side by side; the first may have begun to come earlier."""
    parts = [work.with_name(f"{piece.sha256}.part") for piece in run]
    begun = parts[0].stat().st_size if parts[0].exists() else 0
    advance(begun)
    chunks, rest = server.read(run[0].file, run[0].start + begun, run[-1].start + run[-1].size), b""
    for piece, part in zip(run, parts, strict=True):
        with open(part, "ab" if part == parts[0] else "wb") as file:
            while (left := piece.size - file.tell()) > 0:
                rest = rest or next(chunks)
                advance(file.write(rest[:left]))
                rest = rest[left:]
        came = Place(part, 0, piece.size)
        if digest(came) == piece.sha256:
            copy(came, Place(work / piece.file, piece.start, piece.size))
            part.unlink()
        else:
            part.unlink()
            raise server.changed(piece.file)
    next(chunks, None)  # the answer is read to its end: the connection is kept for the next one
