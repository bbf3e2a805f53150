"""Pairs on the icons of examples/: learned, killed, resumed, grown, cut into micro-batches and over ranks, damaged."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel.conftest import free_port
from tests.parallel.workers import default_dtype
from tests.train.conftest import child_environment, result, same
from tokenformer import load as load_model
from tokenformer.config import load
from tokenformer.errors import UserError
from tokenformer.ops.retrieval import recalls
from tokenformer.train.pair import PairTask
from tokenformer.train.report import read_rows
from tokenformer.train.trainer import Trainer

HERE = Path(__file__)
ICONS = HERE.parents[2] / "examples" / "icons"
CONFIG = f"""
model:
  of: pair
  embed: 16
  trunks:
    image: {{of: image, layers: 1, dim: 32, heads: 4, qkv_tokens: 24, proj_tokens: 24, ffn_tokens: 48, image_size: 32,
             patch: 8, classes: 0, pool: mean}}
    text: {{of: text, layers: 1, dim: 32, heads: 4, qkv_tokens: 24, proj_tokens: 24, ffn_tokens: 48, context: 24,
            vocab: 384, pool: end}}
data: {{path: {ICONS}, tokenizer: byte, workers: 0}}
steps: 6
batch: 8
micro_batch: 4
optimizer: {{rate: 4e-3}}
train: {{precision: fp32, device: cpu}}
checkpoint: {{every: 2, keep: 0}}
validation: {{every: 3, samples: 11}}
log: {{every: 1}}
"""
GROWS = "growth=[{at: {pairs: 24}, on: image., ffn_tokens: 64}, {at: {pairs: 32}, on: text., qkv_tokens: 32}]"
SIGLIP = ["model.loss=sigmoid", "model.trunks.text.pool=mean"]


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "pairs.yml").write_text(CONFIG)
    return tmp_path / "pairs.yml"


def train(file, run, *settings, task=None, resume=False) -> Trainer:
    trainer = Trainer(load(file, overrides=settings), run, task=task, resume=resume)
    assert trainer.run() is None
    return trainer


class Dying(PairTask):
    """Kills its process in step 5, between the features and their gradients."""

    calls = 0

    def features(self, model, batch):
        self.calls += torch.is_grad_enabled()
        if self.calls == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().features(model, batch)


def child(how: str, *arguments: object, **environment: str) -> subprocess.Popen:
    code = f"import sys; from tests.train.test_pair import *; {how}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=HERE.parents[2], env={**child_environment(), **environment})


def test_it_learns_which_text_belongs_to_which_image(file, tmp_path, capsys):
    """By heart: the 120 pairs that it is trained on, with both captions of each. Chance is 10 of 120."""
    shutil.copytree(ICONS, tmp_path / "copy")
    copy = tmp_path / "copy" / "train.csv"
    heart = ["data.images={crop: centre, flip: 0}", f"data.images.validation={copy}", "steps=100"]
    heart += ["batch=24", "micro_batch=24", "validation={every: 0, samples: 1000}", "checkpoint.every=0"]
    run = train(file, tmp_path / "run", *heart)
    rows = read_rows(tmp_path / "run")
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    found = [row for row in rows if row["kind"] == "validation"][-1]
    assert losses[-1] < 0.8 * losses[0] and found["text_to_image_r10"] > 0.3, (losses, found)
    said = capsys.readouterr().out
    assert "24 pairs per step" in said and "image_to_text_r1" in said
    model = load_model(tmp_path / "run")
    assert model.images["size"] == 32 and "<|endoftext|>" in model.tokenizer_json
    features, numbers = run.task.held_out_images(model)
    assert features.shape == (120, 16) and numbers == list(range(120))
    texts = [text for number in numbers for text in run.task.held_pairs.captions(number)]
    again = recalls(features @ run.task.encode(model, texts).T, torch.arange(120).repeat_interleave(2))
    assert {name: found[name] for name in again} == again


@pytest.mark.multi
def test_killed_and_resumed_with_other_workers_it_ends_in_the_same_bits(file, tmp_path):
    train(file, tmp_path / "whole", GROWS)
    call = "train(*sys.argv[1:], task=Dying)"
    assert child(call, file, tmp_path / "run", GROWS, "data.workers=1").wait() == -signal.SIGKILL
    again = train(file, tmp_path / "run", GROWS, resume=True)
    assert again.found.path.name == "step-00000004" and same(result(tmp_path / "whole"), result(tmp_path / "run"))
    assert again.model.config.trunk("image.").ffn_tokens == [48, 16] and again.model.history[0]["on"] == "image."
    assert again.model.config.trunk("text.").qkv_tokens == [24, 8] and again.model.history[1]["on"] == "text."
    growths = [row["losses"] for row in read_rows(tmp_path / "whole") if row.get("what") == "growth"]
    assert len(growths) == 2 and all(before == pytest.approx(after, rel=1e-5) for before, after in growths)


def same_run(one: Path, other: Path) -> None:
    found = [result(path) for path in (one, other)]
    for part in ("model", "optim"):
        assert found[0][part].keys() == found[1][part].keys()
        for name, tensor in found[0][part].items():
            torch.testing.assert_close(tensor, found[1][part][name], rtol=1e-6, atol=1e-9)
    rows = [[row for row in read_rows(path) if row["kind"] == "validation"] for path in (one, other)]
    for first, second in zip(*rows, strict=True):
        measured = [name for name in first if name == "loss" or "_r" in name]
        assert len(measured) == 7 and all(first[name] == pytest.approx(second[name], rel=1e-9) for name in measured)


@pytest.mark.multi
@pytest.mark.parametrize("settings", [[], SIGLIP])
def test_micro_batches_and_ranks_are_one_batch(file, tmp_path, settings):
    """In float64: cut into micro-batches, and over two ranks that shard the model, it is the run of one whole batch."""
    words = [*settings, GROWS, "optimizer.kind=adamw", "steps=5"]
    with default_dtype("float64"):
        train(file, tmp_path / "one", *words, "micro_batch=8")
        train(file, tmp_path / "cut", *words, "micro_batch=2")
    same_run(tmp_path / "one", tmp_path / "cut")
    if not settings:  # of the other loss, tests/ops has the ranks
        ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        how = "torch.set_default_dtype(torch.float64); train(*sys.argv[1:])"
        arguments = (file, tmp_path / "two", *words, "parallel.shard=2", "micro_batch=2")
        both = [child(how, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **ranks) for rank in range(2)]
        assert [process.wait() for process in both] == [0, 0]
        same_run(tmp_path / "one", tmp_path / "two")


def test_damaged_pairs_are_named_or_left_out_and_counted(file, tmp_path):
    lines = ["image,caption", f"{ICONS}/train/food/avocado.png,avocado", "gone.png,gone", f"{ICONS}/x.png,  "]
    (tmp_path / "bad.csv").write_text("\n".join([*lines, ",nothing"]) + "\n")
    bad = f"data.path={tmp_path / 'bad.csv'}"
    with pytest.raises(UserError, match=r"^line 4 of .*bad.csv has no caption: .* \(2 of 4\)"):
        train(file, tmp_path / "run", bad)
    (tmp_path / "bad.csv").write_text("\n".join(lines[:3]) + "\n")
    with pytest.raises(UserError, match=r"gone.png is damaged \(it cannot be read \(No such file or directory\)\)"):
        train(file, tmp_path / "run", bad)
    (tmp_path / "bad.csv").write_text("\n".join([*lines, ",nothing"]) + "\n")
    run = train(file, tmp_path / "other", bad, "data.images.damaged=skip")
    rows = [row for row in read_rows(tmp_path / "other") if row["kind"] == "train"]
    assert sum(row["damaged"] for row in rows) == 24  # half of 48
    assert any("2 of 4 pairs have no image or no text" in note for note in run.notes)
    assert any("batch is 8, but there are 2 pairs to train on" in note for note in run.notes)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.images.mixup=0.8", "data.images.mixup is 0.8, but that is for images with classes"),
        ("train.drop_path=0.1", "train.drop_path is 0.1"),
        ("data.tokenizer=null", "data.tokenizer is missing"),
        ("model.trunks.text.vocab=100", "has 257 ids but model.trunks.text.vocab is 100: set it to 384"),
        (f"data.images.validation={ICONS / 'train.csv'}", r"\.png is trained on and validated on: give other images"),
        (f"data.path={ICONS / 'train'}", "has no pairs of images and texts"),
        ("data.images.caption_column=title", r"train.csv has no column 'title': name the right one .*image, caption"),
        (
            "growth=[{at: {images: 24}, on: image., ffn_tokens: 64}]",
            "but this task counts pairs",
        ),
    ],
)
def test_what_is_refused_before_anything_is_written(file, tmp_path, setting, said):
    with pytest.raises(UserError, match=said):
        train(file, tmp_path / "run", setting)
    assert not (tmp_path / "run").exists()
