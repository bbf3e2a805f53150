"""The place of each rank: degrees from the config → a DeviceMesh, checked before any process group starts.

Unusual: a single process has a place too, with every degree 1 and no mesh, so that callers need no second path.
"""

import contextlib
import dataclasses
import datetime
import math
import os
import platform
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tokenformer.config import PROJECTIONS, ModelConfig, ParallelConfig
from tokenformer.config_train import DEGREES
from tokenformer.errors import UserError
from tokenformer.strict import need

T = TypeVar("T")
LAZY = "TORCH_GLOO_LAZY_INIT"


@dataclasses.dataclass(frozen=True)
class Degrees:
    """How many ranks each kind of parallelism has."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    token: int = 1

    @property
    def world(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.token

    def __str__(self) -> str:
        named = [f"{name} {getattr(self, name)}" for name in DEGREES if getattr(self, name) > 1]
        return " × ".join(named) or "one process"


def degrees(config: ParallelConfig, world: int) -> Degrees:
    """Return the four degrees, with the open one filled in. Refuse them if their product is not the world size.

    >>> degrees(ParallelConfig(shard=-1, token=2), 8)
    Degrees(pipeline=1, replicate=1, shard=4, token=2)
    >>> degrees(ParallelConfig(shard=2), 8).replicate
    4
    """
    wanted = {name: getattr(config, name) for name in DEGREES}
    if wanted["replicate"] is None:
        wanted["replicate"] = 1 if -1 in wanted.values() else -1
    known = Degrees(**{name: max(degree, 1) for name, degree in wanted.items()})
    for name, degree in wanted.items():
        if degree == -1 and world % known.world == 0:
            known = dataclasses.replace(known, **{name: world // known.world})
    if known.world != world:
        given = ", ".join(f"{name} {degree}" for name, degree in wanted.items())
        wrong = f"which does not divide {world}" if -1 in wanted.values() else f"which makes {known.world}, not {world}"
        raise UserError(
            f"parallel asks for {given}, {wrong}, the number of processes that were started: "
            "give other degrees, or start as many by torchrun --nproc-per-node"
        )
    return known


def stages(d: Degrees, config: ParallelConfig) -> int:
    """Return how many stages the pipeline has: one per rank, or two."""
    return d.pipeline * (2 if config.schedule == "interleaved" and d.pipeline > 1 else 1)


def keeps_whole_gradients(d: Degrees, config: ParallelConfig) -> bool:
    """Tell whether a rank keeps the whole gradients of a step's micro-batches and reduces them once at its end.

    PyTorch's pipelines always do.
    """
    chosen = {"whole": True, "sharded": False, "auto": d.shard == 1 or not config.reshard_after_forward}
    return d.pipeline > 1 or chosen[config.accumulate]


def check(model: ModelConfig, d: Degrees, config: ParallelConfig) -> None:
    """Refuse a model that cannot be split like this."""
    if d.pipeline * d.token == 1:
        return
    need(
        model.of == "language" and not model.trunks,
        f"parallel.pipeline is {d.pipeline} and parallel.token {d.token}, but both are for language models alone: "
        "leave them out, and use parallel.shard or parallel.replicate",
    )
    need(
        not model.added_vocab,
        "ids were added to the vocabulary (model.added_vocab), and neither parallel.pipeline nor parallel.token knows "
        "them: use parallel.shard or parallel.replicate",
    )
    need(
        not model.switch_names(),
        "the model has switches (model.switch), which neither parallel.pipeline nor parallel.token knows: "
        "use parallel.shard or parallel.replicate",
    )
    interleaved = " (two per rank when interleaved)" if stages(d, config) > d.pipeline else ""
    need(
        stages(d, config) <= model.layers,
        f"parallel.pipeline is {d.pipeline}{interleaved}, but the model has {model.layers} blocks: "
        "give at most as many stages",
    )
    for name in ("heads", "kv_heads"):
        heads = getattr(model, name) or model.heads
        need(heads % d.token == 0, f"parallel.token is {d.token}: give a divisor of model.{name}, which is {heads}")
    for layer in range(model.layers) if model.kind == "tokenformer" else ():
        for which in PROJECTIONS:
            sizes = [n for n, _ in model.segments(which, layer)]
            need(
                config.segments != "per-rank" or len(sizes) >= d.token,
                f"parallel.segments is per-rank, but {which} of layer {layer} has {len(sizes)} segments for "
                f"{d.token} ranks: split them, or give fewer ranks",
            )
            need(
                config.segments == "per-rank" or min(sizes) >= d.token,
                f"parallel.token is {d.token}, but a segment of {which} in layer {layer} has {min(sizes)} "
                "parameter tokens: give at most as many ranks",
            )
    rows = min(model.vocab, model.mlp_dim)
    need(rows >= d.token, f"parallel.token is {d.token}, more than the vocabulary has rows: give fewer ranks")


class Place:
    """This process's place in the mesh, from the environment that torchrun sets. `start` opens the process group."""

    def __init__(self, config: ParallelConfig) -> None:
        self.config = config
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.degrees = degrees(config, self.world)
        d, rest = self.degrees, self.rank
        rest, self.token = divmod(rest, d.token)
        rest, self.shard = divmod(rest, d.shard)
        self.pipeline, self.replicate = divmod(rest, d.replicate)
        self.data_rank, self.data_world = self.replicate * d.shard + self.shard, d.replicate * d.shard
        self.mesh: DeviceMesh | None = None
        self.opened_group = False
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.question: tuple[torch.Tensor, Any] | None = None

    @property
    def alone(self) -> bool:
        return self.world == 1

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0

    def device(self, kind: torch.device) -> torch.device:
        """Return this rank's own device of that kind."""
        if self.alone or kind.type != "cuda":
            return kind
        local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        need(local < there, f"this node has {there} GPUs, but {local + 1} processes or more: start one per GPU")
        return torch.device("cuda", local)

    def start(self, device: torch.device) -> None:
        """Open the process group and make the mesh, unless that was done already."""
        if self.alone or self.mesh is not None:
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        allow_files(self.world)
        wait = datetime.timedelta(seconds=self.config.timeout)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=wait)
            self.opened_group = True
        world = self.groups["world"] = cast(dist.ProcessGroup, dist.group.WORLD)
        shape = tuple(getattr(self.degrees, name) for name in DEGREES)
        self.mesh = mesh = init_device_mesh(device.type, shape, mesh_dim_names=DEGREES)
        many = {"data": ("replicate", "shard"), "copy": ("pipeline", "shard", "token"), "stage": DEGREES[1:]}
        for name in DEGREES:
            self.groups[name] = mesh.get_group(name)
        for name, parts in many.items():  # a group that is there already costs no sockets
            wide = [part for part in parts if getattr(self.degrees, part) > 1]
            if math.prod(getattr(self.degrees, part) for part in wide) == self.world:
                self.groups[name] = world
            else:
                one = self.groups[wide[0] if wide else parts[0]]
                self.groups[name] = one if len(wide) < 2 else mesh[parts]._flatten(name).get_group()
        if self.degrees.pipeline > 1:  # the first and the last stage both hold a tied embedding
            each = self.world // self.degrees.pipeline
            pairs = [[rank, self.world - each + rank] for rank in range(each)]
            ends, _ = dist.new_subgroups_by_enumeration(pairs, timeout=wait)
            if isinstance(ends, dist.ProcessGroup):
                self.groups["ends"] = ends
        with lazy_connections():  # for the thread that writes checkpoints
            self.groups["files"] = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=wait))

    def sum(self, tensor: torch.Tensor, over: str = "data") -> torch.Tensor:
        """All-reduce a sum in place, over the ranks that see different data (or another group)."""
        if not self.alone:
            dist.all_reduce(tensor, group=self.groups[over])
        return tensor

    def max(self, number: int) -> int:
        """All-reduce a maximum over all ranks, on the host: no device is read."""
        if self.alone:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return int(value)

    def max_of_last_call(self, number: int) -> int:
        """Return the maximum over all ranks of what they gave the last time this was called, at first 0.

        Its all-reduce runs on the host while a step is computed: on many ranks it takes as long as a short step.
        """
        if self.alone:
            return number
        answer = self.answer_last_call()
        value = torch.tensor(number)
        self.question = value, dist.all_reduce(value, dist.ReduceOp.MAX, async_op=True)
        return answer

    def answer_last_call(self) -> int:
        if self.question is None:
            return 0
        value, work = self.question
        work.wait()
        self.question = None
        return int(value)

    def barrier(self, group: str = "world") -> None:
        """Wait for all ranks of a group."""
        if not self.alone:
            dist.all_reduce(torch.zeros(1), group=self.groups[group])  # on the host; NCCL's barrier would take a GPU

    def run_on_first(self, do: Callable[[], T]) -> T:
        """Run `do` on the first rank and return its result on every rank. What it refuses is raised on all of them."""
        if self.alone:
            return do()
        message: list = list(_caught(do)) if self.first else [None, None]
        dist.broadcast_object_list(message, src=0, group=self.groups["files"])
        result, failure = message
        if failure is not None:
            self.barrier("files")  # the first one stays until all have received it
            raise UserError(failure) if isinstance(failure, str) else OSError(*failure)
        return result

    def run_on_each(self, do: Callable[[], T]) -> list[T]:
        """Run `do` on every rank and return all results. What one refuses is raised on all of them."""
        if self.alone:
            return [do()]
        every: list = [None] * self.world
        dist.all_gather_object(every, _caught(do), group=self.groups["files"])  # a ring: each rank talks to two others
        for _, failure in every:
            if failure is not None:
                self.barrier("files")  # nobody leaves before all have received it
                raise UserError(failure) if isinstance(failure, str) else OSError(*failure)
        return [result for result, _ in every]

    def leave(self) -> None:
        """Close the process group that `start` opened, after the last collective."""
        self.answer_last_call()
        if self.opened_group:
            self.barrier()
            dist.destroy_process_group()


