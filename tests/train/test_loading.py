"""A run or a checkpoint is taken wherever weights are."""

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


def test_a_damaged_checkpoint_is_not_loaded(tiny, tmp_path):
    Trainer(tiny("steps=3"), tmp_path / "run").run()
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    with pytest.raises(UserError, match="was not completed"):
        tokenformer.load(tmp_path / "run")
