"""Shrinking takes what does least, keeps what it must, and says what it cost; a slice copies nothing."""

import pytest
import torch
from growing import THETAS, config, lively, moved, random_ids

from tokenformer import UserError, grow, shrink, slice
from tokenformer.growth.measure import segments
from tokenformer.growth.shape import table, total
from tokenformer.growth.shrink import energy


@pytest.mark.parametrize("theta", THETAS)
def test_energy_is_the_sum_over_rows_of_what_each_token_adds(theta):
    model = grow(lively(config(theta=theta), dtype=torch.float64), ffn_tokens=60)
    ids, block = random_ids(2, 9), model.blocks[1]
    seen = []
    handle = block.ffn.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    with torch.no_grad():
        model(ids)
        handle.remove()
        x = seen[0].flatten(0, 1)
        whole = block.ffn(x)
        for j in (0, 7, 47):  # leave one token's value out: the output moves by what it added
            kept = block.ffn.segments[0].value_tokens.clone()
            block.ffn.segments[0].value_tokens[j] = 0
            added = (whole - block.ffn(x)).square().sum()
            block.ffn.segments[0].value_tokens.copy_(kept)
            assert energy(model, ids)[1, "ffn", 0][j].item() == pytest.approx(added.item(), rel=1e-9)


@pytest.mark.parametrize("theta", ["l2_norm_gelu", "gelu_l2_norm", "l1_norm_gelu"])
def test_tokens_that_do_nothing_go_first_and_nothing_changes(theta):
    """After growth by zero keys or by a segment that never trained, energy finds exactly the old tokens."""
    model = lively(config(theta=theta), dtype=torch.float64)
    for rule in ("segment", "zero_key"):
        bigger = grow(model, qkv_tokens=40, proj_tokens=40, ffn_tokens=90, new_tokens=rule)
        back = shrink(bigger, random_ids(), qkv_tokens=24, proj_tokens=20, ffn_tokens=48)
        assert moved(model, back) <= 1e-12
        assert total(table(back.config)["ffn"][0]) == 48 and back.history[-1]["what"] == "shrink"
        assert back.history[-1]["loss_after"] == pytest.approx(back.history[-1]["loss_before"], abs=1e-12)


def test_the_newest_go_first():
    model = lively(config(), dtype=torch.float64)
    bigger = grow(model, ffn_tokens=90)
    assert moved(model, shrink(bigger, by="newest", ffn_tokens=48)) <= 1e-12
    part = shrink(bigger, by="newest", ffn_tokens=60)
    assert part.config.segments("ffn") == [(48, 48**0.5), (12, pytest.approx(12**0.5))]
    assert torch.equal(part.blocks[0].ffn.segments[1].key_tokens, bigger.blocks[0].ffn.segments[1].key_tokens[:12])


def test_q_k_and_v_keep_equally_many_each_its_own_and_globally_the_budget_is_met():
    model = lively(config())
    with torch.no_grad():  # layer 2 does most in few tokens
        model.blocks[2].ffn.segments[0].value_tokens[5:].mul_(0.01)
    ids = random_ids()
    small = shrink(model, ids, ratio=0.5, across="model")
    counts = [total(s) for s in table(small.config)["ffn"]]
    assert sum(counts) == 3 * 24 and counts[2] < counts[0] and min(counts) >= 1
    energies = energy(model, ids)
    for layer in range(3):
        query, key = (getattr(small.blocks[layer].attention, n).segments[0].key_tokens for n in ("query", "key"))
        assert query.shape == key.shape
        best = energies[layer, "query", 0].topk(len(query)).indices.sort().values
        assert torch.equal(query, model.blocks[layer].attention.query.segments[0].key_tokens[best])
    even = shrink(model, ids, ratio=0.5)
    assert even.config.ffn_tokens == 24 and not {
        layer: o for layer, o in even.config.layer_overrides.items() if o.ffn_tokens is not None and o.ffn_tokens != 24
    }


