"""What the ways to compare with preserve, in float64: heads, rotary positions, tied and untied heads included."""

import pytest
import torch
from growing import baseline, config, lively, moved, planned, random_ids

from tokenformer import UserError
from tokenformer.growth.model import apply_plan, grow
from tokenformer.growth.verify import verify

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
    wider = grow(model, dim=32 * ratio, copy_noise=noise)
    assert wider.config.heads == 4 * ratio and wider.config.head_dim == 8
    assert moved(model, wider) <= 1e-12
    assert moved(lively(shape), grow(lively(shape), dim=32 * ratio, copy_noise=noise)) <= 1e-5


def test_the_final_norm_of_a_tied_model_is_divided_by_the_ratio():
    model = lively(baseline())
    wider = grow(model, dim=96)
    assert torch.allclose(wider.norm.weight.view(3, 32), model.norm.weight / 3)
    assert torch.allclose(wider.norm.bias.view(3, 32), model.norm.bias / 3)


@pytest.mark.parametrize("kind", ["transformer", "llama"])
@pytest.mark.parametrize("ffn_dim", [129, 200, 333])
def test_the_mlp_alone_is_exact_at_any_ratio(kind, ffn_dim):
    model = lively(baseline(kind), dtype=torch.float64)
    wider = grow(model, ffn_dim=ffn_dim)
    assert wider.config.mlp_dim == ffn_dim and moved(model, wider) <= 1e-12


@pytest.mark.parametrize("how", [{"dim": 48}, {"dim": 64, "widen": "block"}, {"layers": 6, "new_layers": "stack"}])
def test_other_ratios_the_block_form_and_stacking_change_the_function_and_say_so(how):
    model = lively(baseline())
    growth = planned(model, **how)
    certificate = verify(model, apply_plan(model, growth), random_ids(), growth)
    assert not certificate.exact and certificate.logit_relative > 1e-3


def test_copies_part_in_training_only_with_noise():
    ids = random_ids(4, 16)
    for noise, part in ((0.0, False), (0.1, True)):
        wider = grow(lively(baseline(), dtype=torch.float64), dim=64, copy_noise=noise)
        output = wider(ids[:, :-1], labels=ids[:, 1:])
        output.loss_sum.backward()
        first, second = wider.blocks[0].ffn.up.weight.grad.chunk(2)
        assert torch.allclose(first, second) != part


def test_a_stack_repeats_its_blocks_and_shares_nothing():
    model = lively(config())
    deep = grow(model, layers=6, new_layers="stack", share=True)
    assert torch.equal(deep.blocks[4].ffn.segments[0].key_tokens, model.blocks[1].ffn.segments[0].key_tokens)
    assert len({p.data_ptr() for p in deep.parameters()}) == len(list(deep.parameters()))


def test_the_block_form_keeps_the_old_matrix_in_its_corner():
    model = lively(baseline())
    wider = grow(model, dim=64, widen="block")
    assert torch.equal(wider.blocks[1].ffn.up.weight[:128, :32], model.blocks[1].ffn.up.weight)
    assert torch.equal(wider.norm.weight[:32], model.norm.weight) and (wider.norm.weight[32:] == 1).all()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"dim": 16}, "already"),
        ({"dim": 36}, "multiple of 8"),
        ({"ffn_dim": 100}, "already"),
        ({"dim": 32}, "as wide already"),
        ({"dim": 64, "layers": 4}, "of its own"),
        ({"dim": 64, "widen": "copy"}, "net2net or block"),
        ({"layers": 4, "widen": "block"}, "about width"),
        ({"new_layers": "stack"}, "layers alone"),
        ({"layers": 4, "new_layers": "twice"}, "identity or stack"),
        ({"ffn_tokens": 4}, "no parameter tokens"),
    ],
)
def test_what_cannot_be_widened_is_refused_with_a_sentence(how, sentence):
    with pytest.raises(UserError, match=sentence):
        grow(lively(baseline()), **how)
