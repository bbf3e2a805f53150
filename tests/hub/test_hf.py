"""The transformers classes against the native model: the same numbers, whatever transformers does around them."""

import copy
import dataclasses
import json
import warnings

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import tokenformer
from tests.test_adapters import make_adapter, make_base
from tokenformer import UserError
from tokenformer.config import LayerOverride, ModelConfig
from tokenformer.models import LanguageModel

pytest.importorskip("transformers", minversion="5.17")

from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from tokenformer.hub.hf import TokenFormerConfig, TokenFormerForCausalLM

SHAPE = {"layers": 3, "dim": 64, "heads": 4, "vocab": 256, "context": 32}
CONFIGS = {
    "one": ModelConfig(**SHAPE, qkv_tokens=40, proj_tokens=24, ffn_tokens=72),
    "segmented": ModelConfig(
        **SHAPE,
        qkv_tokens=[16, 24],
        proj_tokens=24,
        ffn_tokens=[24, 48],
        tau={"ffn": [4.0, 9.5]},
        layer_overrides={1: LayerOverride(ffn_tokens=[8, 8, 8])},
    ),
    "transformer": ModelConfig(**SHAPE, kind="transformer"),
    "llama": ModelConfig(**SHAPE, kind="llama", kv_heads=2, tied=False, rotary_fraction=1.0),
}
IDS = torch.randint(256, (3, 10), generator=torch.Generator().manual_seed(0))
LABELS = IDS.clone().masked_fill(IDS < 60, -100)
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny products are many times slower on threads that other tests want too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def lively(config: ModelConfig) -> LanguageModel:
    """A model whose greedy text is not one token again and again."""
    model = LanguageModel(config, seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return model


@pytest.fixture(params=CONFIGS)
def both(request) -> tuple[LanguageModel, TokenFormerForCausalLM]:
    model = lively(CONFIGS[request.param])
    return model, TokenFormerForCausalLM.from_native(copy.deepcopy(model))


@pytest.fixture
def one() -> tuple[LanguageModel, TokenFormerForCausalLM]:
    model = lively(CONFIGS["one"])
    return model, TokenFormerForCausalLM.from_native(copy.deepcopy(model))


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


def test_plain_calls_are_bit_equal_to_native(both):
    native, model = both
    with torch.no_grad():
        logits = native(IDS).logits
        for extra in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(IDS)}):
            assert torch.equal(model(IDS, **extra).logits, logits)
        shifted = torch.arange(5, 15)
        assert torch.equal(model(IDS, position_ids=shifted[None]).logits, native(IDS, positions=shifted).logits)
        kept = model(IDS, logits_to_keep=2).logits
        assert kept.shape[1] == 2 and torch.allclose(kept, logits[:, -2:], atol=1e-5)
        kept = model(IDS, logits_to_keep=torch.tensor([1, 4])).logits
        assert torch.allclose(kept, logits[:, [1, 4]], atol=1e-5)
        assert torch.equal(model(IDS, return_dict=False)[0], logits)


def test_the_flash_path_is_kept_without_padding(one, monkeypatch):
    """No mask reaches attention where none is needed, and one does where it is."""
    import tokenformer.models.trunk as trunk

    masks, attention = [], trunk.attention
    monkeypatch.setattr(trunk, "attention", lambda *a, mask, **k: masks.append(mask) or attention(*a, mask=mask, **k))
    ones = torch.ones_like(IDS)
    one[1](IDS)
    one[1](IDS, attention_mask=ones)
    one[1].generate(IDS, attention_mask=ones, **GREEDY)
    assert masks and all(mask is None for mask in masks)
    one[1](IDS, attention_mask=ones.tril())
    assert masks[-1] is not None
    masks.clear()
    one[1](IDS, past_key_values=StaticCache(config=one[1].config, max_cache_len=16))
    assert masks[0].shape[-2:] == (10, 16)


def test_embeddings_may_be_given_instead_of_ids(both):
    native, model = both
    embeddings = model.get_input_embeddings()(IDS)
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    for more in ({}, {"attention_mask": mask}, {"labels": LABELS}):
        by_ids, by_rows = model(IDS, **more), model(inputs_embeds=embeddings, **more)
        assert torch.equal(by_ids.logits, by_rows.logits) and by_ids.loss == by_rows.loss
    assert torch.equal(native(embeddings=native.embedding(IDS)).logits, native(IDS).logits)
    text = model.generate(inputs_embeds=embeddings, attention_mask=torch.ones_like(IDS), **GREEDY)
    assert torch.equal(text, model.generate(IDS, attention_mask=torch.ones_like(IDS), **GREEDY)[:, IDS.shape[1] :])
    with pytest.raises(UserError, match="reads ids or embeddings: give one of them"):
        native()


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


