"""An adapter is trained alone: the base gets no gradient, state or bytes of a checkpoint; resume needs its digest."""

import gc
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import tokenformer
from tests.train.conftest import TEXT, child_environment, result, same
from tokenformer.adapters import base_of, digest, merged
from tokenformer.cli.main import main
from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.hub.open import open_model, read_config
from tokenformer.hub.run_folder import all_steps, newest_whole
from tokenformer.models import build
from tokenformer.train.trainer import Trainer

TOKENS = ["adapter.qkv_tokens=3", "adapter.ffn_tokens=8"]


@pytest.fixture(scope="module")
def base(config_file, tmp_path_factory) -> Path:
    """A trained model in our folder."""
    run = tmp_path_factory.mktemp("base") / "run"
    assert Trainer(read_config(config_file, overrides=["steps=6"]), run).run() is None
    folder = run.with_name("base")
    model = open_model(run)
    tokenformer.save(model.model, folder, tokenizer_json=model.tokenizer_json)
    return folder


@pytest.fixture(scope="module")
def tune_file(config_file, tmp_path_factory) -> Path:
    """The tiny config without its model."""
    raw = yaml.safe_load(config_file.read_text())
    del raw["model"]
    path = tmp_path_factory.mktemp("tune") / "tune.yml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture
def tune(tune_file, base):
    def make(*overrides: str, start: Path | None = None):
        return read_config(tune_file, overrides=[f"start={start or base}", "steps=12", *TOKENS, *overrides])

    return make


def held_bytes(run: Path) -> int:
    return sum(path.stat().st_size for path in (newest_whole(run) / "model").rglob("*.safetensors"))


def trained(config, run: Path, **how) -> Trainer:
    trainer = Trainer(config, run, **how)
    assert trainer.run() is None
    return trainer


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_only_the_adapter_learns_and_is_kept(tune, base, tmp_path, optimizer):
    trainer = trained(tune(f"optimizer.kind={optimizer}"), tmp_path / "run")
    found, first = result(tmp_path / "run"), tokenformer.load(base)
    new = {name for name, _ in trainer.model.named_parameters()} - {name for name, _ in first.named_parameters()}
    assert found["model"].keys() == new and len(new) == 2 * 2 * 4  # two layers of q, k, v and ffn
    assert {name.partition("/")[2] for name in found["optim"]} == new
    assert all(found["model"][name].abs().max() > 0 for name in new)
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad == (name in new) and (name in new or parameter.grad is None)
        if name not in new:
            assert torch.equal(parameter, first.get_parameter(name))
    assert 4 * held_bytes(tmp_path / "run") < held_bytes(base.with_name("run"))


def test_it_learns_and_begins_as_the_base(tune, base, tmp_path):
    trainer = trained(tune("steps=40", "optimizer.rate=2e-2"), tmp_path / "run")
    text = torch.tensor(list(TEXT.read_bytes()[5000:9096])).view(-1, 16) + 1
    plain = tokenformer.load(base)(text, labels=text.roll(-1, 1)).loss_sum
    assert trainer.model(text, labels=text.roll(-1, 1)).loss_sum < plain - 0.01 * text.numel()
    fresh = Trainer(tune(), tmp_path / "fresh")
    fresh.build()
    ids = torch.arange(24).view(2, 12)
    assert torch.equal(fresh.model(ids).logits, tokenformer.load(base)(ids).logits)  # new values begin at zero
    assert trainer.model.history == [
        {"what": "adapter", "base": str(base), "sha256": digest(*base_of(tokenformer.load(base))), "seed": 1234}
        | {"qkv_tokens": 3, "ffn_tokens": 8}
    ]


@pytest.mark.parametrize(
    "more", [[], ["adapter.hold=bf16", "train.precision=bf16"], ["adapter.also=[norm]", "train.ema=0.9"]]
)
def test_5_and_7_steps_are_12(tune, tmp_path, more):
    trained(tune(*more), tmp_path / "whole")
    trained(tune(*more, "steps=5"), tmp_path / "parts")
    trainer = trained(tune(*more), tmp_path / "parts", resume=True)
    assert same(result(tmp_path / "whole"), result(tmp_path / "parts"))
    held = {p.dtype for p in trainer.model.parameters() if not p.requires_grad}
    assert held == {torch.bfloat16 if more[:1] == ["adapter.hold=bf16"] else torch.float32}
    assert ("norm.weight" in result(tmp_path / "whole")["model"]) == (more[:1] == ["adapter.also=[norm]"])


