"""The image model: sizes, positions, features, drop path, and the same numbers as timm's ViT."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tokenformer
from tests.models.stand_ins import imported
from tokenformer.config import ModelConfig, load, presets, to_dict
from tokenformer.errors import UserError
from tokenformer.hub import load as load_model
from tokenformer.hub import save
from tokenformer.infer.images import class_names
from tokenformer.models import ImageModel, build, cost
from tokenformer.models.cost import equal_transformer
from tokenformer.models.image import resized

TOKENS = {"qkv_tokens": 24, "proj_tokens": 16, "ffn_tokens": 48}
SHAPE = {"of": "image", "layers": 2, "dim": 32, "heads": 4, "image_size": 32, "patch": 8, "classes": 10}
TINY = ModelConfig(**SHAPE, **TOKENS)
VARIANTS = {
    "class token": {},
    "mean": {"pool": "mean"},
    "rotary": {"positions": "rotary", "rotary_fraction": 1.0},
    "oblong": {"image_size": [32, 48], "channels": 1},
    "no head": {"classes": 0},
    "vit": {"kind": "transformer", "bias": True, "norm_affine": True, **dict.fromkeys(TOKENS)},
    "plain vit": {"kind": "transformer", "pool": "mean", **dict.fromkeys(TOKENS)},
}

# parameters, and what the paper prints in millions. Its 109 for B/16 is not what its own numbers of tokens give.
PUBLISHED = {
    "vision/b16-small": (86_447_848, 86),
    "vision/b16": (114_759_400, 109),
    "vision/l16-small": (304_007_144, 307),
    "vision/l16": (404_670_440, 407),
    "vision/tiny16": (5_687_464, None),
    "vision/small16": (21_990_760, None),
    "vision/cifar": (4_751_114, None),
    "vision/vit-b16": (86_567_656, None),  # timm's vit_base_patch16_224
}


def pixels(config: ModelConfig, batch: int = 3, seed: int = 0) -> torch.Tensor:
    rows, columns = config.grid
    shape = (batch, config.channels, rows * config.patch, columns * config.patch)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def variant(**keys) -> ModelConfig:
    return dataclasses.replace(TINY, **keys)


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_that_the_cost_counts_and_a_class_comes_out(name):
    config = variant(**VARIANTS[name])
    model = build(config)
    assert sum(p.numel() for p in model.parameters()) == model.cost().parameters
    x = pixels(config)
    assert model(x).shape == (3, config.classes or config.dim)
    assert model.forward_features(x).shape == (3, config.length, config.dim)
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_of_the_presets(name):
    with torch.device("meta"):
        model = build(load(name).model)
    count, printed = PUBLISHED[name]
    assert sum(p.numel() for p in model.parameters()) == cost(model.config).parameters == count
    assert printed is None or abs(count / 1e6 - printed) < 6


def test_every_vision_preset_is_pinned_and_has_the_published_optimizer_beside_it():
    found = [name for name in presets() if name.startswith("vision/")]
    assert {name.removesuffix("-adamw") for name in found} == set(PUBLISHED)
    for name in [name for name in found if name.endswith("-adamw")]:
        ours, theirs = load(name.removesuffix("-adamw")), load(name)
        assert theirs.optimizer.kind == "adamw" and theirs.optimizer.rate == 1e-4 * theirs.batch / 256
        optimizer = dataclasses.replace(theirs.optimizer, kind="muon")
        assert dataclasses.replace(theirs, optimizer=optimizer) == ours


def test_attention_that_is_not_causal_is_counted_whole():
    """timm counts 17.58 GMACs for a ViT-B/16; a TokenFormer of 576 tokens has the same products."""
    config = load("vision/vit-b16").model
    assert cost(config).sample_flops(config.length) / 2e9 == pytest.approx(17.56, abs=0.01)
    assert cost(config).causal is False and cost(load("lm/150m").model).causal is True
    assert cost(config).token_flops(197) == 4 * 12 * 768 * 197
    small = load("vision/b16-small").model
    assert cost(small).sample_flops(197) == cost(config).sample_flops(197)
    rival = equal_transformer(small)
    assert rival.dim == 768 and cost(rival).parameters == pytest.approx(cost(small).parameters, rel=1e-4)


def test_a_language_model_writes_no_key_of_images_and_an_image_model_none_of_text():
    text, image = to_dict(load("lm/150m").model), to_dict(TINY)
    assert not {"image_size", "patch", "classes", "bias", "pool"} & text.keys() and "vocab" in text
    assert not {"context", "vocab", "tied"} & image.keys() and image["patch"] == 8


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"image_size": 33}, "multiple of the patch"),
        ({"image_size": [32, 32, 32]}, "multiple of the patch"),
        ({"bias": True}, "model.bias has no meaning for kind tokenformer"),
        ({"norm_affine": True}, "model.norm_affine has no meaning for kind tokenformer"),
        ({"vocab": 128}, "model.vocab belongs to models of language"),
        ({"positions": "rotary", "rotary_fraction": 0.25}, "multiple of 4"),
        ({"classes": -1}, "model.classes is -1"),
        ({"of": "language", "classes": 10}, "model.image_size belongs to models of image"),
    ],
)
def test_what_is_refused(keys, said):
    with pytest.raises(UserError, match=said):
        variant(**keys)


def test_images_that_are_not_refused_silently():
    model = build(TINY)
    for shape in ((1, 3, 33, 32), (1, 1, 32, 32), (3, 32, 32)):
        with pytest.raises(UserError, match="multiples of the patch 8"):
            model(torch.zeros(shape))
    with pytest.raises(UserError, match=r"not torch\.uint8"):
        model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_every_patch_sees_every_other():
    model, x = build(TINY), pixels(TINY)
    other = x.clone()
    other[:, :, -8:, -8:] += 1  # the last patch
    moved = (model.forward_features(other) - model.forward_features(x)).abs().amax((0, 2))
    assert (moved > 1e-6).all()


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_positions_tell_patches_apart_and_follow_other_sizes(positions):
    """Two patches exchanged give another answer, at the model's own size, a larger one and another aspect ratio."""
    model = build(variant(positions=positions, rotary_fraction=1.0), seed=1)
    for size in ((32, 32), (48, 48), (24, 64)):
        x = torch.randn(2, 3, *size)
        swapped = torch.cat([x[..., 8:16], x[..., :8], x[..., 16:]], dim=-1)
        moved = (model(x) - model(swapped)).abs().max()
        assert moved > 1e-6, size