def test_greedy_text_is_the_reference_text_with_every_cache(both):
    native, model = both
    wanted = native.generate(IDS, 12)
    assert len(set(wanted[:, 10:].flatten().tolist())) > 6
    mask = torch.ones_like(IDS)
    for extra in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}):
        ids, ones = (IDS[:1], mask[:1]) if "prompt_lookup_num_tokens" in extra else (IDS, mask)
        text = model.generate(ids, attention_mask=ones, **GREEDY, **extra)
        assert torch.equal(text, wanted[: len(ids)]), extra


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_padded_batch_gives_the_texts_of_its_rows_alone(both, cache, beams):
    model, options = both[1], {**GREEDY, "cache_implementation": cache, "num_beams": beams}
    lengths, width = (3, 9, 14), 14
    batch, mask = torch.full((3, width), 7), torch.zeros(3, width, dtype=torch.long)
    for i, length in enumerate(lengths):
        batch[i, width - length :] = torch.randint(256, (length,), generator=torch.Generator().manual_seed(i))
        mask[i, width - length :] = 1
    together = model.generate(batch, attention_mask=mask, **options)[:, width:]
    for i, length in enumerate(lengths):
        row = batch[i : i + 1, width - length :]
        alone = model.generate(row, attention_mask=torch.ones_like(row), **options)[:, length:]
        assert torch.equal(together[i : i + 1], alone), i


def test_sampling_repeats_with_its_seed(one):
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(one[1].generate(IDS, attention_mask=torch.ones_like(IDS), **{**GREEDY, "do_sample": True}))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_a_mask_of_four_dimensions_says_what_is_seen(both):
    native, model = both
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]]).expand(3, -1)
    causal = torch.ones(10, 10, dtype=torch.bool).tril()
    seen = (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
    wanted = native(IDS, documents=documents).logits
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (seen, seen.long(), added):
        assert torch.allclose(model(IDS, attention_mask=mask).logits, wanted, atol=1e-5)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])  # positions that start anew are documents (flattening)
    wanted = native(IDS[:1], documents=documents[:1], positions=packed).logits
    assert torch.allclose(model(IDS[:1], position_ids=packed, use_cache=False).logits, wanted, atol=1e-5)


def test_long_prompts_may_come_in_pieces(both):
    native, model = both
    for past in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=12)):
        pieces = [model(piece, past_key_values=past).logits for piece in IDS.split([4, 5, 1], dim=1)]
        assert torch.allclose(torch.cat(pieces, 1), native(IDS).logits, atol=1e-5)


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


def test_the_loss_is_the_native_loss_with_and_without_logits(both):
    native, model = both
    targets = torch.cat([LABELS[:, 1:], torch.full((3, 1), -100)], 1)
    _, total, count = native(IDS, labels=targets)
    out = model(IDS, labels=LABELS)
    assert torch.allclose(out.loss, total / count, atol=1e-6) and out.logits.shape == (3, 10, 256)
    assert model(IDS, labels=LABELS, skip_logits=True).logits is None
    out = model.train()(IDS, labels=LABELS, num_items_in_batch=torch.tensor(7))
    assert out.logits is None and out.past_key_values is None and torch.equal(out.loss, total / 7)
    assert torch.equal(model(IDS, labels=None, shift_labels=targets).loss, total / count)
    assert model(IDS, labels=torch.full_like(IDS, -100)).loss == 0
    for training in (True, False):
        with pytest.raises(UserError, match=r"labels go from 67 to 1000, but the vocabulary from 0 to \d+: encode"):
            model.train(training)(IDS, labels=LABELS.clone().index_fill(1, torch.tensor([3]), 1000))


def test_hidden_states_are_each_blocks_input_and_the_final_norm(golden, relative):
    folder, tensors = golden
    model = TokenFormerForCausalLM.from_native(tokenformer.load(folder).eval())
    states = model(tensors["input_ids"], output_hidden_states=True).hidden_states
    names = ("embedding", "block.0", "block.1", "final_norm")
    assert len(states) == len(names)
    for state, name in zip(states, names, strict=True):
        assert relative(state, tensors[f"hidden.{name}"]) < 2e-5
    assert model(tensors["input_ids"]).hidden_states is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(both, reentrant):
    model = both[1].train()

    def gradients():
        model.zero_grad()
        model(IDS, labels=LABELS).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    calls = []
    model.model.blocks[0].attention.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    assert len(calls) == 2  # made again in backward
    with pytest.raises(UserError, match="leave the cache out"):
        model(IDS, past_key_values=DynamicCache(config=model.config))
    with torch.no_grad():  # text is still made with a cache
        assert torch.equal(
            model.generate(IDS, attention_mask=torch.ones_like(IDS), **GREEDY), both[0].generate(IDS, 12)
        )