def test_the_base_is_in_memory_once(tune, tmp_path):
    def embeddings() -> int:
        gc.collect()
        return sum(isinstance(found, torch.Tensor) and found.shape == (384, 16) for found in gc.get_objects())

    before, trainer = embeddings(), Trainer(tune("adapter.hold=bf16"), tmp_path / "run")
    trainer.build()
    assert embeddings() == before + 1 and trainer.model.embedding.weight.dtype == torch.bfloat16


def test_a_killed_run_goes_on_to_the_same_bits(tune, tune_file, base, tmp_path):
    run, settings = tmp_path / "run", [f"start={base}", *TOKENS, "checkpoint.every=3", "checkpoint.keep=0"]
    command = [sys.executable, "-m", "tokenformer", "train", str(tune_file), *settings, "--out", str(run)]
    process = subprocess.Popen([*command, "steps=100000"], stdout=subprocess.DEVNULL, env=child_environment())
    while not all_steps(run) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = max(all_steps(run)) + 4
    subprocess.run(
        [*command, f"steps={steps}", "--resume"], check=True, stdout=subprocess.DEVNULL, env=child_environment()
    )
    trained(tune(f"steps={steps}", "schedule.steps=40"), tmp_path / "whole")
    assert same(result(tmp_path / "whole"), result(run))


def test_resume_knows_its_base_by_the_digest(tune, base, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    trained(tune("steps=5"), run)
    shutil.copytree(base, moved)
    other = tokenformer.load(base)
    with torch.no_grad():
        other.embedding.weight[3, 4] += 1e-6
    tokenformer.save(other, tmp_path / "other")
    config = run / "config.yml"
    with pytest.raises(UserError, match=r"has the digest .* but the adapter is trained on .*: say by start=FOLDER"):
        Trainer(read_config(config, overrides=[f"start={tmp_path / 'other'}"]), run, resume=True).run()
    trained(read_config(config, overrides=[f"start={moved}", "steps=12"]), run, resume=True)
    trained(tune(), tmp_path / "whole")
    assert same(result(tmp_path / "whole"), result(run))
    with pytest.raises(UserError, match=r"was begun with another adapter \(adapter.ffn_tokens: 8 → 9\): keep it"):
        Trainer(tune("adapter.ffn_tokens=9"), run, resume=True).run()


def test_the_digest_is_the_same_in_every_kind_of_folder(base, tmp_path):
    model = tokenformer.load(base)
    wanted = digest(*base_of(model))
    tokenformer.save(model, tmp_path / "hf", format="hf")
    assert digest(*base_of(tokenformer.load(tmp_path / "hf"))) == wanted
    assert digest(*base_of(tokenformer.load(base.with_name("run")))) == wanted
    with torch.no_grad():
        model.norm.bias[0] += 1e-7
    assert digest(*base_of(model)) != wanted


def test_chosen_layers_and_attaching_a_run(tune, base, tmp_path):
    trainer = trained(tune("adapter.layers=[1]", "adapter.name=books"), tmp_path / "run")
    assert {name.split(".")[1] for name in result(tmp_path / "run")["model"]} == {"1"}
    model = tokenformer.attach(tokenformer.load(base), tmp_path / "run", "mine")
    ids = torch.arange(24).view(2, 12)
    trainer.model.eval()
    assert torch.equal(model(ids).logits, trainer.model(ids).logits)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.layers=2"], "there is a section model: leave it out"),
        (["start=null"], "adapter needs the weights that it is trained on"),
        (["growth=[{at: {step: 3}, ffn_tokens: 64}]"], "an adapter does not grow"),
        (["adapter.layers=[2]"], "adapter.layers names layer 2, but those of .* go from 0 to 1"),
        (["adapter.qkv_tokens=null", "adapter.ffn_tokens=null"], "adapter has nothing that learns"),
        (["adapter.also=[head]"], "adapter.also names 'head', but no parameter"),
        (["adapter.name=''"], "adapter.name is empty"),
        (["adapter.hold=bf16", "parallel.shard=2"], "FSDP shards parameters of one type"),
        (["adapter.base=abc"], "model' is missing|has the digest"),
    ],
)
def test_what_is_refused(tune, tmp_path, settings, said):
    with pytest.raises(UserError, match=said):
        Trainer(tune(*settings), tmp_path / "run").run()
    assert not (tmp_path / "run").exists()