def test_interpolated_positions():
    """A ramp stays a ramp: at twice the size in the middle of the old steps; the class token's row stays."""
    ramp = torch.arange(8.0)[:, None].expand(8, 8).reshape(64, 1)
    found = resized(torch.cat([torch.tensor([[-7.0]]), ramp]), (8, 8), (16, 8))
    assert found[0] == -7 and len(found) == 1 + 128
    rows = found[1:].view(16, 8)
    torch.testing.assert_close(rows[4:12, 3], torch.arange(1.75, 5.5, 0.5), rtol=0, atol=0.02)
    same = torch.randn(17, 4)
    assert resized(same, (4, 4), (4, 4)) is same


def test_intermediates_are_the_states_behind_the_blocks():
    model, x = build(variant(layers=3)), pixels(TINY)
    features, maps = model.forward_intermediates(x)
    torch.testing.assert_close(features, model.forward_features(x), rtol=0, atol=0)
    assert [m.shape for m in maps] == [(3, 32, 4, 4)] * 3
    _, normed = model.forward_intermediates(x, indices=[-1], norm=True)
    torch.testing.assert_close(normed[0].flatten(2).mT, features[:, 1:], rtol=0, atol=0)
    _, last = model.forward_intermediates(x, indices=2)
    assert torch.equal(last[0], maps[1]) and torch.equal(last[1], maps[2])
    for strange in (4, [3], [-4]):
        with pytest.raises(UserError, match="has 3 blocks"):
            model.forward_intermediates(x, indices=strange)


