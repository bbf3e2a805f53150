"""Processes that answer over plain pipes, and may share memory with us.

Unusual: pipes instead of multiprocessing, so that no `__main__` guard is needed and a worker ends by itself (end of
file) when its parent is gone, however it went. Shared memory has no name, so nothing is left behind either.
"""

import contextlib
import mmap
import os
import queue
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tokenformer.errors import UserError

_LENGTH = struct.Struct("<Q")
Answer = Callable[[bytes], Sequence[bytes]]
Result = TypeVar("Result")


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


def serve(start: Callable[[bytes, mmap.mmap], Answer]) -> None:
    """Run in a worker: `start` makes of the first message what answers the others, until the parent closes the pipe."""
    for end in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and schedulers reach the whole group; the parent decides
        signal.signal(end, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a parent that is gone needs no words
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the answers
    memory = mmap.mmap(int(sys.argv[1]), 0)
    os.close(int(sys.argv[1]))
    setup = _receive(questions)
    answer = start(setup, memory) if setup is not None else None
    while answer and (question := _receive(questions)) is not None:
        _send(answers, *answer(question))


def _nameless() -> int:
    """A file in memory that is gone when nobody has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shared")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Worker:
    """One process; `memory` is shared with it."""

    def __init__(self, start: str, setup: bytes, shared: int, env: dict[str, str]) -> None:
        module, _, name = start.rpartition(".")
        code = f"from tokenformer.data.workers import serve; from {module} import {name}; serve({name})"
        memory = _nameless()
        try:
            os.ftruncate(memory, max(1, shared))
            self.memory = mmap.mmap(memory, 0)
            command = [sys.executable, "-P", "-c", code, str(memory)]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": [memory]}
            self.process: Any = subprocess.Popen(command, env=env, **pipes)
        finally:
            os.close(memory)
        self._setup: bytes | None = setup

    def ask(self, *question: bytes) -> bytes:
        """The answer to a question."""
        answer = None
        with contextlib.suppress(OSError, ValueError):  # it died, or was closed
            if self._setup is not None:
                _send(self.process.stdin, self._setup)
                self._setup = None
            _send(self.process.stdin, *question)
            answer = _receive(self.process.stdout)
        if answer is None:
            raise UserError(
                f"a worker ended before its work (exit code {self.process.wait()}), perhaps for want of memory: "
                "start again to continue, with fewer workers if it was memory"
            )
        return answer


class Workers:
    """A number of worker processes that start alike: by `start`, the full name of what `serve` is given."""

    def __init__(self, start: str, count: int, setup: bytes, shared: int = 0) -> None:
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        one = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        env = {**os.environ, **one, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths)}
        self.all = [Worker(start, setup, shared, env) for _ in range(count)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.all:
            self._idle.put(worker)

    def run(self, work: Callable[[Worker], Result]) -> Result:
        """What `work` gives with a worker of its own; waits until one is idle."""
        worker = self._idle.get()
        try:
            return work(worker)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers; whoever waits for an answer is told that they ended."""
        for worker in self.all:
            worker.process.kill()
        for worker in self.all:
            worker.process.wait()
            worker.process.stdout.close()
            with contextlib.suppress(OSError):  # what a dead worker did not take
                worker.process.stdin.close()
