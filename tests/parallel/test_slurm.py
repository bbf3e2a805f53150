"""The Slurm script: valid bash that says what was asked, refused before it is written where it cannot run."""

import json
import subprocess
from pathlib import Path

import pytest

from tokenformer.cli.main import main

WHERE = ["--nodes", "2", "--gpus-per-node", "4"]


def test_the_script_is_bash_and_says_what_was_asked(tmp_path, capsys):
    run = tmp_path / "runs" / "a b"
    options = ["--out", str(run), "--time", "1:00:00", "--partition", "big"]
    assert main(["slurm", "lm/150m", "data.path=d", "batch=64", "parallel.shard=8", *WHERE, *options]) == 0
    path = tmp_path / "runs" / "a b.sbatch"
    assert f"submit it with: sbatch {path}" in capsys.readouterr().out
    text = path.read_text()
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    for line in ("--nodes=2", "--gpus-per-node=4", "--time=1:00:00", "--partition=big", "--requeue"):
        assert f"#SBATCH {line}\n" in text
    assert "--nnodes=2 --nproc-per-node=4" in text and f"'{run}' --resume &" in text
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    assert not run.exists()


@pytest.mark.parametrize(
    "settings, message",
    [
        (["parallel.shard=3"], "which does not divide 8"),
        (["parallel.token=8"], "give a divisor of model.heads, which is 12"),
        (["batch=100"], "batch 100 cannot be cut into micro-batches"),
        (["data.path=null"], "data.path is missing"),
        (["--time", "banana"], "--time is 'banana'"),
        (["--cpus-per-gpu", "-1"], "--cpus-per-gpu is -1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, capsys, settings, message):
    assert main(["slurm", "lm/150m", "data.path=d", "batch=64", *settings, *WHERE, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_slurm_submitting_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        main(["slurm", "lm/150m", "data.path=d", "batch=64", *WHERE, "--out", str(tmp_path / "run"), "--submit"]) == 2
    )
    assert "there is no sbatch here" in capsys.readouterr().err


def test_a_script_that_is_there_stays_unless_it_is_the_same_or_to_be_replaced(tmp_path, capsys):
    command = ["slurm", "lm/150m", "data.path=d", "batch=64", *WHERE, "--out", str(tmp_path / "run")]
    path = tmp_path / "run.sbatch"
    assert main(command) == 0
    first = path.read_text()
    assert main(command) == 0  # the same again
    path.write_text(first + "# mine\n")
    assert main(command) == 2
    assert capsys.readouterr().err == (
        f"tokenformer: {path} is there already and differs: give another --out, or --force to replace it\n"
    )
    assert path.read_text() == first + "# mine\n"
    assert main([*command, "--force"]) == 0
    assert path.read_text() == first


OFFICIAL = Path(__file__).parents[1] / "data" / "golden" / "l2_norm_gelu" / "config.yml"


def test_an_official_file_with_launcher_slurm_becomes_that_job(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = {"launcher": "slurm", "deepspeed_slurm": True, "num_nodes": 2, "num_gpus": 4, "save": "runs/a/checkpoints"}
    (tmp_path / "job.yml").write_text(json.dumps(job))
    assert main(["slurm", str(OFFICIAL), "job.yml"]) == 0
    said = capsys.readouterr()
    assert "runs/a.sbatch: 2 nodes × 4 processes, shard 8" in said.out
    assert "launcher slurm: `tokenformer slurm` with the same files writes that job" in said.err
    text = (tmp_path / "runs" / "a.sbatch").read_text()
    assert "#SBATCH --nodes=2\n" in text and f"train {OFFICIAL} job.yml --out runs/a --resume &" in text


def test_a_job_without_a_size_is_one_sentence(tmp_path, capsys):
    assert main(["slurm", "lm/150m", "data.path=d", "batch=64", "--out", str(tmp_path / "run")]) == 2
    assert "--nodes N --gpus-per-node G --out RUN" in capsys.readouterr().err
