"""Data parallelism for evaluation: under torchrun each process takes a share of a list, and all gather the results.

Unusual: every process then computes the same metrics, so nothing else needs to know that there are several.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from tokenformer.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_launcher() -> None:
    """Refuse an environment that names several processes but not how they find each other."""
    number = {name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    for name, value in number.items():
        if not value.isdecimal():
            raise UserError(f"{name} is '{value[:80]}' in the environment: start with torchrun, or unset {name}")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world() > 1 and missing:
        raise UserError(
            f"WORLD_SIZE is {world()} in the environment, but {missing[0]} is not set: start the processes with "
            "torchrun, or unset WORLD_SIZE to use one"
        )


def local_device(name: str | None) -> str | None:
    """Return the GPU of this process, where several share a machine and none is named."""
    import torch

    check_launcher()
    if name in (None, "cuda") and world() > 1 and torch.cuda.is_available():
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    return name


def spread(items: Sequence[Item], work: Callable[[Sequence[Item]], list[Result]]) -> list[Result]:
    """Return `work` of all items: each process computes a consecutive part, and the results are gathered in order.

    >>> spread([1, 2, 3], lambda some: [2 * i for i in some])
    [2, 4, 6]
    """
    if world() == 1:
        return work(items)
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    bounds = [len(items) * i // world() for i in range(world() + 1)]
    mine = work(items[bounds[rank()] : bounds[rank() + 1]])
    parts: list = [None] * world()
    dist.all_gather_object(parts, mine)
    return [result for part in parts for result in part]


def leave() -> None:
    """End the process group, if there is one."""
    if world() > 1:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
