"""Training in JAX: equal to PyTorch's step by step, over devices, through kills, growth and changes of side."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'tokenformer[jax]'")
import jax
import numpy as np
import torch

import tokenformer
from tests.twin.conftest import ONE
from tokenformer.errors import UserError
from tokenformer.hub.run_folder import all_steps, newest_whole
from tokenformer.train.report import read_rows
from tokenformer.train.trainer import Trainer as TorchTrainer
from tokenformer_jax.folder import read_tensors
from tokenformer_jax.train import Trainer

GROWTH = "growth=[{at: {step: 4}, qkv_tokens: 24, ffn_tokens: 48, layers: 3, old_tokens: 0.5}]"


@pytest.fixture
def double():
    """Parameters in double precision on both sides."""
    torch.set_default_dtype(torch.float64)
    with jax.enable_x64(True):
        yield
    torch.set_default_dtype(torch.float32)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_rows(run) if row["kind"] in ("train", "validation")]


def tensors(run: Path, part: str = "model") -> dict[str, np.ndarray]:
    found = newest_whole(run)
    assert found is not None
    return read_tensors(found / part)


def differ(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(array - other[name]).max()) for name, array in one.items())


RECIPES = {
    "adamw": ("optimizer.kind=adamw", "train.activation_checkpointing=full"),
    "muon": ("optimizer.segments=joint", "data.boundaries=true", "model.ffn_tokens=[20,12]", "train.clip=0.1"),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_ten_steps_are_those_of_pytorch(tiny, tmp_path, double, kind):
    settings = (*RECIPES[kind], *ONE)
    tokenformer.save(tokenformer.LanguageModel(tiny(*settings).model, seed=3), tmp_path / "start")
    config = tiny(*settings, f"start={tmp_path / 'start'}")
    TorchTrainer(config, tmp_path / "theirs").run()
    Trainer(config, tmp_path / "ours").run()
    theirs, ours = losses(tmp_path / "theirs"), losses(tmp_path / "ours")
    assert len(ours) == 11 and np.abs(np.subtract(ours, theirs)).max() < 1e-9
    assert tensors(tmp_path / "ours")["norm.bias"].dtype == np.float64
    assert differ(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")) < 1e-8
    assert differ(tensors(tmp_path / "ours", "optim"), tensors(tmp_path / "theirs", "optim")) < 1e-8


def test_growth_inside_a_run_is_exact_and_that_of_pytorch(tiny, tmp_path):
    """From scratch, in fp32: first values and new rows are those of PyTorch, too."""
    config = tiny(GROWTH, "optimizer.kind=adamw", *ONE)
    Trainer(config, tmp_path / "ours").run()
    TorchTrainer(config, tmp_path / "theirs").run()
    [grown] = [row for row in read_rows(tmp_path / "ours") if row.get("what") == "growth"]
    before, after = grown["losses"]
    assert abs(before - after) < 1e-6
    assert np.abs(np.subtract(losses(tmp_path / "ours"), losses(tmp_path / "theirs"))).max() < 1e-5
    assert differ(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")) < 1e-4
    model = tokenformer.load(tmp_path / "ours")  # PyTorch reads the run
    assert model.config.layers == 3 and model.history == tokenformer.load(tmp_path / "theirs").history


def test_either_side_goes_on_from_the_other(tiny, tmp_path, double):
    """JAX resumes a run of PyTorch with its optimizer; PyTorch begins with the weights of a run of JAX."""
    settings = ("optimizer.kind=adamw", "schedule.steps=10", *ONE)
    TorchTrainer(tiny(*settings), tmp_path / "whole").run()
    TorchTrainer(tiny(*settings, "steps=6"), tmp_path / "run").run()
    Trainer(tiny(*settings), tmp_path / "run", resume=True).run()
    assert differ(tensors(tmp_path / "run"), tensors(tmp_path / "whole")) < 1e-8
    further = tiny(*settings, f"start={tmp_path / 'run'}")
    TorchTrainer(further, tmp_path / "theirs").run()
    Trainer(further, tmp_path / "ours").run()
    assert np.abs(np.subtract(losses(tmp_path / "ours"), losses(tmp_path / "theirs"))).max() < 1e-9
    with pytest.raises(UserError, match="not of the form that a run writes"):  # its random state is PyTorch's own
        TorchTrainer(tiny(*settings, "steps=12"), tmp_path / "run", resume=True).run()


MESHES = {
    "data 8": ("parallel.replicate=8",),
    "fsdp 8": ("parallel.shard=8",),
    "fsdp 4 × token 2": ("parallel.shard=4", "parallel.token=2", "validation.generate=2"),
}


def test_eight_devices_compute_what_one_computes(tiny, tmp_path):
    """In fp32, with both update rules: Muon's matrices are gathered and shared out over the devices."""
    settings, found = ("steps=3", "optimizer.kind=muon", "batch=16", "micro_batch=1"), {}
    for name, degrees in {"one": ONE, **MESHES}.items():
        trainer = Trainer(tiny(*settings, *degrees), tmp_path / name)
        key = trainer.params["blocks.0.ffn.segments.0.key_tokens"]
        shard = key.sharding.shard_shape(key.shape)
        assert shard == {"fsdp 8": (32, 2), "fsdp 4 × token 2": (16, 4)}.get(name, (32, 16))
        trainer.run()
        found[name] = tensors(tmp_path / name), losses(tmp_path / name)
    for name in MESHES:
        assert np.abs(np.subtract(found[name][1], found["one"][1])).max() < 1e-6, name
        assert differ(found[name][0], found["one"][0]) < 1e-6, name
    with pytest.raises(UserError, match=r"has 12 rows, which parallel\.token=8 does not divide"):
        Trainer(tiny("parallel.token=8"), tmp_path / "wrong")
    with pytest.raises(UserError, match="there are 8: give degrees"):
        Trainer(tiny("parallel.token=16"), tmp_path / "wrong")


