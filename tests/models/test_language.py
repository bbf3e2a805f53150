"""The language model: against the official tensors, formulas written again, and transformers' models."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenformer.config import LayerOverride, ModelConfig
from tokenformer.errors import UserError
from tokenformer.hub import load
from tokenformer.models import Cache, LanguageModel, Pattention

KINDS = {
    "tokenformer": {"qkv_tokens": [12, 8], "proj_tokens": 10, "ffn_tokens": [16, 4, 4]},
    "transformer": {},
    "llama": {"kv_heads": 2, "ffn_dim": 40, "rotary_fraction": 1.0, "tied": False},
}


def tiny(kind: str = "tokenformer", **keys) -> ModelConfig:
    return ModelConfig(
        **{"layers": 2, "dim": 32, "heads": 4, "kind": kind, "vocab": 64, "context": 16, **KINDS[kind], **keys}
    )


def lively(model: LanguageModel) -> LanguageModel:
    """Weights large enough that every part matters."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name) + p.numel())) * 0.4)
    return model


def ids(*shape, seed=0, vocab=64):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def test_golden_logits_hidden_states_loss_and_gradients(golden, relative):
    folder, expected = golden
    model = load(folder)
    hidden = {}
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _m, _a, out, i=i: hidden.update({f"hidden.block.{i}": out}))
    model.embedding.register_forward_hook(lambda _m, _a, out: hidden.update({"hidden.embedding": out}))
    model.norm.register_forward_hook(lambda _m, _a, out: hidden.update({"hidden.final_norm": out}))
    assert relative(model(expected["input_ids"]).logits, expected["logits"]) < 2e-5
    assert len(hidden) == 5
    for name, value in hidden.items():
        assert relative(value, expected[name]) < 2e-5, name
    out = model(expected["input_ids"], labels=expected["labels"])
    loss = out.loss_sum / out.count
    assert abs(loss - expected["loss"]) < 1e-5
    loss.backward()
    from tokenformer.hub.official import to_official

    for name, p in model.named_parameters():
        assert relative(p.grad, expected["grad." + to_official(name, 3)]) < 1e-4, name
    part = expected["labels"].masked_fill(expected["loss_mask_partial"] == 0, -100)
    out = model(expected["input_ids"], labels=part)
    assert abs(out.loss_sum / out.count - expected["loss_partial"]) < 1e-5


def written_again(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """A TokenFormer from the paper's formulas, one sequence, no shared code."""
    c, p = model.config, dict(model.named_parameters())

    def norm(x, w=1.0, b=0.0):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + c.norm_eps).sqrt() * w + b

    def read(x, name, which, layer):
        out = 0
        for i, (_, tau) in enumerate(c.segments(which, layer)):
            a = x @ p[f"{name}.segments.{i}.key_tokens"].T
            s = a * tau / a.norm(dim=-1, keepdim=True)
            out = out + (s * 0.5 * (1 + torch.erf(s / math.sqrt(2)))) @ p[f"{name}.segments.{i}.value_tokens"]
        return out

    def turn(x):  # (T, C): complex rotation of the first channels
        half = c.rotary_dims // 2
        angle = torch.arange(len(x))[:, None] * c.rotary_base ** (-torch.arange(half, dtype=x.dtype) / max(half, 1))
        z = torch.complex(x[:, :half], x[:, half : 2 * half]) * torch.polar(torch.ones_like(angle), angle.to(x.dtype))
        return torch.cat([z.real, z.imag, x[:, 2 * half :]], dim=-1)

    x = p["embedding.weight"][tokens]
    for layer in range(c.layers):
        n, name = norm(x), f"blocks.{layer}"
        q, k, v = (read(n, f"{name}.attention.{w}", "qkv", layer) for w in ("query", "key", "value"))
        heads = []
        for qh, kh, vh in zip(*(t.split(c.head_dim, dim=-1) for t in (q, k, v)), strict=True):
            score = turn(qh) @ turn(kh).T / math.sqrt(c.head_dim)
            score = score.masked_fill(torch.ones_like(score).triu(1).bool(), -torch.inf)
            heads.append(score.softmax(-1) @ vh)
        x = x + read(torch.cat(heads, -1), f"{name}.attention.proj", "proj", layer)
        x = x + read(norm(x), f"{name}.ffn", "ffn", layer)
    return norm(x, p["norm.weight"], p["norm.bias"]) @ p["embedding.weight"].T


