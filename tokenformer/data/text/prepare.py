"""From raw text to a prepared set: read it, encode it in many processes, write it in order.

Unusual: text is cut into pieces by size alone, so the output is the same whatever the number of workers; a piece in the
journal is never encoded twice; the output gets its names at the very end.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenformer.data.text import indexed
from tokenformer.data.text.encode import Encoded, Encoders
from tokenformer.data.text.inputs import STDIN, Input, find_inputs, take_shard
from tokenformer.data.text.journal import Progress, Work, disk
from tokenformer.data.text.reading import Reading, read_units
from tokenformer.data.text.tokenizer import BUNDLED, Tokenizer, dtype_for, fingerprint, load_tokenizer
from tokenformer.errors import UserError
from tokenformer.terminal import meter

FORMAT = 1  # of unfinished work: another number is not continued
PIECE = 1 << 19  # bytes of text a worker gets at a time
MOST_UNITS = 4096


@dataclass
class Piece:
    """Text for one worker, and how far the inputs were read when it ended."""

    texts: list[bytes]
    lasts: list[bool]
    source: int
    unit: int = 0
    digest: str = ""
    empty: int = 0
    skipped: int = 0
    first_skipped: str = ""
    read: int = 0  # bytes from the disk so far


class Changed(Exception):
    """An input no longer begins with the text that was read from it."""


def read_pieces(sources: Sequence[Input], reading: Reading, tokenizer: Tokenizer, after: Progress) -> Iterator[Piece]:
    """Yield the pieces that follow `after`. Finished inputs are not opened; the open one is read again and compared."""
    read = sum(s.bytes for s in sources[: after.source])

    def seen(count: int) -> None:
        nonlocal read
        read += count

    piece, size = Piece([], [], after.source), 0
    for number in range(after.source, len(sources)):
        digest, done = hashlib.blake2b(digest_size=16), after.unit if number == after.source else 0
        count = 0
        for count, unit in enumerate(read_units(sources[number], reading, tokenizer.cuts, seen), 1):
            data = unit.text.encode(errors="replace")  # text is valid by now; a reason may hold a strange file name
            digest.update(data)
            digest.update(b"\1" if unit.last else b"\0")
            if count <= done:
                if count == done and digest.hexdigest() != after.digest:
                    raise Changed
                continue
            if unit.left_out == "empty":
                piece.empty += 1
            elif unit.left_out:
                piece.skipped += 1
                piece.first_skipped = piece.first_skipped or unit.text
            else:
                piece.texts.append(data)
                piece.lasts.append(unit.last)
                size += len(data)
            if size >= PIECE or len(piece.texts) >= MOST_UNITS or piece.empty + piece.skipped >= MOST_UNITS:
                piece.unit, piece.digest, piece.read = count, digest.hexdigest(), read
                yield piece
                piece, size = Piece([], [], number), 0
        if count < done:
            raise Changed
        piece.source, piece.unit, piece.digest = number + 1, 0, ""
    piece.read = read
    if piece.texts or piece.empty or piece.skipped:
        yield piece


def _append(work: Work, piece: Piece, result: Encoded) -> None:
    """Append an encoded piece to the work, and count it."""
    before, sizes, open_ = work.progress, [], work.progress.open
    for count, last in zip(result.counts.tolist(), piece.lasts, strict=True):
        open_ += count
        if last:
            sizes.append(open_)
            open_ = 0
    if max(sizes, default=open_) > 2**31 - 1:
        raise UserError("a document has more than 2,147,483,647 tokens, too many for the format: give a --separator")
    progress = Progress(
        source=piece.source,
        unit=piece.unit,
        digest=piece.digest,
        documents=before.documents + len(sizes),
        tokens=before.tokens + int(result.counts.sum()),
        open=open_,
        text_bytes=before.text_bytes + sum(map(len, piece.texts)),
        special=before.special + result.special,
        empty=before.empty + piece.empty,
        skipped=before.skipped + piece.skipped,
        first_skipped=before.first_skipped or piece.first_skipped,
    )
    work.append(result.ids, np.array(sizes, "<i4").tobytes(), progress)


def prepare(
    inputs: Sequence[str | Path] | Callable[[], list[Input]],
    out: str | Path,
    name: str,
    *,
    tokenizer: str | Path = BUNDLED,
    end: str | None = None,
    reading: Reading | None = None,
    workers: int | None = None,
    shard: tuple[int, int] | None = None,
    force: bool = False,
    say: Callable[[str], object] = lambda sentence: None,
) -> Path:
    """Write `<out>/<name>_text_document.{bin,idx}` and `<out>/<name>.json`, and return the prefix.

    What an interrupted call with the same inputs and settings began is continued. Inputs that must be downloaded first
    come from a function, which is called when everything else was found to be right.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("hello")
    ...     prefix = prepare([folder + "/a.txt"], folder, "toy", tokenizer="byte", workers=1)
    ...     indexed.Indexed(prefix).document(0).tolist()
    [105, 102, 109, 109, 112, 0]
    """
    reading, workers = reading or Reading(), len(os.sched_getaffinity(0)) if workers is None else workers
    if not 1 <= workers <= 1024:
        raise UserError(f"--workers is {workers}: give 1 to 1,024")
    if Path(name).name != name:
        raise UserError(f"--name {name} is not a plain name: put folders into --out")
    encoder = load_tokenizer(tokenizer, end)
    if shard:
        if not 1 <= shard[0] <= shard[1]:
            raise UserError(f"there is no shard {shard[0]} of {shard[1]}: they count from 1 to {shard[1]}")
        name = f"{name}-{shard[0]}-of-{shard[1]}"
    prefix = Path(out) / (name + indexed.SUFFIX)
    targets = indexed.set_files(prefix)
    folder = Path(out) / f".{prefix.name}.work"

    def refuse_existing() -> None:
        for path in targets.values():
            if path.exists() and not force:
                raise UserError(f"{path} is there already: give another --name, or --force to replace it")

    if not (folder / "final").exists():
        refuse_existing()
    sources = inputs() if callable(inputs) else take_shard(find_inputs(inputs), shard)
    dtype, fresh = np.dtype(dtype_for(encoder.vocab_size)), not Path(out).exists()
    stamps = [[s.path if s.path == STDIN else os.path.abspath(s.path), *dataclasses.astuple(s)[1:]] for s in sources]
    work = Work(folder, _settings(reading, encoder), stamps, dtype.itemsize)
    try:
        if not work.final:
            refuse_existing()
            if work.note:
                say(work.note)
            elif work.progress != Progress():
                say(f"continuing after {work.progress.tokens:,} tokens of an interrupted run")
            _encode_all(work, sources, reading, encoder, workers, say)
            if not work.progress.documents:
                work.discard()
                others = f" and {len(sources) - 1} other files" if len(sources) > 1 else ""
                raise UserError(f"there is no text in {sources[0].name}{others}: nothing was written")
            _finish(work, prefix, encoder, dtype)
        work.publish(targets)
    finally:
        work.close()
        if fresh:
            with contextlib.suppress(OSError):  # it holds something
                Path(out).rmdir()
    _report(work.progress, say)
    return prefix


def _settings(reading: Reading, tokenizer: Tokenizer) -> str:
    """Return a digest of all that decides the tokens of an input. (`on_error` only decides what is left out.)"""
    import tokenizers

    how = {**dataclasses.asdict(reading), "on_error": None}
    made_of = [FORMAT, PIECE, how, fingerprint(tokenizer), tokenizer.end_of_document, tokenizers.__version__]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


def _encode_all(
    work: Work,
    sources: Sequence[Input],
    reading: Reading,
    tokenizer: Tokenizer,
    workers: int,
    say: Callable[[str], object],
) -> None:
    """Encode what the work lacks. Where an input changed since the work was begun, start over."""
    total = sum(s.bytes for s in sources) if all(s.path != STDIN for s in sources) else None
    start, first = time.monotonic(), work.progress
    waiting: deque = deque()
    pool = Encoders(tokenizer, workers)
    try:
        with meter(f"preparing with {tokenizer.name}", total) as show:

            def take() -> None:
                piece, future = waiting.popleft()
                _append(work, piece, future.result())
                seconds = time.monotonic() - start
                text, tokens = work.progress.text_bytes - first.text_bytes, work.progress.tokens - first.tokens
                rates = f"{text / seconds / 1e6:.1f} MB/s, {tokens / seconds / 1e6:.2f} M tokens/s"
                show(piece.read, f"{work.progress.tokens / 1e6:.1f} M tokens, {rates}")

            for piece in read_pieces(sources, reading, tokenizer, first):
                waiting.append((piece, pool.submit(piece.texts, piece.lasts)))
                while waiting and (waiting[0][1].done() or len(waiting) > 2 * workers):
                    take()
            while waiting:
                take()
    except Changed:
        pool.close()
        if any(s.path == STDIN for s in sources):
            raise UserError(
                f"standard input is not what the unfinished work in {work.folder} began with: "
                "give the same again, or remove that folder to start over"
            ) from None
        say("a file changed since the unfinished work was begun: starting over")
        work.start_over()
        _encode_all(work, sources, reading, tokenizer, workers, say)
    finally:
        pool.close()


def _finish(work: Work, prefix: Path, tokenizer: Tokenizer, dtype: np.dtype) -> None:
    """Write the index and the description beside the tokens."""
    progress = work.progress
    about = {
        "documents": progress.documents,
        "tokens": progress.tokens,
        "text_bytes": progress.text_bytes,
        "special_tokens_in_text": progress.special,
        "empty_documents": progress.empty,
        "skipped_documents": progress.skipped,
        "tokenizer": {
            "name": Path(tokenizer.name).name,
            "sha256": fingerprint(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document,
        },
    }
    with disk(work.folder.parent):
        sizes = np.memmap(work.folder / "sizes", "<i4", "r", shape=(progress.documents,))
        indexed.write_index(work.folder / "index", dtype, sizes)
        if tokenizer.name not in (BUNDLED, "byte"):
            (work.folder / "tokenizer").write_text(tokenizer.to_json(), encoding="utf-8")
        text = indexed.describe(prefix, work.folder, about, work.sha256.hexdigest())
        (work.folder / "description").write_text(text, encoding="utf-8")


def _report(progress: Progress, say: Callable[[str], object]) -> None:
    counts = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
    say(f"{counts} from {progress.text_bytes / 1e6:,.1f} MB of text")
    if progress.special:
        say(f"{progress.special:,} special tokens stood in the text and were taken as such")
    if progress.empty:
        say(f"{progress.empty:,} empty documents were left out")
    if progress.skipped:
        say(f"{progress.skipped:,} documents were skipped; the first: {progress.first_skipped}")
