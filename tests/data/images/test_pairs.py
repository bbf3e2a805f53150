"""Pairs from every format: the same images and captions; several captions, parts, what is missing."""

import csv
import io
import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.data.images.captions import PairSource
from tokenformer.data.images.decode import Damaged
from tokenformer.data.images.pairs import open_pair_parts, open_pairs, pairs_of
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.errors import UserError

ICONS = Path(__file__).parents[3] / "examples" / "icons"
PAIRS = {"food/avocado": ["avocado", "fruit, food"], "food/bagel": ["bagel"], "animals/fox": ["fox", "face"]}


def image(name: str) -> bytes:
    return (ICONS / "train" / f"{name}.png").read_bytes()


def as_csv(folder: Path, ending: str = "csv", delimiter: str = ",") -> None:
    with open(folder / f"train.{ending}", "w", newline="") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerow(["caption", "image", "more"])
        rows.writerows([text, f"images/{name}.png", "x"] for name, texts in PAIRS.items() for text in texts)


def as_jsonl(folder: Path) -> None:
    rows = [{"image": f"images/{name}.png", "caption": texts} for name, texts in PAIRS.items()]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")


def as_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"image": [{"bytes": image(name)} for name in PAIRS], "caption": list(PAIRS.values())}
    parquet.write_table(pyarrow.table(columns), folder / "train-0.parquet")


def as_tar(folder: Path, more: dict[str, bytes] | None = None) -> None:
    members = {f"{name}.png": image(name) for name in PAIRS} | {
        f"{n}.txt": "\n".join(t).encode() for n, t in PAIRS.items()
    }
    with tarfile.open(folder / "train-0.tar", "w") as tar:
        for name, data in sorted((members | (more or {})).items()):
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))


FORMS = {"csv": as_csv, "jsonl": as_jsonl, "parquet": as_parquet, "tar": as_tar}
FORMS["tsv"] = lambda folder: as_csv(folder, "tsv", "\t")


@pytest.mark.parametrize("form", FORMS)
def test_every_format_has_the_same_pairs(tmp_path, form):
    (tmp_path / "images").symlink_to(ICONS / "train")
    FORMS[form](tmp_path)
    for _ in range(2):  # the second time from what was kept
        found = pairs_of(open_pairs(DataConfig(path=str(tmp_path)), "train"))
        assert sorted((found.item(i), *found.captions(i)) for i in range(len(found))) == sorted(
            (image(name), *texts) for name, texts in PAIRS.items()
        )
    assert len(open_pairs(DataConfig(path=str(tmp_path)), "validation")) == 0
    held = DataConfig(path=str(tmp_path), images=ImagesConfig(hold_back=1))
    train, validation = open_pairs(held, "train"), open_pairs(held, "validation")
    assert len(train) == 2 and len(validation) == 1 and not set(train.labels) & set(validation.labels)


def test_a_caption_is_drawn_by_seed_epoch_and_pair_alone_and_belongs_to_its_image(tmp_path):
    (tmp_path / "images").symlink_to(ICONS / "train")
    as_csv(tmp_path)
    images = open_pairs(DataConfig(path=str(tmp_path)), "train")
    source = PairSource(images, ByteTokenizer(), 8, ImagesConfig(crop="centre"), size=16, seed=1, training=True)
    seen: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    for epoch in range(12):
        rows = [np.array([2, 0, 1]), np.full(3, epoch)]
        out = {name: np.empty((3, *field.shape), field.dtype) for name, field in source.fields.items()}
        source.read(*rows, out)
        assert out["label"].tolist() == [2, 0, 1]
        for row, number in enumerate(out["label"].tolist()):
            length = int(out["length"][row])
            assert out["ids"][row, length - 1] == 0  # the end token
            seen[number].add(ByteTokenizer().decode(out["ids"][row, : length - 1]))
        alone = {name: np.empty((1, *field.shape), field.dtype) for name, field in source.fields.items()}
        source.read(rows[0][1:2], rows[1][1:2], alone)
        assert all(np.array_equal(alone[name][0], out[name][1]) for name in alone)
    assert seen == {0: {"avocado", "fruit, "}, 1: {"bagel"}, 2: {"fox", "face"}}  # 8 tokens with the end


