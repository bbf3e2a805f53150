"""One launch a world size: workers over gloo run all cases of that size, then the tests look at what they left."""

import fcntl
import multiprocessing
import socket
import time
import zlib
from pathlib import Path

import pytest

from tests.parallel.cases import ODD, PLAIN, RUNS, SHORT, THREE, Run
from tests.parallel.workers import train, worker
from tests.train.conftest import TEXT, TINY
from tokenformer.data.prepare import prepare

COUNTS = {  # what is sent, by what: see test_token.py
    "l2": [*SHORT, *ODD, "parallel.token=2"],
    "softmax": [*SHORT, *ODD, "model.theta=softmax", "parallel.token=2"],
    "whole": [*SHORT, *THREE, "parallel.token=2", "parallel.segments=per-rank"],
    "three": [*SHORT, *THREE, "parallel.token=2"],
    "shard": [*SHORT, *ODD, "parallel.shard=2"],
    "zero2": [*SHORT, *ODD, "parallel.shard=2", "parallel.reshard_after_forward=false"],
    "replicate": [*SHORT, *ODD, "parallel.replicate=2"],
    "transformer": [*SHORT, *PLAIN, "model.kind=transformer", "parallel.token=2"],
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def forkserver():
    """Workers are forked from a process that has imported everything once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.workers"])
    return context


def launch(world: int, cases: list[dict], out: Path, seconds: float = 600) -> None:
    """All cases on `world` ranks."""
    out.mkdir(parents=True, exist_ok=True)
    context = forkserver()
    port = free_port()
    ranks = [context.Process(target=worker, args=(rank, world, port, cases, str(out))) for rank in range(world)]
    for process in ranks:
        process.start()
    end = time.monotonic() + seconds
    while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5 if any(p.exitcode for p in ranks) else 0)
    for process in ranks:
        process.kill() if process.is_alive() else None
        process.join()
    logs = "\n".join(f"rank {r}: {(out / f'rank-{r}.log').read_text()[-3000:]}" for r in range(world))
    assert all(p.exitcode == 0 for p in ranks), logs


class Ran:
    """Where the runs are. Several test processes share them: the first one makes them, the others wait."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "tiny.yml"

    def once(self, name: str, make) -> Path:
        with open(self.root / f".{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = self.root / f".{name}.done"
            if not done.exists():
                done.write_text("")  # also when it fails: it would fail again
                make(self.root / name)
        return self.root / name

    def data(self, folder: Path) -> None:
        data = prepare([TEXT], folder, "alice", tokenizer="byte", workers=1)
        self.file.write_text(TINY.replace("DATA", str(data)))

    def many(self, folder: Path, counts: bool = True) -> None:
        """All runs on several ranks, the smallest worlds first."""
        for world in sorted({run.world for run in RUNS.values()}):
            cases = []
            for name, run in RUNS.items():
                if run.world == world:
                    cases.append({"case": "train", "run": str(folder / name), "file": str(self.file),
                                  "settings": [*run.settings, *run.mesh], "dtype": run.dtype,
                                  "since": run.since and str(folder / run.since)})  # fmt: skip
            if world == 2 and counts:
                cases += [{"case": "count", "out": str(folder / f"count-{name}.json"), "file": str(self.file),
                           "settings": settings} for name, settings in COUNTS.items()]  # fmt: skip
            launch(world, cases, folder / f"world-{world}")

    def __call__(self, name: str) -> Path:
        return self.once("many", self.many) / name

    def alone(self, run: Run) -> Path:
        """The run of one process with the same settings, made once."""
        settings = [s for s in run.settings if not s.startswith(("parallel.", "micro_batch="))]
        name = f"alone-{zlib.crc32(repr((settings, run.dtype)).encode()):08x}"
        made: Path = self.once(name, lambda folder: train(str(folder), str(self.file), settings, run.dtype))
        return made


@pytest.fixture(scope="session")
def ran(tmp_path_factory) -> Ran:
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if base.name.startswith("popen-") else base) / "parallel"
    root.mkdir(exist_ok=True)
    found = Ran(root)
    found.once("data", found.data)
    return found
