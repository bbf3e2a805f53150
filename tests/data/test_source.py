"""Any source in the loader, read by threads or processes: one sequence, and nothing that is left behind."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.squares import Squares
from tokenformer import UserError
from tokenformer.data.loader import Loader

ROOT = Path(__file__).parents[2]


def rows(loaders: list[Loader], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and pictures of the global sequence, put together from all ranks; fillers are checked and left out."""
    parts = []
    for _, *batches in zip(range(steps * loaders[0].micro_batches), *loaders, strict=False):
        parts.append([batch.fields for batch in batches])
    index, picture = [], []
    micro = loaders[0].micro_batches
    for step, rank in itertools.product(range(steps), range(len(loaders))):
        for fields in (part[rank] for part in parts[step * micro : (step + 1) * micro]):
            real = fields["index"] >= 0
            assert (fields["picture"][~real] == 0.5).all() and (fields["process"][~real] == 0).all()
            index.append(fields["index"][real])
            picture.append(fields["picture"][real])
    return np.concatenate(index), np.concatenate(picture)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(holds) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("processes, workers", [(False, 0), (False, 3), (True, 1), (True, 2)])
@pytest.mark.parametrize("world, micro", [(1, None), (3, 2)])
def test_threads_and_processes_give_the_same_sequence_however_it_is_cut(processes, workers, world, micro):
    plain = rows([Loader(Squares(17, False), batch=10, workers=0)], 5)
    assert sorted(plain[0][:17].tolist()) == list(range(17)) == sorted(plain[0][17:34].tolist())
    assert (plain[0][:17] != plain[0][17:34]).any()  # each epoch has its own order …
    assert plain[1][17, 0, 0] == (plain[0][17] + 1000) ** 2  # … and is told to the source
    cut = {"batch": 10, "micro_batch": micro, "world": world, "workers": workers}
    loaders = [Loader(Squares(17, processes), rank=rank, **cut) for rank in range(world)]
    for mine, theirs in zip(rows(loaders, 5), plain, strict=True):
        assert np.array_equal(mine, theirs)
    assert {loader.samples_seen for loader in loaders} == {50}


def test_processes_read_and_are_gone_when_the_loader_is_left():
    stream = iter(Loader(Squares(100, True), batch=4, workers=2, prefetch=6))
    seen = {pid for batch in itertools.islice(stream, 30) for pid in batch.fields["process"].tolist()}
    assert os.getpid() not in seen and 1 <= len(seen) <= 2 and all(map(alive, seen))
    stream.close()
    assert not any(map(alive, seen))


def test_a_batch_that_is_kept_is_not_written_again():
    batches = list(itertools.islice(Loader(Squares(100, True), batch=4, workers=1, prefetch=2), 20))
    index = np.concatenate([b.fields["index"] for b in batches])
    assert len(set(index.tolist())) == 80


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_when_their_parent_is_killed(how):
    code = (
        "from tests.data.squares import Squares; from tokenformer.data.loader import Loader; import time\n"
        "stream = iter(Loader(Squares(100, True), batch=1, workers=2, prefetch=4))\n"
        "print(*{next(stream).fields['process'].item() for _ in range(40)}, flush=True); time.sleep(60)"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert workers and all(map(alive, workers))
    parent.send_signal(how)
    parent.wait()
    wait_for(lambda: not any(map(alive, workers)))


@pytest.mark.parametrize(
    "name, processes, error, sentence",
    [
        ("bad", False, UserError, "picture 7 is damaged"),
        ("bad", True, UserError, "picture 7 is damaged"),
        ("broken", True, RuntimeError, "(?s)a worker process failed.*IndexError: seven"),
        ("dying", True, UserError, r"a worker ended before its work \(exit code -9\)"),
    ],
)
def test_what_goes_wrong_in_a_worker_reaches_the_caller(name, processes, error, sentence):
    with pytest.raises(error, match=sentence):
        for _ in itertools.islice(Loader(Squares(20, processes, name), batch=2, workers=2), 20):
            pass


@pytest.mark.parametrize("processes", [False, True])
def test_a_blend_keeps_its_shares_and_the_order_of_each_source(processes):
    sources = [Squares(40, processes, "a"), Squares(30, processes, "b")]
    loader = Loader(sources, weights=[3, 1], batch=8, micro_batch=3, workers=1)
    index, _ = rows([loader], 10)
    turns, _ = loader.blend.turns(np.arange(80))
    alone = [rows([Loader(s, batch=8, workers=0)], 10)[0] for s in (Squares(40, False, "a"), Squares(30, False, "b"))]
    for number in (0, 1):
        mine = index[turns == number]
        assert mine.tolist() == alone[number][: len(mine)].tolist()
    assert loader.identity == {"data": "a*3/4+b*1/4", "size": "3x4"}


def test_a_source_with_an_order_of_its_own_keeps_it_and_is_not_blended():
    own = Squares(6, False, shuffled=False)
    index, picture = rows([Loader(own, batch=4)], 3)
    assert index.tolist() == [*range(6), *range(6)] and picture[6, 0, 0] == 1000**2
    with pytest.raises(UserError, match="only shuffled sources with the same fields can be blended"):
        Loader([own, Squares(6, False)], batch=4)


def test_arrays_come_from_the_allocator_that_is_given():
    given = []

    def allocate(shape, dtype):
        given.append(np.full(shape, 9, dtype))
        return given[-1]

    for processes in (False, True):
        batch = next(iter(Loader(Squares(9, processes), batch=4, workers=1, prefetch=1, allocate=allocate)))
        assert all(any(array is one for one in given) for array in batch.fields.values())


def test_config_and_data_are_imported_without_torch():
    code = (
        "import sys, pkgutil, importlib; sys.modules['torch'] = None\n"
        "import tokenformer.config, tokenformer.data as data\n"
        "names = [m.name for m in pkgutil.walk_packages(data.__path__, 'tokenformer.data.')]\n"
        "[importlib.import_module(name) for name in names]; print(*names)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert {"tokenformer.data.loader", "tokenformer.data.text.samples"} <= set(run.stdout.split())