def test_the_average_of_a_run_is_attached_unless_its_last_weights_are_asked_for(tune, base, tmp_path):
    smooth, plain = tmp_path / "smooth", tmp_path / "plain"
    trained(tune("train.ema=0.9"), smooth)
    trained(tune(), plain)
    ids = torch.arange(24).view(2, 12)

    def logits(run: Path, **how) -> torch.Tensor:
        return tokenformer.attach(tokenformer.load(base), run, "mine", **how)(ids).logits

    assert torch.equal(logits(smooth, average=False), logits(plain))
    assert not torch.equal(logits(smooth), logits(plain)) and torch.equal(logits(plain, average=False), logits(plain))


def test_raw_weights_are_the_adapters_and_the_base_stays_what_it_is(tune, config_file, tmp_path, capsys):
    """Both runs average their weights. Resume of the adapter's finds its base when that was trained on, too."""
    base, run = tmp_path / "base", tmp_path / "run"
    assert Trainer(read_config(config_file, overrides=["steps=6", "train.ema=0.9"]), base).run() is None
    trained(tune("train.ema=0.9", start=base), run)
    (tmp_path / "text.txt").write_bytes(TEXT.read_bytes()[:300])

    def loss(model: Path, *words: str) -> float:
        out = tmp_path / "out.json"
        command = ["eval", str(model), "--text", str(tmp_path / "text.txt"), "--out", str(out), "--force", *words]
        assert main(command) == 0, capsys.readouterr().err
        return json.loads(out.read_text())["texts"][str(tmp_path / "text.txt")]["loss"]

    adapter = ["--adapter", str(run)]
    smooth, raw = loss(base, *adapter), loss(base, *adapter, "--weights", "raw")
    wanted = tokenformer.attach(tokenformer.load(base), run, "mine", average=False)
    tokenformer.save(merged(wanted), tmp_path / "raw", tokenizer_json=open_model(base).tokenizer_json)
    assert smooth != raw and loss(base, "--weights", "raw") != loss(base)
    assert loss(tmp_path / "raw") == pytest.approx(raw, abs=1e-6)

    Trainer(read_config(base / "config.yml", overrides=["steps=8", "checkpoint.keep=0"]), base, resume=True).run()
    config = run / "config.yml"
    with pytest.raises(UserError, match=r"of a run that was trained on, name the checkpoint .*start=RUN/checkpoints"):
        Trainer(read_config(config, overrides=["steps=14"]), run, resume=True).run()
    earlier = next((base / "checkpoints").glob("step-*6"))
    trained(read_config(config, overrides=["steps=14", f"start={earlier}"]), run, resume=True)


def test_a_base_of_several_trunks_is_refused_with_what_can_be_tuned(tune, tmp_path):
    tower = {"layers": 1, "dim": 16, "heads": 2, "qkv_tokens": 8, "proj_tokens": 8, "ffn_tokens": 8}
    image = ModelConfig(**tower, of="image", image_size=16, patch=8, pool="mean", classes=0)
    pair = ModelConfig(of="caption", trunks={"image": image, "text": ModelConfig(**tower, vocab=384, context=32)})
    tokenformer.save(build(pair), tmp_path / "caption")
    with pytest.raises(
        UserError, match="is of several trunks: choose a language or an image model of kind tokenformer"
    ):
        tune(start=tmp_path / "caption")


def test_an_adapter_is_no_model(tune, tmp_path):
    trained(tune("steps=1"), tmp_path / "run")
    with pytest.raises(UserError, match="trains an adapter, not a model: give its base, and --adapter"):
        tokenformer.load(tmp_path / "run")
