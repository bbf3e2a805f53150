"""What the memory of this machine allows. A GPU that has too little says so; on a CPU the system kills the process."""

import dataclasses
import os

from tokenformer.config import Config
from tokenformer.errors import UserError
from tokenformer.parallel.estimate import estimate
from tokenformer.parallel.mesh import Degrees
from tokenformer.parsing import first_text, is_file
from tokenformer.terminal import in_words
from tokenformer.train.run import less_memory


def check_host_memory(config: Config) -> None:
    """Refuse a step of one process on the CPU that needs more memory than the machine has."""

    def needed(micro: int) -> int:
        train = dataclasses.replace(config.train, compile="none")  # the figures of compiled code are those of GPUs
        return estimate(dataclasses.replace(config, train=train, micro_batch=micro), Degrees()).total

    micro, held = config.micro_batch or 1, host_memory()
    if (wanted := needed(micro)) <= held:
        return
    less = (m for m in range(micro // 2, 0, -1) if micro % m == 0 and needed(m) <= 0.8 * held)
    give = less_memory(config, next(less, 1))
    raise UserError(f"a step needs about {in_words(wanted)} of memory, but {in_words(held)} are here: give {give}")


def host_memory() -> float:
    """Return the bytes of memory that this machine has, or that its container may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if is_file(path) and (limit := first_text(path).strip()).isdigit():
            limits.append(int(limit))
    return min(limits)
