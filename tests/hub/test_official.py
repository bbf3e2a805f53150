"""Official weights and YAML files: read as they are, written back, and refused with a reason."""

import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tokenformer.config import LayerOverride, ModelConfig
from tokenformer.config import load as load_preset
from tokenformer.errors import UserError
from tokenformer.hub import load, save
from tokenformer.hub.official import config_beside, refusal, to_official
from tokenformer.hub.official_config import read_generation
from tokenformer.hub.open import read_config
from tokenformer.models import LanguageModel

SHAPE = {"layers": 2, "dim": 32, "heads": 2, "qkv_tokens": 9, "proj_tokens": 16, "ffn_tokens": 25, "vocab": 64}


def test_the_way_back_is_bit_equal(golden, tmp_path):
    folder, expected = golden
    model = load(folder)
    save(model, tmp_path / "again", format="official")
    before = torch.load(folder / "pytorch_model.bin", weights_only=True)
    after = torch.load(tmp_path / "again" / "pytorch_model.bin", weights_only=True)
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.float32 for name in before)
    again = load(tmp_path / "again")
    assert again.config == model.config
    assert torch.equal(again(expected["input_ids"]).logits, model(expected["input_ids"]).logits)


def test_a_weight_file_takes_the_config_that_is_given(golden):
    folder, expected = golden
    config = read_config(folder / "config.yml").model
    assert torch.equal(
        load(folder / "pytorch_model.bin", config=config)(expected["input_ids"]).logits,
        load(folder)(expected["input_ids"]).logits,
    )


@pytest.mark.parametrize("world", [1, 2])
def test_a_zero_folder_is_a_model(golden_folder, world):
    data = golden_folder.parent / "zero"
    config = read_config(data / "config.yml").model
    model = load(data / f"world{world}", config=config)
    expected = load_file(data / f"expected_world{world}.safetensors")
    assert len(expected) == len(dict(model.named_parameters()))
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[to_official(name, 2)])


def test_the_released_shapes_need_no_config(tmp_path):
    """Heads cannot be seen in tensors; those of the released models are known. A hub config has no model_type."""
    config = ModelConfig(layers=12, dim=768, heads=12, qkv_tokens=2, proj_tokens=2, ffn_tokens=3, vocab=128)
    save(LanguageModel(config), tmp_path / "m", format="official")
    for name in ("config.yml", "manifest.json"):  # which lists the config
        os.unlink(tmp_path / "m" / name)
    assert load(tmp_path / "m").config == config.resolved()
    (tmp_path / "m" / "config.json").write_text('{"architectures": ["TokenFormerForCausalLM"]}')
    assert load(tmp_path / "m").config == config.resolved()


@pytest.mark.parametrize("preset", ["lm/150m", "lm/450m", "lm/900m", "lm/1.5b"])
def test_heads_of_released_shapes_are_those_of_their_presets(preset, tmp_path):
    released = load_preset(preset, overrides=["data.path=none", "batch=1"]).model
    shape = {"layers": released.layers, "dim": released.dim, "vocab": 128, "qkv_tokens": 1, "proj_tokens": 1}
    assert config_beside(tmp_path / "pytorch_model.bin", {**shape, "ffn_tokens": 1}).heads == released.heads


