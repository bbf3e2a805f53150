"""Classification on the icons of examples/: learned, killed, resumed, grown, averaged, sharded, fine-tuned."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import tokenformer
from tests.parallel.conftest import free_port
from tests.parallel.workers import default_dtype
from tests.train.conftest import child_environment, result, same
from tokenformer import load as load_model
from tokenformer.cli.main import main
from tokenformer.config import load
from tokenformer.errors import UserError
from tokenformer.hub.dcp import read_tensors
from tokenformer.hub.open import open_model, read_config
from tokenformer.hub.run_folder import newest_whole
from tokenformer.models import build
from tokenformer.models.image import resized
from tokenformer.parallel.mesh import Place
from tokenformer.train.classify import ClassifyTask
from tokenformer.train.report import read_rows
from tokenformer.train.trainer import Trainer

HERE = Path(__file__)
ICONS = HERE.parents[2] / "examples" / "icons"
CONFIG = f"""
model: {{of: image, layers: 2, dim: 32, heads: 4, qkv_tokens: 24, proj_tokens: 24, ffn_tokens: 48, image_size: 32,
         patch: 8, classes: 4}}
data: {{path: {ICONS}, workers: 0, images: {{randaugment_ops: 1, mixup: 0.8, cutmix: 1.0, smoothing: 0.1}}}}
steps: 10
batch: 8
micro_batch: 4
optimizer: {{rate: 4e-3}}
train: {{precision: fp32, device: cpu, ema: 0.9, drop_path: 0.3}}
checkpoint: {{every: 4, keep: 0}}
validation: {{every: 5, samples: 16}}
log: {{every: 1}}
"""
GROWS = "growth=[{at: {images: 48}, ffn_tokens: 64, qkv_tokens: 32, new_tokens: {qkv: zero_key}}]"  # after six steps


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "icons.yml").write_text(CONFIG)
    return tmp_path / "icons.yml"


class Dying(ClassifyTask):
    """Kills its process in the last micro-batch of step 9."""

    calls = 0

    def loss(self, model, batch, drop=None):
        self.calls += 1
        if self.calls == 18:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch, drop)


def train(file, run, *settings, task=None, resume=False) -> Trainer:
    trainer = Trainer(load(file, overrides=settings), run, task=task, resume=resume)
    assert trainer.run() is None
    return trainer


def child(how: str, *arguments: object, **environment: str) -> subprocess.Popen:
    code = f"import sys; from tests.train.test_classify import *; {how}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=HERE.parents[2], env={**child_environment(), **environment})


def averaged(run: Path) -> dict[str, torch.Tensor]:
    return read_tensors(newest_whole(run) / "average")


def test_it_learns_and_is_told_in_images(file, tmp_path, capsys):
    plain = ["train.drop_path=0", "data.images={flip: 0.5, crop: centre}", "validation.samples=1000", "train.ema=0"]
    train(file, tmp_path / "run", *plain, "steps=30", "batch=32", "micro_batch=32")
    rows = read_rows(tmp_path / "run")
    found = [row for row in rows if row["kind"] == "validation"][-1]
    assert 0.5 < found["top1"] < found["top5"] == 1.0  # chance is a quarter
    last = [row for row in rows if row["kind"] == "train"][-1]
    assert last["images"] == 30 * 32 and last["images_per_second"] > 0 and last["flops"] > 0
    said = capsys.readouterr().out
    assert "images/s" in said and "top1" in said
    assert load_model(tmp_path / "run").images["classes"] == ["animals", "faces", "food", "vehicles"]


@pytest.mark.multi
def test_killed_and_resumed_with_other_workers_it_ends_in_the_same_bits(file, tmp_path):
    train(file, tmp_path / "whole", GROWS)
    call = "train(*sys.argv[1:], task=Dying)"
    assert child(call, file, tmp_path / "run", GROWS, "data.workers=2").wait() == -signal.SIGKILL
    again = train(file, tmp_path / "run", GROWS, resume=True)
    assert again.found.path.name == "step-00000008" and same(result(tmp_path / "whole"), result(tmp_path / "run"))
    one, other = averaged(tmp_path / "whole"), averaged(tmp_path / "run")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    metrics = [[r for r in read_rows(tmp_path / n) if r["kind"] == "validation"] for n in ("whole", "run")]
    assert [r["loss"] for r in metrics[0]] == [r["loss"] for r in metrics[1]]


def two_ranks(how: str, *arguments: object, on: tuple[str, ...] = ("parallel.shard=2",)) -> list[int]:
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = (*arguments, *on, "micro_batch=2")
    both = [child(how, *words, RANK=str(rank), LOCAL_RANK=str(rank), **ranks) for rank in range(2)]
    return [process.wait() for process in both]


@pytest.mark.multi
def test_two_ranks_killed_and_resumed_with_other_workers_end_in_the_same_bits(file, tmp_path):
    assert two_ranks("train(*sys.argv[1:])", file, tmp_path / "whole", GROWS) == [0, 0]
    killed = two_ranks("train(*sys.argv[1:], task=Dying)", file, tmp_path / "run", GROWS, "data.workers=1")
    assert killed == [-signal.SIGKILL] * 2 and newest_whole(tmp_path / "run").name == "step-00000008"
    assert two_ranks("train(*sys.argv[1:], resume=True)", file, tmp_path / "run", GROWS) == [0, 0]
    assert same(result(tmp_path / "whole"), result(tmp_path / "run"))
    one, other = averaged(tmp_path / "whole"), averaged(tmp_path / "run")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.multi
@pytest.mark.parametrize(
    "on",
    [
        ("parallel.replicate=2",),
        ("parallel.shard=2", "parallel.accumulate=whole"),
        ("parallel.shard=2", "parallel.reshard_after_forward=false"),
    ],
)
def test_two_ranks_that_accumulate_send_what_plan_counts(file, tmp_path, on):
    """Gradients once per step, and what stays gathered once."""
    how = "from tests.parallel.counting import count; count(sys.argv[1], sys.argv[2], sys.argv[3:])"
    assert two_ranks(how, tmp_path / "sent", file, on=on) == [0, 0]
    for rank in range(2):
        found = json.loads((tmp_path / f"sent-{rank}.json").read_text())
        assert found["counted"] == sum(found["formula"].values())


@pytest.mark.multi
def test_over_two_ranks_it_is_the_same_run(file, tmp_path):
    plain = "data.images.randaugment_ops=0"  # which moves pixels in single precision
    with default_dtype("float64"):
        train(file, tmp_path / "one", GROWS, plain)
    how = "torch.set_default_dtype(torch.float64); train(*sys.argv[1:])"
    assert two_ranks(how, file, tmp_path / "two", GROWS, plain) == [0, 0]
    one, two = result(tmp_path / "one"), result(tmp_path / "two")
    one["average"], two["average"] = averaged(tmp_path / "one"), averaged(tmp_path / "two")
    for part in ("model", "optim", "average"):
        assert one[part].keys() == two[part].keys()
        for name, tensor in one[part].items():
            torch.testing.assert_close(tensor, two[part][name], rtol=1e-6, atol=1e-9, msg=f"{part} {name}")
    losses = [[r["loss"] for r in read_rows(tmp_path / n) if r["kind"] == "validation"] for n in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_the_average_is_that_of_the_weights_and_verbs_read_it(file, tmp_path):
    """Recomputed from the checkpoints of every step; validation is of the average; --weights raw reads the others."""
    train(file, tmp_path / "run", "checkpoint.every=1", "checkpoint.also=[0]", "steps=4", "validation.every=0")
    steps = [read_tensors(tmp_path / "run" / "checkpoints" / f"step-{n:08d}" / "model") for n in range(5)]
    expected = dict(steps[0])
    for step in range(4):
        decay = min(0.9, (1 + step) / (10 + step))
        expected = {n: t * decay + steps[step + 1][n] * (1 - decay) for n, t in expected.items()}
    found = dict(load_model(tmp_path / "run").named_parameters())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)
    raw = dict(open_model(tmp_path / "run", weights="raw").model.named_parameters())
    assert all(torch.equal(raw[name], tensor) for name, tensor in steps[4].items())
    for choice, wanted in (("average", found), ("raw", raw)):
        out = tmp_path / choice
        main(["convert", str(tmp_path / "run"), "--to", "ours", "--weights", choice, "--out", str(out)])
        assert all(torch.equal(p, wanted[name]) for name, p in load_model(out).named_parameters())
    task = Trainer(load(file), tmp_path / "other")
    task.inspect_run()
    task.open_task()
    said = [row for row in read_rows(tmp_path / "run") if row["kind"] == "validation"][-1]["loss"]
    with torch.no_grad():
        losses = [task.task.measures(open_model(tmp_path / "run", weights=w).model)["loss"] for w in (None, "raw")]
    assert said == pytest.approx(losses[0], rel=1e-6) and said != pytest.approx(losses[1], rel=1e-6)


def test_new_rows_enter_the_average_at_their_values_and_the_loss_does_not_jump(file, tmp_path):
    settings = [GROWS, "steps=7", "checkpoint.every=0", "checkpoint.also=[6]"]
    trainer = train(file, tmp_path / "run", *settings)
    losses = next(row["losses"] for row in read_rows(tmp_path / "run") if row["kind"] == "event")
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    before = read_tensors(tmp_path / "run" / "checkpoints" / "step-00000006" / "average")
    after, weights = trainer.average.tensors, dict(trainer.model.named_parameters())
    decay, segment = min(0.9, 7 / 16), "blocks.0.ffn.segments.1.key_tokens"
    query = "blocks.0.attention.query.segments.0.value_tokens"
    assert segment not in before and len(after[query]) == 32 and len(before[query]) == 24
    kept = before[query] * decay + weights[query][:24] * (1 - decay)
    torch.testing.assert_close(after[query][:24], kept, rtol=1e-5, atol=1e-7)
    began = (after[segment] - weights[segment] * (1 - decay)) / decay  # the value before its only step
    torch.testing.assert_close(began, weights[segment].detach(), rtol=0, atol=0.02)
    assert began.std() > 0.015


def test_drop_path_belongs_to_step_layer_and_position(file):
    def task(*settings) -> ClassifyTask:
        trainer = Trainer(load(file, overrides=settings), "nowhere")
        trainer.inspect_run()
        trainer.open_task()
        return trainer.task

    parts, whole = task(), task("micro_batch=8")
    cut = torch.cat([parts.drop(3, 16, micro) for micro in range(2)], dim=2)
    assert torch.equal(cut, whole.drop(3, 16, 0)) and not torch.equal(cut, whole.drop(3, 24, 0))
    assert torch.equal(whole.drop(4, 16, 0)[0], torch.ones(2, 8))  # the first block stays
    many = torch.stack([whole.drop(3, 8 * step, 0) for step in range(200)])
    assert set(np.unique(many[:, 2].numpy().round(4))) == {0.0, np.float32(1 / 0.7).round(4)}
    assert (many == 0).float().mean((0, 2, 3)).tolist() == pytest.approx([0, 0.15, 0.3], abs=0.03)
    assert task("train.drop_path=0").drop(3, 16, 0) is None


def test_earlier_blocks_learn_more_slowly_with_layer_decay(file, tmp_path):
    """AdamW's first step moves every weight by its rate."""
    settings = ["optimizer={kind: adamw, layer_decay: 0.5, rate: 1e-3, weight_decay: 0, eps: 0}", "steps=1"]
    settings += ["schedule={kind: constant, warmup: 0}", "checkpoint.also=[0]", "train.ema=0", "train.drop_path=0"]
    trainer = train(file, tmp_path / "run", *settings)
    first = read_tensors(tmp_path / "run" / "checkpoints" / "step-00000000" / "model")
    moved = {n: (p - first[n]).abs().max().item() for n, p in trainer.model.named_parameters()}
    shares = {"patches.weight": 0.125, "positions": 0.125, "blocks.0.ffn.segments.0.key_tokens": 0.25}
    shares |= {"blocks.1.ffn.segments.0.key_tokens": 0.5, "norm.weight": 1.0, "head.weight": 1.0}
    for name, share in shares.items():
        assert moved[name] == pytest.approx(1e-3 * share, rel=1e-2), name


