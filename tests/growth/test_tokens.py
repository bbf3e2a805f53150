"""FACTS on growth by parameter tokens: what preserves the function, for which Θ, and what is refused."""

import pytest
import torch
from growing import THETAS, config, lively, moved, planned, random_ids

import tokenformer
from tokenformer import UserError
from tokenformer.growth.make import make_tensors
from tokenformer.growth.model import apply_plan, grow
from tokenformer.growth.verify import gradient, verify
from tokenformer.models import build
from tokenformer.strict import build as from_keys

SIZES = [(31, 30, 60), (40, 44, 96), (64, 50, 100)]


def grown(model, times, **how):
    for qkv, proj, ffn in SIZES[:times]:
        model = grow(model, qkv_tokens=qkv, proj_tokens=proj, ffn_tokens=ffn, **how)
    return model


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("times", [1, 3])
def test_segments_are_exact_for_every_theta_in_twelve_layers(theta, times):
    model = lively(config(layers=12, theta=theta))
    assert moved(model, grown(model, times)) <= 5e-6
    double = lively(config(layers=12, theta=theta), dtype=torch.float64)
    assert moved(double, grown(double, times)) <= 1e-12


@pytest.mark.parametrize("theta", ["l2_norm_gelu", "gelu_l2_norm", "l1_norm_gelu"])
@pytest.mark.parametrize("times", [1, 3])
def test_zero_keys_with_held_tau_are_exact_for_the_l2_and_l1_forms(theta, times):
    model = lively(config(layers=12, theta=theta))
    bigger = grown(model, times, new_tokens="zero_key")
    assert bigger.config.segments("ffn") == [(SIZES[times - 1][2], 48**0.5)]
    assert moved(model, bigger) <= 5e-6
    double = lively(config(layers=12, theta=theta), dtype=torch.float64)
    assert moved(double, grown(double, times, new_tokens="zero_key")) <= 1e-12


@pytest.mark.parametrize(
    "how", [{"new_tokens": "zero_key", "tau": "sqrt_n"}, {"new_tokens": "zero_value"}, {"new_tokens": "random"}]
)
def test_the_other_rules_change_the_function_and_the_certificate_says_how_much(how):
    model = lively(config())
    growth = planned(model, qkv_tokens=48, proj_tokens=40, ffn_tokens=96, **how)
    certificate = verify(model, apply_plan(model, growth), random_ids(), growth)
    assert not certificate.exact and certificate.logit_relative > 1e-3
    assert certificate.loss_after != certificate.loss_before
    assert all(alive.within_two == alive.rows for alive in certificate.gradient.values())


def test_the_official_rule_draws_rows_and_lets_tau_follow_n():
    model = lively(config())
    bigger = grow(model, ffn_tokens=4000, new_tokens="random")
    keys = bigger.blocks[1].ffn.segments[0].key_tokens
    assert bigger.config.segments("ffn") == [(4000, 4000**0.5)]
    assert torch.equal(keys[:48], model.blocks[1].ffn.segments[0].key_tokens)
    assert keys[48:].std().item() == pytest.approx(0.02, rel=0.02)
    values = bigger.blocks[1].ffn.segments[0].value_tokens[48:]
    assert values.std().item() == pytest.approx(2 / (3 * 32**0.5), rel=0.02)


def test_new_keys_have_the_rms_of_the_trained_layer_and_new_values_are_zero():
    model = lively(config())
    with torch.no_grad():
        model.blocks[2].ffn.segments[0].key_tokens.mul_(7)
    segment = grow(model, ffn_tokens=4000).blocks[2].ffn.segments[1]
    trained = model.blocks[2].ffn.segments[0].key_tokens.square().mean().sqrt().item()
    assert segment.key_tokens.square().mean().sqrt().item() == pytest.approx(trained, rel=0.02)
    assert not segment.value_tokens.any()


