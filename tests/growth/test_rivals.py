"""What the rivals of the study of growth rules preserve, in float64: heads, rotary positions, tied and untied heads."""

import sys
from pathlib import Path

import pytest
import torch
from growing import baseline, config, lively, moved, random_ids

from tokenformer import UserError

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "growth-rules"))
from rivals import stack, widen

SHAPES = {
    "transformer": baseline(),
    "transformer, untied": baseline(tied=False),
    "llama": baseline("llama"),
    "llama, tied": baseline("llama", tied=True),
    "tokenformer": config(),
}


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("ratio", [2, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_whole_ratios_are_exact(shape, ratio, noise):
    model = lively(shape, dtype=torch.float64)
    wider = widen(model, 32 * ratio, noise=noise)
    assert wider.config.heads == 4 * ratio and wider.config.head_dim == 8
    assert moved(model, wider) <= 1e-12
    assert moved(lively(shape), widen(lively(shape), 32 * ratio, noise=noise)) <= 1e-5


def test_the_final_norm_of_a_tied_model_is_divided_by_the_ratio():
    model = lively(baseline())
    wider = widen(model, 96)
    assert torch.allclose(wider.norm.weight.view(3, 32), model.norm.weight / 3)
    assert torch.allclose(wider.norm.bias.view(3, 32), model.norm.bias / 3)


@pytest.mark.parametrize("kind", ["transformer", "llama"])
@pytest.mark.parametrize("ffn_dim", [129, 200, 333])
def test_the_mlp_alone_is_exact_at_any_ratio(kind, ffn_dim):
    model = lively(baseline(kind), dtype=torch.float64)
    wider = widen(model, ffn_dim=ffn_dim)
    assert wider.config.mlp_dim == ffn_dim and moved(model, wider) <= 1e-12


def test_other_ratios_the_block_form_and_stacking_change_the_function():
    model = lively(baseline())
    for rival in (widen(model, 48), widen(model, 64, block=True), stack(model, 6)):
        assert moved(model, rival) > 1e-3 and len(rival.history) == 1


def test_copies_part_in_training_only_with_noise():
    ids = random_ids(4, 16)
    for noise, part in ((0.0, False), (0.1, True)):
        wider = widen(lively(baseline(), dtype=torch.float64), 64, noise=noise)
        output = wider(ids[:, :-1], labels=ids[:, 1:])
        output.loss_sum.backward()
        first, second = wider.blocks[0].ffn.up.weight.grad.chunk(2)
        assert torch.allclose(first, second) != part


def test_a_stack_repeats_its_blocks_and_shares_nothing():
    model = lively(config())
    deep = stack(model, 6)
    assert torch.equal(deep.blocks[4].ffn.segments[0].key_tokens, model.blocks[1].ffn.segments[0].key_tokens)
    assert len({p.data_ptr() for p in deep.parameters()}) == len(list(deep.parameters()))


def test_the_block_form_keeps_the_old_matrix_in_its_corner():
    model = lively(baseline())
    wider = widen(model, 64, block=True)
    assert torch.equal(wider.blocks[1].ffn.up.weight[:128, :32], model.blocks[1].ffn.up.weight)
    assert torch.equal(wider.norm.weight[:32], model.norm.weight) and (wider.norm.weight[32:] == 1).all()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"dim": 16}, "already"),
        ({"dim": 36}, "multiple of 8"),
        ({"ffn_dim": 100}, "already"),
        ({"dim": 32}, "as wide already"),
    ],
)
def test_what_cannot_be_widened_is_refused_with_a_sentence(how, sentence):
    with pytest.raises(UserError, match=sentence):
        widen(lively(baseline()), **how)
