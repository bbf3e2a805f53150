"""A run folder that cannot be written: a disk that is really full or read-only (a small tmpfs, where we may mount one),

a file size limit, files on /dev/full, a standard output whose reader left. Logging never ends a run.
"""

import errno
import fcntl
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import child_environment, result, same
from tokenformer.config import load
from tokenformer.errors import UserError
from tokenformer.hub.run_folder import all_steps, newest_whole
from tokenformer.train import loggers
from tokenformer.train.report import read_rows
from tokenformer.train.trainer import Trainer

BIG = ("model.dim=64", "model.ffn_tokens=64")  # about 1.5 MB a checkpoint


def child(config_file: Path, run: Path, *settings: str, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tokenformer", "train", str(config_file), *settings, "--out", str(run), "--resume"]
    return subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=120, **more)


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 4 MB: a file system of its own that can be filled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk: Path, leave: int) -> None:
    space = os.statvfs(disk)
    (disk / "filler").write_bytes(b"\0" * max(0, space.f_bavail * space.f_frsize - leave))


@pytest.mark.parametrize("background", ["false", "true"])
@pytest.mark.parametrize("then", ["stop", "continue"])
def test_a_full_disk_is_said_and_the_checkpoint_before_it_loads(small_disk, tiny, tmp_path, capsys, then, background):
    run = small_disk / "run"
    settings = (*BIG, f"checkpoint.on_failure={then}", f"checkpoint.background={background}")
    Trainer(tiny(*settings, "steps=10"), run).run()
    fill(small_disk, leave=300_000)
    full = Trainer(tiny(*settings, "steps=30", "checkpoint.every=5"), run, resume=True)
    if then == "stop":
        with pytest.raises(UserError, match=rf"No space left .*: make room, then .*: tokenformer train {run} --resume"):
            full.run()
        assert full.step == (15 if background == "false" else 20)  # in the background it is heard at the next one
    else:
        assert full.run() is None and full.step == 30
        said = capsys.readouterr().out
        assert "step 15 could not be written (No space left on device)" in said and "training goes on" in said
    events = [row["reason"] for row in read_rows(run) if row["kind"] == "event"]
    assert events and "No space left" in events[0]
    assert list(all_steps(run)) == [10] and newest_whole(run) is not None  # the one before is whole
    assert not list((run / "checkpoints").glob(".step-*"))  # nothing half-written is left
    (small_disk / "filler").unlink()  # room was made
    Trainer(tiny(*settings, "steps=30"), run, resume=True).run()
    assert "going on from step 10" in capsys.readouterr().out
    Trainer(tiny(*BIG, "steps=30"), tmp_path / "whole").run()
    assert same(result(tmp_path / "whole"), result(run))


@pytest.mark.multi
def test_a_file_that_may_not_grow_is_the_same_story(config_file, tiny, tmp_path):
    run = tmp_path / "run"
    Trainer(tiny(*BIG, "steps=10"), run).run()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    done = child(config_file, run, *BIG, "steps=20", preexec_fn=limit)
    assert done.returncode == 2 and "could not be written (File too large)" in done.stderr, done.stderr
    assert list(all_steps(run)) == [10] and newest_whole(run) is not None


def last_step(run: Path) -> int:
    assert newest_whole(run) is not None
    return max(all_steps(run))


def refused(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tokenformer", *command], capture_output=True, text=True, env=child_environment()
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


class Filling(Trainer):
    """Fills the disk before a step, and frees it before another."""

    full, free, disk = 12, 25, Path()

    def train_step(self) -> None:
        if self.step == self.full:
            fill(self.disk, leave=0)
        if self.step == self.free:
            (self.disk / "filler").unlink()
        super().train_step()


def test_a_disk_that_is_full_at_log_lines_loses_no_row_when_there_is_room_again(small_disk, tiny, tmp_path, capsys):
    run, Filling.disk = small_disk / "run", small_disk
    Filling(tiny(*BIG, "steps=30", "log.every=1"), run).run()
    said = capsys.readouterr()
    assert f"{run / 'metrics.jsonl'} cannot be written (No space left on device): training goes on" in said.err
    assert said.err.count("metrics.jsonl") == 1 and "step 30/30" in said.out
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows if json.loads(row)["kind"] == "train"] == list(range(1, 31))
    log = (run / "log").read_text()
    assert all(f"step {step}/30  loss" in log for step in range(1, 31)) and "cannot be written" in log
    Trainer(tiny(*BIG, "steps=30"), tmp_path / "whole").run()
    assert same(result(tmp_path / "whole"), result(run))


def test_a_disk_that_stays_full_is_the_checkpoints_failure_and_one_sentence(small_disk, tiny, capsys):
    run, Filling.disk = small_disk / "run", small_disk
    settings = (*BIG, "steps=20", "log.every=1", "checkpoint.every=10")  # it ends before the disk is freed
    with pytest.raises(UserError, match=r"checkpoint of step 20 could not be written \(No space left on device\)"):
        Filling(tiny(*settings), run).run()
    assert last_step(run) == 10 and not list((run / "checkpoints").glob(".step-*"))
    (small_disk / "filler").unlink()