def test_fine_tuning_at_another_size_and_with_other_classes(file, tmp_path):
    trainer = train(file, tmp_path / "run", "train.ema=0", "steps=2")
    old = {name: p.detach() for name, p in trainer.model.named_parameters()}
    how = ["train.ema=0", "steps=0", f"start={tmp_path / 'run'}"]
    larger = train(file, tmp_path / "larger", *how, "model.image_size=48").model
    torch.testing.assert_close(larger.positions.detach(), resized(old["positions"], (4, 4), (6, 6)))
    same_parts = [name for name in old if name != "positions"]
    assert all(torch.equal(larger.get_parameter(name), old[name]) for name in same_parts)
    more = train(file, tmp_path / "more", *how, "model.classes=7").model
    assert len(more.head.weight) == 7 and torch.equal(more.patches.weight, old["patches.weight"])


def test_fine_tuning_without_learned_positions_at_another_size(file, tmp_path):
    turned = ("model.positions=rotary", "model.rotary_fraction=1")
    small = train(file, tmp_path / "run", "train.ema=0", "steps=2", *turned).model
    how = ["train.ema=0", "steps=0", f"start={tmp_path / 'run'}", "model.image_size=48", *turned]
    larger = train(file, tmp_path / "larger", *how).model
    assert larger.config.image_size == 48
    assert all(torch.equal(larger.get_parameter(name), p) for name, p in small.named_parameters())


