"""Files that are whole or absent: written under another name, then renamed. Manifests of folders, and downloads.

The manifest is written last, so its presence says that a folder is complete.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tokenformer.errors import UserError
from tokenformer.parsing import is_file, is_folder, read_json, shown

MANIFEST = "manifest.json"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TENSORS = "tensors.json"  # beside it: the checksum of every tensor, by file and name
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
BESIDE = (
    *("config.yml", "config.json", "history.json", "state.json", "tokenizer.json", "tokenizer_config.json"),
    *("model.safetensors.index.json", "adapter.yml", "preprocessor_config.json"),
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


def check_writable(path: str | Path, force: bool = True, ending: str = "") -> None:
    """Refuse a file that `atomic_file` could not write, or (without `force`) would replace. Nothing is left behind.

    `ending`: what the name must end in, because that is what will be written.
    """
    path = Path(path)
    if path.suffix.lower() != (ending or path.suffix.lower()):
        raise UserError(f"{path} would be a {ending} file: give a name that ends in {ending}")
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


@contextlib.contextmanager
def writing(what: object, do: str) -> Iterator[None]:
    """Refuse in a sentence, which says what to `do`, a full disk or a folder that cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written ({error.strerror or error}): {make_room(error)}{do}") from None


def is_full(why: object) -> bool:
    """Tell whether an error, or the text of one, says that a disk, a quota or the largest file is full."""
    return any(os.strerror(number) in str(why) for number in FULL)


def make_room(why: object) -> str:
    """Return the words that a sentence about a full disk needs before the other things that one can do."""
    return "make room, or " if is_full(why) else ""