@torch.no_grad()
def test_features_behind_blocks_come_in_the_forms_that_timm_has():
    model, x = build(variant(layers=3)), pixels(TINY)
    features, maps = model.forward_intermediates(x)
    rows = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)
    assert all(torch.equal(row, found.flatten(2).mT) for row, found in zip(rows, maps, strict=True))
    _, pairs = model.forward_intermediates(x, norm=True, return_prefix_tokens=True)
    assert torch.equal(pairs[-1][1], features[:, :1]) and pairs[0][0].shape == maps[0].shape
    calls: list[int] = []
    model.blocks[2].register_forward_hook(lambda *_: calls.append(2))
    stopped, [second] = model.forward_intermediates(x, indices=[1], stop_early=True)
    assert not calls and torch.equal(second, maps[1]) and torch.equal(stopped[:, 1:], model.norm(rows[1]))
    with pytest.raises(UserError, match=r"output_fmt is NHWC: give NCHW .* or NLC"):
        model.forward_intermediates(x, output_fmt="NHWC")


def test_another_head():
    model, x = build(TINY), pixels(TINY)
    before = model.forward_features(x)
    model.reset_classifier(3)
    assert model(x).shape == (3, 3) and model.config.classes == 3 and torch.equal(model.forward_features(x), before)
    assert sum(p.numel() for p in model.parameters()) == model.cost().parameters
    assert model.get_classifier() is model.head and model.num_classes == 3
    assert model.num_features == model.embed_dim == model.head_hidden_size == 32
    model.reset_classifier(0)
    assert torch.equal(model(x), model.forward_head(before, pre_logits=True))
    assert model.get_classifier() is None and model.num_classes == 0
    assert tokenformer.ImageModel is ImageModel and "ImageModel" in dir(tokenformer)


def test_another_head_forgets_the_names_of_the_old_ones_classes(tmp_path):
    model = build(TINY)
    model.images = images = {"classes": [f"old {n}" for n in range(10)], "size": 32}
    model.reset_classifier(3)
    assert class_names(model) == ["class 0", "class 1", "class 2"] and len(images["classes"]) == 10
    save(model, tmp_path / "model")
    assert load_model(tmp_path / "model").images == {"size": 32}


def test_the_pooling_of_another_head_is_the_models_own():
    model, mean = build(TINY), build(variant(pool="mean"))
    model.reset_classifier(5, "token")
    model.reset_classifier(num_classes=5, global_pool="class", seed=3)
    mean.reset_classifier(5, "avg")
    for wrong in ("avg", "map", 7):
        with pytest.raises(UserError, match=rf"global_pool is {wrong}, but the model pools by its class token"):
            model.reset_classifier(4, wrong)
    assert model.num_classes == 5


@pytest.mark.parametrize("keys", [{"of": "image", "classes": 3}, {"of": "text", "pool": "mean", "vocab": 128}])
def test_learned_positions_rotate_nothing(keys):
    """12 channels of a head have no even quarter, which rotary positions alone need."""
    shape = {"layers": 1, "dim": 48, "heads": 4, **TOKENS, **keys}
    assert ModelConfig(**shape).positions == "learned"
    with pytest.raises(UserError, match=r"rotary_fraction 0.25 of 12 channels"):
        ModelConfig(**shape, positions="rotary")


def drop_for(model: ImageModel, batch: int) -> torch.Tensor:
    factors = torch.ones(model.config.layers, 2, batch)
    factors[0, 1, 0], factors[1, 0, 1], factors[1, 1, 1] = 0.0, 0.0, 2.0
    return factors


def test_a_dropped_branch_adds_nothing_and_a_factor_scales_it():
    model, x = build(TINY), pixels(TINY)
    whole, some = model(x), model(x, drop=drop_for(model, 3))
    torch.testing.assert_close(some[2], whole[2], rtol=1e-5, atol=1e-6)
    assert (some[:2] - whole[:2]).abs().amax(1).min() > 1e-4
    none = model(x, drop=torch.zeros(2, 2, 3))
    direct = model.forward_head(model.norm(model.embed(x, None)[0]))
    torch.testing.assert_close(none, direct)


