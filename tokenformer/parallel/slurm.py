"""A Slurm job as one readable script (slurm.sh): rendezvous on the first node, one torchrun agent per node, requeue.

Unusual: Slurm signals before it takes the nodes away; every rank saves and leaves, and the script puts itself back into
the queue. `--resume` is always given: a run that has no checkpoint begins.
"""

import dataclasses
import re
import shlex
import sys
from pathlib import Path

from tokenformer.strict import need


@dataclasses.dataclass(frozen=True)
class Job:
    """What is asked of Slurm."""

    nodes: int
    gpus_per_node: int
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    name: str = "tokenformer"
    cpus_per_gpu: int | None = None
    processes: int | None = None  # per node; default: one per GPU
    signal_before: int = 120  # seconds between the signal and the end of the job's time
    restarts: int = 3


def script(job: Job, run: str, arguments: list[str]) -> str:
    """Return the sbatch script of `tokenformer train` with these arguments.

    >>> print(script(Job(nodes=2, gpus_per_node=8), "runs/a", ["lm/150m"]).splitlines()[0])
    #!/bin/bash
    """
    need(job.nodes > 0, f"--nodes is {job.nodes}: give a number above 0")
    need(job.gpus_per_node >= 0, f"--gpus-per-node is {job.gpus_per_node}: give 0 (CPU) or more")
    need(job.cpus_per_gpu is None or job.cpus_per_gpu > 0, f"--cpus-per-gpu is {job.cpus_per_gpu}: give 1 or more")
    known = re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", job.time)
    need(bool(known), f"--time is '{job.time}': give it as Slurm reads it, such as 24:00:00 or 2-12:00:00")
    processes = job.processes or max(1, job.gpus_per_node)
    asked = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": job.cpus_per_gpu and job.cpus_per_gpu * processes,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "output": f"{run}-%j.out",
        "open-mode": "append",
        "signal": f"B:USR1@{job.signal_before}",
    }
    values = {
        "options": "\n".join(f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None),
        "python": shlex.quote(sys.executable),
        "nodes": job.nodes,
        "processes": processes,
        "restarts": job.restarts,
        "train": shlex.join(["train", *arguments, "--out", run, "--resume"]),
        "run": shlex.quote(run),
    }
    template = Path(__file__).with_suffix(".sh").read_text(encoding="utf-8")
    return re.sub("%([a-z]+)%", lambda name: str(values[name[1]]), template)
