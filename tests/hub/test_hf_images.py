"""Image models for transformers: its Auto classes and pipeline, with our package and without it, and back."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from tests.hub.test_images import VIT, X, trained
from tests.hub.test_remote import run_without_us
from tokenformer import grow, load, save
from tokenformer.data.images.decode import Cropping
from tokenformer.infer.images import reading

IMAGES = {"classes": [f"class {i}" for i in range(10)], "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
IMAGES |= {"crop_pct": 0.8, "interpolation": "bicubic", "size": 32}
READER = """
import importlib.util, json, os, sys
sys.path[:] = [p for p in sys.path if not p.endswith("-packages")] + sys.argv[1].split(os.pathsep)
assert importlib.util.find_spec("tokenformer") is None and importlib.util.find_spec("torchvision") is None
import numpy as np, torch
from PIL import Image
from transformers import AutoModelForImageClassification, pipeline

torch.set_num_threads(1)
folder = sys.argv[2]
picture = Image.fromarray(np.load(sys.argv[3]))
classify = pipeline("image-classification", model=folder, trust_remote_code=True)
assert type(classify.model).__module__.startswith("transformers_modules"), type(classify.model)
pixels = classify.image_processor(picture, return_tensors="pt")["pixel_values"]
model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
model.train().gradient_checkpointing_enable()
loss = model(pixel_values=pixels, labels=torch.tensor([3])).loss
loss.backward()
model.save_pretrained(folder + "-again")
found = {"answer": classify(picture, top_k=10), "loss": loss.item(), "pixels": pixels[0, :, 0, 0].tolist()}
print(json.dumps(found | {"shape": list(pixels.shape)}))
"""


@pytest.mark.multi
def test_a_folder_classifies_where_our_package_and_torchvision_are_not(tmp_path):
    model = trained()
    model.images = IMAGES
    save(model, tmp_path / "model", format="hf")
    picture = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)  # the shorter side is 32 / 0.8
    np.save(tmp_path / "picture.npy", picture)
    found = run_without_us(READER, tmp_path, tmp_path / "model", tmp_path / "picture.npy")
    cut = torch.from_numpy(picture[4:36, 14:46]).permute(2, 0, 1) / 255
    pixels = ((cut - 0.5) / 0.25)[None]
    assert found["shape"] == [1, 3, 32, 32] and found["pixels"] == pytest.approx(pixels[0, :, 0, 0].tolist(), abs=1e-5)
    chances = model(pixels).softmax(-1)[0]
    for entry in found["answer"]:
        number = IMAGES["classes"].index(entry["label"])
        assert entry["score"] == pytest.approx(chances[number].item(), abs=1e-5)
    assert found["loss"] == pytest.approx(-chances[3].log().item(), rel=1e-4)
    again = load(tmp_path / "model-again")  # written by transformers
    assert torch.equal(again(X), model(X))


def test_a_folder_is_read_back_with_names_and_processor(tmp_path):
    model = trained(VIT)
    model.images = IMAGES
    save(model, tmp_path / "vit", format="hf")
    found = load(tmp_path / "vit")
    assert torch.equal(found(X), model(X)) and found.images == IMAGES and found.config == model.config


@pytest.mark.parametrize("crop_pct, shorter", [(0.9, 26), (0.875, 27), (1.0, 24)])
def test_an_export_says_the_size_of_training_and_the_same_shorter_side_as_evaluation(tmp_path, crop_pct, shorter):
    """Trained on 24² where the model's own is 32²: 24 / 0.9 = 26.7, which evaluation rounds down as timm does."""
    model = trained(VIT)
    model.images = {**IMAGES, "crop_pct": crop_pct, "size": 24}
    save(model, tmp_path / "vit", format="hf")
    processor = json.loads((tmp_path / "vit" / "preprocessor_config.json").read_text())
    assert processor["crop_size"] == {"height": 24, "width": 24} and processor["size"] == {"shortest_edge": shorter}
    found, size = reading(load(tmp_path / "vit"))
    picture = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    one, other = (Cropping(24, dataclasses.replace(found, crop_pct=c)) for c in (crop_pct, found.crop_pct))
    assert size == 24 and np.array_equal(one.evaluation(picture), other.evaluation(picture))


def test_a_grown_image_model_in_a_wrapper_is_saved_with_its_own_config(tmp_path):
    from tokenformer.hub.hf import TokenFormerForImageClassification, TokenFormerImageConfig

    keys = {"layers": 2, "dim": 32, "heads": 4, "image_size": 16, "patch": 8, "classes": 3}
    config = TokenFormerImageConfig(**keys, qkv_tokens=8, proj_tokens=8, ffn_tokens=16)
    model = TokenFormerForImageClassification(config)
    model.model = grow(model.model, ffn_tokens=32)
    model.save_pretrained(tmp_path / "grown")
    assert load(tmp_path / "grown").config.ffn_tokens == [16, 16]
