"""Initial weights depend on (seed, name, shape) alone; costs are exact."""

import math

import pytest
import torch

import tokenformer
from tokenformer.config import LayerOverride, ModelConfig, load, presets
from tokenformer.models import LanguageModel, Pattention, cost, init_weights
from tokenformer.models.cost import equal_transformer

CONFIG = ModelConfig(layers=2, dim=64, heads=4, qkv_tokens=48, proj_tokens=[32, 16], ffn_tokens=200, vocab=512)

NO_TOKENS = {"qkv_tokens": None, "proj_tokens": None, "ffn_tokens": None}

PUBLISHED = {  # parameters, matmul parameters
    "lm/150m": (151_881_216, 113_246_208),
    "lm/450m": (454_166_528, 402_653_184),
    "lm/900m": (903_252_480, 838_860_800),
    "lm/1.5b": (1_587_219_456, 1_509_949_440),
    "grow/124m": (123_569_664, 84_934_656),
    "grow/354m": (354_190_848, 315_555_840),
    "grow/757m": (753_796_608, 715_161_600),
    "grow/1.4b": (1_309_705_728, 1_271_070_720),
    "grow/owt2-354m": (353_503_232, 301_989_888),
    "grow/owt2-757m": (756_156_416, 704_643_072),
    "baseline/124m": (123_569_664, 84_934_656),
    "baseline/354m": (353_503_232, 301_989_888),
    "baseline/757m": (756_747_264, 679_477_248),
    "llama/7b": (6_738_415_616, None),
    "llama/13b": (13_015_864_320, None),
}


def test_the_same_seed_gives_the_same_model_however_it_is_built():
    direct = LanguageModel(CONFIG, seed=3)
    with torch.device("meta"):
        staged = LanguageModel(CONFIG)
    staged.to_empty(device="cpu")
    torch.manual_seed(99)  # the global state has no say
    init_weights(staged, staged.config, seed=3)
    state = direct.state_dict()
    assert all(torch.equal(p, state[name]) for name, p in staged.named_parameters())
    other = LanguageModel(CONFIG, seed=4).state_dict()
    assert not torch.equal(other["embedding.weight"], state["embedding.weight"])


def test_a_parameter_does_not_depend_on_the_others():
    """One more layer or segment leaves the values of all others alone (but for their scale, which counts layers)."""
    deeper = LanguageModel(ModelConfig(**{**vars(CONFIG), "layers": 3})).state_dict()
    for name, value in LanguageModel(CONFIG).state_dict().items():
        factor = 2 / 3 if "value_tokens" in name else 1
        torch.testing.assert_close(deeper[name], value * factor)


def test_the_official_scales():
    state = LanguageModel(CONFIG).state_dict()
    for name, value in state.items():
        if name.startswith("norm."):
            assert (value == (1 if name.endswith("weight") else 0)).all()
            continue
        expected = 2 / (2 * math.sqrt(64)) if name.endswith("value_tokens") else 0.02
        assert value.std().item() == pytest.approx(expected, rel=0.06), name


def test_centred_values_have_mean_zero_over_the_tokens():
    centred = LanguageModel(ModelConfig(**{**vars(CONFIG), "init": "centred"})).state_dict()
    official = LanguageModel(CONFIG).state_dict()
    for name, value in centred.items():
        if name.endswith("value_tokens"):
            assert value.mean(0).abs().max() < 1e-7
            torch.testing.assert_close(value, official[name] - official[name].mean(0))
        else:
            assert torch.equal(value, official[name])


@pytest.mark.parametrize("kind", ["tokenformer", "transformer"])
def test_with_init_zero_a_block_adds_nothing_at_first_and_what_grows_later_still_learns(kind):
    config = ModelConfig(
        **{**vars(CONFIG), "init": "zero", "kind": kind} | ({} if kind == "tokenformer" else NO_TOKENS)
    )
    model = LanguageModel(config)
    x = torch.randn(2, 5, config.dim)
    assert torch.equal(model.blocks[0](x, model.view(x)), x)
    moving = {n for n, p in model.named_parameters() if p.std() > 0 and "query" in n}
    assert moving, "what reads the stream is drawn"
    if kind == "tokenformer":
        grown = tokenformer.grow(model, ffn_tokens=600, new_tokens="zero_key").state_dict()
        assert grown["blocks.0.ffn.segments.0.value_tokens"][200:].std() > 0


