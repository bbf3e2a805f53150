"""A disk that is really full (a small tmpfs, where we may mount one) and a file size limit (everywhere)."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import child_environment, result, same
from tokenformer.errors import UserError
from tokenformer.hub.run_folder import all_steps, newest_whole
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
        with pytest.raises(UserError, match=rf"No space left .* go on with: tokenformer train {run} --resume"):
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
