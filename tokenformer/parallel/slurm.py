"""A Slurm job as one readable script: rendezvous on the first node, one torchrun agent a node, signals and requeue.

Unusual: Slurm signals before it takes the nodes away; every rank saves and leaves, and the script puts itself back into
the queue. `--resume` is always given: it begins where there is nothing to go on from.
"""

import dataclasses
import re
import shlex
import sys

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
    processes: int | None = None  # a node; default: one a GPU
    signal_before: int = 120  # seconds before the end of the time that the job hears of it
    restarts: int = 3


def script(job: Job, run: str, arguments: list[str]) -> str:
    """The sbatch script of `tokenformer train` with these arguments.

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
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None]
    train = shlex.join(["train", *arguments, "--out", run, "--resume"])
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by `tokenformer slurm`. Submit it from where you would train: sbatch FILE",
            *lines,
            "#SBATCH --requeue",
            "set -u",
            "",
            "# All nodes meet at the first one, on a port that belongs to this job.",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 20000))",
            "",
            "# Without this a restart after a dead worker fails half of the time.",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
            "",
            "# USR1 comes before the time is over, TERM before preemption: the ranks save and leave, and the job goes",
            "# back into the queue to go on from there. Only they listen: torchrun would kill them after 30 seconds.",
            "asked=0",
            "trap asked=1 USR1 TERM",
            "export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not ask for what sbatch was given",
            'srun --kill-on-bad-exit=1 --cpu-bind=none bash -c \'trap "" USR1 TERM; exec "$@"\' torchrun \\',
            f"  {shlex.quote(sys.executable)} -m torch.distributed.run --signals-to-handle=SIGINT \\",
            f"  --nnodes={job.nodes} --nproc-per-node={processes} --max-restarts={job.restarts} \\",
            '  --rdzv-backend=c10d --rdzv-endpoint="$head:$port" \\',
            '  --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \\',
            f"  -m tokenformer {train} &",
            "step=$!",
            'while kill -0 "$step" 2>/dev/null; do',
            '  if [ "$asked" = 0 ]; then wait "$step"; continue; fi  # a signal ends the wait',
            '  scancel --signal=USR1 "$SLURM_JOB_ID.0" 2>/dev/null  # until they have heard it',
            "  sleep 5",
            "done",
            'wait "$step"',
            "code=$?",
            "# A signal before preemption may come to the ranks alone: then the run's log says so.",
            f"if [ \"$asked\" = 1 ] || tail -n 1 {shlex.quote(run)}/log | grep -q 'stopped by SIG'; then",
            '  scontrol requeue "$SLURM_JOB_ID" && sleep 60  # until Slurm takes it',
            "fi",
            'exit "$code"',
            "",
        ]
    )
