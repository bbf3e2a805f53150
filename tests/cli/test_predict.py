"""`tokenformer predict` and `tokenformer eval --images`: figures beside those of a plain loop, formats, refusals."""

import json
import os
import shutil
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.images import pictures as p
from tests.test_adapters import make_adapter
from tokenformer import load, save
from tokenformer.adapters import attach_all, merged
from tokenformer.cli.main import main
from tokenformer.config import ModelConfig
from tokenformer.models import ImageModel, LanguageModel

SHAPE = {"layers": 1, "dim": 32, "heads": 4, "qkv_tokens": 16, "proj_tokens": 16, "ffn_tokens": 32}
MEAN, STD = [0.5, 0.4, 0.3], [0.25, 0.2, 0.3]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """An image model of three classes and one more that has no name, as a folder and an export; 12 pictures."""
    root = tmp_path_factory.mktemp("predict")
    model = ImageModel(ModelConfig(of="image", image_size=32, patch=8, classes=4, **SHAPE), seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.3)
    model.images = {"classes": p.CLASSES, "mean": MEAN, "std": STD, "crop_pct": 1.0, "interpolation": "bicubic"}
    save(model, root / "model")
    save(model, root / "hf", format="hf")
    save(LanguageModel(ModelConfig(**SHAPE, vocab=384)), root / "language")
    for number in range(12):
        path = root / "set" / "val" / p.CLASSES[p.label(number)] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        p.picture(number, 32, 32).save(path)
    return root


def logits(place: Path, path: Path) -> torch.Tensor:
    """Computed here from the pixels themselves."""
    pixels = torch.from_numpy(np.array(Image.open(path))).double() / 255
    x = ((pixels - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)[None].float()
    with torch.no_grad():
        return load(place / "model")(x)[0]


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_the_shares_are_those_of_the_model_for_folders_and_exports(place, capsys):
    files = sorted((place / "set").rglob("*.png"))
    for source in ("model", "hf"):
        code, out, _ = run(capsys, "predict", place / source, place / "set", "--json", "--top", 4, "--batch", 5)
        rows = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and [row["file"] for row in rows] == [str(f) for f in files]
        for path, row in zip(files, rows, strict=True):
            expected = logits(place, path).softmax(-1)
            shares = [c["share"] for c in row["classes"]]
            assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1)
            for c in row["classes"]:
                assert c["share"] == pytest.approx(expected[c["number"]].item(), abs=1e-5)
                last = "class 3" if source == "model" else "LABEL_3"
                assert c["class"] == [*p.CLASSES, last][c["number"]]
    code, out, _ = run(capsys, "predict", place / "model", files[3], "--top", 1)
    best = logits(place, files[3]).softmax(-1).max(0)
    assert out == f"{files[3]}: {[*p.CLASSES, 'class 3'][best.indices]} {best.values.item():.1%}\n"


def test_an_adapter_counts_in_shares_and_figures(place, capsys, tmp_path):
    folder = make_adapter(tmp_path / "mine", load(place / "model"), 1, ffn=7, layers=[0])
    plain = merged(attach_all(load(place / "model"), [f"{folder}=-2"]))
    save(plain, tmp_path / "merged")

    def shares(model: Path, *words: object) -> torch.Tensor:
        code, out, _ = run(capsys, "predict", model, place / "set", "--json", *words)
        assert code == 0
        rows = [sorted(json.loads(line)["classes"], key=itemgetter("number")) for line in out.splitlines()]
        return torch.tensor([[one["share"] for one in row] for row in rows])

    attached = shares(place / "model", "--adapter", f"{folder}=-2")
    assert (attached - shares(tmp_path / "merged")).abs().max() < 1e-6
    assert (attached - shares(place / "model")).abs().max() > 1e-3
    out = tmp_path / "out.json"
    words = ["eval", place / "model", "--images", place / "set", "--adapter", folder, "--out", out]
    assert run(capsys, *words)[0] == 0
    assert json.loads(out.read_text())["adapters"] == [str(folder)]


def test_damaged_images_are_named_and_the_others_classified_with_code_2(place, capsys, tmp_path):
    shutil.copy(place / "set/val/ant/00.png", tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:300])
    (tmp_path / "c.png").write_text("no image")
    code, out, err = run(capsys, "predict", place / "model", tmp_path)
    assert code == 2 and out.count("\n") == 1 and out.startswith(f"{tmp_path}/a.png: ")
    first, second = err.splitlines()
    assert first.startswith(f"tokenformer: {tmp_path}/b.png is damaged (it cannot be decoded")
    assert second.startswith(f"tokenformer: {tmp_path}/c.png is damaged (it is no JPEG, PNG")
    code, out, _ = run(capsys, "predict", place / "model", tmp_path, "--json")
    assert code == 2 and [sorted(json.loads(line)) for line in out.splitlines()][1:] == [["error", "file"]] * 2


def expected_figures(place: Path) -> dict[str, float]:
    loss, top1 = 0.0, 0
    for number in range(12):
        found = logits(place, place / "set/val" / p.CLASSES[p.label(number)] / f"{number:02}.png")
        loss += torch.nn.functional.cross_entropy(found[None], torch.tensor([p.label(number)])).item() / 12
        top1 += found.argmax().item() == p.label(number)
    return {"images": 12, "damaged": 0, "loss": pytest.approx(loss, abs=1e-5), "top1": top1 / 12, "top5": 1.0}