def test_a_tar_with_incomplete_pairs(tmp_path):
    as_tar(
        tmp_path, {"a.png": image("food/bagel"), "b.txt": b"no image", "c.png": image("animals/fox"), "c.txt": b" \n"}
    )
    data = DataConfig(path=str(tmp_path))
    with pytest.raises(UserError, match=r"^a in train-0.tar has no text in UTF-8: .*damaged=skip .*\(3 of 6\)"):
        open_pairs(data, "train")
    with pytest.warns(UserWarning, match="3 of 6 pairs have no image or no text in UTF-8: left out"):
        assert len(open_pairs(DataConfig(path=str(tmp_path), images=ImagesConfig(damaged="skip")), "train")) == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("image,caption\na.png,a dog, and a cat\n", "line 2 of .* has more cells than the first line: put quotes"),
        ("image,caption,caption\na.png,a dog,a cat\n", "has several columns 'caption': rename all but one"),
        ("image,caption\n", r"train.csv has no pairs of images and texts: check data.path"),
        ("", r"train.csv is empty: write the columns image and caption"),
        ("image,caption\na.png,\n", r"^line 2 of .*train.csv has no caption: mend or remove it, .* \(1 of 1\)"),
        ("image,caption\n,a dog\n", r"^line 2 of .*train.csv has no image: mend or remove it, .* \(1 of 1\)"),
    ],
)
def test_a_table_whose_cells_would_be_lost_is_refused(tmp_path, text, sentence):
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(UserError, match=sentence):
        open_pairs(DataConfig(path=str(tmp_path)), "train")


def test_what_is_not_there_or_named_otherwise_is_said(tmp_path):
    with pytest.raises(UserError, match=r"^there is no file or folder .*nowhere'?: check the path \(CSV, JSON lines"):
        open_pairs(DataConfig(path=str(tmp_path / "nowhere")), "train")
    with pytest.raises(UserError, match="is no local file: fetch the shards first"):
        open_pairs(DataConfig(path="https://example.org/pairs"), "train")
    (tmp_path / "train.jsonl").write_text('\n{"picture": "a.png", "caption": "a dog"}\n')
    with pytest.raises(UserError, match=r"has no column .image.: name the right one with data.images.image_column"):
        open_pairs(DataConfig(path=str(tmp_path)), "train")


