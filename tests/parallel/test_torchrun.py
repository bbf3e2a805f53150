"""The command line under torchrun: rank 0 speaks, a rank that dies is restarted, and the end is the undisturbed one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.conftest import result
from tokenformer.hub.dcp import read_tensors
from tokenformer.hub.run_folder import newest_whole

pytestmark = pytest.mark.multi
MODEL = ["model.heads=4", "model.rotary_fraction=0.5", "batch=8", "micro_batch=2", "checkpoint.every=5", "log.every=5"]


def start(ran, out: Path, *settings: str, restarts: int = 0) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, f"--max-restarts={restarts}", "-m", "tokenformer", "train", str(ran.file), *MODEL, *settings]
    with open(out.with_suffix(".txt"), "w") as log:
        return subprocess.Popen([*command, "--out", str(out), "--resume"], env=environment, stdout=log, stderr=log)


def workers(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children]


def test_kill_9_of_a_rank_restarts_the_job_and_changes_nothing(ran, tmp_path):
    settings = ["steps=60", "parallel.shard=2", "optimizer.kind=adamw"]
    assert start(ran, tmp_path / "calm", *settings).wait(120) == 0
    job = start(ran, tmp_path / "killed", *settings, restarts=3)
    try:
        end = time.monotonic() + 90
        while not (tmp_path / "killed" / "checkpoints" / "last").exists() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(workers(job.pid)[-1], signal.SIGKILL)
        assert job.wait(120) == 0, (tmp_path / "killed.txt").read_text()[-3000:]
    finally:
        job.kill()
    said = (tmp_path / "killed" / "log").read_text()
    assert "going on from step" in said and "done after step 60" in said
    calm, killed = result(tmp_path / "calm"), result(tmp_path / "killed")
    assert calm["model"].keys() == killed["model"].keys()
    assert all((calm["model"][name] == tensor).all() for name, tensor in killed["model"].items())
    assert (tmp_path / "calm.txt").read_text().count("done after step 60") == 1  # one rank speaks


def test_a_signal_to_one_rank_ends_all_after_the_same_step_with_a_checkpoint(ran, tmp_path):
    job = start(ran, tmp_path / "run", "steps=100000", "schedule.steps=100000", "parallel.token=2")
    try:
        end = time.monotonic() + 90
        while not (tmp_path / "run" / "checkpoints" / "last").exists() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(workers(job.pid)[1], signal.SIGUSR1)
        job.wait(60)
    finally:
        job.kill()
    assert "stopped by SIGUSR1 after step" in (tmp_path / "run" / "log").read_text()
    found = newest_whole(tmp_path / "run")
    assert found is not None and read_tensors(found / "model")["embedding.weight"].shape == (384, 16)
