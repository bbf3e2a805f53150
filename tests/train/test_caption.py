"""Captions of the icons of examples/: learned, killed, resumed, grown, cut and over ranks, around a frozen language
model, damaged.
"""

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
from tokenformer import LanguageModel, save
from tokenformer import load as load_model
from tokenformer.cli.main import main
from tokenformer.config import load
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.errors import UserError
from tokenformer.eval.captions import captioning, rank_of
from tokenformer.train.caption import CaptionTask
from tokenformer.train.report import read_rows
from tokenformer.train.trainer import Trainer

HERE = Path(__file__)
ICONS = HERE.parents[2] / "examples" / "icons"
TEXT = "layers: 1, dim: 32, heads: 4, qkv_tokens: 24, proj_tokens: 24, vocab: 384"
CONFIG = f"""
model:
  of: caption
  trunks:
    image: {{of: image, layers: 1, dim: 32, heads: 4, qkv_tokens: 24, proj_tokens: 24, ffn_tokens: 48, image_size: 32,
             patch: 8, classes: 0, pool: mean}}
    text: {{{TEXT}, ffn_tokens: [48, 32], switch: {{ffn: ["", image]}}, context: 40}}
data: {{path: {ICONS}, tokenizer: byte, workers: 0}}
steps: 6
batch: 8
micro_batch: 4
optimizer: {{rate: 4e-3}}
train: {{precision: fp32, device: cpu}}
checkpoint: {{every: 2, keep: 0}}
validation: {{every: 3, samples: 11, generate: 4}}
log: {{every: 1}}
"""
GROWS = "growth=[{at: {captions: 24}, on: text., ffn_tokens: 96, switch: image}]"  # after three steps
FROZEN = "train.freeze=language"


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "captions.yml").write_text(CONFIG)
    return tmp_path / "captions.yml"


@pytest.fixture
def language(tmp_path) -> Path:
    """The folder of a language model that knows no images."""
    config = load(_written(tmp_path / "lm.yml", f"model: {{{TEXT}, ffn_tokens: 48, context: 32}}")).model
    save(LanguageModel(config, seed=7), tmp_path / "lm", tokenizer_json=ByteTokenizer().to_json())
    return tmp_path / "lm"


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def train(file, run, *settings, task=None, resume=False) -> Trainer:
    trainer = Trainer(load(file, overrides=settings), run, task=task, resume=resume)
    assert trainer.run() is None
    return trainer


class Dying(CaptionTask):
    """Kills its process in step 5, between two micro-batches."""

    calls = 0

    def loss(self, model, batch):
        self.calls += torch.is_grad_enabled()
        if self.calls == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def child(how: str, *arguments: object, **environment: str) -> subprocess.Popen:
    return child_of("test_caption", how, *arguments, **environment)


def child_of(tests: str, how: str, *arguments: object, **environment: str) -> subprocess.Popen:
    code = f"import sys; from tests.train.{tests} import *; {how}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=HERE.parents[2], env={**child_environment(), **environment})


def test_it_learns_by_heart_what_is_on_icons(file, tmp_path, capsys):
    """Of eight icons, by the names of all: chance is one of eight."""
    names = ["avocado", "banana", "carrot", "peach", "watermelon", "hot-dog", "bread", "cookie"]
    rows = [f"{ICONS}/train/food/{name}.png,{name}" for name in names if (ICONS / f"train/food/{name}.png").exists()]
    assert len(rows) > 4
    _written(tmp_path / "train.csv", "\n".join(["image,caption", *rows]) + "\n")
    shutil.copytree(ICONS / "train", tmp_path / "copy")
    held = [row.replace(f"{ICONS}/train", "copy") for row in rows]
    _written(tmp_path / "val.csv", "\n".join(["image,caption", *held]) + "\n")
    heart = [
        f"data.path={tmp_path}",
        "data.images={crop: centre, flip: 0, crop_pct: 1.0}",
        "steps=160",
        "micro_batch=8",
    ]
    run = train(file, tmp_path / "run", *heart, "validation={every: 0, samples: 8, generate: 12}", "checkpoint.every=0")
    found = read_rows(tmp_path / "run")
    losses = [row["loss"] for row in found if row["kind"] == "train"]
    assert losses[-1] < 0.2 * losses[0], losses
    said = capsys.readouterr().out
    assert "8 captions per step" in said and "avocado: avocado" in said
    model = load_model(tmp_path / "run").eval()
    measured, _ = captioning(
        model, run.task.held_pairs, run.task.tokenizer, run.task.settings, 32, 4, lambda _count: None
    )
    assert measured.pop("captions")[0] == "avocado"
    assert measured["exact"] == measured["word_f1"] == measured["first"] == 1 and measured["among"] == len(rows)


