"""Folders for transformers, written and read without it; what is wrong with one is said in a sentence."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import tokenformer
from tokenformer import UserError
from tokenformer.config import LayerOverride, ModelConfig
from tokenformer.hub import folder
from tokenformer.hub.hf_folder import load_hf, read_config, save_hf
from tokenformer.models import LanguageModel

SHAPE = {"layers": 3, "dim": 64, "heads": 4, "vocab": 256, "context": 32}
ONE = {"qkv_tokens": 40, "proj_tokens": 24, "ffn_tokens": 72}
SEGMENTED = {
    "qkv_tokens": [16, 24],
    "proj_tokens": 24,
    "ffn_tokens": [24, 48],
    "tau": {"ffn": [4.0, 9.5]},
    "layer_overrides": {1: LayerOverride(ffn_tokens=[8, 8, 8]), 2: LayerOverride(tau={"ffn": [1.0, 0.1]})},
}
CONFIGS = {
    "one": ModelConfig(**SHAPE, **ONE),
    "segmented": ModelConfig(**SHAPE, **SEGMENTED, theta="softmax"),
    "transformer": ModelConfig(**SHAPE, kind="transformer"),
    "llama": ModelConfig(**SHAPE, kind="llama", kv_heads=2, tied=False, rotary_fraction=1.0),
}


@pytest.fixture
def saved(tmp_path):
    """A small model and its folder."""
    model = LanguageModel(CONFIGS["one"], seed=1)
    save_hf(model, tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()  # as transformers leaves it
    return model, tmp_path / "model"


def edit(folder, change):
    """Rewrite config.json after `change(raw)`."""
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shard", [5 * 10**9, 30_000])
def test_there_and_back_is_bit_equal(kind, shard, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "SHARD_BYTES", shard)
    model = LanguageModel(CONFIGS[kind], seed=2).to(torch.bfloat16 if kind == "llama" else torch.float32)
    model.history = [{"grown": 1}]
    save_hf(model, tmp_path / "model")
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) == 1 if shard > 10**9 else len(files) > 3
    assert sum(f.stat().st_size for f in files) < sum(p.nbytes for p in model.parameters()) + 500 * 40  # tied: once
    back = tokenformer.load(tmp_path / "model")
    assert back.config == model.config and back.history == model.history
    for (name, ours), (other, theirs) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other and ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_the_config_has_our_keys_with_every_tau_written_out(tmp_path):
    save_hf(LanguageModel(CONFIGS["segmented"]), tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    assert raw["ffn_tokens"] == [24, 48] and raw["tau"] == {"qkv": [4.0, 24**0.5], "proj": [24**0.5], "ffn": [4.0, 9.5]}
    assert raw["layer_overrides"]["1"] == {
        "ffn_tokens": [8, 8, 8],
        "tau": {"qkv": [4.0, 24**0.5], "proj": [24**0.5], "ffn": [8**0.5] * 3},
    }


def test_a_folder_is_written_and_read_without_transformers(tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import tokenformer\n"
        "from tokenformer import ModelConfig, LanguageModel\n"
        "c = ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=4, vocab=128)\n"
        f"tokenformer.save(LanguageModel(c), {str(tmp_path / 'model')!r}, format='hf')\n"
        f"print(tokenformer.load({str(tmp_path / 'model')!r}).cost().parameters)\n"
        "try:\n    import tokenformer.hub.hf\nexcept tokenformer.UserError as e:\n    print(e)\n"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")
    assert lines[0] == "2720" and "pip install 'tokenformer[hf]'" in lines[1]


def test_the_tokenizer_and_its_special_token_go_along(tmp_path):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2}, unk_token="a")).to_str()
    save_hf(LanguageModel(CONFIGS["one"]), tmp_path / "model", tokenizer_json=tokenizer)
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    assert raw["eos_token_id"] == raw["pad_token_id"] == 0
    assert (tmp_path / "model" / "tokenizer.json").read_text() == tokenizer
    card = (tmp_path / "model" / "README.md").read_text()
    assert "license: unknown" in card and "99,456 parameters" in card and "AutoTokenizer" in card
    wide = Tokenizer(models.WordLevel({"a": 256}, unk_token="a")).to_str()
    for bad, word in ((wide, "id 256"), ("{}", "not a tokenizer.json")):
        with pytest.raises(UserError, match=word):
            save_hf(LanguageModel(CONFIGS["one"]), tmp_path / "other", tokenizer_json=bad)
    assert not (tmp_path / "other").exists()


def test_nothing_is_overwritten(saved):
    with pytest.raises(UserError, match="is there already"):
        save_hf(*saved)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda raw: raw.update(qkv_token=raw.pop("qkv_tokens")), "unknown key 'qkv_token': did you mean 'qkv_tokens'"),
        (lambda raw: raw.update(rope_scaling={"factor": 2}), "unknown key 'rope_scaling'"),
        (lambda raw: raw.pop("layers"), "layers' is missing"),
        (lambda raw: raw.update(heads=5), "heads is 5"),
        (lambda raw: raw.update(dim=32), "shape"),
        (lambda raw: raw.update(layers=4), "lacks 'blocks.3"),
        (lambda raw: raw.update(layers=2), "has 'blocks.2"),
    ],
)
def test_a_wrong_config_is_named(saved, change, sentence):
    edit(saved[1], change)
    with pytest.raises(UserError, match=sentence):
        load_hf(saved[1])


def test_a_config_that_transformers_saved_again_is_read(saved):
    edit(saved[1], lambda raw: raw.update(kv_heads=None, ffn_dim=None, layer_overrides=None, use_cache=True))
    assert read_config(saved[1]) == saved[0].config


@pytest.mark.parametrize("what", ["truncated", "missing", "too many", "shape", "nan", "integers", "no file", "index"])
def test_broken_weights_are_named(saved, what):
    folder = saved[1]
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name, sentence = "model.blocks.1.ffn.segments.0.key_tokens", what
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
        sentence = "not a whole safetensors file"
    elif what == "no file":
        weights.unlink()
        sentence = "model.safetensors"
    elif what == "index":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../elsewhere"}}')
        sentence = "names no files of its own"
    else:
        if what == "missing":
            del tensors[name]
            sentence = "lacks 'blocks.1.ffn.segments.0.key_tokens'"
        elif what == "too many":
            tensors["model.extra"] = torch.zeros(1)
            sentence = "has 'extra' too many"
        elif what == "shape":
            tensors[name] = torch.zeros(71, 64)
            sentence = r"\[71, 64\]"
        elif what == "nan":
            tensors[name][3, 5] = torch.nan
            sentence = "not finite"
        elif what == "integers":
            tensors[name] = tensors[name].int()
            sentence = "holds I32"
        save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=sentence):
        load_hf(folder)