def test_a_parquet_file_of_addresses_has_no_images(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"url": ["https://example.org/a.png"] * 2, "caption": ["a dog", None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    data = DataConfig(path=str(tmp_path), images=ImagesConfig(image_column="url"))
    with pytest.raises(UserError, match=r"^row 1 of train.parquet has no bytes of an image in 'url': .* \(2 of 2\)"):
        open_pairs(data, "train")


def test_two_ways_to_write_a_path_are_one_image_and_lines_end_at_newlines(tmp_path):
    (tmp_path / "train.csv").write_text("image,caption\na.png,one\n./a.png,two\nb/../a.png,three\n")
    found = pairs_of(open_pairs(DataConfig(path=str(tmp_path)), "train"))
    assert [found.captions(i) for i in range(len(found))] == [["one", "two", "three"]]
    (tmp_path / "train.csv").unlink()
    (tmp_path / "train.jsonl").write_text('{"image": "a.png", "caption": "a\u2028b"}\r\n')
    assert pairs_of(open_pairs(DataConfig(path=str(tmp_path)), "train")).captions(0) == ["a b"]


def test_an_image_of_both_parts_is_named_as_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fox = ICONS / "train" / "animals" / "fox.png"
    for part in ("train", "val"):
        (tmp_path / f"{part}.csv").write_text(f"image,caption\n{fox},a fox\n")
    with pytest.raises(UserError, match=f"^{re.escape(str(fox))} is trained on and validated on: give other images"):
        open_pair_parts(DataConfig(path=str(tmp_path)))


def test_files_of_another_kind_that_are_not_read_are_said(tmp_path):
    (tmp_path / "images").symlink_to(ICONS / "train")
    as_csv(tmp_path)
    as_tar(tmp_path)
    with pytest.warns(UserWarning, match=r"has .tar and .csv files, of which .tar are read: .*format=csv"):
        open_pairs(DataConfig(path=str(tmp_path)), "train")
    assert open_pairs(DataConfig(path=str(tmp_path), images=ImagesConfig(format="csv")), "train")


def test_a_named_pipe_is_no_image_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    (tmp_path / "train.csv").write_text("image,caption\na.png,one\n")
    with pytest.raises(Damaged, match="it is no file"):
        pairs_of(open_pairs(DataConfig(path=str(tmp_path)), "train")).item(0)


def test_a_path_that_no_file_can_have_is_a_damaged_image(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"image": "a\\u0000b.png", "caption": "one"}\n')
    with pytest.raises(Damaged, match=r"it cannot be read \(embedded null byte\)"):
        pairs_of(open_pairs(DataConfig(path=str(tmp_path)), "train")).item(0)


def test_texts_of_a_tar_are_utf_8_and_their_lines_end_at_newlines(tmp_path):
    fox = image("animals/fox")
    as_tar(tmp_path, {"a.png": fox, "a.txt": "one\u2028still one\r\ntwo".encode()})
    found = pairs_of(open_pairs(DataConfig(path=str(tmp_path)), "train"))
    assert found.captions(0) == ["one\u2028still one", "two"]
    as_tar(tmp_path, {"a.png": fox, "a.txt": "Füchse".encode("latin-1"), "b.png": fox, "b.txt": b"\xef\xbb\xbfone"})
    with pytest.raises(UserError, match=r"^a in train-0.tar has no text in UTF-8: .*\(1 of 5\)"):
        open_pairs(DataConfig(path=str(tmp_path)), "train")
    with pytest.warns(UserWarning, match="1 of 5 pairs have no image or no text in UTF-8: left out"):
        left = open_pairs(DataConfig(path=str(tmp_path), images=ImagesConfig(damaged="skip")), "train")
    assert pairs_of(left).captions(1) == ["one"]


@pytest.mark.parametrize("blank", ["\u00a0", "\ufeff\u3000\n", "\x0b"])
def test_a_text_of_blanks_alone_is_none(tmp_path, blank):
    as_tar(tmp_path, {"a.png": image("animals/fox"), "a.txt": blank.encode()})
    with pytest.raises(UserError, match=r"^a in train-0.tar has no text in UTF-8: .*\(1 of 4\)"):
        open_pairs(DataConfig(path=str(tmp_path)), "train")


@pytest.mark.parametrize("form", FORMS)
def test_the_pairs_that_are_held_back_depend_on_the_data_and_not_on_where_they_lie(tmp_path, monkeypatch, form):
    folder = tmp_path / "a" / "data"
    folder.mkdir(parents=True)
    (folder / "images").symlink_to(ICONS / "train")
    FORMS[form](folder)

    def held(path: str, cache: str | None = None) -> tuple[str, list[str]]:
        data = DataConfig(path=path, cache=cache, images=ImagesConfig(hold_back=1))
        found = open_pairs(data, "validation")
        return found.fingerprint, pairs_of(found).captions(int(found.labels[0]))

    expected = held(str(folder))
    monkeypatch.chdir(tmp_path)
    assert held("a/data") == expected
    (tmp_path / "a").rename(tmp_path / "b")
    assert held("b/../b/data") == expected
    assert held("b/data", cache=str(tmp_path / "cache")) == expected


def test_a_file_of_no_part_is_named_and_dev_is_validation(tmp_path):
    (tmp_path / "images").symlink_to(ICONS / "train")
    rows = "image,caption\nimages/animals/fox.png,fox\n"
    for name in ("train.csv", "dev.csv", "more.csv"):
        (tmp_path / name).write_text(rows.replace("fox", "bison") if name == "dev.csv" else rows)
    with pytest.warns(UserWarning, match=r"more.csv is of no part, so it is not read: name it after one"):
        assert len(open_pairs(DataConfig(path=str(tmp_path)), "train")) == 1
    (tmp_path / "more.csv").unlink()
    assert pairs_of(open_pairs(DataConfig(path=str(tmp_path)), "validation")).captions(0) == ["bison"]


def test_validation_and_test_files_are_parts_of_their_own(tmp_path):
    """Test files are validated on only where there are no others; validation files are never called a test."""
    (tmp_path / "images").symlink_to(ICONS / "train")

    def captions(part: str) -> list[str]:
        found = pairs_of(open_pairs(DataConfig(path=str(tmp_path)), part))
        return [found.captions(row)[0] for row in range(len(found))]

    for part, name in {"train": "fox", "val": "bison", "test": "beaver"}.items():
        (tmp_path / f"{part}.csv").write_text(f"image,caption\nimages/animals/{name}.png,{name}\n")
    assert [captions(part) for part in ("train", "validation", "test")] == [["fox"], ["bison"], ["beaver"]]
    (tmp_path / "val.csv").unlink()
    assert captions("validation") == captions("test") == ["beaver"]
    (tmp_path / "test.csv").rename(tmp_path / "val.csv")
    with pytest.raises(UserError, match=r"has no .csv files for test: check the path"):
        captions("test")


def test_two_columns_of_one_parquet_file_are_read_side_by_side(tmp_path):
    import pyarrow
    from pyarrow import parquet

    columns = {"image": [image(name) for name in PAIRS], "name": ["a", "b", "c"], "text": ["one", "of many", "letters"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    both = [
        pairs_of(open_pairs(DataConfig(path=str(tmp_path), images=ImagesConfig(caption_column=column)), "train"))
        for column in ("name", "text")
    ]
    for row, name in enumerate(PAIRS):
        assert [found.item(row) for found in both] == [image(name)] * 2
        assert [found.captions(row)[0] for found in both] == [columns[column][row] for column in ("name", "text")]