@pytest.mark.parametrize(("right", "rank"), [(-1.0, 0), (-2.0, 1), (-3.0, 2), (float("nan"), 2)])
def test_what_is_as_likely_as_the_right_name_or_no_number_comes_before_it(right, rank):
    class Says:
        def likelihoods(self, x, ids, labels):
            return torch.tensor([[right, -2.0, -3.0]])

    assert rank_of(Says(), torch.zeros(1), ["fox", "owl", "cat"], 0, ByteTokenizer(), 8) == rank


@pytest.mark.multi
def test_killed_and_resumed_with_other_workers_it_ends_in_the_same_bits(file, language, tmp_path):
    words = (GROWS, FROZEN, f"start={language}")
    train(file, tmp_path / "whole", *words)
    call = "train(*sys.argv[1:], task=Dying)"
    assert child(call, file, tmp_path / "run", *words, "data.workers=1").wait() == -signal.SIGKILL
    again = train(file, tmp_path / "run", *words, resume=True)
    assert again.found.path.name == "step-00000004" and same(result(tmp_path / "whole"), result(tmp_path / "run"))
    assert again.model.config.trunk("text.").ffn_tokens == [48, 32, 16]
    growth = next(row for row in read_rows(tmp_path / "whole") if row.get("what") == "growth")
    assert growth["losses"][0] == pytest.approx(growth["losses"][1], rel=1e-5)
    # the language model is what it was, before and after the growth: its parameters, its logits, its loss
    model, base = load_model(tmp_path / "run"), load_model(language)
    ids = torch.arange(60).view(2, 30) * 7 % 384
    assert torch.equal(model(ids).logits, base(ids).logits)
    assert torch.equal(model(ids, labels=ids).loss_sum, base(ids, labels=ids).loss_sum)
    kept = {name for name in result(tmp_path / "run")["optim"] if "text." in name}
    assert kept and all("ffn.segments.1" in name or "ffn.segments.2" in name for name in kept)
    first = load_model(tmp_path / "whole" / "checkpoints" / "step-00000002")
    assert not torch.equal(first.projection.weight, model.projection.weight)
    assert model.text.blocks[0].ffn.segments[2].value_tokens.any()


