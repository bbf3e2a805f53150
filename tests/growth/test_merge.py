"""Merging segments into one: rescaled by what text says, exact where that can be, refused for softmax."""

import pytest
import torch
from growing import THETAS, config, lively, moved, random_ids

from tokenformer import Pattention, UserError
from tokenformer.config import ModelConfig
from tokenformer.growth.measure import mass
from tokenformer.growth.merge import merge_segments, rescale
from tokenformer.growth.model import grow
from tokenformer.models import build


def test_on_random_keys_rescaling_takes_a_large_change_to_a_few_percent():
    torch.manual_seed(0)
    layer = Pattention(64, 64, [256, 512])
    with torch.no_grad():
        layer.segments[1].key_tokens.mul_(5)
        x = torch.randn(512, 64)
        keys, values, taus = zip(*layer.parts(torch.float32), strict=True)
        sums = [mass(x @ k.T, "l2_norm_gelu").sum(-1).mean().item() for k in keys]
        before = layer(x)

        def change(keys):
            one = Pattention(64, 64, 768)
            one.segments[0].key_tokens.copy_(torch.cat(list(keys)))
            one.segments[0].value_tokens.copy_(torch.cat(list(values)))
            return ((one(x) - before).norm() / before.norm()).item()

        assert change(keys) > 0.3
        assert change(rescale(list(keys), list(values), list(taus), sums, "l2_norm_gelu")[0]) < 0.08


@pytest.mark.parametrize("theta", THETAS)
def test_segments_with_equal_rows_merge_exactly_for_every_theta(theta):
    """Where each row's sums keep one ratio between segments, the rescaling is exact: here they are equal but for τ."""
    model = grow(lively(config(theta=theta), dtype=torch.float64), qkv_tokens=48, proj_tokens=40, ffn_tokens=96)
    with torch.no_grad():
        for block in model.blocks:
            for part in (
                block.attention.query,
                block.attention.key,
                block.attention.value,
                block.attention.proj,
                block.ffn,
            ):
                part.segments[1].key_tokens.copy_(part.segments[0].key_tokens)
                if theta in ("l2_norm_gelu", "l1_norm_gelu"):
                    part.segments[1].key_tokens.mul_(3)  # the scale of keys is nothing to them
                part.segments[1].value_tokens.normal_(std=0.2)
    one = merge_segments(model, random_ids(), force=theta == "softmax")
    assert one.config.segments("ffn") == [(96, 96**0.5)] and one.config.qkv_tokens == 48
    assert moved(model, one) <= 1e-10
    event = one.history[-1]
    assert event["what"] == "merge_segments" and event["loss_after"] == pytest.approx(event["loss_before"], abs=1e-9)


def test_held_tau_is_merged_too():
    model = grow(lively(config()), ffn_tokens=60, new_tokens="zero_key")
    bigger = grow(model, ffn_tokens=96)
    ((count, tau),) = merge_segments(bigger, random_ids()).config.segments("ffn")
    assert count == 96 and tau == pytest.approx((48 + 36) ** 0.5)


def test_softmax_is_refused_unless_forced():
    model = grow(lively(config(theta="softmax")), ffn_tokens=60)
    with pytest.raises(UserError, match="softmax"):
        merge_segments(model, random_ids())


def test_a_model_of_several_trunks_is_refused_in_a_sentence():
    small = {"layers": 1, "dim": 32, "heads": 4, "qkv_tokens": 16, "proj_tokens": 16, "ffn_tokens": [32, 16]}
    image = ModelConfig(of="image", image_size=16, patch=8, classes=0, **small)
    text = ModelConfig(context=16, vocab=64, **small)
    model = build(ModelConfig(of="caption", trunks={"image": image, "text": text}))
    with pytest.raises(UserError, match="a model of caption has several trunks"):
        merge_segments(model, random_ids())