def test_rules_may_differ_by_projection():
    model = lively(config())
    bigger = grow(model, qkv_tokens=30, proj_tokens=30, ffn_tokens=60, new_tokens={"ffn": "segment", "qkv": "zero_key"})
    assert (
        bigger.config.qkv_tokens == 30
        and bigger.config.ffn_tokens == [48, 12]
        and bigger.config.proj_tokens == [20, 10]
    )
    assert bigger.history[0]["rule"] == {"qkv": "zero_key", "proj": "segment", "ffn": "segment"}
    assert bigger.history[0]["tau"] == {"qkv": "hold"}
    assert moved(model, bigger) <= 5e-6


def test_layers_that_differ_get_what_each_lacks():
    overrides = {1: {"ffn_tokens": [60, 20], "tau": {"ffn": [3.0, 2.0]}}, 2: {"ffn_tokens": 100}}
    shape = from_keys(
        tokenformer.ModelConfig,
        {
            "layers": 3,
            "dim": 32,
            "heads": 4,
            "vocab": 128,
            "qkv_tokens": 24,
            "proj_tokens": 20,
            "ffn_tokens": 48,
            "layer_overrides": overrides,
        },
    )
    model = lively(shape)
    for rule in ("segment", "zero_key"):
        bigger = grow(model, ffn_tokens=100, new_tokens=rule)
        assert [sum(n for n, _ in bigger.config.segments("ffn", i)) for i in range(3)] == [100, 100, 100]
        assert bigger.config.segments("ffn", 1)[0] == (60, 3.0)
        assert bigger.config.segments("ffn", 2) == [(100, 10.0)]
        assert moved(model, bigger) <= 5e-6
    with pytest.raises(UserError, match="layer 2 has 100"):
        grow(model, ffn_tokens=90)


@pytest.mark.parametrize("rule", ["segment", "zero_key", "zero_value", "random"])
def test_every_new_token_has_gradient_within_two_steps(rule):
    model = lively(config())
    growth = planned(model, qkv_tokens=48, proj_tokens=40, ffn_tokens=96, new_tokens=rule)
    seen = gradient(apply_plan(model, growth), random_ids(8, 32), growth)
    assert len(seen) == 10 and all(a.within_two == a.rows > 0 for a in seen.values())
    first, later = ("value", "key") if rule == "segment" else ("key", "value")
    if rule in ("segment", "zero_key"):  # one half at once, the other at the second step
        at_once, second = (seen[f"ffn: {kind} tokens"] for kind in (first, later))
        assert at_once.at_once == at_once.rows and second.at_once == 0


def test_zero_keys_beside_values_that_never_trained_are_not_dead():
    model = grow(lively(config()), ffn_tokens=60)
    with torch.no_grad():
        model.blocks[0].ffn.segments[0].value_tokens.zero_()
    bigger = grow(model, ffn_tokens=80, new_tokens="zero_key")
    assert bigger.blocks[0].ffn.segments[1].value_tokens[12:].abs().min() > 0


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"ffn_tokens": 60, "new_tokens": "zero"}, "dead"),
        ({"ffn_tokens": 60, "new_tokens": "zero_keys"}, "one of segment"),
        ({"ffn_tokens": 60, "new_tokens": {"mlp": "segment"}}, "'mlp'"),
        ({"ffn_tokens": 60, "tau": "sqrt_n"}, "leave it out"),
        ({"ffn_tokens": 60, "tau": "foo"}, "hold or sqrt_n"),
        ({"ffn_tokens": [60, 60]}, "give one whole number"),
        ({"ffn_tokens": 60, "new_tokens": "random", "tau": "free"}, "hold or sqrt_n"),
        ({"ffn_tokens": 60, "new_tokens": "random", "tau": {"qkv": "hold"}}, "no rows are appended"),
        ({}, "nothing to grow"),
        ({"ffn_tokens": 48}, "already"),
        ({"ffn_tokens": 40}, "already"),
        ({"layers": 2}, "already"),
        ({"layers": 4, "positions": "front"}, "even, end"),
        ({"layers": 4, "positions": [7]}, "from 0 to 3"),
    ],
)
def test_what_cannot_be_grown_is_refused_with_a_sentence(how, sentence):
    with pytest.raises(UserError, match=sentence):
        grow(build(config()), **how)


