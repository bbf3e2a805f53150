"""Files that are whole or not there: write beside and rename, manifests with sizes and checksums.

The manifest is written last, so its presence says that a folder is complete.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenformer.errors import UserError

MANIFEST = "manifest.json"


def sha256(path: Path, seen: Callable[[int], object] | None = None) -> str:
    """The checksum of a file; `seen` is told how many bytes each piece had."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            if seen:
                seen(len(piece))
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file's or a folder's entry to the disk, so that a rename after it cannot come first."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Write to the yielded path; it takes its name when the block ends well, and is gone when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        yield Path(beside)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(beside, 0o666 & ~umask)  # mkstemp is private; the file is not
        sync(Path(beside))
        os.replace(beside, path)
        sync(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def write_text(path: str | Path, text: str) -> None:
    with atomic_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Fill the yielded folder; it takes its name, with a manifest, when the block ends well."""
    path = Path(path)
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield beside
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(beside, 0o777 & ~umask)
        write_manifest(beside)
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()  # an empty folder may stand where ours goes
        os.rename(beside, path)
        sync(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def refuse_existing(path: str | Path) -> None:
    """Nothing is overwritten by accident."""
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} is there already: give another name, or move it away first")


def write_manifest(folder: Path) -> None:
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    entries = {}
    for name in names:
        sync(folder / name)
        entries[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    write_text(folder / MANIFEST, json.dumps({"files": entries}, indent=1) + "\n")


def read_json(path: str | Path) -> dict:
    """A JSON object from a file, or a sentence."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): restore it or get it anew") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object: restore it or get it anew")
    return value


def check_manifest(folder: str | Path, checksums: bool = True) -> None:
    """Refuse a folder that is not complete, or whose files are not those of its manifest."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} has no {MANIFEST}, so it was not completed: use an earlier one or make it again")
    files = read_json(folder / MANIFEST).get("files")
    if not isinstance(files, dict):
        raise UserError(f"{folder / MANIFEST} lists no files: get the folder anew")
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing although the manifest lists it: get the folder anew")
        if path.stat().st_size != entry["bytes"] or (checksums and sha256(path) != entry["sha256"]):
            raise UserError(f"{path} is not the file that its manifest describes: get the folder anew")
