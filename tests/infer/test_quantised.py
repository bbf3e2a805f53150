"""Weights in 8 bits: the rounding itself, and that the engine computes what the rounded model does."""

import pytest
import torch
from small_models import make

from tokenformer.errors import UserError
from tokenformer.infer import Engine, engine
from tokenformer.infer.quantised import matrices, quantise, rounded


def test_rounding_keeps_four_bits_at_any_size_and_is_exact_in_16_bits_and_when_repeated():
    draw = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-30, 30, 200)[:, None]
    weight = torch.randn(200, 64, generator=draw) * sizes
    weight[0], weight[1, 0], weight[2, 0] = 0.0, 448 * weight[1].abs().max(), 224.1
    rows, scale = quantise(weight)
    back = rows.float() * scale[:, None]
    assert torch.equal(scale.frexp().mantissa, torch.full((200,), 0.5))  # powers of two
    assert not rows.float().isnan().any() and rows.float().abs().amax(-1)[1:].ge(224).all() and rows[0].eq(0).all()
    largest = weight.abs().amax(-1, keepdim=True)
    error = (back - weight).abs() - weight.abs() / 16
    assert (error <= largest * 2**-18).all()  # beside a row's largest number, tiny ones lose bits
    assert torch.equal(back.bfloat16().float(), back)
    assert torch.equal((lambda r, s: r.float() * s[:, None])(*quantise(back)), back)


def test_the_engine_decodes_fp8_weights_as_the_rounded_model_does(model, prompts):
    eight, plain = Engine(model, weights="fp8"), rounded(model)
    expected = [plain.generate(torch.tensor([p]), 20)[0, len(p) :].tolist() for p in prompts]
    assert [row.ids for row in eight.generate(prompts, 20)] == expected
    moved = [(a - b).abs().max() / a.abs().max() for a, b in zip(matrices(model), matrices(plain), strict=True)]
    assert all(1e-3 < m < 2**-4 for m in moved)  # all of them are rounded, and the model itself is as it was
    assert eight.said[0].startswith(
        "weights in fp8: rounded to 8 bits, and computed in float32 without kernels, since "
    )
    assert Engine(model).said == []


def test_an_embedding_that_is_not_the_head_is_not_rounded():
    for tied in (True, False):
        model = make(tied=tied)
        assert torch.equal(rounded(model).embedding.weight, model.embedding.weight) != tied
    assert not torch.equal(rounded(model).head.weight, model.head.weight)


def test_where_there_are_kernels_the_bytes_of_a_step_are_said(monkeypatch):
    """Weights are laid out for the kernels on any device; only a GPU would run them."""
    monkeypatch.setattr(engine, "why_not", lambda config, device: None)
    shape = {"dim": 512, "qkv_tokens": 512, "proj_tokens": 512, "ffn_tokens": 2048, "vocab": 4096}
    said = Engine(make(**shape), weights="fp8", dtype=torch.bfloat16).said
    tokens, head = 2 * (3 * 512 + 512 + 2048), 4096
    eight, sixteen = ((2 * 512 * tokens + 512 * head) * size / 1e9 for size in (1, 2))
    eight += (12 * tokens + 4 * head) / 1e9  # the scales
    assert said == [f"weights in fp8: a step reads {eight:.3f} GB of them instead of {sixteen:.3f}"]


def test_what_fp8_weights_cannot_do_is_said():
    with pytest.raises(UserError, match="weights is 'int4', but must be fp8"):
        Engine(make(), weights="int4")
    with pytest.raises(UserError, match="not computed in float16"):
        Engine(make(), weights="fp8", dtype=torch.float16)
    offloaded = make()
    offloaded.blocks[0].ffn.to("meta")
    with pytest.raises(UserError, match="are offloaded"):
        Engine(offloaded, weights="fp8")
