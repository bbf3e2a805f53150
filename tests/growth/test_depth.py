"""New blocks are the identity, for parameter tokens and for matrices, wherever they stand, and they learn."""

import pytest
import torch
from growing import THETAS, baseline, config, lively, moved, planned, random_ids

from tokenformer.growth.model import apply_plan, grow
from tokenformer.growth.plan import place_blocks
from tokenformer.growth.verify import gradient


@pytest.mark.parametrize("positions", ["even", "end", [0, 4]])
@pytest.mark.parametrize("theta", THETAS)
def test_new_blocks_of_parameter_tokens_are_exact(theta, positions):
    model = lively(config(theta=theta))
    assert moved(model, grow(model, layers=5, positions=positions)) <= 5e-6
    double = lively(config(theta=theta), dtype=torch.float64)
    assert moved(double, grow(double, layers=5, positions=positions)) <= 1e-12


@pytest.mark.parametrize("kind", ["transformer", "llama"])
def test_new_blocks_of_the_baselines_are_exact(kind):
    double = lively(baseline(kind), dtype=torch.float64)
    bigger = grow(double, layers=6)
    assert moved(double, bigger) <= 1e-12 and bigger.history[0]["new_layers"] == [1, 3, 5]


def test_norms_of_a_new_block_begin_at_one():
    model = lively(baseline("llama"))
    bigger = grow(model, layers=4, positions="end")
    norms = {name: p for name, p in bigger.named_parameters() if name.startswith("blocks.3.") and "norm" in name}
    assert len(norms) == 2 and all(torch.equal(p, torch.ones_like(p)) for p in norms.values())


@pytest.mark.parametrize(
    "shape", [config(), baseline(), baseline("llama")], ids=["tokenformer", "transformer", "llama"]
)
def test_new_blocks_learn_from_the_second_step(shape):
    model = lively(shape)
    growth = planned(model, layers=4)
    seen = gradient(apply_plan(model, growth), random_ids(8, 32), growth)
    assert seen and all(a.within_two == a.rows > 0 for name, a in seen.items()), seen


def test_depth_and_tokens_grow_together_also_after_segments():
    model = grow(lively(config(), dtype=torch.float64), ffn_tokens=60, qkv_tokens=40)
    bigger = grow(model, layers=5, positions=[1, 2], ffn_tokens=90, proj_tokens=33)
    assert moved(model, bigger) <= 1e-12
    assert bigger.config.ffn_tokens == [48, 12, 30] and not bigger.config.layer_overrides
    assert [p.shape for p in bigger.blocks[1].ffn.parameters()] == [p.shape for p in bigger.blocks[0].ffn.parameters()]


def test_overrides_travel_with_their_blocks():
    from tokenformer.growth.shape import table, with_table

    shape = config()
    uneven = {**table(shape), "ffn": [[(48, 6.0, "")], [(50, 5.0, ""), (10, 2.0, "")], [(48, 6.0, "")]]}
    model = lively(with_table(shape, uneven), dtype=torch.float64)
    bigger = grow(model, layers=5, positions=[0, 1])
    assert bigger.config.segments("ffn", 3) == [(50, 5.0), (10, 2.0)] and moved(model, bigger) <= 1e-12


def test_even_places_spread_over_the_depth():
    assert [layer for layer, (_, new) in enumerate(place_blocks(12, 16)) if new] == [3, 7, 11, 15]
    assert [source for source, _ in place_blocks(3, 4, [1])] == [0, 0, 1, 2]
