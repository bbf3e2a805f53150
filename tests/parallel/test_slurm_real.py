"""The script of `tokenformer slurm` on a real Slurm of two nodes: a job that is taken away ends as if it were not."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parallel.cluster import Slurm, needs
from tests.train.conftest import result, same

pytestmark = [pytest.mark.hosts, pytest.mark.multi]
SETTINGS = [
    "steps=600", "schedule.steps=600", "checkpoint.every=0", "log.every=10", "model.heads=4",
    "model.rotary_fraction=0.5", "parallel.shard=2", "parallel.timeout=60",
]  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    needs("slurmctld", "slurmd", "munged", "unshare")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def calm(slurm, ran, tmp_path_factory) -> dict:
    """What the undisturbed job ends with."""
    job = Training(slurm, ran, tmp_path_factory.mktemp("calm") / "run")
    job.finish()
    assert slurm.job(job.number)["Restarts"] == "0"
    return result(job.run)


class Training:
    """A job of two nodes, one process each."""

    def __init__(self, slurm: Slurm, ran, run: Path, *more: str) -> None:
        self.slurm, self.run = slurm, run
        command = [sys.executable, "-m", "tokenformer", "slurm", str(ran.file), *SETTINGS, "--out", str(run)]
        where = ["--nodes", "2", "--gpus-per-node", "0", "--time", "10:00", "--partition", "main", "--submit"]
        done = subprocess.run([*command, *where, *more], env=slurm.environment, capture_output=True, text=True)
        assert "Submitted batch job" in done.stdout, done.stdout + done.stderr
        self.number = done.stdout.split()[-1]

    def said(self) -> str:
        out = self.run.with_name(f"run-{self.number}.out")
        return out.read_text() if out.exists() else ""

    def wait(self, for_what, seconds: float = 120) -> None:
        """A job that came back into the queue waits two minutes there: it is let go when its old script has left."""
        end = time.monotonic() + seconds
        while not for_what():
            assert time.monotonic() < end, f"{self.slurm.job(self.number)}\n{self.said()}\n{self.slurm.logs()}"
            if self.slurm.job(self.number).get("Reason") == "BeginTime":
                time.sleep(2)
                self.slurm("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            time.sleep(0.2)

    def state(self) -> str:
        return self.slurm.job(self.number)["JobState"]

    def reach(self, step: int) -> None:
        self.wait(lambda: f"step {step}/600" in self.said())

    def finish(self) -> None:
        self.wait(lambda: self.state() in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"))
        assert self.state() == "COMPLETED", self.said()
        assert "done after step 600" in self.said()


def test_a_job_that_is_requeued_in_the_middle_saves_and_ends_the_same(slurm, ran, calm, tmp_path):
    job = Training(slurm, ran, tmp_path / "run")
    job.reach(100)
    slurm("scontrol", "requeue", job.number)
    job.wait(lambda: "stopped by SIG" in job.said())
    job.finish()
    assert "going on from step " in job.said() and slurm.job(job.number)["Restarts"] == "1"
    assert same(result(job.run), calm)


def test_a_job_that_is_preempted_twice_saves_and_ends_the_same(slurm, ran, calm, tmp_path):
    job = Training(slurm, ran, tmp_path / "run")
    for times, step in enumerate((100, 300), 1):
        job.reach(step)
        slurm("sbatch", "--partition=urgent", "--nodes=2", f"--output={tmp_path}/urgent", "--wrap=sleep 1")
        job.wait(lambda times=times: job.said().count("stopped by SIG") == times)
    job.finish()
    assert job.said().count("going on from step") == 2 and slurm.job(job.number)["Restarts"] == "2"
    assert same(result(job.run), calm)


def test_a_job_whose_time_is_over_puts_itself_back_into_the_queue(slurm, ran, calm, tmp_path):
    """Slurm signals the script alone, two minutes before: here at once."""
    job = Training(slurm, ran, tmp_path / "run")
    job.reach(100)
    slurm("scancel", "--batch", "--signal=USR1", job.number)
    job.wait(lambda: "stopped by SIGUSR1" in job.said())
    job.finish()
    assert "going on from step " in job.said() and slurm.job(job.number)["Restarts"] == "1"
    assert same(result(job.run), calm)


def test_a_job_that_is_cancelled_saves_and_stays_out_of_the_queue(slurm, ran, tmp_path):
    """With a prelude, words before python as a container has them, and a taken port, too."""
    before = int(slurm("sbatch", "--hold", f"--output={tmp_path}/held", "--wrap=true").split()[-1])
    slurm("scancel", str(before))
    taken = socket.create_server(("", 10000 + before + 1))  # the port that the next job takes first
    setup = tmp_path / "set up.sh"
    setup.write_text("export FROM_SETUP=1\n")
    more = ["--setup", str(setup), "--prelude", "echo prelude $FROM_SETUP", "--container", "env STAND_IN=1"]
    job = Training(slurm, ran, tmp_path / "run", *more)
    job.reach(100)
    taken.close()
    assert int(job.number) == before + 1
    slurm("scancel", job.number)
    job.wait(lambda: "stopped by SIGTERM" in job.said())
    job.wait(lambda: job.state() == "CANCELLED")
    time.sleep(8)
    assert job.state() == "CANCELLED" and slurm.job(job.number)["Restarts"] == "0"
    assert "prelude 1" in job.said() and list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert job.number not in slurm("squeue", "-h", "-o", "%i")
