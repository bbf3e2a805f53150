"""Image models through the one door: folders, growth, shrinking, tables and plans, as for language models."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tokenformer import grow, load, save, shrink
from tokenformer.cli.main import main
from tokenformer.config import ModelConfig
from tokenformer.data.images.decode import Cropping
from tokenformer.errors import UserError
from tokenformer.hub.open import open_model
from tokenformer.infer.images import reading
from tokenformer.models import ImageModel, build
from tokenformer.ops.augment import normalise

ICONS = Path(__file__).parents[2] / "examples" / "icons"

SHAPE = {"of": "image", "layers": 2, "dim": 32, "heads": 4, "image_size": 32, "patch": 8, "classes": 10}
CONFIG = ModelConfig(**SHAPE, qkv_tokens=24, proj_tokens=16, ffn_tokens=48)
VIT = ModelConfig(**SHAPE, kind="transformer", bias=True, norm_affine=True)
IMAGES = {"classes": ["ant", "bee"], "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "crop_pct": 1.0}
X = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def trained(config: ModelConfig = CONFIG) -> ImageModel:
    """With values that are none of a new model's, and with what it knows of its images."""
    model = build(config, seed=5)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    model.images = IMAGES
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "model"
    save(trained(), path)
    return path


@pytest.mark.parametrize("config", [CONFIG, VIT], ids=["tokenformer", "vit"])
def test_a_folder_gives_back_the_model_and_what_it_knows_of_images(config, tmp_path):
    model = trained(config)
    save(model, tmp_path / "model")
    found = load(tmp_path / "model")
    assert isinstance(found, ImageModel) and found.config == model.config and found.images == IMAGES
    assert torch.equal(found(X), model(X))


def test_an_image_model_has_no_tokenizer_and_no_official_form(folder, tmp_path):
    with pytest.raises(UserError, match="is a model of image, but one of language or caption is needed here"):
        _ = open_model(folder).tokenizer
    with pytest.raises(UserError, match="official"):
        save(load(folder), tmp_path / "official", format="official")
    assert not (tmp_path / "official").exists()


@pytest.mark.parametrize("size", [{"ffn_tokens": 96, "qkv_tokens": 48}, {"layers": 3}], ids=["tokens", "layers"])
def test_growth_leaves_the_logits_as_they_are_and_hands_on_what_is_known(size):
    model = trained()
    bigger = grow(model, **size)
    torch.testing.assert_close(bigger(X), model(X), rtol=0, atol=1e-5)
    assert bigger.images == IMAGES and bigger.cost().parameters > model.cost().parameters


def test_a_vit_with_biases_grows_in_depth_exactly():
    model = trained(VIT)
    torch.testing.assert_close(grow(model, layers=3)(X), model(X), rtol=0, atol=1e-5)


def test_the_verbs_grow_and_shrink_on_random_pixels_and_stream(folder, tmp_path, capsys):
    main(["grow", str(folder), "--ffn-tokens", "96", "--out", str(tmp_path / "bigger")])
    said = capsys.readouterr().out
    assert "random pixels" in said and "exact up to rounding" in said
    main(["grow", str(folder), "--ffn-tokens", "96", "--no-verify", "--out", str(tmp_path / "streamed")])
    one, other = load(tmp_path / "bigger"), load(tmp_path / "streamed")
    assert torch.equal(one(X), other(X)) and one.images == other.images == IMAGES
    how = ["--ffn-tokens", "48", "--by", "newest", "--tau", "hold"]
    main(["shrink", str(tmp_path / "bigger"), *how, "--out", str(tmp_path / "back")])
    torch.testing.assert_close(load(tmp_path / "back")(X), load(folder)(X), rtol=0, atol=1e-5)


def test_shrinking_by_energy_looks_at_pixels():
    model = trained()
    smaller = shrink(model, X, ffn_tokens=24)
    moved, other = (smaller(X) - model(X)).norm(), (shrink(model, by="newest", ffn_tokens=24)(X) - model(X)).norm()
    assert smaller.config.ffn_tokens == 24 and moved < other


def test_tables_and_plans(folder, capsys):
    main(["info", str(folder)])
    said = capsys.readouterr().out
    assert "4 × 4 patches of 8 × 8 pixels, 10 classes" in said and "attention is not causal" in said
    main(["plan", "vision/b16", "--gpus", "8"])
    assert "recommended: parallel." in capsys.readouterr().out
    assert main(["info", str(folder), "--context", "1k"]) == 2
    assert "--context is for language models" in capsys.readouterr().err


def test_an_export_of_an_image_model_asks_for_no_tokenizer(folder, tmp_path, capsys):
    assert main(["convert", str(folder), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'hf'}: {load(folder).cost().parameters:,} parameters, hf format\n"


def test_the_verb_shrinks_by_energy_on_images(folder, tmp_path, capsys):
    """As `shrink` does with these pixels; a language model is refused."""
    paths = sorted((ICONS / "val").rglob("*.png"), key=str)
    model = load(folder)
    model.images = {}
    save(model, tmp_path / "plain")
    how = ["--ffn-tokens", "24", "--images", str(ICONS / "val"), "--out", str(tmp_path / "small")]
    assert main(["shrink", str(tmp_path / "plain"), *how]) == 0
    settings, size = reading(model)
    pixels = np.stack([Cropping(size, settings).evaluation(path.read_bytes()) for path in paths])
    expected = shrink(model, normalise(torch.from_numpy(pixels).permute(0, 3, 1, 2), settings), ffn_tokens=24)
    torch.testing.assert_close(load(tmp_path / "small")(X), expected(X), rtol=1e-5, atol=1e-6)
    assert main(["shrink", str(folder), "--ratio", "0.5", "--out", str(tmp_path / "no")]) == 2
    assert "--text (or --images), or --by newest" in capsys.readouterr().err