@pytest.mark.parametrize("theta", THETAS)
def test_a_matched_tau_leaves_scores_as_large_as_they_were(theta):
    model = lively(config(theta=theta), dtype=torch.float64)
    with torch.no_grad():  # the other half's scores are proportional: then matching is exact, row by row
        for _, segment in segments(model):
            half = len(segment.key_tokens) // 2
            segment.key_tokens[half:] = segment.key_tokens[:half]
            segment.value_tokens[half:] = 0
    assert moved(model, shrink(model, random_ids(), ratio=0.5)) <= 1e-12
    assert moved(model, shrink(model, random_ids(), ratio=0.5, tau="hold")) > 1e-2


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({}, "not both"),
        ({"ratio": 0.5, "ffn_tokens": 3}, "not both"),
        ({"ratio": 1.5}, "between 0 and 1"),
        ({"ffn_tokens": 48}, "at most 48"),
        ({"ratio": 0.5, "ids": None}, "give ids"),
        ({"ratio": 0.5, "by": "age"}, "energy or newest"),
        ({"ratio": 0.5, "across": "all"}, "layer or model"),
        ({"ratio": 0.5, "tau": "free"}, "match, hold or sqrt_n"),
        ({"ratio": 0.5, "by": "newest", "across": "model"}, "leave across out"),
    ],
)
def test_what_cannot_be_shrunk_is_refused_with_a_sentence(how, sentence):
    with pytest.raises(UserError, match=sentence):
        shrink(lively(config()), **{"ids": random_ids(), **how})


def test_a_slice_is_a_view_of_the_first_segments():
    model = lively(config(), dtype=torch.float64)
    twice = grow(grow(model, ffn_tokens=60, qkv_tokens=40), ffn_tokens=90)
    assert moved(model, slice(twice, segments=1)) <= 1e-12
    two = slice(twice, segments=2)
    assert two.config.ffn_tokens == [48, 12] and two.config.qkv_tokens == [24, 16] and two.config.proj_tokens == 20
    whole = dict(twice.named_parameters())
    assert all(p is whole[name] for name, p in two.named_parameters())
    assert twice.config.ffn_tokens == [48, 12, 30]
    with pytest.raises(UserError, match="at least one"):
        slice(twice, segments=0)


def test_a_small_ratio_leaves_one_token():
    model = lively(config(qkv_tokens=4, proj_tokens=4, ffn_tokens=4))
    small = shrink(model, random_ids(), ratio=0.1)
    assert small.config.ffn_tokens == small.config.qkv_tokens == small.config.proj_tokens == 1


def test_a_shrunk_model_keeps_its_compute_type_and_mode():
    model = lively(config()).eval()
    model.compute_dtype = torch.bfloat16
    small = shrink(model, random_ids(), ratio=0.5)
    assert small.compute_dtype is torch.bfloat16 and not small.training
    assert shrink(model.train(), random_ids(), ratio=0.5).training


def test_across_layers_shares_are_compared_not_sizes():
    """The last layer's size moves no other layer's input, so only its own energies grow."""
    model, ids = lively(config()), random_ids()
    before = shrink(model, ids, ratio=0.5, across="model")
    with torch.no_grad():
        model.blocks[2].ffn.segments[0].value_tokens.mul_(100)
    after = shrink(model, ids, ratio=0.5, across="model")
    counts = [[total(s) for s in table(m.config)["ffn"]] for m in (before, after)]
    assert counts[0] == counts[1]


def test_across_layers_each_keeps_a_token():
    """Layer 0 has many tokens of equal share, all below those of the others."""
    model = lively(config(layers=2, ffn_tokens=8))
    with torch.no_grad():
        for layer, equal in ((0, 8), (1, 2)):  # two of layer 1 have nearly all of its energy
            for tokens in model.blocks[layer].ffn.segments[0].parameters():
                tokens[:equal] = tokens[0].clone()
        model.blocks[1].ffn.segments[0].value_tokens[2:].mul_(1e-3)
    small = shrink(model, random_ids(), ratio=0.1, across="model")
    assert [total(s) for s in table(small.config)["ffn"]] == [1, 1]
