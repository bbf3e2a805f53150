"""Models that go through the files of transformers and back: growth, adapters, vocabularies, what is missing."""

import dataclasses
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import tokenformer
from tests.test_adapters import make_adapter, make_base
from tokenformer import UserError

pytest.importorskip("transformers", minversion="5.17")

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)

from tests.hub.hf_models import CONFIGS, IDS, lively, padded
from tokenformer.hub.hf import TokenFormerConfig, TokenFormerForCausalLM


def test_golden_logits_through_transformers_and_the_way_back(golden, tmp_path, relative):
    folder, tensors = golden
    native = tokenformer.load(folder)
    tokenformer.save(native, tmp_path / "hf", format="hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        logits = model(tensors["input_ids"]).logits
        assert relative(logits, tensors["logits"]) < 2e-5
        assert torch.equal(logits, native(tensors["input_ids"]).logits)
    tokenformer.save(tokenformer.load(tmp_path / "hf"), tmp_path / "back", format="official")
    back = tokenformer.load(tmp_path / "back")
    assert all(torch.equal(a, b) for a, b in zip(native.parameters(), back.parameters(), strict=True))


def test_a_folder_carries_its_tokenizer(one, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, 256)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="w1"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenformer.save(one[0], tmp_path / "hf", format="hf", tokenizer_json=plain.to_str())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0 and tokenizer.model_max_length == 32
    inputs = tokenizer(["w5 w6 w7", "w8"], return_tensors="pt", padding=True)
    assert set(inputs) == {"input_ids", "attention_mask"} and inputs["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 0
    text = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=3, do_sample=False)[:, 3:])
    wanted = [one[0].generate(torch.tensor([ids]), 3)[0, -3:].tolist() for ids in ([5, 6, 7], [8])]
    assert [line.split() for line in text] == [[f"w{i}" for i in ids] for ids in wanted]


def test_folders_of_transformers_hold_the_same_model(both, tmp_path):
    native, model = both
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(index) == sorted(f"model.{name}" for name, _ in native.named_parameters())  # tied: no head
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is TokenFormerForCausalLM and again.config.to_native() == native.config
    assert torch.equal(again(IDS).logits, native(IDS).logits)
    back = tokenformer.load(tmp_path)
    assert back.config == native.config and torch.equal(back(IDS).logits, native(IDS).logits)


def test_a_config_that_was_edited_in_an_export_is_refused_and_saving_anew_is_the_way(one, tmp_path):
    tokenformer.save(one[0], tmp_path / "model", format="hf")
    config = tmp_path / "model" / "config.json"
    AutoModelForCausalLM.from_pretrained(config.parent)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"heads": 2}))
    with pytest.raises(UserError, match=r"config.json was changed since .* delete its manifest.json if you changed it"):
        AutoModelForCausalLM.from_pretrained(config.parent)
    (config.parent / "manifest.json").rename(tmp_path / "manifest.json")
    model = AutoModelForCausalLM.from_pretrained(config.parent)
    assert model.config.heads == 2
    (tmp_path / "manifest.json").rename(config.parent / "manifest.json")
    model.save_pretrained(config.parent)  # it describes itself again
    assert AutoModelForCausalLM.from_pretrained(config.parent).config.heads == 2
    assert tokenformer.load(config.parent).config.heads == 2


def test_the_vocabulary_can_be_resized(both, tmp_path):
    native, model = both
    before = native(IDS).logits
    for size, mean in ((300, True), (310, False)):
        model.resize_token_embeddings(size, mean_resizing=mean)
        assert model.config.vocab == model.config.vocab_size == model.model.config.vocab == size
        assert torch.allclose(model(IDS).logits[..., :256], before, atol=1e-5)
        assert model.get_output_embeddings().weight is model.model.head_weight  # also of a tied head
    assert model.model.embedding.weight[300:].std().item() == pytest.approx(0.02, rel=0.2)
    model.save_pretrained(tmp_path)
    assert torch.equal(tokenformer.load(tmp_path)(IDS).logits, model(IDS).logits)


def test_what_is_missing_is_said_and_filled_as_the_native_model_would(one, tmp_path):
    one[1].save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"], weights["model.blocks.1.ffn.segments.0.value_tokens"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"model.norm.weight", "model.blocks.1.ffn.segments.0.value_tokens"}
    assert torch.equal(model.model.norm.weight, torch.ones(64))
    assert model.model.blocks[1].ffn.segments[0].value_tokens.std().item() == pytest.approx(2 / (3 * 8), rel=0.05)
    assert torch.equal(model.model.embedding.weight, one[0].embedding.weight)
    weights["model.norm.weight"] = torch.ones(32)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_loading_draws_no_random_numbers_and_takes_a_type(one, tmp_path, monkeypatch):
    one[1].save_pretrained(tmp_path)
    import tokenformer.hub.hf.language as hf
    import tokenformer.models.init as init

    for module in (hf, init):
        monkeypatch.setattr(module, "initial", None)
    for extra in ({}, {"device_map": "cpu"}, {"dtype": torch.bfloat16}):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **extra)
        assert model(IDS).logits.dtype == extra.get("dtype", torch.float32)
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).device.type == "meta"


