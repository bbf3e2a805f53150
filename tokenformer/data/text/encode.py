"""Processes that encode: each reads pieces of text on its standard input and answers with ids on its standard output.

Unusual: plain pipes instead of multiprocessing, so that nothing is pickled, no `__main__` guard is needed, and a worker
ends by itself (end of file) when its parent is gone, however it went.
"""

import contextlib
import json
import os
import queue
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tokenformer.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, dtype_for
from tokenformer.errors import UserError

_LENGTH = struct.Struct("<Q")


class Encoded(NamedTuple):
    """What became of a piece: tokens of each of its units, all ids, and how many of them are special tokens."""

    counts: np.ndarray
    ids: bytes
    special: int


def encode_units(tokenizer: Tokenizer, texts: Sequence[str], lasts: Sequence[bool]) -> Encoded:
    """Ids of units one after another, with the end-of-document id behind each that ends a document."""
    end = np.array([tokenizer.end_of_document], dtype_for(tokenizer.vocab_size))
    encoded = tokenizer.encode_batch(texts)
    counts = [len(ids) + last for ids, last in zip(encoded, lasts, strict=True)]
    parts = [part for ids, last in zip(encoded, lasts, strict=True) for part in ((ids, end) if last else (ids,))]
    ids = np.concatenate([end[:0], *parts])
    special = sum(int((ids == i).sum()) for i in tokenizer.special_ids)
    special -= sum(lasts) if tokenizer.end_of_document in tokenizer.special_ids else 0  # those are ours
    return Encoded(np.array(counts, np.int64), ids.tobytes(), special)


def _send(pipe: BinaryIO, *payloads: bytes) -> None:
    pipe.write(_LENGTH.pack(sum(map(len, payloads))))
    for payload in payloads:
        pipe.write(payload)
    pipe.flush()


def _receive(pipe: BinaryIO) -> bytes | None:
    head = pipe.read(8)
    if len(head) < 8:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = pipe.read(length)
    return payload if len(payload) == length else None


def serve() -> None:
    """The worker: first the tokenizer, then pieces, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a parent that is gone needs no words
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = json.loads(_receive(source) or b"null")
    if setup is None:
        return
    tokenizer: Tokenizer = ByteTokenizer()
    if setup["json"]:
        tokenizer = FileTokenizer(setup["json"], setup["name"], setup["end"])
    while (payload := _receive(source)) is not None:
        (units,) = _LENGTH.unpack_from(payload)
        lengths = np.frombuffer(payload, np.int64, units, 8)
        lasts = np.frombuffer(payload, np.bool_, units, 8 + 8 * units)
        ends = 8 + 9 * units + np.cumsum(lengths)
        texts = [payload[e - n : e].decode() for e, n in zip(ends.tolist(), lengths.tolist(), strict=True)]
        result = encode_units(tokenizer, texts, lasts.tolist())
        _send(answers, _LENGTH.pack(result.special), result.counts.tobytes(), result.ids)


class Encoders:
    """A number of worker processes; `submit` gives a Future of an `Encoded`."""

    def __init__(self, tokenizer: Tokenizer, workers: int, end: str | None = None) -> None:
        package = Path(__file__).parents[3]
        paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        one = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **one, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-P", "-c", "from tokenformer.data.text.encode import serve; serve()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._all: list[Any] = [subprocess.Popen(command, env=env, **pipes) for _ in range(workers)]
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers)
        text = "" if isinstance(tokenizer, ByteTokenizer) else tokenizer.to_json()
        setup = json.dumps({"json": text, "name": tokenizer.name, "end": end}).encode()
        for process in self._all:
            self._threads.submit(self._start, process, setup)

    def _start(self, process: Any, setup: bytes) -> None:
        with contextlib.suppress(OSError):  # it died: the first piece will say so
            _send(process.stdin, setup)
        self._idle.put(process)

    def submit(self, texts: Sequence[bytes], lasts: Sequence[bool]) -> Future[Encoded]:
        lengths = np.array([len(t) for t in texts], np.int64).tobytes()
        head = _LENGTH.pack(len(texts)) + lengths + np.array(lasts, np.bool_).tobytes()
        return self._threads.submit(self._encode, len(texts), head, b"".join(texts))

    def _encode(self, units: int, head: bytes, body: bytes) -> Encoded:
        process = self._idle.get()
        try:
            _send(process.stdin, head, body)
            answer = _receive(process.stdout)
        except OSError:
            answer = None
        finally:
            self._idle.put(process)
        if answer is None:
            raise UserError(
                f"a worker ended before its work (exit code {process.wait()}), perhaps for want of memory: "
                "start again to continue, with fewer workers if it was memory"
            )
        (special,) = _LENGTH.unpack_from(answer)
        return Encoded(np.frombuffer(answer, np.int64, units, 8), answer[8 + 8 * units :], special)

    def close(self) -> None:
        for process in self._all:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.wait()
            process.stdout.close()
            with contextlib.suppress(OSError):  # what a dead worker did not take
                process.stdin.close()
