"""What grows with the number of ranks: sockets, open files, groups; and a checkpoint that all ranks read together."""

import itertools
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.parallel.conftest import forkserver, free_port
from tests.parallel.workers import become
from tokenformer.config import ParallelConfig
from tokenformer.errors import UserError
from tokenformer.files import check_manifest, write_manifest
from tokenformer.parallel.mesh import Place, allow_files
from tokenformer.train.checkpoint import find_together


@pytest.mark.parametrize(
    "degrees, sizes",
    [
        ({"replicate": 1024}, {"data": 1024, "copy": 1, "stage": 1024, "shard": 1}),
        ({"shard": 1024}, {"data": 1024, "copy": 1024, "stage": 1024, "token": 1}),
        ({"replicate": 16, "shard": 8, "token": 8}, {"data": 128, "copy": 64, "stage": 1024, "token": 8}),
        (
            {"pipeline": 4, "replicate": 4, "shard": 8, "token": 8},
            {"data": 32, "copy": 256, "stage": 256, "pipeline": 4},
        ),
    ],
)
def test_a_rank_of_1024_has_the_groups_of_its_layout_and_no_two_of_the_whole_world(degrees, sizes, monkeypatch):
    """A simulated process group: nothing is sent."""
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda **more: new_group(**{**more, "backend": "fake"}))
    monkeypatch.setenv("WORLD_SIZE", "1024")
    for rank in (0, 517, 1023):
        monkeypatch.setenv("RANK", str(rank))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
        try:
            place = Place(ParallelConfig(**degrees))
            place.start(torch.device("cpu"))
            assert {name: place.groups[name].size() for name in sizes} == sizes
            whole = {id(group) for name, group in place.groups.items() if group.size() == 1024 and name != "files"}
            assert len(whole) <= 2  # the world, and the mesh's own
        finally:
            dist.destroy_process_group()


def sockets() -> int:
    names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(name) and os.readlink(name).startswith("socket") for name in names)


def count_sockets(rank: int, world: int, port: int, out: str, ours: bool) -> None:
    """Leave how many sockets a rank has after what each step and each checkpoint sends on the host."""
    become(rank, world, port, out)
    before = sockets()
    if ours:
        place = Place(ParallelConfig(shard=world))
        place.start(torch.device("cpu"))
        place.max_of_last_call(place.max(0))
        place.run_on_each(lambda: None)
        place.sum(torch.ones(2), "copy")
    else:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(2))
    Path(f"{out}/{rank}").write_text(str(sockets() - before))
    dist.barrier()
    os._exit(0)


@pytest.mark.multi
def test_sockets_of_every_rank_grow_with_the_world_as_those_of_torch_itself(tmp_path):
    """gloo opens one for each further rank; the group of checkpoints may add the logarithm of their number."""
    found: dict[bool, dict[int, list[int]]] = {True: {}, False: {}}
    for ours, world in itertools.product(found, (2, 4, 8)):
        out, context, port = tmp_path / f"{ours}-{world}", forkserver(), free_port()
        out.mkdir()
        ranks = [context.Process(target=count_sockets, args=(r, world, port, str(out), ours)) for r in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        found[ours][world] = [int((out / f"{rank}").read_text()) for rank in range(world)]
    extra = {n: [a - b for a, b in zip(found[True][n], found[False][n], strict=True)] for n in (2, 4, 8)}
    assert max(extra[4]) <= max(extra[2]) + 1 and max(extra[8]) <= max(extra[4]) + 1, found


def limited(ranks: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        allow_files(ranks)
    except UserError as error:
        assert f"a job of {ranks} ranks may open 16896 files per process, but the limit is {hard}: raise" in str(error)
        os._exit(2)
    os._exit(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512 + 4 * ranks)


@pytest.mark.parametrize("ranks, code", [(4096, 2), (64, 1)])
def test_too_few_open_files_are_raised_or_refused_in_a_sentence(ranks, code):
    process = forkserver().Process(target=limited, args=(ranks, 4096))
    process.start()
    process.join(60)
    assert process.exitcode == code


def test_every_file_is_read_by_one_of_the_ranks_that_share_them(tmp_path):
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    for number in range(7):
        (folder / f"{number}.safetensors").write_bytes(bytes(100))
    write_manifest(folder)
    alone = Place(ParallelConfig())
    assert find_together(tmp_path, alone, "full").path == folder
    for number in range(7):
        path = folder / f"{number}.safetensors"
        path.write_bytes(bytes(99) + b"\1")
        found = []
        for rank in range(3):
            try:
                check_manifest(folder, share=(rank, 3))
            except UserError:
                found.append(rank)
        assert len(found) == 1
        with pytest.raises(UserError, match="is not the file that its manifest describes"):
            find_together(tmp_path, alone, "full")
        assert find_together(tmp_path, alone, "sizes").path == folder
        path.write_bytes(bytes(100))
