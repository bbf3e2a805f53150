"""Unfinished work of `prepare`: tokens and document sizes so far, and a journal that says which of them are whole.

Unusual: a line of the journal is written after the data that it describes, with their checksum. Whatever kills a
process, the next one keeps every piece up to the first that is not whole. Inputs that were not read yet may change.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tokenformer.errors import UserError
from tokenformer.files import sync, writing

disk = functools.partial(writing, do="choose another --out, and start again to continue")


@dataclass(frozen=True)
class Progress:
    """How far the work is; all numbers are totals."""

    source: int = 0  # the source that is being read …
    unit: int = 0  # … and how many of its units are done,
    digest: str = ""  # whose text had this checksum
    documents: int = 0
    tokens: int = 0
    open: int = 0  # tokens of a document that has not ended
    text_bytes: int = 0
    special: int = 0
    empty: int = 0
    skipped: int = 0
    first_skipped: str = ""


class Work:
    """The folder of unfinished work for one output, held by one process."""

    def __init__(self, folder: Path, settings: str, sources: list[list], itemsize: int) -> None:
        self.folder, self.progress, self.note, self._itemsize = folder, Progress(), "", itemsize
        with disk(folder.parent):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(folder / "lock", "w")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"another process is at work in {folder}: wait for it or end it") from None
        self._tokens, self._sizes, self._journal = folder / "tokens", folder / "sizes", folder / "journal"
        self.sha256 = hashlib.sha256()
        self._files: list[BinaryIO] = []
        good = self._verify(settings, sources)
        with disk(folder.parent):
            if good is None:
                self.start_over()
            else:
                self._open(good)
            (folder / "key").write_text(json.dumps({"settings": settings, "sources": sources}))

    @property
    def final(self) -> bool:
        """Whether the output is complete and only has to take its names."""
        return (self.folder / "final").exists()

    def _verify(self, settings: str, sources: list[list]) -> int | None:
        """Return how many bytes of the journal are good; None if it belongs to other inputs or settings."""
        try:
            key = json.loads((self.folder / "key").read_text())
        except (FileNotFoundError, ValueError):
            return None
        good = 0
        with contextlib.ExitStack() as stack:
            lines = stack.enter_context(open(self._journal, "rb"))
            data = [] if self.final else [stack.enter_context(open(p, "rb")) for p in (self._tokens, self._sizes)]
            for line in lines:
                try:
                    entry = json.loads(line)
                    pieces = [file.read(size) for file, size in zip(data, entry["bytes"], strict=False)]
                    if data and hashlib.sha256(b"".join(pieces)).hexdigest() != entry["sha256"]:
                        break
                    progress = Progress(**entry["progress"])
                except (ValueError, KeyError, TypeError):
                    break  # the line was cut off
                self.progress = progress
                self.sha256.update(pieces[0] if pieces else b"")
                good += len(line)
        done = len(sources) if self.final else self.progress.source
        if key["settings"] == settings and key["sources"][:done] == sources[:done]:
            return good
        if self.progress != Progress():
            self.note = "the input or the settings changed since the unfinished work was begun: starting over"
        return None

    def start_over(self) -> None:
        self.progress, self.sha256 = Progress(), hashlib.sha256()
        self._close_files()
        for path in self.folder.iterdir():
            if path.name not in ("lock", "key"):
                path.unlink()
        for path in (self._tokens, self._sizes, self._journal):
            path.touch()
        self._open(0)

    def _open(self, journal_bytes: int) -> None:
        """Open the files to append to them, cut off behind the last whole piece."""
        if self.final:
            return
        ends = self.progress.tokens * self._itemsize, self.progress.documents * 4, journal_bytes
        for path, end in zip((self._tokens, self._sizes, self._journal), ends, strict=True):
            file = open(path, "r+b")  # noqa: SIM115 (held until close)
            file.truncate(end)
            file.seek(end)
            self._files.append(file)

    def append(self, ids: bytes, sizes: bytes, progress: Progress) -> None:
        tokens_file, sizes_file, journal = self._files
        with disk(self.folder.parent):
            for file, data in ((tokens_file, ids), (sizes_file, sizes)):
                file.write(data)
                file.flush()
            digest = hashlib.sha256(ids + sizes).hexdigest()
            entry = {"bytes": [len(ids), len(sizes)], "sha256": digest, "progress": dataclasses.asdict(progress)}
            journal.write(json.dumps(entry).encode() + b"\n")
            journal.flush()
        self.sha256.update(ids)
        self.progress = progress

    def publish(self, targets: dict[str, Path]) -> None:
        """Move the files of the folder to their names, even after an interruption, and remove the folder."""
        with disk(self.folder.parent):
            for name in targets:
                if (self.folder / name).exists():
                    sync(self.folder / name)
            (self.folder / "final").touch()
            sync(self.folder)
        for name, target in targets.items():
            if (self.folder / name).exists():
                (self.folder / name).replace(target)
        sync(self.folder.parent)
        self.discard()

    def discard(self) -> None:
        self._close_files()
        shutil.rmtree(self.folder)
        self._lock.close()

    def close(self) -> None:
        """Close the files and release the lock. Remove the folder if nothing was done in it."""
        self._close_files()
        if not self._lock.closed and self.progress == Progress() and not self.final:
            shutil.rmtree(self.folder)
        self._lock.close()

    def _close_files(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # what a full disk left in a buffer
                file.close()
        self._files = []
