"""A run or a checkpoint is taken wherever weights are."""

import re

import pytest
import torch

import tokenformer
from tokenformer.cli.main import main
from tokenformer.errors import UserError
from tokenformer.hub.open import open_model
from tokenformer.train.trainer import Trainer


def test_a_run_is_its_last_checkpoint(tiny, tmp_path):
    trainer = Trainer(tiny("steps=6", "checkpoint.every=3"), tmp_path / "run")
    trainer.run()
    for source in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000006"):
        model = tokenformer.load(source)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trainer.model.parameters(), strict=True))
        opened = open_model(source)
        assert opened.config == trainer.model.config and '"<|endoftext|>"' in opened.tokenizer_json
    earlier = tokenformer.load(tmp_path / "run" / "checkpoints" / "step-00000003")
    assert not torch.equal(earlier.embedding.weight, model.embedding.weight)


def test_a_run_can_be_handed_on_as_a_folder_and_begun_from(tiny, tmp_path):
    first = Trainer(tiny("steps=3"), tmp_path / "run")
    first.run()
    assert main(["convert", str(tmp_path / "run"), "--to", "ours", "--out", str(tmp_path / "folder")]) == 0
    handed = tokenformer.load(tmp_path / "folder")
    assert torch.equal(handed.embedding.weight, first.model.embedding.weight)
    second = Trainer(tiny(f"start={tmp_path / 'run'}", "steps=0", "model.ffn_tokens=40"), tmp_path / "second")
    second.run()
    new, old = (t.model.blocks[0].ffn.segments[0].key_tokens for t in (second, first))
    assert torch.equal(new[:32], old) and new[32:].std() > 0.01
    with pytest.raises(UserError, match="only the number of parameter tokens may differ"):
        Trainer(tiny(f"start={tmp_path / 'run'}", "model.dim=32"), tmp_path / "third").run()


def test_what_the_weights_do_not_hold_is_said(tiny, tmp_path, capsys):
    Trainer(tiny("steps=0"), tmp_path / "run").run()
    deeper, more = "blocks.2.attention.query.segments.0.key_tokens and 9 more", "added_embedding.weight"
    for setting, wanted in (("model.layers=3", [deeper]), ("model.added_vocab=5", [more]), ("model.layers=2", [])):
        capsys.readouterr()
        Trainer(tiny(f"start={tmp_path / 'run'}", "steps=0", setting), tmp_path / setting).run()
        assert re.findall("begin as in a new model: (.*)", capsys.readouterr().out) == wanted


def test_a_run_begun_with_weights_takes_over_the_growths_that_led_to_them(tiny, tmp_path):
    Trainer(tiny("steps=1"), tmp_path / "run").run()
    grown = tokenformer.grow(tokenformer.load(tmp_path / "run"), ffn_tokens=48)
    tokenformer.save(grown, tmp_path / "grown", tokenizer_json=open_model(tmp_path / "run").tokenizer_json)
    stage = "growth=[{at: {step: 1}, layers: 3}]"
    Trainer(tiny(f"start={tmp_path / 'grown'}", "steps=2", "model.ffn_tokens=[32,16]", stage), tmp_path / "on").run()
    history = tokenformer.load(tmp_path / "on").history
    assert [event["number"] for event in history] == [0, 1] and history[0] == grown.history[0]


def test_info_of_a_run_reads_its_configs_but_not_its_weights(tiny, tmp_path, capsys):
    Trainer(tiny("steps=2", "checkpoint.every=1"), tmp_path / "run").run()
    model = tmp_path / "run" / "checkpoints" / "step-00000002" / "model"
    (shard,) = model.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")  # of the same size: only a checksum tells
    assert main(["info", str(tmp_path / "run")]) == 0
    assert "is damaged" not in capsys.readouterr().err
    config = (model / "config.yml").read_text()
    (model / "config.yml").write_text(config.replace("heads: 2", "heads: 1"))
    assert main(["info", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert "step-00000002 is damaged (" in err and "2 heads of" in out


def test_a_damaged_checkpoint_is_not_loaded(tiny, tmp_path):
    Trainer(tiny("steps=3"), tmp_path / "run").run()
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    with pytest.raises(UserError, match="was not completed"):
        tokenformer.load(tmp_path / "run")