def test_static_decoding_and_training_compile_whole(one):
    native, model = one
    past = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(IDS, past_key_values=past)
        step = torch.compile(model, fullgraph=True, backend="aot_eager")(IDS[:, :1], past_key_values=past).logits
        whole = native(torch.cat([IDS, IDS[:, :1]], 1)).logits
    assert torch.allclose(step[:, 0], whole[:, -1], atol=1e-4)
    torch.compile(model.train(), fullgraph=True, backend="aot_eager")(IDS, labels=LABELS).loss.backward()
    assert model.model.embedding.weight.grad.isfinite().all()


def run_trainer(tmp_path, batch: int, steps: int, **options):
    data = [{"input_ids": (torch.arange(16) * k) % 256} for k in range(1, 17)]
    data = [{**row, "labels": row["input_ids"].clone().masked_fill(row["input_ids"] % 5 == 0, -100)} for row in data]
    model = TokenFormerForCausalLM.from_native(LanguageModel(CONFIGS["segmented"], seed=1))
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=steps,
        max_steps=6,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_learns_and_accumulation_is_exact(tmp_path):
    trainer, whole = run_trainer(tmp_path / "a", 8, 1)
    assert whole[-1] < whole[0] - 0.3 and trainer.evaluate()["eval_loss"] < whole[0] - 0.3
    _, cut = run_trainer(tmp_path / "b", 2, 4, gradient_checkpointing=True)
    assert cut == pytest.approx(whole, abs=1e-4)
    trainer.save_model(str(tmp_path / "saved"))
    assert torch.equal(tokenformer.load(tmp_path / "saved")(IDS).logits, trainer.model.model(IDS).logits)


def test_flattened_batches_keep_documents_apart(one):
    rows = [{"input_ids": IDS[0, :4].tolist()}, {"input_ids": IDS[1, :6].tolist()}]
    batch = DataCollatorWithFlattening()(rows)
    flat = one[1].train()(**{k: v for k, v in batch.items() if torch.is_tensor(v)}).loss
    apart = [one[1](torch.tensor([row["input_ids"]]), labels=torch.tensor([row["input_ids"]])).loss for row in rows]
    assert torch.allclose(flat * 8, apart[0] * 3 + apart[1] * 5, atol=1e-4)


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


def test_what_cannot_be_done_is_refused_in_a_sentence(one):
    model = one[1]
    with pytest.raises(UserError, match="reads input_ids or inputs_embeds: give one of them"):
        model(IDS, inputs_embeds=torch.zeros(3, 10, 64))
    with pytest.raises(UserError, match="leave it out"):
        model(IDS, output_attentions=True)
    with pytest.raises(UserError, match="did you mean 'qkv_tokens'"):
        TokenFormerConfig(layers=1, dim=8, heads=2, qkv_token=3, proj_tokens=3, ffn_tokens=3)
    with pytest.raises(UserError, match="does not divide"):
        TokenFormerConfig(layers=1, dim=9, heads=2, qkv_tokens=3, proj_tokens=3, ffn_tokens=3)


def test_no_cache_is_filled_while_activations_are_recomputed(one):
    """Backward runs the blocks a second time, and would put their keys in a second time."""
    model = one[1].train()
    assert model(IDS, use_cache=True).past_key_values is not None
    model.gradient_checkpointing_enable()
    assert model(IDS, use_cache=True).past_key_values is None


def test_eager_attention_computes_the_same_and_gives_its_weights(both, tmp_path, relative):
    native, wrapped = both
    wrapped.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0  # padding on the left
    for words in ({}, {"attention_mask": mask}):
        out, expected = model(IDS, output_attentions=True, **words), wrapped(IDS, **words).logits
        assert relative(out.logits[1:], expected[1:]) < 2e-5 and relative(out.logits[0, 3:], expected[0, 3:]) < 2e-5
        shape = (len(IDS), native.config.heads, IDS.shape[1], IDS.shape[1])
        assert [weights.shape for weights in out.attentions] == [shape] * native.config.layers
        torch.testing.assert_close(out.attentions[0].sum(-1)[1], torch.ones(shape[1:3]))
        assert out.attentions[0].triu(1)[1].abs().max() == 0
    assert model.generate(IDS, **GREEDY).tolist() == wrapped.generate(IDS, **GREEDY).tolist()
    with pytest.raises(UserError, match="needs attn_implementation"):
        wrapped(IDS, output_attentions=True)


