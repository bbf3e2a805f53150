"""What a step is, what is skipped, what is refused, and what a run leaves behind."""

import json
import math
import os

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.conftest import TEXT, result, same
from tokenformer.cli.main import main
from tokenformer.errors import UserError
from tokenformer.files import MANIFEST, check_manifest
from tokenformer.hub import save
from tokenformer.hub.dcp import read_tensors
from tokenformer.hub.run_folder import all_steps, newest_whole
from tokenformer.models import LanguageModel
from tokenformer.train.checkpoint import read_state
from tokenformer.train.report import read_rows
from tokenformer.train.run import with_batch_sizes
from tokenformer.train.schedule import factor
from tokenformer.train.trainer import Trainer


def train(config, folder, **more) -> Trainer:
    trainer = Trainer(config, folder, **more)
    assert trainer.run() is None
    return trainer


def losses(run) -> list[float]:
    return [row["loss"] for row in read_rows(run) if row["kind"] == "train"]


@pytest.mark.parametrize("kind", ["tokenformer", "transformer", "llama"])
def test_training_learns(tiny, tmp_path, kind):
    plain = (
        ["model.qkv_tokens=null", "model.proj_tokens=null", "model.ffn_tokens=null"] if kind != "tokenformer" else []
    )
    settings = [f"model.kind={kind}", *plain, "steps=120", "schedule.steps=120", "batch=16", "micro_batch=16"]
    settings += ["model.rotary_fraction=0.5", "optimizer.rate=1e-2"]
    train(tiny(*settings), tmp_path / "run")
    first, *_, last = losses(tmp_path / "run")
    assert first > 4 and last < 3.2
    validation = [row["loss"] for row in read_rows(tmp_path / "run") if row["kind"] == "validation"]
    assert len(validation) == 1 and abs(validation[0] - last) < 0.6


@pytest.fixture(scope="module")
def ignoring(tmp_path_factory) -> list[str]:
    """Settings: every word a document, and the labels between two of them ignored."""
    out = tmp_path_factory.mktemp("words")
    how = ["--name", "words", "--tokenizer", "byte", "--separator", " ", "--workers", "1"]
    assert not main(["prepare", str(TEXT), "--out", str(out), *how])
    return [f"data.path={out / 'words'}", "data.boundaries=true", "data.boundary_labels=ignore"]


def test_gradients_are_normalised_by_all_labels_of_a_step(tiny, ignoring, tmp_path):
    """With labels ignored at document boundaries the micro-batches count differently; only their sum matters."""
    one, four = (
        train(tiny(*ignoring, f"micro_batch={m}", "steps=5", "optimizer.kind=adamw"), tmp_path / str(m)) for m in (4, 1)
    )
    for (name, p), q in zip(one.model.named_parameters(), four.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-5, msg=name)


def test_the_norm_of_a_step_is_that_of_the_mean_over_the_labels_that_count(tiny, ignoring, tmp_path):
    """AdamW and Muon hide the length of a gradient; the logged norm and clipping show it."""
    config = tiny(*ignoring, "steps=1", "log.every=1")
    train(config, tmp_path / "run")
    logged = next(row["norm"] for row in read_rows(tmp_path / "run") if row["kind"] == "train")
    trainer = Trainer(config, tmp_path / "other")  # the same first model and batch
    trainer.build()
    model, total, count = trainer.model, torch.zeros(()), 0
    batches = iter(trainer.task.loader)
    for batch in (next(batches), next(batches)):
        fields = {name: torch.as_tensor(array).long() for name, array in batch.fields.items()}
        out = model(fields["ids"], labels=fields["labels"], documents=fields["documents"])
        total, count = total + out.loss_sum, count + int(out.count)
    assert 0 < count < 4 * 16  # some labels are ignored
    (total / count).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert logged == pytest.approx(norm, rel=1e-5)


def test_the_logged_rate_is_the_one_the_step_was_taken_with(tiny, tmp_path):
    config = tiny("log.every=1", "steps=12", "schedule.steps=12")
    train(config, tmp_path / "run")
    rows = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    expected = [4e-3 * factor(config.schedule, step, 12) for step in range(12)]
    assert [row["rate"] for row in rows] == pytest.approx(expected) and len(set(expected)) > 9


def test_a_checkpoint_keeps_all_that_a_run_must_remember(tiny, tmp_path):
    train(tiny("steps=3"), tmp_path / "run")
    state = read_state(newest_whole(tmp_path / "run"))
    assert state.keys() >= {"step", "guard", "spikes", "totals", "loader", "growth"}
    assert state["spikes"]["seen"] == 3 and state["loader"]["samples_seen"] == 12


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device: a tensor's value becoming a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "item")
        self.count += func.__name__.split(".")[0] in names
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_nothing_reads_the_device_off_the_log_step(tiny, tmp_path, precision, optimizer):
    trainer = Trainer(tiny(f"train.precision={precision}", f"optimizer.kind={optimizer}"), tmp_path / "run")
    trainer.build()
    os.makedirs(tmp_path / "run")
    trainer.resume()
    with Reads() as reads:
        for _ in range(3):
            trainer.train_step()
            trainer.step += 1
        assert reads.count == 0
        trainer.log()
        assert reads.count > 0  # the counter works
    trainer.report.close()


