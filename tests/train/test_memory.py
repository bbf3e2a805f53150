"""Memory that does not suffice: one sentence that names micro_batch=, and a run that may be begun again."""

import re
import resource
import subprocess
import sys

import pytest
import torch

from tests.train.conftest import child_environment, result, same
from tokenformer.cli.main import main
from tokenformer.errors import UserError
from tokenformer.hub.run_folder import all_steps
from tokenformer.train.trainer import Trainer


@pytest.mark.multi
def test_too_little_memory_on_the_host_is_one_sentence_and_a_smaller_micro_batch_begins_again(config_file, tmp_path):
    """A process whose address space is limited really gets none. Nothing was saved: the same command may be given."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "tokenformer", "train", str(config_file), "--out", str(run)]
    command += ["model.dim=256", "model.context=512", "batch=256", "steps=2", "validation.samples=1"]

    peak = "print(next(line for line in open('/proc/self/status') if 'VmPeak' in line).split()[1])"
    imported = subprocess.check_output(
        [sys.executable, "-c", f"import tokenformer.train.trainer, torch._dynamo; {peak}"]
    )
    most = (int(imported) << 10) + (2 << 30)  # a CUDA build of PyTorch takes more of it by itself

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    arguments = {"capture_output": True, "text": True, "env": child_environment()}
    done = subprocess.run([*command, "micro_batch=256"], preexec_fn=limit, **arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "out of memory (" in done.stderr and "in step 1: give micro_batch=128 (it is 256; the batch" in done.stderr
    assert (run / "config.yml").is_file() and not all_steps(run)
    done = subprocess.run([*command, "batch=2", "micro_batch=1"], preexec_fn=limit, **arguments)
    assert done.returncode == 0 and "no checkpoint: it is begun again" in done.stdout, done.stderr


class Fails(Trainer):
    """Runs out of memory in a step, as PyTorch says it on a GPU."""

    error: Exception = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.2 GiB is"
    )

    def train_step(self) -> None:
        if self.step == 12:
            raise self.error
        super().train_step()


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_gpu_without_memory_is_one_sentence_that_says_how_to_go_on(tiny, tmp_path, micro, saved):
    run, less = tmp_path / "run", r"give micro_batch=1 \(it is 2; the batch of 4 stays as it is\)"
    less = less if micro == 2 else r"give train.activation_checkpointing=full, .* \(micro_batch= is 1\)"
    then = f"go on with: tokenformer train {run} --resume" if saved else "start again"
    with pytest.raises(
        UserError, match=rf"^out of memory \(2.50 GiB more were wanted\) in step 13: {less}, and {then}$"
    ):
        Fails(tiny(f"micro_batch={micro}", f"checkpoint.every={10 if saved else 0}"), run).run()
    Trainer(tiny("micro_batch=1"), run, resume=saved).run()  # what the sentence says can be done
    Trainer(tiny("micro_batch=1"), tmp_path / "whole").run()
    assert same(result(tmp_path / "whole"), result(run)) or (saved and micro == 2)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")])
def test_other_words_for_the_same(tiny, tmp_path, monkeypatch, error):
    monkeypatch.setattr(Fails, "error", error)
    with pytest.raises(UserError, match=r"^out of memory in step 13: give micro_batch=1"):
        Fails(tiny(), tmp_path / "run").run()


def test_another_error_is_not_taken_for_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Fails, "error", RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        Fails(tiny(), tmp_path / "run").run()


@pytest.mark.parametrize("foreign", ["notes.txt", "model.safetensors", None])
def test_only_a_run_without_a_checkpoint_is_begun_again(tiny, tmp_path, capsys, foreign):
    run = tmp_path / "run"
    with pytest.raises(UserError, match="out of memory"):
        Fails(tiny(), run).run()
    assert (run / "metrics.jsonl").is_file()
    if foreign is None:
        Trainer(tiny("steps=12", "model.layers=1", "seed=5"), run).run()  # another model: nothing was learned yet
        assert "has no checkpoint: it is begun again" in capsys.readouterr().out
    else:
        (run / foreign).write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        Trainer(tiny(), run).run()


def test_a_config_file_in_a_folder_is_no_run(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yml").write_text("mine: 1")
    with pytest.raises(UserError, match="is there already"):
        Trainer(tiny(), tmp_path / "run").run()
    assert (tmp_path / "run" / "config.yml").read_text() == "mine: 1"


def test_every_verb_says_it_in_a_sentence(config_file, capsys, monkeypatch):
    from tokenformer.cli import info

    def runs_out(_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    monkeypatch.setattr(info, "run", runs_out)
    assert main(["info", str(config_file)]) == 2
    assert capsys.readouterr().err.startswith("tokenformer: out of memory (2.50 GiB more were wanted): give smaller")


def test_a_step_that_the_host_has_no_memory_for_is_refused_before_anything_is_written(tiny, tmp_path, monkeypatch):
    """Else the system kills the process without a word. What the sentence names then fits."""
    monkeypatch.setattr("tokenformer.train.host.host_memory", lambda: 2e6)
    with pytest.raises(
        UserError, match=r"needs about .* MB of memory, but 2.0 MB are here: give micro_batch=\d+ \("
    ) as e:
        Trainer(tiny("batch=256", "micro_batch=256", "steps=1"), tmp_path / "run").run()
    assert not (tmp_path / "run").exists()
    less = re.search(r"micro_batch=(\d+)", str(e.value))
    assert less and 1 < int(less[1]) < 256
    Trainer(tiny("batch=256", f"micro_batch={less[1]}", "steps=1"), tmp_path / "run").run()
