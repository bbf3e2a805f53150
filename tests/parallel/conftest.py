"""One launch a world size: workers over gloo run all cases of that size, then the tests look at what they left."""

import fcntl
import multiprocessing
import socket
import time
import zlib
from pathlib import Path

import pytest

from tests.parallel.cases import (
    ADAMW,
    BOTH,
    EQUAL,
    MUON,
    ODD,
    ONE,
    PLAIN,
    RUNS,
    SMALL,
    THREE,
    TWO,
    ZERO2,
    Run,
    mesh,
    run,
)
from tests.parallel.workers import train, worker
from tests.train.conftest import TEXT, TINY
from tokenformer.data.text.prepare import prepare

COUNTS = {  # what is sent, by what: see test_token.py
    "l2": run(ODD, on=TWO),
    "one": run(ONE, on=TWO),
    "three": run(THREE, on=TWO),
    "softmax": run(ODD, ["model.theta=softmax"], on=TWO),
    "whole": run(THREE, on=mesh(token=2, segments="per-rank")),
    "again": run(ODD, ["train.activation_checkpointing=full"], on=TWO),
    "transformer": run(PLAIN, ["model.kind=transformer"], on=TWO),
    "llama": run(PLAIN, ["model.kind=llama", "model.kv_heads=2", "model.tied=false"], on=BOTH),
    "zero2": run(ODD, ZERO2, on=mesh(shard=2)),
    "once-replicate4": run(ODD, SMALL, on=mesh(replicate=4)),
    "once-sharded": run(ODD, SMALL, on=mesh(replicate=2, shard=2)),
    "once-whole": run(ODD, SMALL, ["parallel.accumulate=whole"], on=mesh(replicate=2, shard=2)),
    "zero2-sharded": run(ODD, ZERO2, ["parallel.accumulate=sharded"], on=mesh(shard=2)),
    "joint": run(ODD, ["optimizer.segments=joint"], on=BOTH),
    "whole-both": run(THREE, MUON, on=mesh(shard=2, token=2, segments="per-rank")),
    **{f"{name}-{o[0][15:]}": run(ODD, d, o, on=on) for name, (d, on) in EQUAL.items() for o in (ADAMW, MUON)},
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

    def many(self, folder: Path) -> None:
        """All runs on several ranks, the smallest worlds first."""
        for world in sorted({one.world for one in RUNS.values()}):
            cases = []
            for name, one in RUNS.items():
                if one.world == world:
                    cases.append({"case": "train", "run": str(folder / name), "file": str(self.file),
                                  "settings": [*one.settings, *one.mesh], "dtype": one.dtype,
                                  "since": one.since and str(folder / one.since)})  # fmt: skip
            for name, one in COUNTS.items():
                if one.world == world:
                    cases.append({"case": "count", "out": str(folder / f"count-{name}"), "file": str(self.file),
                                  "settings": [*one.settings, *one.mesh]})  # fmt: skip
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
