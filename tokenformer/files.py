"""Files that are whole or absent: written under another name, then renamed. Manifests of folders, and downloads.

The manifest is written last, so its presence says that a folder is complete.
"""

import contextlib
import errno
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenformer.errors import UserError
from tokenformer.parsing import is_file, read_json, shown
from tokenformer.terminal import meter

MANIFEST = "manifest.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
BESIDE = (
    *("config.yml", "config.json", "history.json", "state.json", "tokenizer.json", "tokenizer_config.json"),
    "model.safetensors.index.json",
)


def sha256(path: Path, seen: Callable[[int], object] | None = None) -> str:
    """Return the checksum of a file; `seen` is called with the number of bytes of each piece."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
                if seen:
                    seen(len(piece))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): get it anew") from None
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, so that a later rename cannot get there first."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to. It is renamed to `path` when the block ends well, and removed when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        yield Path(beside)
        _publish(beside, 0o666)
        sync(Path(beside))
        os.replace(beside, path)
        sync(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def _publish(path: str | Path, mode: int) -> None:
    """Give a temporary file or folder, which is private, the permissions that a new one usually has."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, mode & ~umask)


def check_writable(path: str | Path, force: bool = True) -> None:
    """Refuse a file that `atomic_file` could not write, or (without `force`) would replace. Nothing is left behind."""
    path = Path(path)
    try:
        if path.is_file() and not force:
            raise UserError(f"{path} is there already: give another name, or --force to replace it")
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is {'a folder' if path.is_dir() else 'no plain file'}: give the name of a file")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another place") from None


