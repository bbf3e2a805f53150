"""`tokenformer data images`: a contact sheet, and the list of what cannot be decoded."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.images import pictures as p
from tokenformer.cli.main import main
from tokenformer.config_data import ImagesConfig
from tokenformer.data.images.decode import Cropping

ICONS = Path(__file__).parents[2] / "examples" / "icons"


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["data", "images", *map(str, arguments)])
    return code, *capsys.readouterr()


def tile(sheet: np.ndarray, row: int, column: int, size: int) -> np.ndarray:
    return sheet[row * (size + 4) :, column * (size + 4) :][:size, :size]


def test_the_sheet_shows_evaluation_and_three_epochs_of_training(capsys, tmp_path):
    out = tmp_path / "sheet.png"
    keys = ["size=32", "randaugment_ops=1", "randaugment_probability=1", "mixup=0.8", "crop_pct=1"]
    code, said, _ = run(capsys, ICONS, *(f"data.images.{key}" for key in keys), "--out", out, "--count", 5)
    assert code == 0 and "train: 120 images of 4 classes\nvalidation: 40 images of 4 classes\n" in said
    sheet = np.asarray(Image.open(io.BytesIO(out.read_bytes())))
    assert sheet.shape == (4 * 36 - 4, 5 * 36 - 4, 3)
    crop = Cropping(32, ImagesConfig(crop_pct=1.0))
    known = {crop.evaluation(path.read_bytes()).tobytes() for path in (ICONS / "train").rglob("*.png")}
    assert all(tile(sheet, 0, column, 32).tobytes() in known for column in range(5))
    below = {tile(sheet, row, column, 32).tobytes() for row in range(1, 4) for column in range(5)}
    assert len(below) == 15 and not below & known
    again = tmp_path / "again.png"
    run(capsys, ICONS, *(f"data.images.{key}" for key in keys), "--out", again, "--count", 5)
    assert again.read_bytes() == out.read_bytes()
    code, _, said = run(capsys, ICONS, "--out", out)
    assert code == 2 and said == f"tokenformer: {out} is there already: give another name, or --force to replace it\n"


def test_every_damaged_image_is_named_with_its_reason(capsys, tmp_path):
    root = p.make_folder(tmp_path / "set", 80)
    counts = "train: 80 images of 3 classes\nvalidation: 6 images of 3 classes\n"
    assert run(capsys, root, "--check")[:2] == (0, f"{counts}damaged images: 0\n")
    (root / "train" / "ant" / "066.jpg").write_bytes(b"no image")
    (root / "val" / "bee" / "085.jpg").write_bytes(p.encoded(p.picture(1))[:400])
    code, said, _ = run(capsys, root, "--check", "data.workers=0")
    assert code == 2 and said.endswith("damaged images: 2\n")
    assert f"{root}/train/ant/066.jpg: it is no JPEG, PNG" in said and f"{root}/val/bee/085.jpg: it cannot be" in said


def test_shards_for_validation_alone_may_be_looked_at(capsys, tmp_path):
    p.make_tars(tmp_path)
    for number in range(3):
        (tmp_path / f"train-{number:03}.tar").rename(tmp_path / f"val-{number:03}.tar")
    pattern, counts = f"{tmp_path}/val-*.tar", "validation: 12 images of 3 classes\n"
    assert run(capsys, pattern, "--check", "data.workers=0")[:2] == (0, f"{counts}damaged images: 0\n")
    code, said, _ = run(capsys, pattern, "--out", tmp_path / "sheet.png", "data.images.size=32")
    assert code == 0 and said.startswith(counts) and (tmp_path / "sheet.png").is_file()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nowhere"], "there is no folder 'nowhere'"),
        ([ICONS, "--count", 0], "--count 0 is no number of images for a sheet"),
        ([ICONS, "data.images.mixup=-1"], "data.images.mixup is -1"),
        ([ICONS, "data.images.mixupp=1"], "did you mean 'data.images.mixup'?"),
        ([ICONS, "--out", "/proc/sheet.png"], "/proc/sheet.png cannot be written"),
        ([ICONS, "--config", "nothing"], "there is no config file or preset 'nothing'"),
    ],
)
def test_mistakes_are_one_sentence_with_code_2(capsys, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and sentence in err
    assert list(tmp_path.iterdir()) == []
