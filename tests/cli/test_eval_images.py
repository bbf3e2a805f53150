"""`tokenformer eval --images` of every format, and of ImageNet's one folder: the figures of a plain loop."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.test_predict import MEAN, SHAPE, STD, run
from tests.data.images import pictures as p
from tokenformer import save
from tokenformer.config import ModelConfig
from tokenformer.models import ImageModel

NAMES = [*p.CLASSES, *"defghij"]
SYNSETS = ["n00000003", "n00000001", "n00000002"]  # of the classes; the devkit counts them in another order
COUNT = 12


@pytest.fixture(scope="module")
def model() -> ImageModel:
    made = ImageModel(ModelConfig(of="image", image_size=32, patch=8, classes=10, **SHAPE), seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.3)
    made.images = {"classes": NAMES, "mean": MEAN, "std": STD, "crop_pct": 1.0, "interpolation": "bicubic"}
    return made


def figures(model: ImageModel, numbers: range, grey: bool = False) -> dict:
    """Computed from the pixels themselves: label, likeliest class, loss."""
    losses, right, counts = [], 0, np.zeros((10, 10), int)
    for number in numbers:
        image = p.picture(number, 32, 32)
        if grey:
            image = p.picture(number, 28, 28).convert("L").convert("RGB").resize((32, 32), Image.Resampling.BICUBIC)
        x = (torch.from_numpy(np.array(image)).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        with torch.no_grad():
            found = model(x.permute(2, 0, 1)[None])
        losses.append(torch.nn.functional.cross_entropy(found, torch.tensor([p.label(number)])).item())
        right += found.argmax().item() == p.label(number)
        counts[p.label(number), found.argmax()] += 1
    loss = pytest.approx(np.mean(losses), abs=1e-5)
    return {"images": len(numbers), "loss": loss, "top1": right / len(numbers), "confusion": counts.tolist()}


def png(number: int) -> bytes:
    return p.encoded(p.picture(number, 32, 32), "PNG")


def make_tar(root: Path) -> Path:
    with tarfile.open(root / "val-000.tar", "w") as tar:
        for number in range(COUNT):
            p.add(tar, f"{number:03}.png", png(number))
            p.add(tar, f"{number:03}.cls", str(p.label(number)).encode())
    return root


def make_table(root: Path, names: list[str], columns: tuple[str, str] = ("image", "label")) -> Path:
    import pyarrow
    from pyarrow import parquet

    labels = [names.index(p.CLASSES[p.label(number)]) for number in range(COUNT)]
    table = pyarrow.table({columns[0]: [{"bytes": png(n), "path": None} for n in range(COUNT)], columns[1]: labels})
    features = {"info": {"features": {columns[1]: {"names": names, "_type": "ClassLabel"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    parquet.write_table(table, root / "test-00000-of-00001.parquet")
    return root


def make_flat(root: Path) -> Path:
    (root / "val").mkdir()
    for number in range(COUNT):
        (root / "val" / f"ILSVRC2012_val_{number + 1:08}.JPEG").write_bytes(png(number))
    index = {str(number): [folder, name] for number, (folder, name) in enumerate(zip(SYNSETS, p.CLASSES, strict=True))}
    (root / "index.json").write_text(json.dumps(index))
    return root / "val"


@pytest.mark.parametrize("form", ["tar", "tar pattern", "parquet", "parquet in another order", "cifar", "mnist"])
def test_every_format_gives_the_figures_of_a_plain_loop(form, model, capsys, tmp_path):
    save(model, tmp_path / "model")
    data = tmp_path / "data"
    data.mkdir()
    expected, more = figures(model, range(COUNT)), []
    if form.startswith("tar"):
        make_tar(data)
        path = data if form == "tar" else data / "val-{000..000}.tar"
    elif form == "parquet":
        path = make_table(data, p.CLASSES)
    elif form == "parquet in another order":  # numbers are counted in the order of the names that the file has
        path = make_table(data, ["cat", "ant", "bee"], ("img", "fine_label")) / "test-00000-of-00001.parquet"
        more = ["data.images.image_column=img", "data.images.label_column=fine_label", f"data.cache={tmp_path / 'c'}"]
    elif form == "cifar":
        path, expected = p.make_cifar(data, held_out=6), figures(model, range(12, 18))
    else:
        path, expected = p.make_mnist(data, held_out=6), figures(model, range(12, 18), grey=True)
    options = ["--images", path, "--out", tmp_path / "r.json", "--confusion", tmp_path / "c.png", "--batch", 5, *more]
    code, out, err = run(capsys, "eval", tmp_path / "model", *options)
    assert code == 0, err
    found = json.loads((tmp_path / "r.json").read_text())
    assert {key: found[key] for key in expected} == expected and 0 < sum(np.diag(found["confusion"])) < COUNT
    assert [c["class"] for c in found["classes"].values()] == p.CLASSES and Image.open(tmp_path / "c.png").width > 300
    assert "(validation): top-1" in out


LISTS = {
    "caffe.txt": "\n".join(f"ILSVRC2012_val_{n + 1:08}.JPEG {p.label(n)}" for n in reversed(range(COUNT))),
    "LOC_val_solution.csv": "ImageId,PredictionString\n"
    + "\n".join(f"ILSVRC2012_val_{n + 1:08},{SYNSETS[p.label(n)]} 1 2 3 4 " for n in reversed(range(COUNT))),
    "synset_labels.txt": "\n".join(SYNSETS[p.label(n)] for n in range(COUNT)),
    "ground_truth.txt": "\n".join(str([2, 3, 1][p.label(n)]) for n in range(COUNT)),  # ids: the devkit's, from 1
}


@pytest.mark.parametrize("name", LISTS)
def test_imagenet_in_one_folder_with_a_list_of_labels(name, model, capsys, tmp_path):
    flat = make_flat(tmp_path)
    save(model, tmp_path / "model")
    (tmp_path / name).write_text(LISTS[name] + "\n")
    if name == "ground_truth.txt":
        io = pytest.importorskip("scipy.io")
        rows = [(i + 1, SYNSETS[which], "some words", "a gloss") for i, which in enumerate([2, 0, 1])]
        kinds = [(field, object) for field in ("ILSVRC2012_ID", "WNID", "words", "gloss")]
        for compressed in (False, True):
            io.savemat(tmp_path / "meta.mat", {"synsets": np.array(rows, kinds)}, do_compression=compressed)
            _measure_flat(model, capsys, tmp_path, flat, name)
    else:
        _measure_flat(model, capsys, tmp_path, flat, name)
    (flat / "ILSVRC2012_val_00000013.JPEG").write_bytes(png(0))
    how = ["--labels", tmp_path / name, "--class-index", tmp_path / "index.json"]
    code, _, err = run(capsys, "eval", tmp_path / "model", "--images", flat, *how)
    named = "has no label of ILSVRC2012_val_00000013.JPEG" if name[0] in "cL" else "has 12 labels for 13 images"
    assert code == 2 and named in err and err.count("\n") == 1


def _measure_flat(model: ImageModel, capsys, root: Path, flat: Path, name: str) -> None:
    how = ["--labels", root / name, "--class-index", root / "index.json", "--out", root / "r.json", "--force"]
    code, _, err = run(capsys, "eval", root / "model", "--images", flat, *how)
    assert code == 0, err
    expected, found = figures(model, range(COUNT)), json.loads((root / "r.json").read_text())
    assert {key: found[key] for key in expected} == expected and found["part"] == "all"
    assert [c["class"] for c in found["classes"].values()] == p.CLASSES


def test_lists_that_do_not_say_what_they_mean_are_refused(model, capsys, tmp_path, monkeypatch):
    flat = make_flat(tmp_path)
    save(model, tmp_path / "model")
    for text, said in (
        ("\n".join(["1"] * COUNT), "has numbers alone, as in ImageNet's devkit, and no meta.mat beside it"),
        (LISTS["synset_labels.txt"], "has the label 'n00000003', which is none of the 10 classes"),
        ("a.jpg 1\n", "has no label of ILSVRC2012_val_00000001.JPEG"),
    ):
        (tmp_path / "list.txt").write_text(text)
        code, _, err = run(capsys, "eval", tmp_path / "model", "--images", flat, "--labels", tmp_path / "list.txt")
        assert code == 2 and said in err and err.count("\n") == 1
    code, _, err = run(capsys, "eval", tmp_path / "model", "--images", flat)
    assert code == 2 and "has no folders" in err and "data.images.labels" in err
    table = make_table(tmp_path, ["cat", "ant", "bee", "wasp"])
    monkeypatch.setattr(model, "images", {**model.images, "classes": ["ant", "cat", *NAMES[3:]]})
    save(model, tmp_path / "other")
    code, _, err = run(capsys, "eval", tmp_path / "other", "--images", table / "test-00000-of-00001.parquet")
    assert code == 2 and "has the class 'bee', which the model's classes lack" in err