def test_a_new_model_follows_the_global_seed():
    config = TokenFormerConfig.from_native(CONFIGS["one"])
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(TokenFormerForCausalLM(config).model.embedding.weight)
    assert torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])
    assert models[0].std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_config_is_ours_under_transformers_names_too(kind, tmp_path):
    native = CONFIGS[kind]
    config = TokenFormerConfig.from_native(native, eos_token_id=3)
    assert config.to_native() == native.resolved()
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size, config.head_dim) == (64, 3, 256, 16)
    assert config.num_key_value_heads == (2 if kind == "llama" else 4) and config.max_position_embeddings == 32
    assert config.tie_word_embeddings == native.tied and config.eos_token_id == 3
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_native() == native.resolved()
    assert TokenFormerConfig(**config.to_dict()).to_native() == native.resolved()


def test_the_growth_history_goes_through_transformers_and_back(one, tmp_path):
    grown = tokenformer.grow(one[0], ffn_tokens=96)
    tokenformer.save(grown, tmp_path / "ours to hf", format="hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours to hf").save_pretrained(tmp_path / "again")
    assert len(grown.history) == 1
    assert tokenformer.load(tmp_path / "again").history == grown.history
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").model.history == grown.history


def test_tokens_that_are_added_take_the_place_of_padding_and_may_be_chosen(tmp_path):
    loaded, tokenizer = padded(lively(CONFIGS["one"]), tmp_path)
    tokenizer.add_tokens(["<turn>"])  # gets the first id behind the others, which was padding
    prompt, how = torch.tensor([[3, 201]]), {"max_new_tokens": 2, "pad_token_id": 0}
    with pytest.warns(UserWarning, match=r"the prompt holds the id 201, .*resize_token_embeddings\(len\(tokenizer\)\)"):
        loaded.generate(prompt, **how)
    loaded.generation_config.suppress_tokens.insert(0, 7)
    for rows, more in ((202, {}), (256, {"pad_to_multiple_of": 64}), (320, {"pad_to_multiple_of": 160})):
        loaded.resize_token_embeddings(len(tokenizer), mean_resizing=False, **more)
        assert loaded.config.vocab_size == rows
        assert loaded.generation_config.suppress_tokens == [7, *range(202, rows)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.generate(prompt, **how)


def test_ids_that_a_growth_added_are_counted_and_the_table_around_them_is_not_resized(one):
    wrapped = TokenFormerForCausalLM.from_native(tokenformer.grow(one[0], vocab=300))
    assert wrapped.config.vocab_size == wrapped(IDS).logits.shape[-1] == 300
    with pytest.raises(UserError, match="a growth added ids to this vocabulary, which would get other numbers: save"):
        wrapped.resize_token_embeddings(310)
    assert wrapped(IDS).logits.shape[-1] == 300
    hidden = TokenFormerForCausalLM.from_native(tokenformer.grow(one[0], vocab=300, switch="draw"))
    assert hidden.config.vocab_size == hidden(IDS).logits.shape[-1] == 256


def test_a_folder_saved_over_by_transformers_loads(one, tmp_path):
    """The manifest of the export describes weights that are there no more."""
    tokenformer.save(tokenformer.grow(one[0], ffn_tokens=96), tmp_path / "export", format="hf")
    one[1].save_pretrained(tmp_path / "export")
    assert torch.equal(tokenformer.load(tmp_path / "export")(IDS).logits, one[0](IDS).logits)


def test_an_exported_model_takes_adapters_and_is_not_saved_with_them(tmp_path):
    base = make_base(vocab=256)
    tokenformer.save(base, tmp_path / "hf", format="hf")
    make_adapter(tmp_path / "books", base, 1, qkv=5, ffn=7)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    plain, ids = model(IDS).logits, IDS[:, :3]
    native = tokenformer.attach(base, tmp_path / "books", "books")
    tokenformer.attach(model.model, tmp_path / "books", "books")
    assert torch.equal(model(IDS).logits, native(IDS).logits) and not torch.equal(model(IDS).logits, plain)
    made = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(made, native.generate(ids, 5))
    with tokenformer.detached(model.model):
        assert torch.equal(model(IDS).logits, plain)
    with pytest.raises(UserError, match=r"adapters are attached \(books\)"):
        model.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("sizes", [{"ffn_tokens": 200}, {"layers": 4, "qkv_tokens": 100}])
def test_a_grown_model_in_a_wrapper_is_saved_with_its_own_config(one, tmp_path, sizes):
    one[1].save_pretrained(tmp_path / "small")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match="grow that one"):
        tokenformer.grow(model, **sizes)
    model.model = tokenformer.grow(model.model, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # as training does
    model.save_pretrained(tmp_path / "grown")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    ids = torch.arange(6)[None]
    assert again.model.config == model.model.config and len(again.model.history) == 1
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), model.model.generate(ids, 3))


@pytest.mark.filterwarnings("error")
def test_keys_that_no_shape_shows_are_said_where_they_are_not_those_of_the_weights(one, tmp_path):
    tokenformer.save(one[0], tmp_path / "model", format="hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(UserWarning, match="heads is 2 here but 4 in the config beside the weights, so the same"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", heads=2)
    other = TokenFormerConfig.from_native(dataclasses.replace(one[0].config, tau={"ffn": [5.0]}))
    with pytest.raises(UserWarning, match=r"tau is .*5\.0.* here but .* something else: leave tau out"):
        TokenFormerForCausalLM.from_pretrained(tmp_path / "model", config=other)
