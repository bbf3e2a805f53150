"""Image models for transformers: its Auto classes and pipeline, with our package and without it, and back."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.hub.test_images import VIT, X, trained
from tests.hub.test_remote import run_without_us
from tokenformer import UserError, grow, load, save
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


def test_labels_that_are_no_class_and_an_edited_config_are_refused(tmp_path):
    model = trained()
    model.images = IMAGES
    save(model, tmp_path / "model", format="hf")
    pytest.importorskip("transformers")
    from tokenformer.hub.hf import TokenFormerForImageClassification as Theirs

    theirs = Theirs.from_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"labels go from 1 to 99, but the classes from 0 to \d+: give"):
        theirs(pixel_values=X[:2], labels=torch.tensor([1, 99]))
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(UserError, match=r"config.json was changed since the folder was written"):
        Theirs.from_pretrained(tmp_path / "model")
    theirs.save_pretrained(tmp_path / "model")
    Theirs.from_pretrained(tmp_path / "model")
    assert torch.equal(load(tmp_path / "model")(X), model(X))


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


def test_how_pixels_are_made_is_checked_and_what_is_not_known_is_said(tmp_path):
    model = trained()
    model.images = IMAGES
    save(model, tmp_path / "model", format="hf")
    about, manifest = (tmp_path / "model" / f"{name}.json" for name in ("preprocessor_config", "manifest"))
    said = json.loads(about.read_text())
    about.write_text(json.dumps(said | {"image_mean": [0.4, 0.4, 0.4]}))
    with pytest.raises(UserError, match=r"preprocessor_config.json is not the file that its manifest describes"):
        load(tmp_path / "model")
    manifest.unlink()
    assert load(tmp_path / "model").images["mean"] == [0.4, 0.4, 0.4]
    sizes = [{"size": {"height": 32, "width": 32}}, {"size": [32]}, {"size": {"shortest_edge": -1}}, {"crop_size": 32}]
    for other in ({"resample": 0}, {"resample": [3]}, {"do_normalize": False}, *sizes):
        about.write_text(json.dumps(said | other))
        with pytest.raises(UserError, match=r"preprocessor_config.json prepares images in a way that we do not know: "):
            load(tmp_path / "model")
    about.unlink()
    with pytest.warns(UserWarning, match="has no preprocessor_config.json, so pixels are made as for ImageNet"):
        assert "mean" not in load(tmp_path / "model").images


def test_a_grown_image_model_in_a_wrapper_is_saved_with_its_own_config(tmp_path):
    from tokenformer.hub.hf import TokenFormerForImageClassification, TokenFormerImageConfig

    keys = {"layers": 2, "dim": 32, "heads": 4, "image_size": 16, "patch": 8, "classes": 3}
    config = TokenFormerImageConfig(**keys, qkv_tokens=8, proj_tokens=8, ffn_tokens=16)
    model = TokenFormerForImageClassification(config)
    model.model = grow(model.model, ffn_tokens=32)
    model.save_pretrained(tmp_path / "grown")
    assert load(tmp_path / "grown").config.ffn_tokens == [16, 16]


def test_accumulated_micro_batches_give_the_gradient_and_loss_of_one(tmp_path):
    """Trainer leaves the division to models that take its count of items, as any **kwargs seems to."""
    transformers = pytest.importorskip("transformers")
    from tokenformer.hub.hf import TokenFormerForImageClassification as Theirs

    save(trained(), tmp_path / "model", format="hf")
    rows = [{"pixel_values": x, "labels": i} for i, x in enumerate(torch.randn(8, *X.shape[1:]))]
    found = []
    for size in (8, 2):
        model = Theirs.from_pretrained(tmp_path / "model")
        before = [parameter.detach().clone() for parameter in model.parameters()]
        how = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "optim": "sgd"}
        more = {"max_steps": 1, "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), learning_rate=0.1, max_grad_norm=0, **how, **more
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        moved = [new.detach() - old for new, old in zip(model.parameters(), before, strict=True)]
        found.append((trainer.state.log_history[0]["loss"], torch.cat([part.flatten() for part in moved])))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-6)


def test_other_classes_make_a_new_head_and_other_problems_are_refused(tmp_path):
    pytest.importorskip("transformers")
    from tokenformer.hub.hf import TokenFormerForImageClassification as Theirs
    from tokenformer.hub.hf import TokenFormerImageConfig

    model = trained()
    model.images = IMAGES
    save(model, tmp_path / "model", format="hf")
    names = {0: "cat", 1: "dog"}
    for how in ({"num_labels": 2}, {"classes": 2}, {"id2label": names, "label2id": {"cat": 0, "dog": 1}}):
        theirs = Theirs.from_pretrained(tmp_path / "model", ignore_mismatched_sizes=True, **how)
        assert theirs(X).logits.shape[1] == theirs.config.num_labels == len(theirs.config.id2label) == 2
        assert theirs.config.id2label == names or "id2label" not in how
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            Theirs.from_pretrained(tmp_path / "model", **how)
    assert len(TokenFormerImageConfig.from_native(model.config).id2label) == model.config.classes
    theirs = Theirs.from_pretrained(tmp_path / "model", problem_type="multi_label_classification")
    several = torch.zeros(len(X), 10)
    several[:, :2] = 1
    with pytest.raises(UserError, match="problem_type is multi_label_classification, but an image has one class"):
        theirs(X, labels=several)
    theirs.config.problem_type = None
    with pytest.raises(UserError, match="do not add up to 1: give numbers of classes"):
        theirs(X, labels=several)
    assert theirs(X, labels=several / 2).loss.isfinite()


@pytest.mark.parametrize("size, crop_pct", [(48, 1.0), (224, 0.875), (224, 0.9), (224, 0.95), (64, 0.9)])
def test_an_export_cuts_out_the_same_pixels(tmp_path, size, crop_pct):
    """Of forty pictures of any size: to the last bit of every pixel."""
    from transformers import AutoImageProcessor

    model, random = trained(), np.random.default_rng(size)
    model.images = IMAGES | {"size": size, "crop_pct": crop_pct}
    save(model, tmp_path / "model", format="hf")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model")
    for width, height in random.integers(20, 400, (40, 2)).tolist():
        picture = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        theirs = processor(Image.fromarray(picture), do_rescale=False, do_normalize=False, return_tensors="np")
        ours = Cropping(size, reading(model)[0]).evaluation(picture)
        assert np.array_equal(theirs["pixel_values"][0].transpose(1, 2, 0), ours), (width, height)