def write_text(path: str | Path, text: str) -> None:
    with atomic_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic_folder(path: str | Path, force: bool = False, known: Mapping[str, dict] | None = None) -> Iterator[Path]:
    """Yield a folder to fill; it gets a manifest and its name when all went well. `force` replaces one of ours.

    `known`: see `write_manifest`; it may be filled in the meantime.
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
        write_manifest(beside, known)
        rename_folder(beside, path, force)
    except Exception as error:
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":  # raised when the disk is full
            raise UserError(f"{path} could not be written ({error}): {make_room(error)}choose another place") from error
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def rename_folder(beside: Path, path: Path, force: bool) -> None:
    """Give a complete folder its name. With `force` one of ours that has the name already is removed."""
    if force and is_file(path / MANIFEST):
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as aside:
            os.rename(path, Path(aside) / "old")
            os.rename(beside, path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()  # an empty folder may be there
        os.rename(beside, path)
    sync(path.parent)


def refuse_existing(path: str | Path, force: bool = False) -> None:
    """Refuse a path where something is, except an empty folder or, with `force`, a folder that we wrote."""
    path = Path(path)
    try:
        if not path.exists() or (path.is_dir() and not any(path.iterdir())) or (force and is_file(path / MANIFEST)):
            return
    except (OSError, ValueError) as error:
        raise UserError(f"{shown(str(path))} cannot be made ({error.__class__.__name__}): give another name") from None
    hint = ": give another name, or move it away first"
    if force:
        hint = ", which we did not write, so move it away first"
    elif is_file(path / MANIFEST):
        hint = ": give another name, or replace it (--force; in Python force=True)"
    raise UserError(f"{path} is there already{hint}")


def refuse_overlap(out: str | Path, source: str | Path, in_place: bool = False) -> None:
    """Refuse a folder to make that is, holds or lies in the one that is read, so that `--force` cannot destroy it.

    A folder that stands in a run beside its checkpoints is fine; so is the source itself with `in_place`.
    """
    if not is_folder(source) and not is_file(source):
        return  # whoever reads it says so
    inside = Path(source) / "checkpoints"
    made, read = (Path(path).resolve() for path in (out, inside if inside.is_dir() else source))
    if in_place and made == read:
        return
    if made == read or made in read.parents or read in made.parents:
        what = "is" if made == Path(source).resolve() else "holds" if made in read.parents else "lies in"
        raise UserError(f"--out {out} {what} {source}, which is read here: give a folder outside of it")


def refuse_same(paths: Iterable[str | Path]) -> None:
    """Refuse two paths to one file or folder, by whatever names: a copy of a training text could be held out."""
    seen: dict[str, str | Path] = {}
    for path in paths:
        if (first := seen.get(real := os.path.realpath(path))) is not None:
            named = f"{path} is given twice" if str(first) == str(path) else f"{path} is {first}, given twice"
            raise UserError(f"{named}: give it once, so that no text is both trained on and held out")
        seen[real] = path


def write_manifest(folder: Path, known: Mapping[str, dict] | None = None) -> None:
    """Flush all files and subfolders of a folder to the disk, then write its manifest.

    `known` has the entries of files whose writers flushed and hashed them already.
    """
    known = known or {}
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    for name in paths.keys() - known.keys():
        sync(paths[name])
    entries = {
        name: known.get(name) or {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for name, path in sorted(paths.items())
        if path.is_file() and path.name != MANIFEST
    }
    for name, entry in known.items():
        if not is_file(paths.get(name, folder)) or paths[name].stat().st_size != entry["bytes"]:
            raise OSError(errno.EIO, f"{name} is not what its writer left")
    write_text(folder / MANIFEST, json.dumps({"files": entries}, indent=1) + "\n")


def is_read(name: str) -> bool:
    """Tell whether loading weights reads a file of this name, so that a manifest must list it."""
    return name.endswith(WEIGHTS) or name in BESIDE


def listed(manifest: dict, where: str, anew: str = "get the folder anew") -> dict[str, dict]:
    """Return the files of a manifest, {"bytes": …, "sha256": …} by name; refuse what we would not write."""
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise UserError(f"{where} lists no files: get the folder anew")
    for name, entry in files.items():
        known = isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        if not known or Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{where} has an entry {shown(name)} that we would not write: {anew}")
    return files


def check_manifest(
    folder: str | Path, values: bool = True, edited: bool = False, share: tuple[int, int] = (0, 1)
) -> None:
    """Refuse a folder without a manifest, with files that differ from it, or with weights that it does not list.

    Without `values` the size of a weight file is enough, which saves reading it: for callers that need the config
    alone. `edited`: people may have changed what loading does not read, such as a README. `share` (number, of how many)
    says which weight files this process reads, of several.
    """
    folder, manifest = Path(folder), Path(folder) / MANIFEST
    if not is_file(manifest):
        raise UserError(f"{folder} has no {MANIFEST}, so it was not completed: use an earlier one or make it again")
    anew = f"get the folder anew, or delete {MANIFEST} if you changed it yourself" if edited else "get the folder anew"
    files = listed(read_json(manifest), str(manifest), anew)
    for number, (name, entry) in enumerate(sorted(files.items())):
        path = folder / name
        if edited and not is_read(path.name):
            continue
        if not is_file(path):
            raise UserError(f"{path} is missing although the manifest lists it: {anew}")
        read = (values and number % share[1] == share[0]) or not name.endswith(WEIGHTS)
        if path.stat().st_size != entry["bytes"] or (read and sha256(path) != entry["sha256"]):
            raise UserError(f"{path} is not the file that its manifest describes: {anew}")
    for place in {(folder / name).parent for name in files} | {folder}:
        for path in place.iterdir():
            if is_read(path.name) and str(path.relative_to(folder)) not in files:
                raise UserError(f"{path} is not in the folder's {MANIFEST}, so it is of another model: move it away")


# Downloads: `<name>.<version>.part` grows beside the target, for the version of the file that the server has.


def download(url: str, path: str | Path) -> Path:
    """Download a file. What was interrupted is continued; if the file changed meanwhile, it starts over.

    The result gets its name once it is whole and has the checksum (sha256) that a hub says.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".part.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes that want it wait, and then find it
        if not path.is_file():
            _fetch(url, path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(lock.name)
    return path


def _fetch(url: str, path: Path) -> None:
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.file_download import get_hf_file_metadata, http_get

    try:
        about = get_hf_file_metadata(url, token=False)
        version = about.etag or ""
        part = path.with_name(f"{path.name}.{hashlib.sha256(version.encode()).hexdigest()[:16]}.part")
        for old in path.parent.glob(f"{path.name}.*.part"):
            if old != part or not version:  # without a version we cannot continue
                old.unlink()
        with open(part, "ab") as file:
            http_get(about.location, file, resume_size=file.tell(), expected_size=about.size)
    except (HTTPError, OSError) as error:
        why = " ".join(str(error).split())[:200]
        do = "go online and start again to continue, or give the path of a local copy"
        raise UserError(f"{url} could not be fetched ({why}): {do}") from None
    if re.fullmatch("[0-9a-f]{64}", version) and sha256(part) != version:
        part.unlink()
        raise UserError(f"what came from {url} has not the checksum {version}: start again to download it anew")
    sync(part)
    os.replace(part, path)
    sync(path.parent)