def start(cache: Path, *calls: list[str], **more: str) -> subprocess.Popen:
    """Give the command line these words, one call after the other, in a process where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from tokenformer_jax.__main__ import main; "
    code += f"sys.exit(max(main(words) for words in {calls!r}))"
    kept = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], **pipes, env=os.environ | kept | more)


@pytest.mark.multi
def test_a_killed_run_ends_in_the_bits_of_the_uninterrupted_one_without_torch(config_file, tmp_path):
    settings = ("checkpoint.every=1", "checkpoint.keep=2", "steps=16", GROWTH, "validation.generate=4", *ONE)
    train = ["train", str(config_file), *settings, "--resume", "--out"]
    whole = start(tmp_path / "cache", [*train, str(tmp_path / "whole")])
    said = whole.communicate(timeout=300)
    assert whole.returncode == 0 and "grown from" in said[0], said
    for after in (2, 5):  # before the growth, and after it
        run = start(tmp_path / "cache", [*train, str(tmp_path / "run")])
        while run.poll() is None and max(all_steps(tmp_path / "run"), default=0) < after:
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
        said = run.communicate()
        assert run.returncode == -signal.SIGKILL, said
    ask = ["generate", str(tmp_path / "run"), "--prompt", "Alice", "--tokens", "5"]
    run = start(tmp_path / "cache", [*train, str(tmp_path / "run")], ask, ["eval", str(tmp_path / "run"), *ONE])
    said = run.communicate(timeout=300)
    assert run.returncode == 0 and "going on from step" in said[0], said
    for part in ("model", "optim"):
        one, other = tensors(tmp_path / "run", part), tensors(tmp_path / "whole", part)
        assert one.keys() == other.keys() and all(np.array_equal(array, other[name]) for name, array in one.items())
    kept = ("kind", "step", "loss", "text")
    run_rows, whole_rows = (read_rows(tmp_path / name) for name in ("run", "whole"))
    assert [[row.get(k) for k in kept] for row in run_rows] == [[row.get(k) for k in kept] for row in whole_rows]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    *_, generated, measured = said[0].strip().splitlines()
    assert generated.startswith("Alice")
    validation = [row["loss"] for row in run_rows if row["kind"] == "validation"][-1]
    assert abs(json.loads(measured)["loss"] - validation) < 1e-6


@pytest.mark.slow
@pytest.mark.multi
def test_two_processes_of_four_devices_compute_what_one_device_computes(config_file, tiny, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["train", str(config_file), "parallel.shard=4", "parallel.token=2", "--out", str(tmp_path / "two")]
    flags = os.environ["XLA_FLAGS"].replace("count=8", "count=4")
    both = [start(tmp_path / "cache", [*words, "--distributed", f"{where},{i},2"], XLA_FLAGS=flags) for i in (0, 1)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    Trainer(tiny(*ONE), tmp_path / "one").run()
    assert differ(tensors(tmp_path / "two"), tensors(tmp_path / "one")) < 1e-6


def test_what_a_run_in_jax_does_not_do_is_refused_before_anything_is_written(tiny, tmp_path):
    refused = ("train.precision=fp16", "train.precision=fp8", "train.ema=0.9", "optimizer.layer_decay=0.5")
    for setting in (*refused, "train.freeze=language", "parallel.pipeline=2"):
        with pytest.raises(UserError, match="in JAX"):
            Trainer(tiny(setting), tmp_path / "run")
    with pytest.raises(UserError, match=r"growth.at names images, but this task counts tokens"):
        Trainer(tiny("growth=[{at: {images: 512}, ffn_tokens: 48}]"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_first_values_of_a_run_are_saved_if_asked(tiny, tmp_path):
    Trainer(tiny("checkpoint.also=[0]", "steps=1", *ONE), tmp_path / "run").run()
    assert list(all_steps(tmp_path / "run")) == [0, 1]
