"""A real Slurm of two nodes on one machine: Debian's slurm-wlm and munge, as root, all state in one folder. No test.

Unusual: the daemons live in a mount namespace of their own, where /etc/hosts names the nodes n1 and n2; nothing outside
the folder is touched, and `stop` ends exactly what `start` began.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
KillWait=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port=17001 CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port=17002 CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """`environment` is what its commands need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> "Slurm":
        f, host = self.folder, os.uname().nodename.split(".")[0]
        for name in ("state", "spool"):
            (f / name).mkdir(parents=True)
        key = f / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (f / "slurm.conf").write_text(CONF.format(host=host, folder=f))
        (f / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 n1 n2\n")
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={f}/munge.{end}" for option, end in files.items()]
        daemons = "slurmctld && slurmd -N n1 && slurmd -N n2"
        with open(f / "start.log", "w") as log:
            for command in (
                ["munged", "--force", *munge],
                ["unshare", "--mount", "bash", "-c", f"mount --bind '{f}/hosts' /etc/hosts && {daemons}"],
            ):
                subprocess.run(command, check=True, env=self.environment, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while set(self("sinfo", "-h", "-o", "%t", "-p", "main").split()) != {"idle"}:
            assert time.monotonic() < end, f"Slurm did not come up: {self.logs()}"
            time.sleep(0.2)
        return self

    def stop(self) -> None:
        for name in ("slurmctld", "n1", "n2", "munge"):
            path = self.folder / f"{name}.pid"
            if path.exists():
                os.kill(int(path.read_text()), signal.SIGTERM)

    def __call__(self, *command: str) -> str:
        """What a command of Slurm says."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        said = self("scontrol", "show", "job", number)
        return dict(part.split("=", 1) for part in said.split() if "=" in part)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))


def needs(*tools: str) -> None:
    """Says what a test of several hosts lacks here."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    root = os.getuid() == 0
    assert root and not missing, f"tests of two hosts need root and {', '.join(missing or tools)}: sudo make test-hosts"