def test_the_base_model_gives_what_the_head_reads(both, tmp_path):
    native, wrapped = both
    wrapped.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(base(IDS).last_hidden_state, native.hidden(IDS))
        assert torch.equal(base(IDS, return_dict=False)[0], native.hidden(IDS))
        embedded = base(inputs_embeds=base.get_input_embeddings()(IDS), output_hidden_states=True)
    assert torch.equal(embedded.last_hidden_state, embedded.hidden_states[-1]) and base(IDS).hidden_states is None
    assert len(embedded.hidden_states) == native.config.layers + 1
    with pytest.raises(UserError, match="has no loss"):
        base(IDS, labels=IDS)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_continuous_batching_gives_the_tokens_of_generate(both, device):
    wrapped = copy.deepcopy(both[1]).to(device).eval()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 12, [7]]
    how = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)  # absent: most of the memory is taken
    found = wrapped.generate_batch(inputs=prompts, generation_config=how, continuous_batching_config=small)
    words = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [wrapped.generate(torch.tensor([p], device=device), **words)[0, len(p) :].tolist() for p in prompts]
    assert [output.generated_tokens for output in found.values()] == expected


def test_attention_by_another_name_gets_what_it_needs_and_every_keyword(one):
    """As other engines replace it: by a name, with the layer's number, its scale, and keywords of their own."""
    asked = []

    def mine(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        asked.append((module.layer_idx, scaling, module.is_causal, kwargs["own"]))
        seen = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return seen.transpose(1, 2), None

    AttentionInterface.register("of_the_test", mine)
    native, wrapped = one
    expected = wrapped(IDS).logits
    wrapped.config._attn_implementation = "of_the_test"
    torch.testing.assert_close(wrapped(IDS, use_cache=False, own="word").logits, expected)
    scale = native.config.head_dim**-0.5
    assert asked == [(layer, scale, True, "word") for layer in range(native.config.layers)]


def test_the_growth_history_goes_through_transformers_and_back(one, tmp_path):
    grown = tokenformer.grow(one[0], ffn_tokens=96)
    tokenformer.save(grown, tmp_path / "ours to hf", format="hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours to hf").save_pretrained(tmp_path / "again")
    assert len(grown.history) == 1
    assert tokenformer.load(tmp_path / "again").history == grown.history
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").model.history == grown.history


def padded(model, folder):
    """An export with 201 tokens in a vocabulary of 256, and its tokenizer."""
    words = {f"w{i}": i for i in range(200)} | {"<|endoftext|>": 200}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenformer.save(model, folder, format="hf", tokenizer_json=tokenizer.to_str())
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_generate_never_chooses_a_row_that_is_no_token(tmp_path):
    """Exactly the padding is suppressed; logits stay."""
    model = lively(CONFIGS["one"])
    loaded, _ = padded(model, tmp_path)
    assert loaded.generation_config.suppress_tokens == list(range(201, 256))
    torch.manual_seed(0)
    how = {"do_sample": True, "top_k": 0, "temperature": 50.0, "max_new_tokens": 20, "eos_token_id": None}
    found = loaded.generate(IDS.repeat(8, 1).clamp(max=200), **how)
    assert found.max() <= 200
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    loaded.resize_token_embeddings(300, mean_resizing=False)
    found = loaded.generate(IDS.repeat(8, 1).clamp(max=200), **how)
    assert found.max() >= 256 and ((found > 200) & (found < 256)).any()


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


def test_positions_that_begin_anew_keep_documents_apart_without_labels_too(one):
    """In evaluation transformers' own models forget this as soon as they make a cache."""
    native, model = one
    rows = torch.cat([torch.arange(4), torch.arange(6)])[None]
    found = model(IDS[:1], position_ids=rows)
    assert torch.allclose(found.logits[:, 4:], native(IDS[:1, 4:]).logits, atol=1e-5)
    assert found.past_key_values.get_seq_length() == 10


@pytest.mark.filterwarnings("error")
def test_keys_that_no_shape_shows_are_said_where_they_are_not_those_of_the_weights(one, tmp_path):
    tokenformer.save(one[0], tmp_path / "model", format="hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(UserWarning, match="heads is 2 here but 4 in the config beside the weights, so the same"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", heads=2)
    other = TokenFormerConfig.from_native(dataclasses.replace(one[0].config, tau={"ffn": [5.0]}))
    with pytest.raises(UserWarning, match=r"tau is .*5\.0.* here but .* something else: leave tau out"):
        TokenFormerForCausalLM.from_pretrained(tmp_path / "model", config=other)
