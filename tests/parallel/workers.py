"""What a worker of these tests runs: a list of cases, one after the other, in one process group. No test in here."""

import contextlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parallel import counting
from tokenformer.cli.main import main
from tokenformer.config import load
from tokenformer.train.trainer import Trainer


@contextlib.contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """A trainer's parameters are of the default type: float64 tells a wrong term from rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def middle(run: Path, copy: Path) -> None:
    """A run as it stood after step 5."""
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 5:
            shutil.rmtree(path)


def train(run: str, file: str, settings: list[str], dtype: str, since: str | None = None) -> None:
    """A whole run of the trainer, or one that goes on from the middle of another."""
    if since is not None and int(os.environ.get("RANK", 0)) == 0:
        middle(Path(since), Path(run))
    if dist.is_initialized():
        dist.barrier()
    with default_dtype(dtype):
        Trainer(load(file, overrides=settings), run, resume=since is not None).run()


CASES = {"train": train, "count": counting.count}


def command_line(rank: int, world: int, command: list[str], out: str, port: int = 1) -> None:
    """`tokenformer` as a rank of a job."""
    become(rank, world, port, out)
    sys.exit(main(command))


def without_memory(rank: int, world: int, command: list[str], out: str, port: int) -> None:
    """The same, where the last rank runs out of memory in its second step, as PyTorch says it on a GPU."""

    def train_step(self: Trainer) -> None:
        if rank == world - 1 and self.step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
        whole_step(self)

    whole_step, Trainer.train_step = Trainer.train_step, train_step
    command_line(rank, world, command, out, port)


def become(rank: int, world: int, port: int, out: str) -> None:
    """This process is a rank; what it says is left in a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    log = os.open(Path(out) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)


def worker(rank: int, world: int, port: int, cases: list[dict], out: str) -> None:
    """Rank `rank`'s part of every case; what went wrong is left in a file."""
    become(rank, world, port, out)
    code = 0
    try:
        meeting = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
        for number, one in enumerate(cases):  # each in a process group of its own: the threads of many are a burden
            arguments = dict(one)
            print(f"--- {time.monotonic():.1f} s, {time.process_time():.1f} s of CPU: {json.dumps(one)}", flush=True)
            dist.init_process_group("gloo", store=dist.PrefixStore(str(number), meeting), rank=rank, world_size=world)
            CASES[arguments.pop("case")](**arguments)
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