def test_softmax_refuses_zero_keys():
    with pytest.raises(UserError, match="softmax"):
        grow(build(config(theta="softmax")), ffn_tokens=60, new_tokens="zero_key")


def test_new_values_belong_to_seed_number_and_name_and_to_no_global_state():
    model = lively(config())
    torch.manual_seed(1)
    one = grow(model, ffn_tokens=60)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = grow(model, ffn_tokens=60)
    assert torch.equal(torch.get_rng_state(), before)
    pick = lambda m, layer=0, i=1: m.blocks[layer].ffn.segments[i].key_tokens  # noqa: E731
    assert torch.equal(pick(one), pick(again))
    assert not torch.allclose(pick(one), pick(grow(model, ffn_tokens=60, seed=1)))
    assert not torch.allclose(pick(one), pick(one, layer=1))
    second = grow(one, ffn_tokens=72)
    one.history = []  # as if nothing had come before: other values
    assert not torch.allclose(pick(second, i=2), pick(grow(one, ffn_tokens=72), i=2))


def test_the_old_model_stays_and_its_parameters_are_copied_unless_shared():
    model = lively(config())
    model.embedding.weight.requires_grad_(False)
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    copied, shared = grow(model, ffn_tokens=60), grow(model, ffn_tokens=60, share=True)
    assert shared.embedding.weight is model.embedding.weight and not shared.embedding.weight.requires_grad
    assert copied.embedding.weight.data_ptr() != model.embedding.weight.data_ptr()
    assert shared.blocks[0].ffn.segments[1].key_tokens.requires_grad
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert all(torch.equal(p, kept[n]) for n, p in model.named_parameters())


def test_the_history_says_what_happened():
    model = grow(grow(lively(config()), ffn_tokens=60, seed=5), layers=4, new_tokens="zero_key")
    first, second = model.history
    assert first["number"] == 0 and first["seed"] == 5 and first["rule"] == {"ffn": "segment"}
    assert first["before"]["ffn_tokens"] == 48 and first["after"]["ffn_tokens"] == 60
    assert second["number"] == 1 and second["new_layers"] == [3] and second["after"]["layers"] == 4


def test_the_pure_function_needs_no_model():
    model = lively(config())
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    plan = planned(model, ffn_tokens=60)
    made = dict(make_tensors(plan, tensors))
    assert made["embedding.weight"] is tensors["embedding.weight"]
    bigger = build(plan.config)
    bigger.load_state_dict(made)
    assert moved(model, bigger) <= 5e-6


@pytest.mark.parametrize("how", [{"ffn_tokens": 90}, {"ffn_tokens": 90, "new_tokens": "zero_key"}, {"layers": 4}])
def test_switches_stay_with_their_segments(how):
    shape = config(ffn_tokens=[48, 12], switch={"ffn": ["", "image"]}, layer_overrides={})
    model = lively(shape, dtype=torch.float64)
    bigger = grow(model, **how)
    layers = range(bigger.config.layers)
    names = ["", "image", ""] if how == {"ffn_tokens": 90} else ["", "image"]
    assert all(bigger.config.switches("ffn", layer) == names for layer in layers)
    assert moved(model, bigger) <= 1e-12
    ids = random_ids()
    on = {"image": torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)}
    with torch.no_grad():
        before, after = (m(ids, switches=on).logits for m in (model, bigger))
    assert ((before - after).abs().max() / before.abs().max()).item() <= 1e-12
    assert not torch.allclose(before, model(ids).logits)
    tokenformer.active(model, {"image": 0.5})  # of calls that give none
    assert moved(model, grow(model, **how)) <= 1e-12
    small = tokenformer.shrink(bigger, by="newest", ffn_tokens=50, tau="hold")
    assert small.config.switches("ffn", 0) == ["", "image"]
