"""A folder read and written one tensor at a time is the folder that `save` and `load` know, whole or not there."""

import pytest
import torch

from tokenformer import LanguageModel, ModelConfig, UserError, load, save
from tokenformer.hub import folder
from tokenformer.hub.folder import Stored, write_folder

SHAPE = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=8, proj_tokens=8, ffn_tokens=[16, 4], vocab=128)


@pytest.fixture
def model():
    return LanguageModel(SHAPE, seed=3)


def stream(model, place, tensors=None, **more):
    named = [(n, p.detach()) for n, p in model.named_parameters()]
    types = {n: t.dtype for n, t in named}
    write_folder(place, model.config, [{"what": "grow"}], tensors or iter(named), types, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_written_in_shards_it_loads_bit_for_bit(model, tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(folder, "SHARD_BYTES", 10_000)
    model = model.to(dtype)
    stream(model, tmp_path / "out", tokenizer_json="{}")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    back = load(tmp_path / "out")
    assert back.config == model.config and back.history == [{"what": "grow"}]
    tensors = dict(back.named_parameters())
    assert all(torch.equal(p, tensors[n]) and p.dtype == tensors[n].dtype for n, p in model.named_parameters())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_stored_tensors_are_those_that_were_saved(model, tmp_path):
    save(model, tmp_path / "out")
    stored = Stored(tmp_path / "out")
    assert stored.config == model.config and len(stored) == len(dict(model.named_parameters()))
    assert all(torch.equal(stored[n], p) for n, p in model.named_parameters())


def test_what_goes_wrong_on_the_way_leaves_nothing_behind(model, tmp_path):
    def broken():
        yield from [(n, p.detach()) for n, p in model.named_parameters()][:5]
        raise OSError("no space left on device")

    with pytest.raises(UserError, match=r"could not be written \(no space"):
        stream(model, tmp_path / "out", tensors=broken())
    with pytest.raises(RuntimeError, match="was due"):
        stream(model, tmp_path / "out", tensors=iter([("norm.bias", torch.zeros(32))]))
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_refused_when_they_are_read(model, tmp_path):
    with torch.no_grad():
        model.norm.bias[3] = torch.nan
    save(model, tmp_path / "out")
    with pytest.raises(UserError, match=r"norm\.bias"):
        Stored(tmp_path / "out")["norm.bias"]