def test_a_config_without_a_vocabulary_takes_that_of_the_tensors(golden_folder, tmp_path):
    shutil.copytree(golden_folder / "softmax", tmp_path / "m")
    text = (tmp_path / "m" / "config.yml").read_text()
    rows = load(tmp_path / "m").config.vocab
    (tmp_path / "m" / "config.yml").write_text(
        "".join(line for line in text.splitlines(keepends=True) if "padded_vocab_size" not in line.replace("-", "_"))
    )
    assert text != (tmp_path / "m" / "config.yml").read_text()
    assert load(tmp_path / "m").config.vocab == rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ffn_tokens": [9, 16]}, "its ffn projections have 2 segments"),
        ({"switch": {"ffn": ["image"]}}, "segments count only with the switch image"),
        ({"tau": {"proj": [3.0]}}, "τ of its proj projections is 3, not √16"),
        ({"layer_overrides": {1: LayerOverride(ffn_tokens=4)}}, "its layers differ"),
        ({"theta": "l1_norm_gelu"}, "l1_norm_gelu does not exist there"),
        ({"tied": False}, "not tied"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_with_the_reason(tmp_path, change, reason):
    model = LanguageModel(ModelConfig(**{**SHAPE, **change}))
    with pytest.raises(UserError, match=reason):
        save(model, tmp_path / "out", format="official")
    assert os.listdir(tmp_path) == []


def test_tau_may_be_written_out_as_the_root():
    model = ModelConfig(**SHAPE, tau={"proj": [math.sqrt(16)], "qkv": [3.0], "ffn": [5.0]})
    assert refusal(model) is None


def test_all_official_configs_parse(shared, capsys):
    sizes = {"150M": 12, "450M": 24, "900M": 32, "1-5B": 40, "354M": 24}
    files = sorted((shared / "golden" / "configs").glob("*.yml"))
    assert len(files) == 12
    for path in files:
        if path.name == "text_generation.yml":
            with pytest.raises(UserError, match="has generation settings but no model"):
                read_config(path)
            merged = read_config(files[0], path).model
            assert merged == read_config(files[0]).model
            continue
        model = read_config(path).model
        assert model.layers == sizes[path.name.split("_")[0]]
        assert model.theta == "l2_norm_gelu"
        assert "official keys that do not change the model were ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('"norm": "rmsnorm"', "norm is 'rmsnorm', but only 'layernorm_nonparam'"),
        ('"gpt_j_residual": true', "gpt_j_residual is True"),
        ('"attention_config": [[["flash"], 3]]', "attention_config names flash"),
        ('"pos_emb": "alibi"', "pos_emb is 'alibi'"),
        ('"use_mup": true', "use_mup is True"),
        ('"mixture_of_depths": 3', "the official key 'mixture_of_depths' is not one that we know"),
        ('"norm_activation_type": "relu"', "model.theta is 'relu'"),
        ('"num-attention-heads": 5', "does not divide dim"),
    ],
)
def test_a_key_that_changes_the_function_is_refused_by_name(golden_folder, tmp_path, line, sentence):
    base = golden_folder / "l2_norm_gelu" / "config.yml"
    (tmp_path / "more.yml").write_text("{" + line + "}")
    with pytest.raises(UserError) as caught:
        read_config(base, tmp_path / "more.yml")
    assert sentence in str(caught.value)


def test_hyphens_and_capital_false_are_understood_and_files_merge(golden_folder, tmp_path):
    base = golden_folder / "l2_norm_gelu" / "config.yml"
    (tmp_path / "more.yml").write_text('{ "qkv-slot-num": 44, # more\n "use_wandb": False, }')
    assert read_config(base, tmp_path / "more.yml").model.qkv_tokens == 44
    assert read_config(base, overrides=["model.ffn_tokens=[72, 8]"]).model.ffn_tokens == [72, 8]


def harmed(folder, harm):
    path = folder / "pytorch_model.bin"
    tensors = torch.load(path, weights_only=True)
    name = "sequential.3.attention.key.value_param_tokens"
    if harm == "missing tensor":
        del tensors[name]
    elif harm == "extra tensor":
        tensors["sequential.9.extra"] = torch.ones(1)
    elif harm == "wrong shape":
        tensors[name] = torch.ones(41, 64)
    elif harm == "not finite":
        tensors[name] = torch.full((40, 64), float("nan"))
    elif harm == "whole numbers":
        tensors[name] = torch.ones(40, 64, dtype=torch.int64)
    elif harm == "no mapping":
        tensors = [torch.ones(2)]
    if harm == "cut off":
        path.write_bytes(path.read_bytes()[:-1000])
    elif harm == "not torch":
        path.write_text("hello")
    else:
        torch.save(tensors, path)


HARMS = (
    "missing tensor",
    "extra tensor",
    "wrong shape",
    "not finite",
    "whole numbers",
    "no mapping",
    "cut off",
    "not torch",
)


@pytest.mark.parametrize("harm", HARMS)
def test_harmed_weights_are_refused_by_the_command_line_with_nothing_written(golden_folder, tmp_path, capsys, harm):
    import shutil

    from tokenformer.cli.main import main

    shutil.copytree(golden_folder / "l2_norm_gelu", tmp_path / "in")
    harmed(tmp_path / "in", harm)
    assert main(["convert", "--to", "ours", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenformer: ")]
    assert len(lines) == 1
    assert os.listdir(tmp_path) == ["in"]


def test_generation_settings_are_read_from_every_official_file_and_a_typo_is_refused(shared, tmp_path):
    files = sorted((shared / "golden" / "configs").glob("*.yml"))
    assert len(files) > 5
    for file in files:
        assert read_generation(file).has_model == (file.name != "text_generation.yml")
    (tmp_path / "typo.yml").write_text('{"text-gen-type": "unconditional", "maximum_token": 9}')
    with pytest.raises(UserError, match=r"typo.yml: .*'maximum_token' .*did you mean 'maximum_tokens'"):
        read_generation(files[0], tmp_path / "typo.yml")