@settings(max_examples=15, deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    quarter=st.integers(1, 3),
    tokens=st.lists(st.integers(1, 30), min_size=5, max_size=5),
    length=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_formulas_written_again(layers, heads, quarter, tokens, length, seed):
    config = ModelConfig(
        layers=layers,
        dim=heads * quarter * 8,
        heads=heads,
        qkv_tokens=tokens[:2],
        proj_tokens=tokens[2],
        ffn_tokens=tokens[3:],
        tau={"proj": [1.7]},
        layer_overrides={0: LayerOverride(ffn_tokens=tokens[:3])},
        norm_eps=1e-2,  # not PyTorch's own
        vocab=64,
    )
    model = lively(LanguageModel(config)).double()
    tokens = ids(length, seed=seed)
    torch.testing.assert_close(model(tokens[None]).logits[0], written_again(model, tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_positions_matter_and_only_their_differences(kind, batch):
    """Fails if positions are ignored at batch 1 or above."""
    model, tokens = lively(LanguageModel(tiny(kind))).double(), ids(batch, 8)
    plain = model(tokens).logits
    shifted = model(tokens, positions=torch.arange(8) + 100).logits
    torch.testing.assert_close(shifted, plain)
    stretched = model(tokens, positions=torch.arange(8) * 3).logits
    assert (stretched - plain).abs().amax((1, 2)).min() > 1e-3
    each = torch.arange(8) * torch.arange(1, batch + 1)[:, None]
    apart = model(tokens, positions=each).logits
    for b in range(batch):
        torch.testing.assert_close(apart[b], model(tokens[b : b + 1], positions=each[b]).logits[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[1] * 9, [4, 1, 3, 1], [9]])
def test_cached_decoding_equals_the_full_forward(kind, cuts):
    model, tokens, cache = lively(LanguageModel(tiny(kind))).double(), ids(2, 9), Cache()
    parts = [model(part, cache=cache).logits for part in tokens.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens).logits)
    assert cache.length == 9


@pytest.mark.parametrize("kind", KINDS)
def test_documents_in_one_sample_do_not_see_each_other(kind):
    model, tokens = lively(LanguageModel(tiny(kind))).double(), ids(1, 9)
    documents = torch.tensor([[0] * 4 + [1] * 5])
    together = model(tokens, documents=documents).logits
    torch.testing.assert_close(together[:, :4], model(tokens[:, :4]).logits)
    torch.testing.assert_close(together[:, 4:], model(tokens[:, 4:]).logits)
    assert not torch.allclose(together[:, 4:], model(tokens).logits[:, 4:])


@pytest.mark.parametrize("kind", KINDS)
def test_generate_is_greedy_or_sampled_by_seed(kind):
    model, prompt = lively(LanguageModel(tiny(kind))), ids(2, 4)
    greedy = model.generate(prompt, 6)
    for end in range(4, 10):
        assert torch.equal(greedy[:, end], model(greedy[:, :end]).logits[:, -1].argmax(-1))
    sampled = model.generate(prompt, 6, temperature=2.0, seed=5)
    assert torch.equal(sampled, model.generate(prompt, 6, temperature=2.0, seed=5))
    assert not torch.equal(sampled, model.generate(prompt, 6, temperature=2.0, seed=6))
    assert torch.equal(greedy, model.generate(prompt, 6, temperature=1e-5))  # nothing but the largest is left


def test_qkv_scores_are_one_product_although_they_are_separate_parameters():
    from torch.utils._python_dispatch import TorchDispatchMode

    shapes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func.__name__:
                shapes.append(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    model = LanguageModel(tiny(layers=1))
    with torch.no_grad(), Watch():
        model(ids(1, 4))
    assert shapes[0] == (32, 3 * 20)
    assert "blocks.0.attention.key.segments.1.key_tokens" in dict(model.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_compute_type_is_one_choice(kind, relative):
    model, tokens = lively(LanguageModel(tiny(kind))), ids(2, 8)
    exact = model(tokens).logits
    model.compute_dtype = torch.bfloat16
    out = model(tokens)
    assert out.logits.dtype == torch.bfloat16
    assert 1e-4 < relative(out.logits.float(), exact) < 0.1
    loss = model(tokens, labels=tokens).loss_sum
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("kind", ["tokenformer", "llama"])
def test_the_model_compiles_block_by_block_in_one_graph(kind, relative):
    torch._dynamo.reset()
    model, tokens = lively(LanguageModel(tiny(kind))), ids(2, 8)
    expected = model(tokens).logits
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    assert relative(model(tokens).logits, expected) < 1e-5


def test_llama_equals_transformers(relative):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = tiny("llama")
    model = lively(LanguageModel(config))
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_theta=10000.0,
        )
    ).eval()
    names = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.proj": "self_attn.o_proj",
    }
    state = {f"model.norm.{w}": p.detach() for w, p in model.norm.named_parameters()}
    state |= {
        "model.embed_tokens.weight": model.embedding.weight.detach(),
        "lm_head.weight": model.head.weight.detach(),
    }
    for name, p in model.blocks.named_parameters():
        layer, part, kind = name.split(".", 1)[0], name.split(".", 1)[1].rsplit(".", 1)[0], name.rsplit(".", 1)[1]
        part = names[part] if part in names else f"mlp.{part.removeprefix('ffn.')}_proj"
        state[f"model.layers.{layer}.{part}.{kind}"] = p.detach()
    theirs.load_state_dict(state)
    tokens = ids(2, 9)
    with torch.no_grad():
        assert relative(model(tokens).logits, theirs(tokens).logits) < 2e-5


def test_the_transformer_baseline_equals_gpt_neox_without_biases(relative):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    model = lively(LanguageModel(tiny("transformer")))
    theirs = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            rotary_pct=0.25,
            use_parallel_residual=False,
            attention_bias=False,
            tie_word_embeddings=True,
            layer_norm_eps=1e-5,
            hidden_act="gelu",
        )
    ).eval()
    ours, state = dict(model.named_parameters()), {k: torch.zeros_like(v) for k, v in theirs.state_dict().items()}
    for name in state:
        if "layernorm.weight" in name:
            state[name] = torch.ones(32)
    for name in set(state) & {"gpt_neox.embed_in.weight", "embed_out.weight", "lm_head.weight"}:
        state[name] = ours["embedding.weight"].detach()
    state |= {f"gpt_neox.final_layer_norm.{w}": ours[f"norm.{w}"].detach() for w in ("weight", "bias")}
    for layer in range(2):
        mine, their = f"blocks.{layer}", f"gpt_neox.layers.{layer}"
        qkv = [ours[f"{mine}.attention.{w}.weight"].detach().view(4, 8, 32) for w in ("query", "key", "value")]
        state[f"{their}.attention.query_key_value.weight"] = torch.stack(qkv, 1).reshape(96, 32)  # by head there
        state[f"{their}.attention.dense.weight"] = ours[f"{mine}.attention.proj.weight"].detach()
        state[f"{their}.mlp.dense_h_to_4h.weight"] = ours[f"{mine}.ffn.up.weight"].detach()
        state[f"{their}.mlp.dense_4h_to_h.weight"] = ours[f"{mine}.ffn.down.weight"].detach()
    theirs.load_state_dict(state)
    tokens = ids(2, 9)
    with torch.no_grad():
        assert relative(model(tokens).logits, theirs(tokens).logits) < 2e-5


