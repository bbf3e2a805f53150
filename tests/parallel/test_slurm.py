"""The Slurm script: valid bash that says what was asked, refused before it is written where it cannot run."""

import json
import random
import socket
import subprocess
import sys
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
        (["--name", "a\nb"], "Slurm takes no line break, quote or backslash in it"),
        (["--prelude", "a\nb"], "--prelude holds a line break"),
        (["--sbatch=--mem=3"], "--sbatch is '--mem=3'"),
        (["--sbatch=nodes=4"], "--sbatch is 'nodes=4', but the script counts on its own: give --nodes"),
        (["--sbatch=ntasks-per-node=8"], "but the script counts on its own: give --gpus-per-node"),
        (["--sbatch=signal=TERM@60"], "but the script counts on its own: give --signal-before"),
        (["--sbatch=no-requeue"], "but the script counts on its own: leave it out"),
        (["--setup", "/nowhere"], "--setup /nowhere is no file"),
        (["--signal-before", "0"], "--signal-before is 0"),
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


def sums(*texts: str) -> list[str]:
    """The checksum of the options in each script."""
    return [text.split("tokenformer slurm: options ")[1][:8] for text in texts]


def test_all_that_a_cluster_may_ask_for_is_said_and_quoted(tmp_path):
    run, setup = tmp_path / "a run", tmp_path / "set up.sh"
    setup.write_text("export NCCL_DEBUG=INFO\n")
    more = ["--mem", "500G", "--exclusive", "--qos", "high", "--constraint", "a100&ib", "--gres", "gpu:a100:4"]
    more += ["--sbatch", "reservation=week 3", "--sbatch", "no-kill", "--signal-before", "300", "--restarts", "1"]
    more += ["--setup", str(setup), "--prelude", "module load cuda", "--srun=--container-image=a b.sqsh"]
    more += ["--container", "apptainer exec --nv image.sif", "--name", "my job"]
    assert main(["slurm", "lm/150m", "data.path=d", "batch=64", *WHERE, "--out", str(run), *more]) == 0
    path = tmp_path / "a run.sbatch"
    text = path.read_text()
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    for line in ('job-name="my job"', f'output="{run}-%j.out"', "mem=500G", "exclusive", "qos=high", "no-kill",
                 "constraint=a100&ib", "gres=gpu:a100:4", 'reservation="week 3"', "signal=B:USR1@300"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in text, line
    assert f"source '{setup}'\nmodule load cuda\n" in text and "--max-restarts=1" in text
    assert "--cpu-bind=none '--container-image=a b.sqsh' bash" in text
    assert f"  apptainer exec --nv image.sif {sys.executable} -m torch.distributed.run" in text


def test_the_port_is_below_the_ephemeral_ones_and_one_that_is_taken_is_passed_over(tmp_path):
    assert main(["slurm", "lm/150m", "data.path=d", "batch=64", *WHERE, "--out", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run.sbatch").read_text()
    lines = text[text.index("port=") : text.index("\n\n# Without this")]
    with socket.socket() as taken:
        while True:
            try:
                taken.bind(("127.0.0.1", number := random.randrange(10000, 29999)))
                break
            except OSError:
                continue
        taken.listen()
        job = {"SLURM_JOB_ID": str(number - 10000)}
        said = subprocess.run(["bash", "-c", f"{lines}\necho $port"], env=job, capture_output=True, text=True)
    assert number < int(said.stdout) < number + 20 and int(said.stdout) < 32768


def test_a_script_that_is_there_stays_unless_it_is_the_same_or_to_be_replaced(tmp_path, capsys):
    command = ["slurm", "lm/150m", "data.path=d", "batch=64", *WHERE, "--out", str(tmp_path / "run")]
    path = tmp_path / "run.sbatch"
    assert main(command) == 0
    first = path.read_text()
    assert main(command) == 0  # the same again
    mine = first.replace("# Lines of yours", "module load cuda\n# Lines of yours")
    path.write_text(mine)
    assert main([*command, "--time", "1:00:00"]) == 0  # lines between the blocks stay
    assert path.read_text() == mine.replace("24:00:00", "1:00:00").replace(*sums(mine, path.read_text()))
    edited = first.replace("set -u\n", "set -eu\n")
    path.write_text(edited)
    assert main(command) == 2
    assert "differs inside of what this command writes: move your lines" in capsys.readouterr().err
    assert path.read_text() == edited
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


def test_a_script_that_cannot_be_read_is_one_sentence(tmp_path, capsys):
    (tmp_path / "run.sbatch").symlink_to("/proc/self/mem")  # every read of it fails, like one on a bad disk
    assert main(["slurm", "lm/150m", "data.path=d", "batch=64", *WHERE, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "run.sbatch cannot be read" in said and said.count("\n") == 1
