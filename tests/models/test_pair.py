"""Pairs of images and texts: what a text is, what is refused, growth of one trunk, and open_clip's numbers."""

import dataclasses
import importlib.util
import math

import pytest
import torch

from tests.models.stand_ins import imported
from tokenformer import grow
from tokenformer.config import ModelConfig, load, presets, to_dict
from tokenformer.errors import UserError
from tokenformer.models import PairModel, build, cost
from tokenformer.models.cost import equal_transformer, training_flops_per_sample
from tokenformer.models.names import parse
from tokenformer.train.optim import blocks_after

TOKENS = {"qkv_tokens": 24, "proj_tokens": 16, "ffn_tokens": 48}
IMAGE = ModelConfig(of="image", layers=2, dim=32, heads=4, image_size=16, patch=8, classes=0, **TOKENS)
TEXT = ModelConfig(of="text", layers=3, dim=24, heads=3, context=8, vocab=40, pool="end", **TOKENS)
VIT = {"kind": "transformer", "bias": True, "norm_affine": True, **dict.fromkeys(TOKENS)}
VARIANTS = {
    "clip": ({}, {}, {}),
    "siglip": ({"loss": "sigmoid"}, {"pool": "mean"}, {"pool": "mean"}),
    "rotary": ({}, {"positions": "rotary", "rotary_fraction": 1.0}, {"positions": "rotary"}),
    "transformers": ({}, {**VIT, "first_norm": True}, {**VIT, "activation": "quick_gelu"}),
}
IDS, LENGTHS = torch.tensor([[5, 6, 7, 0, 9], [8, 0, 1, 2, 3], [4, 5, 6, 7, 0]]), torch.tensor([4, 2, 5])


def pair(keys=None, image=None, text=None) -> ModelConfig:
    image, text = dataclasses.replace(IMAGE, **image or {}), dataclasses.replace(TEXT, **text or {})
    return ModelConfig(**{"of": "pair", "embed": 20, "trunks": {"image": image, "text": text}} | (keys or {}))