def test_other_pixels_than_those_of_the_first_weights_are_said(file, tmp_path, capsys):
    train(file, tmp_path / "run", "steps=0")
    capsys.readouterr()
    train(file, tmp_path / "on", "steps=0", f"start={tmp_path / 'run'}", "data.images.std=[0.5, 0.5, 0.5]")
    said = [line for line in capsys.readouterr().out.splitlines() if "data.images" in line]
    assert said == [f"data.images.std is [0.5, 0.5, 0.5], but [0.229, 0.224, 0.225] in {tmp_path / 'run'}"]


def test_what_is_unusual_about_classes_and_validation_is_said(file, tmp_path, capsys):
    """No images to validate on; rows of the head without a class; a head whose classes had other names."""
    shutil.copytree(ICONS / "train", tmp_path / "icons")
    data, unseen = f"data.path={tmp_path / 'icons'}", "there are no images to validate on"

    def said(name: str, *settings: str) -> list[str]:
        capsys.readouterr()
        train(file, tmp_path / name, "steps=0", *settings)
        return [line for line in capsys.readouterr().out.splitlines() if "class" in line or unseen in line]

    assert said("run", "model.classes=5") == [
        "model.classes is 5, but the data have 4 classes: 1 row of the head is never right"
    ]
    assert said("plain", data) == [f"{unseen}: set data.images.hold_back, or name some with data.images.validation"]
    assert said("held", data, "data.images.hold_back=9") == said("again", f"start={tmp_path / 'plain'}") == []
    (tmp_path / "icons" / "food").rename(tmp_path / "icons" / "drink")
    names = "['animals', 'faces', 'food', 'vehicles'], not ['animals', 'drink', 'faces', 'vehicles']"
    assert said("other", data, "data.images.hold_back=9", f"start={tmp_path / 'plain'}") == [
        f"the head is that of {tmp_path / 'plain'}, whose classes were called {names}"
    ]