def test_fp16_begins_with_a_scale_that_is_too_large_and_finds_its_own(tiny, tmp_path, capsys):
    settings = ["train.precision=fp16", "train.loss_scale=1e9", "train.loss_scale_hysteresis=1", "log.every=1"]
    trainer = train(tiny(*settings), tmp_path / "run")
    rows = read_rows(tmp_path / "run")
    skipped = [row["step"] for row in rows if row.get("what") == "skipped"]
    assert skipped[:3] == [1, 2, 3] and len(skipped) == trainer.guard.skipped.item() < 30
    scales = [row["loss_scale"] for row in rows if row["kind"] == "train"]
    assert scales[0] == 1e9 and scales[-1] < 1e9 / 2**3
    assert losses(tmp_path / "run")[-1] < 5.2
    assert "was skipped: its loss or gradient is not finite" in capsys.readouterr().out


def test_a_run_that_cannot_go_on_stops_with_its_last_good_state(tiny, tmp_path):
    poisoned = LanguageModel(tiny().model)
    with torch.no_grad():
        poisoned.embedding.weight[33] = 3e38  # finite, but no logit of it is
    save(poisoned, tmp_path / "start")
    config = tiny(f"start={tmp_path / 'start'}", "train.skip_limit=5", "log.every=3")
    with pytest.raises(UserError, match=r"not finite in 6 steps in a row, up to step 6: the state before them is kept"):
        Trainer(config, tmp_path / "run").run()
    kept = read_tensors(newest_whole(tmp_path / "run") / "model")
    for name, parameter in poisoned.named_parameters():
        assert torch.equal(kept[name], parameter.detach()), name


@pytest.mark.parametrize("how", ["full", "selective"])
def test_activation_checkpointing_changes_no_bit_and_no_name(tiny, tmp_path, how):
    plain = train(tiny("steps=5"), tmp_path / "plain")
    wrapped = train(tiny("steps=5", f"train.activation_checkpointing={how}"), tmp_path / "wrapped")
    assert dict(plain.model.named_parameters()).keys() == dict(wrapped.model.named_parameters()).keys()
    assert same(result(tmp_path / "plain"), result(tmp_path / "wrapped"))


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_compiled_blocks_train_the_same_and_are_compiled_once(tiny, tmp_path, how):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = train(tiny("steps=5"), tmp_path / "plain")
    settings = ["steps=5", "train.compile=aot_eager", f"train.activation_checkpointing={how}", "model.layers=2"]
    compiled = train(tiny(*settings, "validation.generate=3"), tmp_path / "compiled")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] in (2, 3)  # training, validation; not one a layer
    for (name, p), q in zip(plain.model.named_parameters(), compiled.model.named_parameters(), strict=True):
        assert name == q[0]
        torch.testing.assert_close(p, q[1], rtol=1e-3, atol=1e-4)


def test_more_blocks_than_pytorch_would_compile_are_compiled_and_a_limit_that_is_hit_is_an_error(tiny, tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = {i: {"ffn_tokens": 20 + i} for i in range(5)}
    settings = ["steps=2", "train.compile=aot_eager", "model.layers=5", f"model.layer_overrides={layers}"]
    train(tiny(*settings), tmp_path / "run")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 10  # each block in training and in validation
    torch._dynamo.reset()
    trainer = Trainer(tiny(*settings), tmp_path / "limited")
    trainer.build()
    with torch._dynamo.config.patch(recompile_limit=3), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        trainer.batches = iter(trainer.task.loader)
        trainer.train_step()


def test_every_file_of_a_checkpoint_is_wholly_safetensors_json_or_the_model_config(tiny, tmp_path):
    train(tiny("steps=3"), tmp_path / "run")
    found = newest_whole(tmp_path / "run")
    names = sorted(str(p.relative_to(found)) for p in found.rglob("*") if p.is_file())
    assert [n for n in names if not n.endswith(".safetensors")] == [
        MANIFEST, "model/config.yml", "model/history.json", "model/tokenizer.json", "state.json"
    ]  # fmt: skip
    seen = 0
    for name in names:
        path = found / name
        if name.endswith(".safetensors"):
            raw = path.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + length])
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            assert max(ends) + 8 + length == len(raw)  # not a byte beyond what the header names
            with safe_open(path, framework="pt") as file:
                seen += sum(file.get_tensor(key).isfinite().all().item() for key in file.keys())  # noqa: SIM118
        elif name.endswith(".json"):
            json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert seen == len(read_tensors(found / "model")) + len(read_tensors(found / "optim"))
    check_manifest(found)


def test_kept_are_the_last_ones_and_every_kth(tiny, tmp_path):
    settings = [
        "steps=20",
        "checkpoint.every=2",
        "checkpoint.keep=2",
        "checkpoint.keep_every=8",
        "checkpoint.also=[19]",
    ]
    train(tiny(*settings), tmp_path / "run")
    assert list(all_steps(tmp_path / "run")) == [8, 16, 19, 20]
    assert (tmp_path / "run" / "checkpoints" / "last").read_text() == "step-00000020\n"