def test_a_state_dict_knows_tau_theta_and_switches_and_holds_tensors_alone(tmp_path):
    x = torch.randn(3, 16)
    held = Pattention(16, 24, tokens=8, tau=[7.0])
    state = held.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    torch.save(state, tmp_path / "state.pt")
    for kept in (state, torch.load(tmp_path / "state.pt", weights_only=True), copy.deepcopy(state)):
        with pytest.raises(RuntimeError, match=r"segments.0.tau is 7.0 in the state_dict but 2.82.* compute"):
            Pattention(16, 24, tokens=8).load_state_dict(kept, strict=False)
        same = Pattention(16, 24, tokens=8, tau=[7.0])
        same.load_state_dict(kept)
        assert torch.equal(same(x), held(x))
    with pytest.raises(RuntimeError, match="theta is l2_norm_gelu in the state_dict but softmax in this model"):
        Pattention(16, 24, tokens=8, tau=[7.0], theta="softmax").load_state_dict(state)
    Pattention(16, 24, tokens=8).load_state_dict(dict(state))  # tensors alone, as files hold them
    switched = Pattention(16, 24, tokens=[8, 8], switch=["", "image"])
    with pytest.raises(RuntimeError, match=r"switch is null in the state_dict but \['', 'image'\] in this model"):
        switched.load_state_dict(Pattention(16, 24, tokens=[8, 8]).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*segments.1.key_tokens") as refused:
        Pattention(16, 24, tokens=[8, 8]).load_state_dict(Pattention(16, 24, tokens=8).state_dict())
    assert "switch" not in str(refused.value)  # fewer segments are no other switches


@pytest.mark.parametrize(
    ("key", "value"), [("heads", 2), ("rotary_base", 5e5), ("rotary_fraction", 0.5), ("norm_eps", 0.1)]
)
def test_a_state_dict_knows_what_no_shape_shows(key, value):
    state = LanguageModel(tiny()).state_dict()
    other = LanguageModel(tiny(**{key: value}))
    with pytest.raises(RuntimeError, match=f"{key} is .* in the state_dict but {value:g}.* in this model"):
        other.load_state_dict(state)
    other.load_state_dict(dict(state))  # tensors alone, as files hold them
    for about in state._metadata.values():  # a state_dict of an older version
        about.pop(key, None)
    other.load_state_dict(state)


@pytest.mark.parametrize("wrong", [64, -1])
def test_labels_outside_the_vocabulary_are_refused_as_ids_are(wrong):
    with pytest.raises(UserError, match=f"labels go from .*{wrong}.*, but the vocabulary from 0 to 63"):
        LanguageModel(tiny())(ids(1, 4), labels=torch.tensor([[1, wrong, 2, 3]]))


@pytest.mark.parametrize("word", ["label", "attention_mask"])
def test_an_unknown_word_names_the_model_and_its_words(word):
    with pytest.raises(UserError, match=f"LanguageModel knows no '{word}': its words are ids, labels, .* mask"):
        LanguageModel(tiny())(ids(1, 4), **{word: ids(1, 4)})
