"""Degrees and places, and what is refused before anything starts: one sentence, exit code 2, on every rank."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.parallel.conftest import forkserver
from tests.parallel.workers import command_line
from tokenformer.config import ModelConfig, ParallelConfig
from tokenformer.errors import UserError
from tokenformer.parallel.layout import Split
from tokenformer.parallel.mesh import Place, check, degrees, kill_stuck_launcher
from tokenformer.parallel.tokens import owners, tiled

MODEL = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=8, proj_tokens=8, ffn_tokens=[8, 3], vocab=128)


@pytest.mark.parametrize(
    "config, world, message",
    [
        ({"shard": 3}, 8, "shard 3, token 1, which does not divide 8"),
        ({"replicate": 2, "shard": 2}, 8, "which makes 4, not 8, the number of processes that were started"),
        ({"shard": 2}, 1, "which does not divide 1"),
        ({"shard": -1, "token": -1}, 8, "only one of them can be what is left"),
        ({"token": 0}, 8, "parallel.token is 0: give a number above 0"),
    ],
)
def test_degrees_that_do_not_make_the_world_are_refused(config, world, message):
    with pytest.raises(UserError, match=message):
        degrees(ParallelConfig(**config), world)


@pytest.mark.parametrize(
    "config, world, message",
    [
        ({"token": 8}, 8, "parallel.token is 8: give a divisor of model.heads, which is 4"),
        ({"token": 4}, 4, "a segment of ffn in layer 0 has 3 parameter tokens: give at most as many ranks"),
        ({"token": 2, "segments": "per-rank"}, 2, "qkv of layer 0 has 1 segments for 2 ranks"),
        ({"pipeline": 4}, 4, "parallel.pipeline is 4, but the model has 2 blocks"),
    ],
)
def test_a_model_that_cannot_be_laid_out_is_refused(config, world, message):
    parallel = ParallelConfig(**config)
    with pytest.raises(UserError, match=message):
        check(MODEL, degrees(parallel, world), parallel)


def test_places_are_laid_out_with_the_token_ranks_beside_each_other(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    seen = set()
    for rank in range(16):
        monkeypatch.setenv("RANK", str(rank))
        place = Place(ParallelConfig(pipeline=2, replicate=2, shard=2, token=2))
        seen.add((place.pipeline, place.data_rank, place.token))
        assert rank == (place.pipeline * place.data_world + place.data_rank) * 2 + place.token
    assert len(seen) == 16


def test_every_rank_of_a_node_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert Place(ParallelConfig()).device(gpu) == gpu  # a single process has the one that was asked for
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    place = Place(ParallelConfig(shard=4))
    assert place.device(gpu) == torch.device("cuda:1") and place.device(cpu) == cpu
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="this node has 2 GPUs, but 3 processes or more"):
        place.device(gpu)


@pytest.mark.parametrize("n, ranks", [(2140, 8), (4850, 8), (8620, 8), (34480, 8), (11, 4), (9, 8)])
def test_slices_differ_by_at_most_a_tile_and_miss_nothing(n, ranks):
    cuts = tiled(n, ranks)
    sizes = [last - first for first, last in itertools.pairwise(cuts)]
    assert sum(sizes) == n and min(sizes) > 0 and max(sizes) - min(sizes) <= (64 + 63 if n >= 512 else 1)
    split = Split((n, 5), 0, cuts)
    rows = [split.box(token, shard, 3)[0] for token in range(ranks) for shard in range(3)]
    assert [row for part in rows for row in range(part.start, part.stop)] == list(range(n))


def test_whole_segments_are_shared_out_by_size():
    sizes = [64, 16, 16, 32, 8]
    load = [sum(n for n, owner in zip(sizes, owners(sizes, 2), strict=True) if owner == rank) for rank in (0, 1)]
    assert max(load) == 72 and min(load) == 64


WRONG = {  # settings of a job of two processes, and what every one of them says
    "world": (["parallel.shard=3"], "shard 3, token 1, which does not divide 2, the number of processes"),
    "heads": (["parallel.token=2", "model.heads=1"], "parallel.token is 2: give a divisor of model.heads, which is 1"),
    "tokens": (["parallel.token=2", "model.ffn_tokens=[31,1]"], "a segment of ffn in layer 0 has 1 parameter tokens"),
    "stages": (["parallel.pipeline=-1", "model.layers=1"], "parallel.pipeline is 2, but the model has 1 blocks"),
}


@pytest.mark.multi
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_mesh_is_one_sentence_from_every_rank_before_anything_starts(ran, tmp_path, name):
    settings, message = WRONG[name]
    context = forkserver()
    command = ["train", str(ran.file), *settings, "--out", str(tmp_path / "run")]
    ranks = [context.Process(target=command_line, args=(rank, 2, command, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        process.join(120)
        said = (tmp_path / f"rank-{rank}.log").read_text()
        assert process.exitcode == 2 and said.count("\n") == 1, said
        assert said.startswith("tokenformer: parallel") and message in said
    assert not (tmp_path / "run").exists()


def stuck_launcher(here: str, everywhere: str) -> None:
    """Stands for a torchrun that does not see its worker end; gives 0 where nobody kills it meanwhile."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": here, "WORLD_SIZE": everywhere}
    worker = os.fork()
    if not worker:
        kill_stuck_launcher(seconds=0)
        time.sleep(30 if here != everywhere else 1)  # where it is killed, nobody waits for this
        os._exit(0)
    os.waitpid(worker, 0)


@pytest.mark.multi
@pytest.mark.parametrize("here, everywhere, code", [("1", "2", -signal.SIGKILL), ("2", "2", 0)])
def test_a_launcher_that_does_not_see_its_worker_end_is_killed_where_there_are_other_hosts(here, everywhere, code):
    launcher = forkserver().Process(target=stuck_launcher, args=(here, everywhere))
    launcher.start()
    launcher.join(300)
    assert launcher.exitcode == code


@pytest.mark.multi
def test_a_wrong_mesh_under_torchrun_is_a_sentence_without_a_traceback_of_ours(ran, tmp_path):
    settings, message = WRONG["tokens"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "-m", "tokenformer", "train", str(ran.file), *settings, "--out", str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and message in done.stderr, done.stderr  # of both, or torchrun ended the second
    assert "UserError" not in done.stderr and "exitcode  : 2" in done.stderr
    assert not (tmp_path / "run").exists()
