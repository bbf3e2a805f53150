"""Run a case in a forked child that cannot write outside its folder, within limits of time and memory.

Unusual: Landlock (Linux 5.13) keeps the child inside; it needs no rights and holds for root too. Without it nothing is
run: what is fed to the child is made to do harm.
"""

import ctypes
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SECONDS, BYTES = 20.0, 3 * 10**9
CREATE, ADD, RESTRICT, NO_NEW_PRIVILEGES = 444, 445, 446, 38  # system calls; prctl's option
WRITES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # write, remove and make whatever there is
REFER, TRUNCATE, TCP = 1 << 13, 1 << 14, 3  # since versions 2, 3 and 4
TRAINING = re.compile(r"out of memory .* in step \d+: give micro_batch=")  # a config may ask for more than there is
_libc = ctypes.CDLL(None, use_errno=True)


class Ended(NamedTuple):
    how: str  # "exit N", "signal N", "time", "memory"
    out: str
    err: str
    seconds: float
    bytes: int


def landlock() -> int:
    """The kernel's version of Landlock; 0 where it has none."""
    return max(0, _libc.syscall(CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))) if sys.platform == "linux" else 0


def confine(folder: Path, port: int = 0) -> None:
    """From here on this process and its children write below `folder` alone, and connect to `port` alone, if any."""

    class Rules(ctypes.Structure):
        _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64))

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))

    class Port(ctypes.Structure):
        _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))

    version = landlock()
    handled = WRITES | (REFER if version > 1 else 0) | (TRUNCATE if version > 2 else 0)
    rules = Rules(handled, TCP if version > 3 else 0)
    size = ctypes.c_size_t(16 if version > 3 else 8)
    made = _checked(_libc.syscall(CREATE, ctypes.byref(rules), size, ctypes.c_uint32(0)))
    for path, allowed in ((folder, handled), (Path(os.devnull), 1 << 1)):
        beneath = Beneath(allowed, os.open(path, os.O_PATH))
        _checked(_libc.syscall(ADD, made, ctypes.c_int(1), ctypes.byref(beneath), ctypes.c_uint32(0)))
    if port and version > 3:
        allowed = Port(TCP, port)
        _checked(_libc.syscall(ADD, made, ctypes.c_int(2), ctypes.byref(allowed), ctypes.c_uint32(0)))
    _checked(_libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(_libc.syscall(RESTRICT, made, ctypes.c_uint32(0)))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def run(call: Callable[[], int | None], folder: Path, said: Path, seconds: float = SECONDS, port: int = 0) -> Ended:
    """Fork, go into `folder`, call. `said` is a folder for what the child prints, outside of what it may write to;
    `port` is one that it may serve and ask.
    """
    said.mkdir(parents=True, exist_ok=True)
    paths = [said / "out", said / "err"]
    sys.stdout.flush()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(call, folder, paths, port)
    how, usage = "time", None
    limit = seconds * min(3.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))  # others have the cores too
    while time.monotonic() - start < limit:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            how = f"exit {code}" if code >= 0 else f"signal {-code}"
            break
        time.sleep(0.005)
    else:
        os.killpg(child, signal.SIGKILL)
        _, _, usage = os.wait4(child, 0)
    took = time.monotonic() - start
    with _quietly():
        os.killpg(child, signal.SIGKILL)  # what it started
    used = usage.ru_maxrss * 1024
    out, err = (path.read_bytes()[:2_000_000].decode("utf-8", "replace") for path in paths)
    refused = how == "exit 2" and TRAINING.search(err)
    if (used > BYTES or "MemoryError" in err or "can't allocate memory" in err) and not refused:
        how = "memory"
    return Ended(how, out, err, took, used)


class _quietly:
    def __enter__(self) -> None: ...

    def __exit__(self, kind, error, trace) -> bool:
        return isinstance(error, ProcessLookupError | PermissionError)


def _child(call: Callable[[], int | None], folder: Path, paths: list[Path], port: int) -> None:
    code = 70
    try:
        os.setsid()
        for number, path in enumerate(paths, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  as Python does
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        have = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (have + BYTES, have + BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, BYTES))
        os.chdir(folder)
        os.environ.update(TMPDIR=str(folder), HOME=str(folder), HF_HOME=str(folder))
        confine(folder, port)
        code = call() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
