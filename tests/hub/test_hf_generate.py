"""Texts by transformers' `generate` of our class: those of the native model, with every cache and in every batch."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
)

from tests.hub.hf_models import CONFIGS, GREEDY, IDS, LABELS, lively, padded


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


def test_long_prompts_may_come_in_pieces(both):
    native, model = both
    for past in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=12)):
        pieces = [model(piece, past_key_values=past).logits for piece in IDS.split([4, 5, 1], dim=1)]
        assert torch.allclose(torch.cat(pieces, 1), native(IDS).logits, atol=1e-5)


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