def write_text(path: str | Path, text: str) -> None:
    with atomic_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic_folder(path: str | Path, force: bool = False) -> Iterator[Path]:
    """Yield a folder to fill. It gets a manifest and is renamed to `path` when the block ends well.

    With `force` it replaces one that we wrote.
    """
    path = Path(path)
    refuse_existing(path, force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise UserError(f"{path} cannot be made ({error.strerror}): choose another place") from None
    try:
        yield beside
        _publish(beside, 0o777)
        write_manifest(beside)
        if force and is_file(path / MANIFEST):
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as aside:
                os.rename(path, Path(aside) / "old")
                os.rename(beside, path)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()  # an empty folder may be there
            os.rename(beside, path)
        sync(path.parent)
    except Exception as error:
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":  # raised when the disk is full
            raise UserError(f"{path} could not be written ({error}): make room or choose another place") from error
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def refuse_existing(path: str | Path, force: bool = False) -> None:
    """Refuse a path where something is, except an empty folder or, with `force`, a folder that we wrote."""
    path = Path(path)
    try:
        if not path.exists() or (path.is_dir() and not any(path.iterdir())) or (force and is_file(path / MANIFEST)):
            return
    except (OSError, ValueError) as error:
        raise UserError(f"{shown(str(path))} cannot be made ({error.__class__.__name__}): give another name") from None
    hint = ", which we did not write, so move it away first" if force else ": give another name, or move it away first"
    raise UserError(f"{path} is there already{hint}")


def write_manifest(folder: Path) -> None:
    """Flush all files and subfolders of a folder to the disk, then write its manifest."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    for path in folder.rglob("*"):
        sync(path)
    entries = {n: {"bytes": (folder / n).stat().st_size, "sha256": sha256(folder / n)} for n in names}
    write_text(folder / MANIFEST, json.dumps({"files": entries}, indent=1) + "\n")


def is_read(name: str) -> bool:
    """Tell whether loading weights reads a file of this name, so that a manifest must list it."""
    return name.endswith(WEIGHTS) or name in BESIDE


def check_manifest(folder: str | Path, values: bool = True, edited: bool = False) -> None:
    """Refuse a folder without a manifest, with files that differ from it, or with weights that it does not list.

    Without `values` the size of a weight file is enough, which saves reading it: for callers that need the config
    alone. `edited`: people may have changed what loading does not read, such as a README.
    """
    folder, manifest = Path(folder), Path(folder) / MANIFEST
    if not is_file(manifest):
        raise UserError(f"{folder} has no {MANIFEST}, so it was not completed: use an earlier one or make it again")
    files = read_json(manifest).get("files")
    if not isinstance(files, dict) or not files:
        raise UserError(f"{manifest} lists no files: get the folder anew")
    anew = f"get the folder anew, or delete {MANIFEST} if you changed it yourself" if edited else "get the folder anew"
    for name, entry in files.items():
        known = isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        if not known or Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{manifest} has an entry {shown(name)} that we would not write: {anew}")
        path = folder / name
        if edited and not is_read(path.name):
            continue
        if not is_file(path):
            raise UserError(f"{path} is missing although the manifest lists it: {anew}")
        read = values or not name.endswith(WEIGHTS)
        if path.stat().st_size != entry["bytes"] or (read and sha256(path) != entry["sha256"]):
            raise UserError(f"{path} is not the file that its manifest describes: {anew}")
    for place in {(folder / name).parent for name in files} | {folder}:
        for path in place.iterdir():
            if is_read(path.name) and str(path.relative_to(folder)) not in files:
                raise UserError(f"{path} is not in the folder's {MANIFEST}, so it is of another model: move it away")


# Downloads: `<name>.part` grows beside the target, `<name>.part.json` says which version of the file it is of.


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps the checksum that a hub sends with its redirection to the file's storage."""

    linked = ""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        self.linked = self.linked or (headers.get("X-Linked-Etag") or "").strip('"')
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str, path: str | Path, *, checksum: str | None = None, tries: int = 5, pause: float = 1.0) -> Path:
    """Download a file. What was interrupted is continued; if the file changed meanwhile, it starts over.

    The result gets its name once it is whole and has the `checksum` (sha256; by default the one that the hub sends).
    """
    path = Path(path)
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part, about = path.with_name(path.name + ".part"), path.with_name(path.name + ".part.json")
    with open(path.with_name(path.name + ".part.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes that want it wait, and then find it
        if not path.is_file():
            _fetch_all(url, part, about, tries, pause)
            expected = checksum or json.loads(about.read_text())["sha256"]
            if expected and sha256(part) != expected:
                part.unlink()
                about.unlink()
                raise UserError(
                    f"what came from {url} has not the checksum {expected}: run it again to download it anew"
                )
            sync(part)
            os.replace(part, path)
            about.unlink()
            sync(path.parent)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(lock.name)
    return path


def _fetch_all(url: str, part: Path, about: Path, tries: int, pause: float) -> None:
    """Repeat the request until the part is whole, or until nothing came `tries` times in a row."""
    failures = 0
    with meter(f"fetching {part.stem}", None) as show:
        while True:
            had = part.stat().st_size if part.exists() else 0
            try:
                return _fetch(url, part, about, show)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise UserError(f"there is no room left for {part}: free some and start again") from None
                have = part.stat().st_size if part.exists() else 0
                failures = 1 if have > had else failures + 1
                offline = isinstance(getattr(error, "reason", None), socket.gaierror)
                if failures >= tries or offline:
                    kept = f" ({have / 1e6:.1f} MB are kept)" if have else ""
                    raise UserError(
                        f"{url} could not be fetched ({getattr(error, 'reason', None) or error}): go online and start "
                        f"again to continue{kept}, or give the path of a local copy"
                    ) from None
                time.sleep(pause * 2 ** (failures - 1))


def _fetch(url: str, part: Path, about: Path, show: Callable[[float, str], None]) -> None:
    """Make one request, append what comes to `part`, and return when it is whole."""
    known: dict[str, Any] = json.loads(about.read_text()) if about.exists() and part.exists() else {}
    have = part.stat().st_size if known.get("version") else 0  # without a version we cannot continue
    redirects = _Redirects()
    request = urllib.request.Request(url, headers={"User-Agent": "tokenformer"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", known["version"])
    try:
        answer = urllib.request.build_opener(redirects).open(request, timeout=30)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing comes after what we have: it is whole, or the file changed
            if error.headers.get("Content-Range") == f"bytes */{have}" and known.get("total") == have:
                return
            part.unlink()
            raise OSError("the file changed, starting over") from None
        if error.code >= 500 or error.code in (408, 429):
            raise
        raise UserError(f"{url} answers {error.code} {error.reason}: give the path of a local copy instead") from None
    with answer:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range") or "")
        if answer.status == 206 and (not match or [int(n) for n in match.groups()] != [have, known.get("total")]):
            part.unlink()
            raise OSError("the server sent another range than was asked for, starting over")
        if answer.status != 206:
            have, length = 0, answer.headers.get("Content-Length")
            tag = answer.headers.get("ETag") or "W/"
            version = answer.headers.get("Last-Modified") if tag.startswith("W/") else tag
            known = {"version": version, "total": int(length) if length else None}
            known["sha256"] = redirects.linked if re.fullmatch("[0-9a-f]{64}", redirects.linked) else ""
            part.write_bytes(b"")
            write_text(about, json.dumps(known))
        start, before, total = time.monotonic(), have, known["total"]
        with open(part, "ab") as file:
            while block := answer.read(1 << 16):
                file.write(block)
                have += len(block)
                rate = (have - before) / 1e6 / max(time.monotonic() - start, 1e-9)
                left = f", {(total - have) / 1e6 / rate:.0f} s left" if total and rate else ""
                whole = f" of {total / 1e6:.1f}" if total else ""
                show(have, f"{have / 1e6:.1f}{whole} MB, {rate:.1f} MB/s{left}")
    if total is not None and have < total:
        raise OSError(f"it broke off after {have:,} of {total:,} bytes")
