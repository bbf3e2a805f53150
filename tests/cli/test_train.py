"""`tokenformer train`: one sentence and code 2 for what the user can mend, before anything is written."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import config_file, one_thread, prepared, tiny  # noqa: F401 (fixtures)
from tokenformer.cli.main import main
from tokenformer.hub.run_folder import all_steps
from tokenformer.train.report import read_rows


def refused(capsys, *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("tokenformer: ") and said.err.count("\n") == 1 and said.out == ""
    return said.err


def test_a_preset_and_overrides_train_a_run_and_the_run_goes_on_by_its_folder(config_file, tmp_path, capsys):  # noqa: F811
    run = tmp_path / "run"
    assert main(["train", str(config_file), "--out", str(run), "steps=3", "log.every=1"]) == 0
    said = capsys.readouterr().out
    assert "step 3/3  loss " in said and "tokens/s" in said and "0:00 left" in said
    assert main(["train", str(run), "--resume", "steps=5"]) == 0
    assert "going on from step 3" in capsys.readouterr().out and list(all_steps(run)) == [3, 5]


def test_a_run_has_the_whole_name_of_its_preset(prepared, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    tokens = [f"model.{which}_tokens=8" for which in ("qkv", "proj", "ffn")]
    model = ["layers=1", "dim=32", "heads=2", "context=16", "vocab=384"]
    how = ["steps=1", "batch=2", "train.precision=fp32", "train.compile=none", "validation.generate=0"]
    words = [*tokens, *(f"model.{key}" for key in model), *how, f"data.path={prepared}"]
    assert main(["train", "lm/1.5b", *words]) == 0
    assert list(all_steps(Path("runs/1.5b"))) == [1]


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (["optimizer.raet=1"], "unknown key 'optimizer.raet': did you mean 'optimizer.rate'?"),
        (["optimizer.kind=adam"], "optimizer.kind is 'adam', but must be one of muon, adamw"),
        (["batch=6", "micro_batch=4"], "batch 6 cannot be cut into micro-batches of 4 on each of 1 ranks"),
        (["batch=null", "micro_batch=null"], "batch is missing"),
        (["data.path=nowhere/set"], "there is no prepared set 'nowhere/set'"),
        (["data.path=null"], "data.path is missing"),
        (["model.context=200000"], "has no sample of 200000 + 1 tokens"),
        (["model.vocab=128"], "the data has a vocabulary of 257 ids but model.vocab is 128: set model.vocab=384"),
        (["train.device=cuda"], "PyTorch sees no GPU"),
        (["schedule.floor=2"], "schedule.floor is 2.0"),
        (["steps=-1"], "steps is -1"),
        (["start=nowhere"], "nowhere"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(config_file, tmp_path, capsys, settings, sentence):  # noqa: F811
    assert sentence in refused(capsys, str(config_file), *settings, "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_an_existing_run_and_another_architecture_are_refused(config_file, tmp_path, capsys):  # noqa: F811
    run = str(tmp_path / "run")
    assert main(["train", str(config_file), "steps=2", "--out", run]) == 0
    capsys.readouterr()
    assert "is there already" in refused(capsys, str(config_file), "--out", run)
    assert "another model" in refused(capsys, str(config_file), "model.layers=1", "--resume", "--out", run)
    assert "has 2 steps behind it, and steps is 1: give more" in refused(capsys, run, "--resume", "steps=1")
    assert "steps: 2" in (tmp_path / "run" / "config.yml").read_text().splitlines()
    assert "steps is empty, but must be a whole number" in refused(capsys, run, "--resume", "steps=")


def test_a_resumed_run_says_what_is_left_and_what_other_steps_do_to_the_rate(config_file, tmp_path, capsys):  # noqa: F811
    run = str(tmp_path / "run")

    def said(*words: str) -> str:
        assert main(["train", *words]) == 0
        return capsys.readouterr().out

    schedule = "schedule={kind: linear, warmup: 0, floor: 0, steps: null}"
    said(str(config_file), "steps=4", schedule, "log.every=1", "--out", run)
    assert "all 4 steps are done: give more, such as steps=8, to train on" in said(run, "--resume")
    longer = "the schedule now ends at step 8: the learning rate goes on at 0.002, not 0"
    assert f"{longer} (schedule.steps=4 would keep it)" in said(run, "--resume", "steps=8")
    assert [row["rate"] for row in read_rows(Path(run)) if row["kind"] == "train"][-1] == pytest.approx(0.004 / 8)
    assert "the learning rate goes on as it would have" in said(run, "--resume", "steps=9", "schedule.kind=constant")
    other = said(run, "--resume", "steps=10", "optimizer.rate=1e-3")
    assert "rate: 0.004 → 0.001" in other and "as it would have" not in other


def test_a_vocabulary_much_larger_than_the_data_is_said(config_file, tmp_path, capsys):  # noqa: F811
    assert main(["train", str(config_file), "model.vocab=4096", "steps=0", "--out", str(tmp_path / "run")]) == 0
    assert "but model.vocab is 4096: model.vocab=384 would do" in capsys.readouterr().out


def test_a_decay_that_lies_ahead_is_said_to_move(config_file, tmp_path, capsys):  # noqa: F811
    run, schedule = str(tmp_path / "run"), "schedule={kind: wsd, warmup: 0, decay: 0.5, floor: 0, steps: null}"
    assert main(["train", str(config_file), "steps=20", schedule, "checkpoint.also=[2]", "--out", run]) == 0
    for step in (Path(run) / "checkpoints").glob("step-*"):
        if int(step.name.removeprefix("step-")) > 2:
            shutil.rmtree(step)
    capsys.readouterr()
    assert main(["train", run, "--resume", "steps=10"]) == 0
    moved = "the schedule now ends at step 10: the learning rate is the same here, and at step 9"
    assert moved in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["inductor", "true"])
def test_compiling_without_a_compiler_is_one_sentence(config_file, tmp_path, capsys, monkeypatch, setting):  # noqa: F811
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = str(tmp_path / "run")
    said = refused(capsys, str(config_file), f"train.compile={setting}", "--out", run)
    assert "needs the C++ compiler no-such-compiler, and there is none" in said
    assert not (tmp_path / "run").exists()
    assert main(["train", str(config_file), "train.compile=auto", "steps=1", "--out", run]) == 0  # not on a CPU
    assert "compiled" not in capsys.readouterr().out


def test_a_preset_fits_its_micro_batch_to_a_small_batch_and_a_run_that_is_not_there_is_said(tmp_path, capsys):
    from tokenformer.config import load
    from tokenformer.train.run import with_batch_sizes

    assert with_batch_sizes(load("lm/150m", overrides=["batch=4"]), world=1).micro_batch == 4
    assert "there is no run at" in refused(capsys, str(tmp_path / "nope"), "--resume")


def test_no_such_config(capsys):
    assert "there is no config file or preset 'lm/151m': did you mean the preset 'lm/150m'?" in refused(
        capsys, "lm/151m"
    )


@pytest.mark.parametrize(
    "logger, leaves", [("log.tensorboard=true", "tensorboard/events*"), ("log.wandb=offline", "wandb/offline-run*")]
)
def test_loggers_write_beside_metrics(config_file, tmp_path, logger, leaves):  # noqa: F811
    pytest.importorskip(logger.split(".")[1].split("=")[0])
    run = tmp_path / "run"
    command = [sys.executable, "-m", "tokenformer", "train", str(config_file), "steps=3", logger, "--out", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list(run.glob(leaves)) and (run / "metrics.jsonl").is_file()


def test_a_missing_logger_names_its_extra_before_anything_is_written(config_file, tmp_path):  # noqa: F811
    code = (
        "import sys, importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'wandb' else find(name, *a); "
        "from tokenformer.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "train",
        str(config_file),
        "log.wandb=offline",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "pip install 'tokenformer[log]'" in done.stderr, done.stderr
    assert not Path(tmp_path / "run").exists()