@contextlib.contextmanager
def lazy_connections() -> Iterator[None]:
    """Let gloo connect two ranks of a new group when they first talk, not all with all: most never do."""
    before = os.environ.get(LAZY)
    os.environ[LAZY] = "1"
    try:
        yield
    finally:
        os.environ.pop(LAZY)
        os.environ |= {} if before is None else {LAZY: before}


def allow_files(ranks: int) -> None:
    """Raise this process's limit of open files to what a job of so many ranks needs, or refuse in a sentence.

    gloo connects all ranks, some of them once more in a subgroup; the first rank also has a connection from each to
    its store; data and libraries open some hundred files.
    """
    needed, (soft, hard) = 512 + 4 * ranks, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in (resource.RLIM_INFINITY, -1) or soft >= needed:
        return
    if hard not in (resource.RLIM_INFINITY, -1) and hard < needed:
        raise UserError(
            f"a job of {ranks} ranks may open {needed} files per process, but the limit is {hard}: raise it "
            f"(ulimit -n {needed}, or LimitNOFILE of the service that starts the job)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _caught(do: Callable[[], T]) -> tuple[T | None, str | tuple | None]:
    """Return a result and nothing, or nothing and what can be sent of a UserError (its sentence) or OSError."""
    try:
        return do(), None
    except UserError as error:
        return None, str(error)
    except OSError as error:
        return None, (error.errno, error.strerror)


LOST = ("imed out", "imeout", "Connection closed", "Connection reset", "Connection refused", "Broken pipe")
FAILURE = "tokenformer failure"  # what a rank that fails alone leaves in the job's store


def run_rank(run: Callable[[], signal.Signals | None]) -> int:
    """Run this rank's part of a job and return its exit code; each rank says what went wrong with it.

    A rank of many ends its process right here: one that had a mesh over gloo may abort while Python shuts down, though
    all went well.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        stop = run()
        return 0 if stop is None else 128 + stop
    code, rank = 1, f"rank {os.environ.get('RANK')} on {platform.node()}"
    try:
        run()
        code = 0  # also when it was asked to stop: torchrun would start it again
    except UserError as error:
        print(f"tokenformer: {error}", file=sys.stderr)
        with contextlib.suppress(Exception):  # where there is a store, and it can be reached
            dist.distributed_c10d._get_default_store().set(FAILURE, f"{rank} failed: {error}")
        code = 2
    except Exception as error:
        if isinstance(error, RuntimeError) and any(word in str(error) for word in LOST):
            why = "another rank failed (it says why), the network died, or parallel.timeout is too short"
            said = str(error).strip().splitlines()[0]
            lost = f"{rank} lost the others: {why}; go on with --resume. PyTorch says: {said}"
            if (failure := failure_of_another(error)) is not None:
                code, lost = 2, f"tokenformer: {failure}"
            print(lost, file=sys.stderr)
            kill_stuck_launcher()
        else:
            print(f"{rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # its reader left, which is no error
    except OSError as error:
        code = code or 2
        with contextlib.suppress(OSError):
            print(
                f"tokenformer: standard output of {rank} cannot be used ({error.strerror}): check it", file=sys.stderr
            )
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def failure_of_another(error: RuntimeError) -> str | None:
    """Return the sentence of a rank that failed alone, from the job's store; None if it left none."""
    if "imed out" in str(error):
        return None  # the network may be dead, and the store would not answer either
    with contextlib.suppress(Exception):  # the store went with its rank
        store = dist.distributed_c10d._get_default_store()
        return store.get(FAILURE).decode() if store.check([FAILURE]) else None
    return None


def kill_stuck_launcher(seconds: int = 10) -> None:
    """Kill the torchrun that started this rank if it does not notice, within some seconds, that the rank has ended.

    torchrun waits without end for a rendezvous on a host that is out of reach, and so does not see its workers die.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        said = f"torchrun on {platform.node()} cannot reach the rendezvous and is ended"
        watch = f"sleep {seconds}; kill -0 {os.getpid()} 2>/dev/null && echo {said} >&2 && kill -9 {os.getppid()}"
        subprocess.Popen(["sh", "-c", watch], start_new_session=True)