def pixels(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_that_the_cost_counts_and_features_have_length_1(name):
    model = build(pair(*VARIANTS[name]), seed=1)
    assert isinstance(model, PairModel) and model.cost().parameters == sum(p.numel() for p in model.parameters())
    images, texts = model(pixels(), IDS, LENGTHS)
    assert images.shape == texts.shape == (3, 20)
    torch.testing.assert_close(images.norm(dim=1), torch.ones(3))
    model.logits(images, texts).square().sum().backward()
    learn = [p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters()]
    assert all(learn)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_stands_behind_the_end_of_a_text_changes_nothing(name):
    model = build(pair(*VARIANTS[name]), seed=1)
    other = IDS.clone()
    other[0, 4], other[1, 2:] = 30, 31
    found = model.encode_text(IDS, LENGTHS)
    torch.testing.assert_close(found, model.encode_text(other, LENGTHS), rtol=0, atol=1e-6)
    torch.testing.assert_close(found[1:2], model.encode_text(IDS[1:2, :2]), rtol=0, atol=1e-6)  # nor does its absence
    other = IDS.clone()
    other[:, 0] = 33
    assert (model.encode_text(other, LENGTHS) - found).abs().amax(1).min() > 1e-6


def test_the_first_values_of_scale_and_bias_and_their_limit():
    clip, siglip = build(pair()), build(pair({"loss": "sigmoid"}))
    assert clip.scale.item() == pytest.approx(math.log(1 / 0.07)) and clip.bias is None
    assert siglip.scale.item() == pytest.approx(math.log(10)) and siglip.bias.item() == -10
    with torch.no_grad():
        clip.scale.fill_(9.0)
    one = torch.eye(20)[:2]
    torch.testing.assert_close(clip.logits(one, one), 100 * torch.eye(2))


def test_either_trunk_grows_and_features_do_not_change():
    model = build(pair(), seed=1)
    before = model(pixels(), IDS, LENGTHS)
    for on, same in (("image.", "text."), ("text.", "image.")):
        bigger = grow(model, on=on, ffn_tokens=96, layers=4)
        assert bigger.config.trunk(on).ffn_tokens == [48, 48] and bigger.config.trunk(same) == model.config.trunk(same)
        assert bigger.cost().parameters == sum(p.numel() for p in bigger.parameters()) > model.cost().parameters
        for one, other in zip(before, bigger(pixels(), IDS, LENGTHS), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match=r"trunks are image\., text\.: say which one"):
        grow(model, ffn_tokens=96)


@pytest.mark.parametrize(
    ("keys", "image", "text", "said"),
    [
        ({}, {"classes": 10}, {}, "model.trunks.image.classes is 10"),
        ({}, {}, {"pool": "class"}, "a text has no class token"),
        ({}, {"pool": "end"}, {}, "an image has no end token"),
        ({}, {"activation": "quick_gelu"}, {}, "model.activation has no meaning for kind tokenformer"),
        ({}, {}, {"patch": 8}, "model.patch belongs to models of image"),
        ({"patch": 8}, {}, {}, "model.patch belongs to models of image"),
        ({"trunks": {"image": IMAGE}}, {}, {}, "a pair has a trunk image"),
        ({"trunks": {}}, {}, {}, "model.trunks is missing"),
        ({"loss": "hinge"}, {}, {}, "model.loss is 'hinge'"),
        ({"kind": "transformer"}, {}, {}, "model.kind belongs to each of model.trunks: move it there"),
        ({"dim": 64}, {}, {}, "model.dim belongs to each of model.trunks"),
    ],
)
def test_what_is_refused(keys, image, text, said):
    with pytest.raises(UserError, match=said):
        pair(keys, image, text)


def test_a_trunk_of_another_kind_drops_what_has_no_meaning_there_and_mistakes_name_their_trunk():
    model = load("pair/icons", overrides=["model.trunks.image.kind=transformer"]).model
    assert model.trunks["image"].kind == "transformer" and model.trunks["image"].ffn_tokens is None
    assert model.trunks["text"] == load("pair/icons").model.trunks["text"]
    with pytest.raises(UserError, match=r"^model.trunks.txt.pool belongs to models of image and text, and this one is"):
        load("pair/icons", overrides=["model.trunks.txt.pool=end"])
    with pytest.raises(UserError, match=r"^model.trunks.text.heads is 5, which does not divide dim 64"):
        load("pair/icons", overrides=["model.trunks.text.heads=5"])


def test_texts_that_do_not_fit_are_refused():
    model = build(pair())
    with pytest.raises(UserError, match="a text has 9 tokens, but the model's context is 8"):
        model.encode_text(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(UserError, match="ids go from 40 to 40, but the vocabulary from 0 to 39"):
        model.encode_text(torch.tensor([[40]]))
    with pytest.raises(UserError, match=r"model.of is 'text', but must be language, image, pair"):
        build(TEXT)


def test_flops_count_each_trunk_at_its_own_length():
    config = pair()
    image, text = cost(IMAGE).sample_flops(5), cost(TEXT).sample_flops(8)
    assert cost(config).sample_flops(0) == image + text + 2 * 20 * (32 + 24)
    assert training_flops_per_sample(config) == 3 * cost(config).sample_flops(0)
    assert cost(TEXT).causal and not cost(dataclasses.replace(TEXT, pool="mean")).causal
    assert "context" not in to_dict(config) and "embed" not in to_dict(IMAGE) and "first_norm" not in to_dict(IMAGE)
    for trunk in (IMAGE, TEXT):
        rival = cost(equal_transformer(trunk)).parameters
        assert rival == pytest.approx(cost(trunk).parameters, rel=0.02)


def test_the_rate_of_layers_follows_their_own_trunk():
    model = build(pair())
    depth = {name: blocks_after(parse(name, model.ends), model.config) for name, _ in model.named_parameters()}
    assert depth["image.patches.weight"] == depth["image.positions"] == 3 and depth["image.norm.weight"] == 0
    assert depth["text.embedding.weight"] == 4 and depth["text.blocks.0.ffn.segments.0.key_tokens"] == 3
    assert depth["scale"] == depth["image_projection.weight"] == 0


def test_the_presets():
    found = {name: cost(load(name).model).parameters for name in presets() if name.startswith("pair/")}
    assert found == {"pair/b16": 149_879_041, "pair/b16-adamw": 149_879_041, "pair/icons": 246_081}


@pytest.fixture(scope="module")
def open_clip():
    """open_clip without torchvision and ftfy, which its transforms and its tokenizer need."""
    if importlib.util.find_spec("open_clip") is None:
        pytest.skip("open_clip is not installed")
    with imported("open_clip", "torchvision", "ftfy") as found:
        yield found


def trunk_of(theirs: dict[str, torch.Tensor], at: str, layers: int) -> dict[str, torch.Tensor]:
    """The blocks of one of open_clip's trunks, by our names."""
    names = {"attention_norm": "ln_1", "ffn_norm": "ln_2", "attention.proj": "attn.out_proj"}
    names |= {"ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}
    found = {}
    for i in range(layers):
        here = f"{at}resblocks.{i}."
        for leaf in ("weight", "bias"):
            found |= {f"blocks.{i}.{ours}.{leaf}": theirs[f"{here}{name}.{leaf}"] for ours, name in names.items()}
            parts = theirs[f"{here}attn.in_proj_{leaf}"].chunk(3)
            kinds = zip(("query", "key", "value"), parts, strict=True)
            found |= {f"blocks.{i}.attention.{kind}.{leaf}": part for kind, part in kinds}
    return found


def from_open_clip(theirs: torch.nn.Module, config: ModelConfig) -> PairModel:
    """Our model with the weights of an open_clip model, by name."""
    given = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    image = trunk_of(given, "visual.transformer.", config.trunks["image"].layers)
    image |= {"class_token": given["visual.class_embedding"], "positions": given["visual.positional_embedding"]}
    image |= {"patches.weight": given["visual.conv1.weight"].flatten(1), "patches.bias": torch.zeros(768)}
    text = trunk_of(given, "transformer.", config.trunks["text"].layers)
    text |= {"embedding.weight": given["token_embedding.weight"], "positions": given["positional_embedding"]}
    for leaf in ("weight", "bias"):
        image |= {f"first_norm.{leaf}": given[f"visual.ln_pre.{leaf}"], f"norm.{leaf}": given[f"visual.ln_post.{leaf}"]}
        text[f"norm.{leaf}"] = given[f"ln_final.{leaf}"]
    found = {f"image.{name}": tensor for name, tensor in image.items()}
    found |= {f"text.{name}": tensor for name, tensor in text.items()} | {"scale": given["logit_scale"]}
    found |= {"image_projection.weight": given["visual.proj"].T, "text_projection.weight": given["text_projection"].T}
    with torch.device("meta"):
        model = PairModel(config)
    model.load_state_dict(found, assign=True)
    return model


@torch.no_grad()
def test_towers_with_open_clips_weights_compute_what_open_clip_does(open_clip):
    """Its ViT-B-32 with QuickGELU, as the first CLIP models; random biases and norms; texts of all lengths."""
    torch.manual_seed(0)
    theirs = open_clip.create_model("ViT-B-32-quickgelu").eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 1:  # which begin at 0 and 1
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    vit = {"kind": "transformer", "bias": True, "norm_affine": True, "layers": 12, "activation": "quick_gelu"}
    vit |= {"positions": "learned"}
    image = ModelConfig(of="image", dim=768, heads=12, patch=32, classes=0, first_norm=True, **vit)
    text = ModelConfig(of="text", dim=512, heads=8, context=77, vocab=49408, pool="end", **vit)
    config = ModelConfig(of="pair", embed=512, trunks={"image": image, "text": text})
    ours = from_open_clip(theirs, config)
    assert sum(p.numel() for p in theirs.parameters()) == ours.cost().parameters - 768  # it has no bias of the patches
    pixels, ids, lengths = torch.randn(2, 3, 224, 224), torch.zeros(3, 77, dtype=torch.long), torch.tensor([3, 40, 77])
    for row, length in enumerate(lengths.tolist()):
        ids[row, :length] = torch.randint(1, 49406, (length,))
        ids[row, 0], ids[row, length - 1] = 49406, 49407
    for one, other in (
        (ours.encode_image(pixels), theirs.encode_image(pixels, normalize=True)),
        (ours.encode_text(ids, lengths), theirs.encode_text(ids, normalize=True)),
        (ours.encode_text(ids, lengths, normalize=False), theirs.encode_text(ids)),
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