@pytest.mark.parametrize("name", ["log", "metrics.jsonl"])
def test_a_log_that_takes_nothing_does_not_end_the_run(tiny, tmp_path, capsys, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to("/dev/full")
    assert Trainer(tiny("steps=20", "log.every=1"), tmp_path / "run", resume=True).run() is None
    said = capsys.readouterr().err
    assert said.count(f"{name} cannot be written (No space left on device): training goes on") == 1
    assert last_step(tmp_path / "run") == 20


@pytest.mark.multi
def test_a_standard_output_that_takes_nothing_does_not_end_the_run(config_file, tmp_path):
    command = [sys.executable, "-m", "tokenformer", "train", str(config_file), "steps=20", "log.every=1", "--out"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, str(tmp_path / "run")], stdout=full, stderr=subprocess.PIPE, text=True, env=child_environment()
        )
    assert done.returncode == 0 and last_step(tmp_path / "run") == 20, done.stderr
    assert done.stderr.count("\n") == 1 and "standard output cannot be written (No space left" in done.stderr
    assert "done after step 20" in (tmp_path / "run" / "log").read_text()
    piped = subprocess.Popen(
        [*command, str(tmp_path / "piped")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment()
    )
    piped.stdout.readline()
    piped.stdout.close()  # as `head -n 1` does
    assert piped.wait(120) == 0, piped.stderr.read()
    assert last_step(tmp_path / "piped") == 20 and "done after step 20" in (tmp_path / "piped" / "log").read_text()


def test_a_logger_that_fails_is_left_out_and_the_run_goes_on(tiny, tmp_path, capsys, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("its server is gone")

    monkeypatch.setattr(loggers, "open_loggers", lambda *_: [loggers.Logger("wandb", fails, fails)])
    assert Trainer(tiny("steps=20", "log.every=1"), tmp_path / "run").run() is None
    assert capsys.readouterr().err.count("log.wandb cannot be written (its server is gone)") == 1
    assert last_step(tmp_path / "run") == 20


@pytest.mark.parametrize("then", ["stop", "continue"])
def test_a_checkpoint_whose_folder_cannot_be_made_counts_as_one_that_failed(tiny, tmp_path, capsys, then):
    """Not the tensors alone: `checkpoint.on_failure` decides, and the event is written."""
    run = tmp_path / "run"

    class Blocked(Trainer):
        def train_step(self) -> None:
            if self.step == 12:
                (run / "checkpoints").rename(run / "away")
                (run / "checkpoints").write_text("")
            super().train_step()

    trainer = Blocked(tiny("steps=20", "checkpoint.every=5", f"checkpoint.on_failure={then}"), run)
    said = r"the checkpoint of step 15 could not be written \(File exists\); the checkpoints before it are untouched"
    if then == "stop":
        with pytest.raises(UserError, match=rf"{said}: mend that, then go on with"):
            trainer.run()
    else:
        assert trainer.run() is None and re.search(said, capsys.readouterr().out)
    assert any(row.get("what") == "checkpoint failed" for row in read_rows(run))
    (run / "checkpoints").unlink()
    (run / "away").rename(run / "checkpoints")
    assert last_step(run) == 10


@pytest.mark.multi
def test_a_folder_that_cannot_be_written_at_the_start_is_one_sentence(small_disk, config_file):
    run = small_disk / "run"
    Trainer(load(config_file, overrides=["steps=5"]), run).run()
    fill(small_disk, leave=0)
    full = f"the run {run} cannot be written (No space left on device): make room, or give another --out"
    assert full in refused("train", str(run), "--resume")
    assert "cannot be written (No space left" in refused("train", str(config_file), "--out", str(small_disk / "new"))
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for command in (["train", str(run), "--resume"], ["train", str(config_file), "--out", str(small_disk / "other")]):
        assert "cannot be written (Read-only file system): give another --out" in refused(*command)


@pytest.mark.parametrize("what", ["a folder", "no locks", "held"])
def test_a_lock_that_cannot_be_taken_is_one_sentence(tiny, tmp_path, monkeypatch, what):
    run, message = tmp_path / "run", r"run cannot be written \(Is a directory\)"
    Trainer(tiny("steps=3"), run).run()
    if what == "a folder":
        (run / ".lock").unlink()
        (run / ".lock").mkdir()
    elif what == "no locks":  # Lustre without -o flock; no such file system can be had here
        message = r"run cannot be locked \(Function not implemented\): mount its file system with locks"
        error = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(error))
    else:
        message = "is being trained by another process"
        held = open(run / ".lock", "w")  # noqa: SIM115
        fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(UserError, match=message):
        Trainer(tiny("steps=6"), run, resume=True).run()
    assert last_step(run) == 3 and "steps: 3\n" in (run / "config.yml").read_text()


def test_a_file_where_the_run_should_be_is_one_sentence(tiny, tmp_path):
    (tmp_path / "run").write_text("mine")
    for resume in (False, True):
        with pytest.raises(UserError, match="run is a file, but a run is a folder"):
            Trainer(tiny(), tmp_path / "run", resume=resume).run()