def test_an_existing_run_is_never_overwritten(tiny, tmp_path):
    train(tiny("steps=3"), tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    with pytest.raises(UserError, match="is there already: go on with it by --resume, or give another name by --out"):
        Trainer(tiny("steps=3"), tmp_path / "run").run()
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("model.ffn_tokens=48", r"another model \(model.ffn_tokens: 32 → 48.*\): keep it"),
        ("batch=8", "begun with batch 4, not 8"),
        ("seed=5", "begun with seed 1234, not 5"),
        ("optimizer.kind=adamw", "begun with optimizer.kind muon, not adamw"),
        ("data.split=[50, 50, 0]", "the data are not those of the saved state"),
        ("model.context=8", "another model"),
    ],
)
def test_what_would_be_another_run_is_refused(tiny, tmp_path, change, sentence):
    train(tiny("steps=3"), tmp_path / "run")
    config = (tmp_path / "run" / "config.yml").read_text()
    with pytest.raises(UserError, match=sentence):
        Trainer(tiny(change), tmp_path / "run", resume=True).run()
    assert (tmp_path / "run" / "config.yml").read_text() == config


def test_resume_with_an_architecture_that_the_config_does_not_lead_to(tiny, tmp_path):
    """The run's config was changed by hand to another model: the checkpoint's own config says otherwise."""
    train(tiny("steps=3"), tmp_path / "run")
    path = tmp_path / "run" / "config.yml"
    path.write_text(path.read_text().replace("layers: 2", "layers: 1"))
    with pytest.raises(UserError, match="is not the one that the config describes: resume"):
        Trainer(tiny("model.layers=1"), tmp_path / "run", resume=True).run()


def test_micro_batches_that_a_pipeline_cannot_share_are_refused(tiny):
    assert with_batch_sizes(tiny(), world=1, pipeline=2).micro_batch == 2
    with pytest.raises(UserError, match="a step has 1 micro-batches, not a multiple of the 2 ranks of the pipeline"):
        with_batch_sizes(tiny("micro_batch=4"), world=1, pipeline=2)


def test_a_language_model_refuses_the_keys_of_images(tiny, tmp_path):
    for key in ("data.images.flip", "train.drop_path"):
        with pytest.raises(UserError, match=rf"{key.removesuffix('.flip')} is .*image models?"):
            Trainer(tiny(f"{key}=0.1"), tmp_path / "run").run()
    assert not (tmp_path / "run").exists()


def test_an_average_over_a_pipeline_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"train.ema is 0.9 and parallel.pipeline 2, but .* leave one of them out"):
        Trainer(tiny("train.ema=0.9", "parallel.pipeline=2", "micro_batch=2"), tmp_path / "run").inspect_run()


def test_changes_that_may_be_made_are_said(tiny, tmp_path, capsys):
    train(tiny("steps=3"), tmp_path / "run")
    capsys.readouterr()
    train(tiny("steps=5", "log.every=1"), tmp_path / "run", resume=True)
    said = capsys.readouterr().out
    assert "changed since the last start: steps: 3 → 5" in said and "log.every: 10 → 1" in said


def test_a_run_folder_holds_what_it_was_made_with(tiny, tmp_path):
    train(tiny("steps=3", "validation.generate=5"), tmp_path / "run", command=["tokenformer", "train", "x"])
    run = tmp_path / "run"
    assert {"config.yml", "environment.json", "metrics.jsonl", "log", "checkpoints"} <= {p.name for p in run.iterdir()}
    start = json.loads((run / "environment.json").read_text())["starts"][0]
    assert start["torch"] == torch.__version__ and start["command"] == ["tokenformer", "train", "x"]
    kinds = {row["kind"] for row in read_rows(run)}
    assert kinds == {"train", "validation", "sample", "checkpoint"}
    assert all(row["idle"] > 0 for row in read_rows(run) if row["kind"] == "checkpoint")
    text = next(row["text"] for row in read_rows(run) if row["kind"] == "sample")
    assert text.startswith("The ")
    row = next(row for row in read_rows(run) if row["kind"] == "train")
    assert row["mfu"] is None and row["memory"] > 1e6 and row["tokens"] == 3 * 4 * 16 and row["flops"] > 0
    assert math.isclose(row["left"], 0)


def test_a_profiled_window_leaves_a_trace(tiny, tmp_path):
    train(tiny("steps=6", "log.profile=[2, 2]"), tmp_path / "run")
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert any(
        "addmm" in str(event.get("name")) or "aten::" in str(event.get("name")) for event in trace["traceEvents"]
    )
    train(tiny("steps=2"), tmp_path / "other")
    assert not (tmp_path / "other" / "trace.json").exists()


def test_spikes_are_logged(tiny, tmp_path):
    train(tiny("steps=40", "train.spike=0.5", "optimizer.rate=1e-6"), tmp_path / "run")  # half a deviation is common
    spikes = [row for row in read_rows(tmp_path / "run") if row.get("what") == "spike"]
    assert spikes and all(row["step"] > 20 for row in spikes)