def test_activations_may_be_recomputed(file, tmp_path):
    plain = train(file, tmp_path / "plain", "steps=3")
    again = train(file, tmp_path / "again", "steps=3", "train.activation_checkpointing=full")
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(parameter, again.model.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_what_is_refused(file, tmp_path):
    for settings, said in (
        (["model.classes=3"], "the data have 4 classes but model.classes is 3: set model.classes=4"),
        (["model.image_size=[32, 64]"], "images are squares here"),
        (["batch=6", "micro_batch=3"], "splits a pair of images"),
    ):
        with pytest.raises(UserError, match=said):
            train(file, tmp_path / "run", *settings)
    assert not (tmp_path / "run").exists()


def test_damaged_images_are_counted_in_training_and_validation(file, tmp_path, capsys):
    shutil.copytree(ICONS, tmp_path / "icons")
    broken = [
        *sorted((tmp_path / "icons/train").rglob("*.png"))[::3],
        *sorted((tmp_path / "icons/val").rglob("*"))[1:4],
    ]
    for path in broken:
        path.write_bytes(b"no image")
    settings = [f"data.path={tmp_path / 'icons'}", "data.images={damaged: skip}", "steps=15", "log.every=5"]
    train(file, tmp_path / "run", *settings, "validation={every: 0, samples: 40}")
    rows = read_rows(tmp_path / "run")
    assert sum(row["damaged"] for row in rows if row["kind"] == "train") == 40  # of the 120 of one epoch
    assert [row["damaged"] for row in rows if row["kind"] == "validation"] == [3]
    assert "damaged images" in capsys.readouterr().out


def test_drop_path_fits_a_last_micro_batch_that_is_not_full(file):
    """A task that is used without a trainer may have such a batch: ten images in micro-batches of four."""
    gradients = []
    for micro in (10, 4):
        config = load(file, overrides=["data.images={flip: 0.0}", "batch=10", f"micro_batch={micro}"])
        task = ClassifyTask(config, Place(config.parallel), torch.device("cpu"))
        model = build(config.model)
        _, count = task.gradients(model, iter(task.loader), torch.tensor(0.1))
        assert count == 10
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_predict_eval_and_exports_read_the_average_and_the_size_of_training(file, tmp_path, capsys):
    """Averaged and raw weights give other figures; an export has those of the average. The model's own size is 32."""
    how = ["steps=6", "data.images.size=24", "data.images.crop_pct=0.9", "validation={every: 0, samples: 40}"]
    train(file, tmp_path / "run", *how)
    said = [row for row in read_rows(tmp_path / "run") if row["kind"] == "validation"][-1]

    def asked(source: Path, *words: str) -> tuple[float, list[float]]:
        assert main(["eval", str(source), "--images", str(ICONS), "--out", str(tmp_path / "r"), "--force", *words]) == 0
        found = json.loads((tmp_path / "r").read_text())
        assert found["size"] == 24
        capsys.readouterr()
        assert main(["predict", str(source), str(ICONS / "val/food"), "--json", "--top", "1", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        return found["loss"], [json.loads(line)["classes"][0]["share"] for line in lines]

    loss, shares = asked(tmp_path / "run")
    other, others = asked(tmp_path / "run", "--weights", "raw")
    assert loss == pytest.approx(said["loss"], rel=1e-5) and abs(other - loss) > 1e-3 and others != shares
    for choice, wanted in (("average", (loss, shares)), ("raw", (other, others))):
        for form in ("hf", "ours"):
            out = tmp_path / f"{form}-{choice}"
            words = ["convert", str(tmp_path / "run"), "--to", form, "--out", str(out)]
            main([*words, "--weights", "raw"] if choice == "raw" else words)
            found = asked(out)
            assert found[0] == pytest.approx(wanted[0], rel=1e-5) and found[1] == pytest.approx(wanted[1], rel=1e-4)


def test_a_compiled_run_with_drop_path_mixup_and_ema_is_the_same(file, tmp_path):
    """Blocks are compiled, in training and validation; only rounding differs (1e-4; losses 1e-5)."""
    how = ["steps=4", "validation.every=2"]
    runs = [train(file, tmp_path / name, *how, f"train.compile={name}") for name in ("none", "aot_eager")]
    assert [all(b._compiled_call_impl for b in r.model.blocks) for r in runs] == [False, True]
    for name, tensor in runs[0].average.tensors.items():
        torch.testing.assert_close(runs[1].average.tensors[name], tensor, rtol=1e-4, atol=1e-6)
    losses = [[row["loss"] for row in read_rows(tmp_path / n) if "loss" in row] for n in ("none", "aot_eager")]
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_fewer_validation_images_are_a_sample_of_all_classes(file, tmp_path):
    """Folders are read class by class: the first ten would be animals alone. `eval --limit` takes the same ones."""
    train(file, tmp_path / "run", "steps=1", "validation.samples=10", "train.ema=0")
    main(["eval", str(tmp_path / "run"), "--images", str(ICONS), "--limit", "10", "--out", str(tmp_path / "r.json")])
    found = json.loads((tmp_path / "r.json").read_text())
    said = [row for row in read_rows(tmp_path / "run") if row["kind"] == "validation"][-1]
    assert (
        found["images"] == 10 and len(found["classes"]) > 2 and found["loss"] == pytest.approx(said["loss"], rel=1e-5)
    )


def test_an_adapter_of_a_classifier_learns_and_its_base_stays(file, tmp_path):
    """With a parameter of the base that learns too, and an average: what `eval --adapter` reads."""
    train(file, tmp_path / "base", "steps=4")
    keys = [f"start={tmp_path / 'base'}", "adapter.ffn_tokens=8", "adapter.also=[head]", "train.ema=0.5", "steps=6"]
    raw = {name: value for name, value in yaml.safe_load(CONFIG).items() if name != "model"}
    (tmp_path / "tune.yml").write_text(yaml.safe_dump(raw))
    trainer = Trainer(read_config(tmp_path / "tune.yml", overrides=keys), tmp_path / "run")
    assert trainer.run() is None
    base, model = tokenformer.load(tmp_path / "base"), tokenformer.load(tmp_path / "base")
    tokenformer.attach(model, tmp_path / "run", "mine")
    with trainer.average.in_place():
        held = {name for name, p in trainer.model.named_parameters() if not p.requires_grad}
        assert all(torch.equal(p, base.get_parameter(n)) for n, p in trainer.model.named_parameters() if n in held)
        pixels = torch.randn(2, 3, 32, 32)
        ours, theirs = model(pixels), trainer.model.eval()(pixels)
    assert ((ours - theirs).abs().max() / theirs.abs().max()) < 1e-6 < (ours - base(pixels)).abs().max()
    with tokenformer.detached(model):
        assert torch.equal(model(pixels), base(pixels))
