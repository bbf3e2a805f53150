"""Worker processes that answer questions over a socket and may share memory with this process.

Unusual: no multiprocessing, so no `__main__` guard is needed, and a worker ends by itself (end of file) when its parent
is gone, however it went. Shared memory has no name, so nothing is left behind either.
"""

import contextlib
import mmap
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenformer.errors import UserError


def serve(start: Callable[..., Callable[..., Any]]) -> None:
    """Run in a worker: `start(memory, *setup)` returns the function that answers questions until the parent is gone."""
    for end in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C and schedulers reach the whole group; the parent decides
        signal.signal(end, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a parent that is gone needs no words
    parent, memory = Connection(int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), 0)
    os.close(int(sys.argv[2]))
    received = _received(parent)
    if (setup := next(received, None)) is None:
        return
    answer = start(memory, *setup)
    for question in received:
        try:
            reply = None, answer(*question)
        except UserError as error:
            reply = UserError, str(error)
        except MemoryError:
            raise  # the parent says what to do about a worker that ended
        except Exception:
            reply = RuntimeError, f"a worker process failed:\n{traceback.format_exc()}"
        parent.send(reply)


def _received(connection: Connection) -> Iterator[Any]:
    with contextlib.suppress(EOFError, OSError):  # the other end was closed
        while True:
            yield connection.recv()


def _nameless_file() -> int:
    """Open a file in memory that is gone when nobody has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shared")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Worker:
    """One process; `memory` is shared with it."""

    def __init__(self, start: str, setup: bytes, shared: int, env: dict[str, str]) -> None:
        module, _, name = start.rpartition(".")
        code = f"from tokenformer.data.workers import serve; from {module} import {name}; serve({name})"
        memory, (ours, theirs) = _nameless_file(), socket.socketpair()
        self._setup, self._connection = setup, Connection(ours.detach())
        try:
            os.ftruncate(memory, max(1, shared))
            self.memory = mmap.mmap(memory, 0)
            given = theirs.fileno(), memory
            command = [sys.executable, "-P", "-c", code, *map(str, given)]
            # what a library prints goes to standard error: standard output belongs to the program
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=given, env=env)
        finally:
            os.close(memory)
            theirs.close()

    def ask(self, *question: Any) -> Any:
        """Return the answer to a question, or raise what went wrong with it."""
        try:
            if self._setup:
                self._connection.send_bytes(self._setup)
                self._setup = b""
            self._connection.send(question)
            failure, answer = self._connection.recv()
        except (EOFError, OSError):  # it died, or was closed
            raise UserError(
                f"a worker ended before its work (exit code {self.process.wait()}), perhaps for want of memory: "
                "start again to continue, with fewer workers if it was memory"
            ) from None
        if failure:
            raise failure(answer)
        return answer

    def close(self) -> None:
        self.process.wait()
        self._connection.close()


class Workers:
    """Several worker processes that start alike: by `start`, the full name of the function that `serve` is given."""

    def __init__(self, start: str, count: int, setup: tuple, shared: int = 0) -> None:
        paths = [os.path.abspath(path) for path in sys.path]  # where the classes of what is sent are found
        one = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        paths = os.pathsep.join([*paths, str(Path(__file__).parents[2])])
        env = {**os.environ, **one, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}
        self.all = [Worker(start, pickle.dumps(setup), shared, env) for _ in range(count)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.all:
            self._idle.put(worker)

    @contextlib.contextmanager
    def idle(self) -> Iterator[Worker]:
        """Wait for a worker that is idle, and have it to oneself."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers; whoever waits for an answer is told that they ended."""
        for worker in self.all:
            worker.process.kill()
        for worker in self.all:
            worker.close()
