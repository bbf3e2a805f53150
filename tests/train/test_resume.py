"""40 steps in one piece and 17 + 23 end in the same bits, and this comparison would notice a broken restore."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.train.conftest import result, same
from tokenformer.errors import UserError
from tokenformer.files import MANIFEST, write_manifest
from tokenformer.hub.dcp import read_tensors, write_tensors
from tokenformer.hub.run_folder import all_steps, newest_whole, remove_old
from tokenformer.train.trainer import Trainer


def straight(config, folder: Path) -> dict:
    assert Trainer(config, folder).run() is None
    return result(folder)


def resumed(first, second, folder: Path) -> dict:
    assert Trainer(first, folder).run() is None
    assert Trainer(second, folder, resume=True).run() is None
    return result(folder)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_17_and_23_steps_are_40(tiny, tmp_path, precision, optimizer):
    """With accumulation (two micro-batches a step)."""
    recipe = [f"train.precision={precision}", f"optimizer.kind={optimizer}"]
    whole = straight(tiny(*recipe), tmp_path / "whole")
    parts = resumed(tiny(*recipe, "steps=17"), tiny(*recipe), tmp_path / "parts")
    assert whole["state"]["step"] == 40 and whole["state"]["loader"]["samples_seen"] == 160
    assert len(whole["optim"]) > len(whole["model"]) - 2
    assert same(whole, parts)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_background_checkpoints_hold_the_step_they_were_asked_for(tiny, tmp_path, optimizer):
    recipe = [f"optimizer.kind={optimizer}", "checkpoint.background=true", "checkpoint.every=1", "checkpoint.keep=50"]
    whole = straight(tiny(f"optimizer.kind={optimizer}"), tmp_path / "whole")
    parts = resumed(tiny(*recipe, "steps=17"), tiny(*recipe), tmp_path / "parts")
    assert same(whole, parts)
    assert "done after step 40; its state is in" in (tmp_path / "parts" / "log").read_text()  # the last was waited for
    short = straight(tiny(f"optimizer.kind={optimizer}", "steps=9"), tmp_path / "short")
    shutil.copytree(
        tmp_path / "parts" / "checkpoints" / "step-00000009", tmp_path / "at9" / "checkpoints" / "step-00000009"
    )
    assert same(short, result(tmp_path / "at9"))  # written while steps 10, 11, … were under way


def test_a_changed_number_of_loader_workers_changes_nothing(tiny, tmp_path):
    whole = straight(tiny("data.workers=0"), tmp_path / "whole")
    parts = resumed(tiny("data.workers=2", "steps=17"), tiny("data.workers=3", "data.prefetch=2"), tmp_path / "parts")
    assert same(whole, parts)


def test_a_changed_micro_batch_changes_rounding_only(tiny, tmp_path):
    whole = straight(tiny(), tmp_path / "whole")
    parts = resumed(tiny("steps=17"), tiny("micro_batch=4"), tmp_path / "parts")
    assert parts["state"]["loader"] == whole["state"]["loader"]
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(tensor, parts["model"][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("broken", ["optimizer", "loader", "weights", "scale"])
def test_the_comparison_notices_a_broken_restore(tiny, tmp_path, broken):
    recipe = ["train.precision=fp16", "optimizer.kind=adamw"]
    whole = straight(tiny(*recipe), tmp_path / "whole")
    Trainer(tiny(*recipe, "steps=17"), tmp_path / "parts").run()
    damage(newest_whole(tmp_path / "parts"), broken)
    Trainer(tiny(*recipe), tmp_path / "parts", resume=True).run()
    assert not same(whole, result(tmp_path / "parts"))


def damage(checkpoint: Path, what: str) -> None:
    """Change one thing and make the manifest fit, as a faulty trainer would have written it."""
    if what in ("optimizer", "weights"):
        folder = checkpoint / {"optimizer": "optim", "weights": "model"}[what]
        tensors = read_tensors(folder)
        name = "exp_avg/embedding.weight" if what == "optimizer" else "norm.bias"
        tensors[name].view(-1)[0] += 1e-3
        for path in folder.glob("*.safetensors"):
            path.unlink()
        write_tensors(folder, tensors)
    else:
        state = json.loads((checkpoint / "state.json").read_text())
        if what == "loader":
            state["loader"]["samples_seen"] += 1
        else:
            state["guard"]["scale"] *= 2
        (checkpoint / "state.json").write_text(json.dumps(state))
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint)


def test_steps_that_were_lost_leave_no_row_behind(tiny, tmp_path):
    """Killed after step 30 with the last checkpoint at 20: the rows of 21–30 are dropped, then written again."""
    Trainer(tiny("log.every=1", "checkpoint.every=20", "checkpoint.keep=0", "steps=30"), tmp_path / "run").run()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000030")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "event", "step": 20, "what": "skipped"}\n')
        file.write('{"kind": "event", "step": 20, "what": "growth"}\n')  # what comes after the save of its step
        file.write('{"kind": "train", "st')  # a kill in the middle of a line
    Trainer(tiny("log.every=1"), tmp_path / "run", resume=True).run()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 41))
    assert [row["what"] for row in rows if row["kind"] == "event"] == ["skipped"]
    starts = json.loads((tmp_path / "run" / "environment.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 20]


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_another_process_trained_between_look_and_lock_is_refused(tiny, tmp_path, begun):
    class Late(Trainer):
        def build(self) -> None:
            super().build()
            assert Trainer(tiny("steps=6"), self.folder, resume=True).run() is None

    run = tmp_path / "run"
    if begun:
        straight(tiny("steps=3"), run)
    with pytest.raises(UserError, match=f"another process trained {run} meanwhile: .* --resume"):
        Late(tiny("steps=9"), run, resume=begun).run()
    assert result(run)["state"]["step"] == 6 and "steps: 6\n" in (run / "config.yml").read_text()


def test_checkpoints_without_their_config_are_not_trained_over(tiny, tmp_path):
    straight(tiny("steps=3"), tmp_path / "run")
    (tmp_path / "run" / "config.yml").unlink()
    before = result(tmp_path / "run")
    with pytest.raises(UserError, match=r"run has checkpoints but no config\.yml: put it back"):
        Trainer(tiny("steps=6"), tmp_path / "run", resume=True).run()
    assert same(before, result(tmp_path / "run"))


def test_the_newest_checkpoint_has_the_largest_step_however_many_digits_that_has(tmp_path):
    for step in (99_999_999, 100_000_000, 8):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert list(all_steps(tmp_path)) == [8, 99_999_999, 100_000_000]
    remove_old(tmp_path, keep=1, keep_every=0)
    assert list(all_steps(tmp_path)) == [100_000_000]