@pytest.mark.multi
def test_micro_batches_and_ranks_are_one_batch(file, tmp_path):
    """In float64: cut into micro-batches, and over two ranks that shard the model, it is the run of one whole batch."""
    words = [GROWS, "optimizer.kind=adamw", "steps=4"]
    with default_dtype("float64"):
        train(file, tmp_path / "one", *words, "micro_batch=8")
        train(file, tmp_path / "cut", *words, "micro_batch=2")
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    how = "torch.set_default_dtype(torch.float64); train(*sys.argv[1:])"
    arguments = (file, tmp_path / "two", *words, "parallel.shard=2", "micro_batch=2")
    both = [child(how, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **ranks) for rank in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    runs = [result(tmp_path / name)["model"] for name in ("one", "cut", "two")]
    losses = [
        [row["loss"] for row in read_rows(tmp_path / n) if row["kind"] == "validation"] for n in ("one", "cut", "two")
    ]
    for other, loss in zip(runs[1:], losses[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-9)
        for name, tensor in runs[0].items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-6, atol=1e-9)


def test_damaged_pairs_are_named_or_left_out_and_counted(file, tmp_path):
    lines = ["image,caption", f"{ICONS}/train/food/avocado.png,avocado", "gone.png,gone"]
    _written(tmp_path / "bad.csv", "\n".join(lines) + "\n")
    bad = f"data.path={tmp_path / 'bad.csv'}"
    with pytest.raises(UserError, match=r"gone.png is damaged \(it cannot be read \(No such file or directory\)\)"):
        train(file, tmp_path / "run", bad)
    train(file, tmp_path / "other", bad, "data.images.damaged=skip")
    rows = [row for row in read_rows(tmp_path / "other") if row["kind"] == "train"]
    assert sum(row["damaged"] for row in rows) == 24  # half of 48


def held_out_damage(file: Path, folder: Path) -> tuple[list[int], list[int]]:
    """Return how many damaged images a run counts in its log lines and validations, if only held-out ones are."""
    data = folder / "pairs"
    data.mkdir()
    _written(data / "train.csv", f"image,caption\n{ICONS}/train/food/avocado.png,avocado\n")
    _written(data / "val.csv", f"image,caption\ngone.png,gone\n{ICONS}/train/food/banana.png,banana\n")
    train(file, folder / "held", f"data.path={data}", "data.images.damaged=skip")
    rows = read_rows(folder / "held")
    every = [[row["damaged"] for row in rows if row["kind"] == kind] for kind in ("train", "validation")]
    return every[0], every[1]


def test_damaged_held_out_pairs_are_counted_in_validation_alone(file, tmp_path):
    assert held_out_damage(file, tmp_path) == ([0] * 6, [1, 1])


def test_it_begins_with_a_run_of_a_language_model_and_leaves_it_as_it_is(file, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    assert main(["prepare", str(text), "--tokenizer", "byte", "--out", str(tmp_path), "--name", "a"]) == 0
    plain = f"model: {{{TEXT}, ffn_tokens: 48, context: 32}}\ndata: {{path: {tmp_path / 'a'}}}\nsteps: 2\nbatch: 2\n"
    train(_written(tmp_path / "lm.yml", f"{plain}train: {{precision: fp32, device: cpu}}\n"), tmp_path / "lm")
    train(file, tmp_path / "run", FROZEN, f"start={tmp_path / 'lm'}", "steps=2")
    ids = torch.arange(60).view(2, 30)
    before, after = load_model(tmp_path / "lm"), load_model(tmp_path / "run").text
    assert torch.equal(before(ids).logits, after(ids).logits)
    with pytest.raises(UserError, match="language, and text has no switch: nothing would learn"):
        train(
            tmp_path / "lm.yml", tmp_path / "no", FROZEN, "model.ffn_tokens=[48, 8]", 'model.switch={ffn: ["", draw]}'
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([GROWS.replace("switch: image", "switch: banana")], "growth.switch is 'banana' on text., but this task gives"),
        (
            [GROWS.replace("on: text.", "on: image.")],
            "growth.switch is 'image' on image., but this task gives 'image' to",
        ),
        (["data.images.mixup=0.8"], "data.images.mixup is 0.8, but that is for images with classes"),
        (["data.tokenizer=null"], "data.tokenizer is missing"),
        (["model.trunks.text.vocab=100"], "has 257 ids but model.trunks.text.vocab is 100: set it to 384"),
        (["growth=[{at: {pairs: 24}, on: image., ffn_tokens: 64}]"], "but this task counts captions"),
        (
            [FROZEN, "growth=[{at: {step: 2}, on: text., ffn_tokens: 96}]"],
            "would never learn: give the growth a switch",
        ),
        (["start=lm", "model.trunks.text.ffn_tokens=[40, 32]"], "start: .*ffn_tokens is 40 .*, and 48 there"),
        (["start=lm", "model.trunks.text.tau={ffn: [5, 6]}"], "start: .*tau is .* there"),
        (["start=lm", "model.trunks.text.heads=2"], "start: .*heads is 2"),
    ],
)
def test_what_is_refused_before_anything_is_written(file, language, tmp_path, settings, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        train(file, tmp_path / "run", *settings)
    assert not (tmp_path / "run").exists()
