"""Pairs for transformers: its Auto classes and pipeline, with our package and without it, and back."""

import numpy as np
import pytest
import torch

from tests.hub.test_remote import run_without_us
from tests.models.test_pair import pair
from tokenformer import grow, load, save
from tokenformer.data.images.captions import encode_captions
from tokenformer.data.text.tokenizer import ByteTokenizer, FileTokenizer, same_tokenizer
from tokenformer.errors import UserError
from tokenformer.models import build

IMAGES = {"size": 16, "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.8, "interpolation": "bicubic"}
TEXTS = ["a fox", "an owl that flies", "bread"]
READER = """
import importlib.util, json, os, sys
sys.path[:] = [p for p in sys.path if not p.endswith("-packages")] + sys.argv[1].split(os.pathsep)
assert importlib.util.find_spec("tokenformer") is None and importlib.util.find_spec("torchvision") is None
import numpy as np, torch
from PIL import Image
from transformers import AutoModel, AutoProcessor, AutoTokenizer, pipeline

torch.set_num_threads(1)
folder, texts = sys.argv[2], ["a fox", "an owl that flies", "bread"]
picture = Image.fromarray(np.load(sys.argv[3]))
find = pipeline("zero-shot-image-classification", model=folder, trust_remote_code=True)
assert type(find.model).__module__.startswith("transformers_modules"), type(find.model)
answer = find(picture, candidate_labels=texts, hypothesis_template="{}")
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
inputs = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(texts, padding=True, return_tensors="pt")
pixels = find.image_processor(picture, return_tensors="pt")["pixel_values"]
both = AutoProcessor.from_pretrained(folder, trust_remote_code=True)  # as CLIP's
both = both(text=texts, images=picture, padding=True, return_tensors="pt")
assert torch.equal(both["pixel_values"], pixels) and torch.equal(both["input_ids"], inputs["input_ids"])
with torch.no_grad():
    image, text = model.get_image_features(pixels).pooler_output, model.get_text_features(**inputs).pooler_output
model.train().gradient_checkpointing_enable()
loss = model(**inputs, pixel_values=pixels.expand(3, -1, -1, -1), return_loss=True).loss
loss.backward()
assert all(p.grad is not None for p in model.parameters())
model.save_pretrained(folder + "-again")
found = {"answer": answer, "image": image.tolist(), "text": text.tolist(), "pixels": pixels[0, :, 0, 0].tolist()}
print(json.dumps(found | {"ids": inputs["input_ids"].tolist(), "loss": loss.item()}))
"""


def trained(**keys):
    model = build(pair(keys, text={"vocab": 384, "context": 24}), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim else 1)
    model.images, model.tokenizer_json = IMAGES, ByteTokenizer().to_json()
    return model


@pytest.mark.multi
def test_a_folder_finds_texts_where_our_package_and_torchvision_are_not(tmp_path):
    model = trained()
    save(model, tmp_path / "model", format="hf")
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)  # the shorter side is 16 / 0.8
    np.save(tmp_path / "picture.npy", picture)
    found = run_without_us(READER, tmp_path, tmp_path / "model", tmp_path / "picture.npy")
    pixels = ((torch.from_numpy(picture[2:18, 7:23]).permute(2, 0, 1) / 255 - 0.5) / 0.25)[None]
    assert found["pixels"] == pytest.approx(pixels[0, :, 0, 0].tolist(), abs=1e-5)
    ids, lengths = map(torch.from_numpy, encode_captions(ByteTokenizer(), TEXTS, 24))
    assert found["ids"] == ids[:, : lengths.max()].tolist()  # the end token is appended, and pads
    with torch.no_grad():
        image, text = model.encode_image(pixels, normalize=False), model.encode_text(ids, lengths, normalize=False)
        chances = model.logits(*model(pixels, ids, lengths)).softmax(-1)[0]
        images, texts = model(pixels.expand(3, -1, -1, -1), ids, lengths)
        logits = model.logits(images, texts)
    torch.testing.assert_close(torch.tensor(found["image"]), image, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(found["text"]), text, rtol=0, atol=1e-5)
    for entry in found["answer"]:
        assert entry["score"] == pytest.approx(chances[TEXTS.index(entry["label"])].item(), abs=1e-4)
    both = -(logits.log_softmax(1).diagonal().mean() + logits.log_softmax(0).diagonal().mean()) / 2
    assert found["loss"] == pytest.approx(both.item(), rel=1e-4)
    again = load(tmp_path / "model-again")  # written by transformers
    assert torch.equal(again.encode_text(ids, lengths), model.encode_text(ids, lengths))


def test_a_folder_is_read_back_and_a_grown_pair_in_a_wrapper_is_saved_with_its_own_config(tmp_path):
    from transformers import AutoModel

    import tokenformer.hub.hf  # noqa: F401 (makes the Auto classes know ours)

    model = trained(loss="sigmoid")
    save(model, tmp_path / "pair", format="hf")
    found, ids = load(tmp_path / "pair"), torch.tensor([[5, 6, 0]])
    assert found.config == model.config and found.images == IMAGES
    assert torch.equal(found.encode_text(ids), model.encode_text(ids))
    assert same_tokenizer(FileTokenizer(found.tokenizer_json, "x"), FileTokenizer(model.tokenizer_json, "y"))
    theirs = AutoModel.from_pretrained(tmp_path / "pair")
    pixels = torch.zeros(1, 3, 16, 16)
    out = theirs(input_ids=ids, pixel_values=pixels, return_loss=True)
    wanted = model.logits(*model(pixels, ids))
    assert out.logits_per_image.item() == wanted.item() and out.loss.item() == pytest.approx(
        -torch.nn.functional.logsigmoid(wanted).item()
    )
    with pytest.raises(UserError, match="padded on its right"):
        theirs.get_text_features(ids, attention_mask=torch.tensor([[0, 1, 1]]))
    theirs.model = grow(theirs.model, on="image.", ffn_tokens=64)
    theirs.save_pretrained(tmp_path / "grown")
    assert load(tmp_path / "grown").config.trunk("image.").ffn_tokens == [48, 16]
    with pytest.raises(UserError, match="no tokenizer lies beside it"):
        save(build(pair()), tmp_path / "none", format="hf")


def test_padded_texts_without_their_mask_are_refused(tmp_path):
    pytest.importorskip("transformers")
    from tokenformer.hub.hf.pair import TokenFormerPairModel

    save(trained(), tmp_path / "model", format="hf")
    model = TokenFormerPairModel.from_pretrained(tmp_path / "model")
    ids, lengths = map(torch.from_numpy, encode_captions(ByteTokenizer(), TEXTS, 24))
    ids = ids[:, : lengths.max()]
    with pytest.raises(UserError, match="texts that are padded have an attention_mask: give it"):
        model.get_text_features(ids)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    alone = model.get_text_features(ids[:1, : lengths[0]]).pooler_output
    assert torch.allclose(model.get_text_features(ids, mask).pooler_output[:1], alone, atol=1e-5)
