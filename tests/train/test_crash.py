"""Real processes, really killed: whatever the moment, the run goes on from its last complete checkpoint.

The text of a run's log and its folder tell where it stands, so kills can be aimed at training and at writing.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.conftest import child_environment, result, same
from tokenformer.hub.run_folder import all_steps
from tokenformer.train.trainer import Trainer

pytestmark = pytest.mark.multi


def start(config_file: Path, run: Path, *settings: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tokenformer", "train", str(config_file), *settings, "--out", str(run), "--resume"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=child_environment()
    )


def kill_at_a_random_moment(process: subprocess.Popen, run: Path, rng: random.Random) -> str:
    """Half of the kills wait for a checkpoint that is just being written; the rest come a while after the start."""
    before, deadline = set(all_steps(run)), time.monotonic() + 60
    writing = rng.random() < 0.5
    while process.poll() is None and time.monotonic() < deadline:
        started = (run / "log").exists() and len(all_steps(run).keys() - before) > 0
        half = [p for p in (run / "checkpoints").glob(".step-*") if p.is_dir()]
        if writing and half and started:
            time.sleep(rng.random() ** 3 * 0.01)  # sooner more often than later: a write may take 3 ms
            break
        if not writing and started:
            time.sleep(rng.random() * 0.15)
            break
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = [p for p in (run / "checkpoints").glob(".step-*") if p.is_dir()]
    return "writing" if left else "training"


def soak(config_file: Path, tiny, tmp_path: Path, kills: int, *settings: str, writes: int = 0) -> dict[str, int]:
    """Kill a run until it was killed often enough, `writes` times of these while it wrote; let it end, and compare it

    with one that was left alone. How many of the kills meet a write depends on the disk and on who else is busy.
    """
    rng, moments = random.Random(kills), {"writing": 0, "training": 0}
    run = tmp_path / "run"
    while sum(moments.values()) < kills or moments["writing"] < writes:
        assert sum(moments.values()) < 4 * kills, f"after {4 * kills} kills: {moments}"
        process = start(config_file, run, *settings, "steps=100000")
        moment = kill_at_a_random_moment(process, run, rng)
        assert process.returncode == -signal.SIGKILL, process.stdout.read()
        moments[moment] += 1
    steps = f"steps={max(all_steps(run)) + 20}"  # it ends when it was killed often enough
    process = start(config_file, run, *settings, steps)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert "going on from step" in said
    Trainer(tiny(*settings, steps), tmp_path / "whole").run()
    assert same(result(tmp_path / "whole"), result(run))
    assert not [p for p in (run / "checkpoints").iterdir() if p.name.startswith(".")]  # what kills left is swept
    print(moments)
    return moments


@pytest.mark.parametrize("background, kills", [("false", 7), ("true", 6)])
def test_a_run_killed_at_random_moments_ends_in_the_bits_of_the_uninterrupted_one(
    config_file, tiny, tmp_path, background, kills
):
    """13 kills in all, those during writes among them."""
    settings = ("checkpoint.every=2", "checkpoint.keep=2", "log.every=5", f"checkpoint.background={background}")
    assert sum(soak(config_file, tiny, tmp_path, kills, *settings).values()) == kills


@pytest.mark.slow
def test_a_hundred_kills(config_file, tiny, tmp_path):
    settings = ("checkpoint.every=2", "checkpoint.keep=2", "log.every=5", "train.precision=bf16")
    soak(config_file, tiny, tmp_path, 100, *settings, writes=20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_says_how_to_go_on(config_file, tiny, tmp_path, number):
    run = tmp_path / "run"
    process = start(config_file, run, "steps=100000", "log.every=5")
    while not (run / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert f"stopped by {number.name} after step" in said and f"tokenformer train {run} --resume" in said
    at = max(all_steps(run))
    done = subprocess.run(
        [sys.executable, "-m", "tokenformer", "train", str(run), "--resume", f"steps={at + 3}"],
        capture_output=True, text=True, env=child_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"going on from step {at} " in done.stdout and max(all_steps(run)) == at + 3
    Trainer(tiny(f"steps={at + 3}"), tmp_path / "whole").run()
    assert same(result(tmp_path / "whole"), result(run))


def test_one_process_at_a_time(config_file, tmp_path):
    run = tmp_path / "run"
    first = start(config_file, run, "steps=1000000")
    try:
        while not (run / "log").exists() and first.poll() is None:
            time.sleep(0.01)
        second = start(config_file, run)
        said, _ = second.communicate(timeout=60)
        assert second.returncode == 2 and "is being trained by another process" in said
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