def test_eval_gives_the_figures_of_a_plain_loop_and_draws_what_is_confused(place, capsys, tmp_path):
    expected = expected_figures(place)
    assert 0 < expected["top1"] < 1
    options = ["--out", tmp_path / "r.json", "--confusion", tmp_path / "c.png", "--batch", 5]
    code, out, _ = run(capsys, "eval", place / "model", "--images", place / "set", *options)
    found = json.loads((tmp_path / "r.json").read_text())
    assert code == 0 and {key: found[key] for key in expected} == expected and found["part"] == "validation"
    counts = np.array(found["confusion"])
    assert counts.sum(1).tolist() == [4, 4, 4, 0] and np.trace(counts) == round(12 * found["top1"])
    for number, name in enumerate(p.CLASSES):
        told = found["classes"][str(number)]
        assert (told["class"], told["images"], told["top1"]) == (name, 4, counts[number, number] / 4)
        wrong = np.delete(counts[number], number).max()
        assert told["taken_for"] is None if wrong == 0 else wrong in counts[number]
    assert f"12 images (validation): top-1 {found['top1']:.2%}" in out and "most often taken for" in out
    assert Image.open(tmp_path / "c.png").width > 300
    code, _, err = run(capsys, "eval", place / "model", "--images", place / "set", *options)
    assert code == 2 and "is there already" in err


def test_a_class_index_says_which_folder_is_which_class(place, capsys, tmp_path):
    folders = ["n00000003", "n00000001", "n00000002"]
    for folder, name in zip(folders, p.CLASSES, strict=True):
        shutil.copytree(place / "set/val" / name, tmp_path / "set" / folder)
    index = {str(i): pair for i, pair in enumerate(zip(folders, p.CLASSES, strict=True))}
    (tmp_path / "index.json").write_text(json.dumps(index))
    (tmp_path / "lines.txt").write_text("\n".join(f"{f} {n}" for f, n in zip(folders, p.CLASSES, strict=True)))
    for file in ("index.json", "lines.txt"):
        how = ["--class-index", tmp_path / file, "--out", tmp_path / "r.json", "--force"]
        assert run(capsys, "eval", place / "model", "--images", tmp_path / "set", *how)[0] == 0
        found, expected = json.loads((tmp_path / "r.json").read_text()), expected_figures(place)
        assert {key: found[key] for key in expected} == expected and found["part"] == "all"
        assert [c["class"] for c in found["classes"].values()] == p.CLASSES
    code, _, err = run(capsys, "eval", place / "model", "--images", tmp_path / "set")
    assert code == 2 and "is none of the 3 classes" in err and err.count("\n") == 1


def test_a_damaged_image_counts_in_no_figure(place, capsys, tmp_path):
    shutil.copytree(place / "set", tmp_path / "set")
    (tmp_path / "set/val/bee/01.png").write_text("no image")
    code, out, err = run(capsys, "eval", place / "hf", "--images", tmp_path / "set")
    assert code == 2 and "11 images (validation)" in out and "1 damaged left out" in out
    assert f"{tmp_path}/set/val/bee/01.png is damaged (it is no JPEG" in err


@pytest.mark.multi
def test_two_processes_share_the_images(place, tmp_path):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "tokenformer", "eval"]
    words = [place / "model", "--images", place / "set", "--out", tmp_path / "r.json", "--batch", "4"]
    subprocess.run([sys.executable, *command, *map(str, words)], check=True, capture_output=True, env={**os.environ})
    found, expected = json.loads((tmp_path / "r.json").read_text()), expected_figures(place)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["predict", "language", "set"], "is a model of language, but one of image is needed here: `tokenformer gen"),
        (["eval", "language", "--images", "set"], "is a model of language, but one of image is needed here"),
        (
            ["eval", "model", "--text", "text"],
            "is a model of image, but one of language or caption is needed here: `tok",
        ),
        (["generate", "model", "--prompt", "a"], "is a model of image, but one of language or caption is needed here"),
        (["predict", "model", "nothing.png"], "there is no image and no folder nothing.png"),
        (["predict", "model", "model"], "model has no images (jpg, jpeg"),
        (["predict", "model", "set", "--top", "0"], "--top is 0: give 1 or more"),
        (["predict", "model", "set", "--size", "30"], "--size is 30: give a multiple of the model's patch 8"),
        (["predict", "model", "set", "--size", "100000"], "multiple of the model's patch 8, 4,096 at most"),
        (["eval", "model", "--images", "set", "--text", "text"], "give one of them"),
        (["eval", "model", "--text", "text", "--confusion", "c.png"], "--confusion goes with --images"),
        (["eval", "model", "--images", "set", "--part", "train"], "set/val is none of the 3 classes"),
        (["eval", "model", "--images", "nowhere"], "there is no folder 'nowhere'"),
        (["eval", "model", "--images", "set", "--class-index", "text"], "names no classes"),
    ],
)
def test_mistakes_are_one_sentence_with_code_2(place, capsys, monkeypatch, words, sentence):
    monkeypatch.chdir(place)
    Path("text").write_text("")
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and err.count("\n") == 1 and sentence in err