def test_a_layer_alone_stands_where_a_linear_does():
    torch.manual_seed(0)
    layer = Pattention(64, 32, tokens=[512, 512])
    y = layer(100 * torch.randn(1000, 64))
    assert y.shape == (1000, 32)
    assert y.square().mean().sqrt().item() == pytest.approx(math.sqrt(2) * 0.65, rel=0.1)
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert {name for name, _ in layer.named_parameters()} == {
        f"segments.{i}.{kind}_tokens" for i in (0, 1) for kind in ("key", "value")
    }


@pytest.mark.parametrize("tokens", [0, -3, 2.5, [], [4, 0]])
def test_a_layer_refuses_what_is_no_number_of_tokens(tokens):
    with pytest.raises(ValueError, match="give a whole number above 0"):
        Pattention(8, 8, tokens)


def test_a_layer_refuses_an_unknown_theta_and_whole_numbers():
    with pytest.raises(ValueError, match="theta is 'gelu'"):
        Pattention(8, 8, 4, theta="gelu")
    with pytest.raises(TypeError, match="floating point"):
        Pattention(8, 8, 4)(torch.ones(2, 8, dtype=torch.long))


def test_every_published_count_is_a_preset_and_the_other_way_round():
    assert set(presets()) >= set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_exactly_the_published_parameters(name):
    config = load(name).model
    parameters, matmul = PUBLISHED[name]
    assert cost(config).parameters == parameters
    assert matmul is None or cost(config).matmul_parameters == matmul
    with torch.device("meta"):
        model = LanguageModel(config)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("kind", ["tokenformer", "transformer", "llama"])
def test_the_formulas_count_what_a_real_model_has_and_does(kind):
    from torch.utils.flop_counter import FlopCounterMode

    from tokenformer.models import Cache

    tokens = {
        "qkv_tokens": [9, 5],
        "proj_tokens": 7,
        "ffn_tokens": 11,
        "layer_overrides": {1: LayerOverride(ffn_tokens=[3, 2])},
    }
    config = ModelConfig(
        layers=3, dim=32, heads=4, kind=kind, vocab=64, tied=kind != "llama",
        **(tokens if kind == "tokenformer" else {}), **({"kv_heads": 2, "ffn_dim": 40} if kind == "llama" else {}),
    )  # fmt: skip
    model = LanguageModel(config)
    total = model.cost()
    assert total.parameters == sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for n, p in model.named_parameters() if n.startswith("blocks") and "norm" not in n)
    assert total.matmul_parameters == sum(total.projections.values()) == blocks
    cache = Cache()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.long), cache=cache)
    products = {op: n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)}
    assert sum(products.values()) == 8 * total.parameter_flops
    assert 8 * total.cache_values == sum(k.numel() + v.numel() for k, v in cache.layers.values())
    assert total.token_flops(1024) == 2 * 3 * 32 * 1024
    assert total.training_flops(1024) == 3 * (total.parameter_flops + total.token_flops(1024))


@pytest.mark.parametrize("name", ["lm/150m", "grow/1.4b", "baseline/354m", "llama/7b", "draw/icons"])
def test_the_transformer_beside_it_is_as_large(name):
    config = load(name).model
    rival = equal_transformer(config)
    assert cost(rival).parameters == pytest.approx(cost(config).parameters, rel=1e-3)
    assert rival.layers == config.layers
    assert rival.head_dim == config.head_dim
    assert (rival.added_vocab, rival.added_switch) == (config.added_vocab, config.added_switch)


def test_the_transformers_beside_a_model_that_reads_images_are_as_large():
    config = load("caption/icons").model
    rival = equal_transformer(config)
    assert {trunk.kind for trunk in rival.trunks.values()} == {"transformer"}
    assert cost(rival).parameters == pytest.approx(cost(config).parameters, rel=1e-2)


def test_several_trunks_cost_what_their_blocks_cost_together():
    shape = {"layers": 2, "dim": 32, "heads": 2, "vocab": 64}
    text = ModelConfig(**shape, qkv_tokens=16, proj_tokens=8, ffn_tokens=[8, 8])
    image = ModelConfig(**shape | {"layers": 3}, kind="transformer")
    both, apart = cost(ModelConfig(of="two", trunks={"text": text, "image": image})), [cost(text), cost(image)]
    assert both.parameters == sum(c.parameters - 64 * 32 for c in apart) and both.head_parameters == 0
    assert both.matmul_parameters == sum(c.matmul_parameters for c in apart) == sum(both.projections.values())
    assert both.token_flops(8) == 2 * (2 + 3) * 32 * 8 and both.causal
