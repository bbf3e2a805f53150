"""A Slurm job as one readable script (slurm.sh): rendezvous on the first node, one torchrun agent per node, requeue.

Unusual: Slurm signals before it takes the nodes away; every rank saves and leaves, and the script puts itself back into
the queue. `--resume` is always given: a run that has no checkpoint begins.
"""

import dataclasses
import re
import shlex
import sys
import zlib
from pathlib import Path

from tokenformer.strict import need

# what torchrun, the traps and the end of the script must agree with
FIXED = {"nodes": "give --nodes", "signal": "give --signal-before"}
FIXED |= dict.fromkeys(("gpus-per-node", "ntasks", "ntasks-per-node"), "give --gpus-per-node")
FIXED |= dict.fromkeys(("array", "requeue", "no-requeue"), "leave it out")


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
    mem: str | None = None
    exclusive: bool = False
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    more: tuple[str, ...] = ()  # further options of sbatch, KEY or KEY=VALUE
    setup: str | None = None  # a file that the job sources first
    prelude: tuple[str, ...] = ()  # commands that it then runs
    srun: tuple[str, ...] = ()  # further options of srun
    container: str | None = None  # words before the python of every node


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
    need(job.signal_before > 0, f"--signal-before is {job.signal_before}: give seconds above 0")
    need(job.restarts >= 0, f"--restarts is {job.restarts}: give 0 or more")
    processes = job.processes or max(1, job.gpus_per_node)
    asked: dict[str, object] = {
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
        "mem": job.mem,
        "exclusive": job.exclusive or None,
        "qos": job.qos,
        "constraint": job.constraint,
        "gres": job.gres,
        "requeue": True,
    }
    for option in job.more:
        name, given, value = option.partition("=")
        known = re.fullmatch("[a-z][a-z-]*", name)
        need(bool(known), f"--sbatch is '{option}': give an option of sbatch as KEY=VALUE or KEY, without dashes")
        do = FIXED.get(name)
        need(do is None, f"--sbatch is '{option}', but the script counts on its own: {do}")
        asked[name] = value if given else True
    setup = [f"source {shlex.quote(str(Path(job.setup).absolute()))}"] if job.setup else []
    for command in job.prelude:
        need("\n" not in command, "--prelude holds a line break: give it once per line, or --setup FILE")
    values = {
        "options": block("options", [directive(name, value) for name, value in asked.items() if value is not None]),
        "setup": "".join(f"{line}\n" for line in (*setup, *job.prelude)),
        "srun": "".join(f"{shlex.quote(option)} " for option in job.srun),
        "container": f"{job.container} " if job.container else "",
        "python": shlex.quote(sys.executable),
        "nodes": job.nodes,
        "processes": processes,
        "restarts": job.restarts,
        "train": shlex.join(["train", *arguments, "--out", run, "--resume"]),
        "run": shlex.quote(run),
    }
    template = Path(__file__).with_suffix(".sh").read_text(encoding="utf-8")
    text = re.sub("%([a-z]+)%", lambda name: str(values.get(name[1], name[0])), template)
    before, _, rest = text.partition("%begin%\n")
    return before + block("job", rest.removesuffix("%end%\n").splitlines()) + "\n"


def directive(name: str, value: object) -> str:
    """Return a line that asks Slurm for something.

    >>> directive("job-name", "a b"), directive("exclusive", True)
    ('#SBATCH --job-name="a b"', '#SBATCH --exclusive')
    """
    if value is True:
        return f"#SBATCH --{name}"
    text = str(value)
    need(not set(text) & set('\n\r"\\'), f"--{name} is {text!r}: Slurm takes no line break, quote or backslash in it")
    return f'#SBATCH --{name}="{text}"' if re.search(r"[\s#]", text) else f"#SBATCH --{name}={text}"


def block(name: str, lines: list[str]) -> str:
    """Mark lines as ours, with a checksum that tells whether somebody edited them."""
    inside = "\n".join(lines) + "\n"
    mark = f"tokenformer slurm: {name} {zlib.crc32(inside.encode()):08x}"
    return f"# >>> {mark}; written anew by the next `tokenformer slurm`\n{inside}# <<< {name}"


OURS = re.compile(
    r"# >>> tokenformer slurm: (?P<name>\w+) (?P<sum>[0-9a-f]{8});[^\n]*\n(?P<inside>.*?\n)# <<< (?P=name)", re.DOTALL
)


def renewed(old: str, new: str) -> str | None:
    """Put the blocks of a new script into an old one, whose other lines stay; None if its blocks were edited."""
    found = {match["name"]: match for match in OURS.finditer(old)}
    wanted = {match["name"]: match[0] for match in OURS.finditer(new)}
    if found.keys() != wanted.keys():
        return None
    if any(f"{zlib.crc32(match['inside'].encode()):08x}" != match["sum"] for match in found.values()):
        return None
    return OURS.sub(lambda match: wanted[match["name"]], old)