def test_the_kernels_compute_the_same_with_drop_path():
    """In Triton's interpreter; the two blocks of each model took the fused path, and those of one were compiled."""
    pytest.importorskip("triton")
    checks = [sys.executable, Path(__file__).parent / "drop_checks.py"]
    done = subprocess.run(checks, capture_output=True, check=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    found = json.loads(done.stdout)
    assert found.pop("fused") == 6 and found.pop("graphs") > 0
    assert found.keys() == {"learned", "compiled", "rotary"} and max(found.values()) < 1e-5


@pytest.fixture(scope="session")
def timm():
    """timm without torchvision, whose CUDA build does not import beside the CPU's torch: only transforms, which are not
    used here, need it."""
    with imported("timm", "torchvision") as found:
        yield found


BLOCK = {
    "attention_norm": "norm1",
    "ffn_norm": "norm2",
    "attention.proj": "attn.proj",
    "ffn.up": "mlp.fc1",
    "ffn.down": "mlp.fc2",
}


def from_timm(theirs: torch.nn.Module, config: ModelConfig) -> ImageModel:
    """Our model with the weights of a timm ViT, by name."""
    given = {name: p.detach() for name, p in theirs.named_parameters()}
    found = {"class_token": given["cls_token"].flatten(), "positions": given["pos_embed"][0]}
    found |= {"patches.weight": given["patch_embed.proj.weight"].flatten(1)}
    found |= {"patches.bias": given["patch_embed.proj.bias"]}
    found |= {name: given[name] for name in ("norm.weight", "norm.bias", "head.weight", "head.bias")}
    for i in range(config.layers):
        for leaf in ("weight", "bias"):
            here = f"blocks.{i}."
            found |= {f"{here}{ours}.{leaf}": given[f"{here}{name}.{leaf}"] for ours, name in BLOCK.items()}
            parts = given[f"{here}attn.qkv.{leaf}"].chunk(3)
            names = ("query", "key", "value")
            found |= {f"{here}attention.{n}.{leaf}": part for n, part in zip(names, parts, strict=True)}
    with torch.device("meta"):
        model = ImageModel(config)
    model.load_state_dict(found, assign=True)
    return model


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_base_patch16_224"])
@torch.no_grad()
def test_a_vit_with_timms_weights_computes_what_timm_does(timm, name):
    """Logits, features, intermediates, and another size, whose positions both interpolate; random biases and norms."""
    torch.manual_seed(0)
    theirs = timm.create_model(name, dynamic_img_size=True).eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 1:  # which begin at 0 and 1
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    dim, heads = theirs.embed_dim, theirs.blocks[0].attn.num_heads
    config = dataclasses.replace(load("vision/vit-b16").model, dim=dim, heads=heads)
    ours = from_timm(theirs, config)
    x = torch.randn(1, 3, 224, 224)
    own, wanted = ours.forward_features(x), theirs.forward_features(x)
    torch.testing.assert_close(own, wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.forward_head(own), theirs.forward_head(wanted), rtol=0, atol=2e-5)
    if "tiny" in name:
        _, maps = ours.forward_intermediates(x, indices=3)
        for one, other in zip(maps, theirs.forward_intermediates(x, indices=3)[1], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
        oblong = torch.randn(1, 3, 256, 192)
        torch.testing.assert_close(ours(oblong), theirs(oblong), rtol=0, atol=2e-5)


def test_a_state_dict_knows_the_grid_of_its_patches():
    wide, high = (ImageModel(variant(image_size=size)) for size in ([16, 32], [32, 16]))
    with pytest.raises(RuntimeError, match=r"grid is \[2, 4\] in the state_dict but \[4, 2\] in this model"):
        high.load_state_dict(wide.state_dict())
    ImageModel(wide.config).load_state_dict(wide.state_dict())
