"""The transformers classes against the native model: the same numbers, whatever transformers does around them."""

import pytest
import torch

import tokenformer
from tokenformer import UserError
from tokenformer.models import LanguageModel

pytest.importorskip("transformers", minversion="5.17")

from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from tests.hub.hf_models import CONFIGS, GREEDY, IDS, LABELS
from tokenformer.hub.hf import TokenFormerConfig, TokenFormerForCausalLM


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


def test_positions_that_begin_anew_keep_documents_apart_without_labels_too(one):
    """In evaluation transformers' own models forget this as soon as they make a cache."""
    native, model = one
    rows = torch.cat([torch.arange(4), torch.arange(6)])[None]
    found = model(IDS[:1], position_ids=rows)
    assert torch.allclose(found.logits[:, 4:], native(IDS[:1, 4:]).logits, atol=1e-5)
    assert found.past_key_values.get_seq_length() == 10
