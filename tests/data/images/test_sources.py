"""Every format gives the same images, labels and classes, and is refused in a sentence where it is not what it says."""

import gzip
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

from tests.data.images import pictures as p
from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.data.images.folders import _labels, find_images
from tokenformer.data.images.opening import open_images, open_parts
from tokenformer.data.images.stored import renumbered
from tokenformer.errors import UserError


def opened(path: object, part: str = "train", classes=None, cache=None, **keys):
    return open_images(DataConfig(path=str(path), cache=cache, images=ImagesConfig(**keys)), part, classes)


def numbers(images) -> list[int]:
    """Which picture each item is."""
    known = {p.encoded(p.picture(n)): n for n in range(20)}
    return [known[images.item(i)] for i in range(len(images))]


def test_an_image_folder_has_its_parts_and_classes(tmp_path):
    root = p.make_folder(tmp_path / "set")
    (root / "train" / "ant" / "notes.txt").write_text("no image")
    (root / "train" / "ant" / "._000.jpg").write_text("no image")
    train, held_out = opened(root), opened(root, "validation")
    assert train.classes == p.CLASSES and numbers(train) == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4 and train.name(4).endswith("train/bee/001.jpg")
    assert sorted(numbers(held_out)) == [12, 13, 14, 15, 16, 17]
    (root / "val" / "ant").rename(root / "val" / "dog")
    with pytest.raises(UserError, match="val/dog is none of the 3 classes"):
        opened(root, "validation", train.classes)


def test_a_folder_without_parts_is_all_training_and_has_nothing_to_validate_on(tmp_path):
    root = p.make_folder(tmp_path / "set") / "train"
    assert len(opened(root)) == 12 and len(opened(root, "validation")) == 0
    other = opened(root, "validation", validation=str(tmp_path / "set" / "val"))
    assert sorted(numbers(other)) == [12, 13, 14, 15, 16, 17]


def test_held_back_images_are_a_part_that_the_data_alone_decide(tmp_path):
    root = p.make_folder(tmp_path / "set")
    train, held_out = (numbers(opened(root, part, hold_back=3)) for part in ("train", "validation"))
    assert len(held_out) == 3 and sorted(train + held_out) == list(range(12))
    with pytest.raises(UserError, match="has no folder test: give another part"):
        opened(root, "test", hold_back=3)
    (root / "val").rename(root / "test")
    assert sorted(numbers(opened(root, "test", hold_back=3))) == [12, 13, 14, 15, 16, 17]
    with pytest.raises(UserError, match="hold_back is 12, but there are 12 images"):
        opened(root, hold_back=12)


def test_images_that_are_trained_on_are_not_validated_on(tmp_path):
    root, tars = p.make_folder(tmp_path / "set"), p.make_tars(tmp_path)
    table = p.make_parquet(tmp_path / "tables") / "train-00000-of-00001.parquet"
    shutil.copy(tmp_path / "train-001.tar", tmp_path / "val-000.tar")
    shutil.copy(table, tmp_path / "copy.parquet")
    (tmp_path / "link").symlink_to(root / "train")

    def parts(path: object, **keys) -> list[int]:
        data = DataConfig(path=str(path), cache=str(tmp_path / "cache"), images=ImagesConfig(**keys))
        return [len(part) for part in open_parts(data)]

    for path, held in (
        (root / "train", root / "train"),
        (root / "train", tmp_path / "link"),
        (tars, tmp_path / "train-000.tar"),
        (tars, tmp_path / "val-000.tar"),
        (table, table),
        (table, tmp_path / "copy.parquet"),
    ):
        with pytest.raises(UserError, match="is trained on and validated on: give other images"):
            parts(path, validation=str(held))
    assert parts(root / "train", hold_back=3) == [9, 3]
    assert parts(root / "train") == [12, 0] and parts(root) == [12, 6]
    assert parts(root / "train", validation=str(root / "val")) == [12, 6]


def test_tars_are_read_by_brace_ranges_and_indexed_once(tmp_path):
    pattern = p.make_tars(tmp_path / "shards")
    images = opened(pattern)
    assert numbers(images) == list(range(12)) and images.labels.tolist() == [p.label(n) for n in range(12)]
    assert images.classes == ["0", "1", "2"] and images.name(5) == f"images/005.jpg in {tmp_path}/shards/train-001.tar"
    assert numbers(opened(tmp_path / "shards")) == list(range(12))  # a folder of shards
    index = tmp_path / "shards" / ".train-001.tar.index"
    before = index.stat().st_mtime_ns
    assert opened(pattern).fingerprint == images.fingerprint and index.stat().st_mtime_ns == before
    with tarfile.open(tmp_path / "shards" / "train-001.tar", "w") as tar:  # changed: indexed anew
        p.add(tar, "x.png", p.encoded(p.picture(3), "PNG"))
        p.add(tar, "x.cls", b"2")
    assert len(opened(pattern)) == 8 and opened(pattern).fingerprint != images.fingerprint


@pytest.mark.parametrize("damage", [b"", b"PK not an index", "cut"])
def test_an_index_that_is_damaged_is_made_anew(tmp_path, damage):
    pattern = p.make_tars(tmp_path)
    good = opened(pattern, cache=str(tmp_path / "cache")).places
    [index] = (tmp_path / "cache").glob("train-001.tar.*.index")
    index.write_bytes(index.read_bytes()[:300] if damage == "cut" else damage)
    assert np.array_equal(opened(pattern, cache=str(tmp_path / "cache")).places, good)


def test_what_is_no_local_whole_tar_is_refused(tmp_path):
    pattern = p.make_tars(tmp_path)
    first = tmp_path / "train-000.tar"
    whole = first.read_bytes()
    with tarfile.open(first) as tar:
        ends = [member.offset for member in tar.getmembers()]
    last = whole.rindex(b"no sample") + 512
    for place in (ends[2], ends[4], ends[3] + 100, ends[3] + 600, ends[2] + 700, last, last + 100):
        first.write_bytes(whole[:place])
        with pytest.raises(UserError, match=r"train-000.tar is not a whole, uncompressed tar"):
            opened(pattern)
    spoilt = bytearray(whole)
    spoilt[ends[4] + 150] ^= 1  # a header whose checksum is wrong: tarfile takes it for the end
    first.write_bytes(spoilt)
    with pytest.raises(UserError, match=r"train-000.tar is not a whole.*breaks off at byte"):
        opened(pattern)
    first.write_bytes(gzip.compress(whole))
    with pytest.raises(UserError, match="is not a whole, uncompressed tar"):
        opened(pattern)
    for path in ("pipe:curl x.tar", "https://x/{0..9}.tar", "s3://b/x.tar", "http://folder"):
        with pytest.raises(UserError, match="is no local file: fetch the shards first"):
            opened(path)
    for path, sentence in {
        "a-{0..9999999}.tar": "is no range of at most 100,000 shards",
        "a-{9..1}.tar": "is no range",
        "{0..999}-{0..999}.tar": "more than 100,000 shards",
        "nowhere-{0..1}.tar": "there is no shard 'nowhere-0.tar'",
        "nowhere": "there is no folder 'nowhere'",
    }.items():
        with pytest.raises(UserError, match=sentence):
            opened(path)


@pytest.mark.parametrize("about", [None, ("cls", b"cat"), ("cls", b"-1"), ("json", b'{"text": "a"}'), ("cls", b"\xff")])
def test_a_sample_of_a_tar_without_a_label_is_refused(tmp_path, about):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        p.add(tar, "a/b.jpg", p.encoded(p.picture(1)))
        if about:
            p.add(tar, f"a/b.{about[0]}", about[1])
    with pytest.raises(UserError, match=r"a/b.* in .*x.tar (has no label|holds no number of a class|is not JSON)"):
        opened(tmp_path / "x.tar")


def test_parquet_is_unpacked_once_and_names_its_classes(tmp_path):
    root = p.make_parquet(tmp_path / "set")
    images = opened(root)
    assert numbers(images) == list(range(12)) and images.classes == p.CLASSES
    assert images.name(3).startswith("image 4 of ")
    [unpacked] = root.glob(".train-00000-of-00001.parquet.*.images")
    before = unpacked.stat().st_mtime_ns
    assert opened(root).fingerprint == images.fingerprint and unpacked.stat().st_mtime_ns == before
    unpacked.write_bytes(b"cut")  # not what the index says: unpacked anew
    assert numbers(opened(root)) == list(range(12))
    with pytest.raises(UserError, match=r"no column 'picture': name .* data.images.image_column \(image, label\)"):
        opened(root, image_column="picture")
    with pytest.raises(UserError, match="the label 2, but there are 2 classes"):
        opened(root, classes=["a", "b"])
    with pytest.raises(UserError, match="row 1, has no number of a class"):
        opened(root, label_column="image")
    (root / "train-00000-of-00001.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="is not a whole Parquet file"):
        opened(root)


def test_cifar_and_mnist_are_read_as_published(tmp_path):
    cifar = opened(p.make_cifar(tmp_path / "c" / "cifar-10-batches-bin").parent)
    assert cifar.classes[:3] == p.CLASSES and len(cifar) == 12
    assert all(np.array_equal(cifar.item(n), p.small(n)) for n in range(12))
    assert np.array_equal(opened(tmp_path / "c", "validation").item(3), p.small(15))
    for zipped in (True, False):
        root = p.make_mnist(tmp_path / f"m{zipped}", zipped=zipped)
        mnist, held_out = opened(root), opened(root, "validation")
        assert mnist.classes == list("0123456789") and mnist.labels.tolist() == [p.label(n) for n in range(12)]
        for n in range(16):
            item = mnist.item(n) if n < 12 else held_out.item(n - 12)
            assert np.array_equal(item, np.asarray(p.picture(n, 28, 28).convert("L")))


def test_cifar_100_has_its_fine_labels(tmp_path):
    record = bytes([3, 77]) + p.small(1).transpose(2, 0, 1).tobytes()
    (tmp_path / "train.bin").write_bytes(record * 3)
    images = opened(tmp_path)
    assert images.labels.tolist() == [77] * 3 and len(images.classes) == 100
    assert np.array_equal(images.item(2), p.small(1))


def test_binary_files_that_are_cut_or_pickled_are_refused(tmp_path):
    root = p.make_cifar(tmp_path / "c")
    data = (root / "data_batch_2.bin").read_bytes()
    for spoilt, sentence in (
        (data[:-1], "no records of 3,073"),
        (b"\x0a" + data[1:], "label 10 of 10"),
        (b"", "0 bytes"),
    ):
        (root / "data_batch_2.bin").write_bytes(spoilt)
        with pytest.raises(UserError, match=f"data_batch_2.bin has .*{sentence}"):
            opened(root)
    (tmp_path / "py").mkdir()
    (tmp_path / "py" / "data_batch_1").write_bytes(b"\x80")
    with pytest.raises(UserError, match="Python pickles, which may run programs: get the binary version"):
        opened(tmp_path / "py")
    root = p.make_mnist(tmp_path / "m", zipped=False)
    images = root / "train-images-idx3-ubyte"
    data = images.read_bytes()
    huge = struct.pack(">4I", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1) + data[16:]
    for spoilt in (data[:-1], data[:9], b"\0\0\x08\x01" + data[4:], huge, b""):
        images.write_bytes(spoilt)
        with pytest.raises(UserError, match=r"train-images-idx3-ubyte (states|is no IDX file)"):
            opened(root)
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b\x08 and no more")
    (tmp_path / "z" / "train-labels-idx1-ubyte.gz").write_bytes(b"")
    with pytest.raises(UserError, match="is no whole gzip file"):
        opened(tmp_path / "z")


def test_folders_without_images_or_names_are_refused(tmp_path):
    with pytest.raises(UserError, match="has no folders: put the images of each class"):
        opened(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match=r"no folder in .* has images"):
        opened(tmp_path)
    with pytest.raises(UserError, match="has no folder test"):
        opened(tmp_path, "test")
    with pytest.raises(UserError, match="has no binary files of CIFAR"):
        opened(tmp_path, format="cifar")
    with pytest.raises(UserError, match=r"has no .tar files for train"):
        opened(tmp_path, format="tar")
    with pytest.raises(UserError, match=r"data.path is missing"):
        open_images(DataConfig(), "train")
    with pytest.raises(UserError, match=r"data.path is a blend"):
        open_images(DataConfig(path={"a": 1.0, "b": 1.0}), "train")


def test_class_names_may_stand_in_a_file(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("cat\nbee\nant\n")
    images = opened(p.make_folder(tmp_path / "set"))
    turned = open_images(DataConfig(path=str(tmp_path / "set"), images=ImagesConfig(classes=str(names))), "train")
    assert turned.classes == ["cat", "bee", "ant"] and turned.labels.tolist() == (2 - images.labels).tolist()


def test_the_subset_of_cifar_as_tars(shared, tmp_path):
    """Real pictures: 200 of the subset, through a tar of PNG files, arrive pixel for pixel."""
    folder = shared / "data" / "cifar10-subset"
    strip = np.asarray(Image.open(folder / "test-00.webp").convert("RGB")).reshape(-1, 32, 32, 3)[:200]
    about = json.loads((folder / "labels.json").read_text())["test"]["labels"][:200]
    with tarfile.open(tmp_path / "test-0.tar", "w") as tar:
        for n, pixels in enumerate(strip):
            p.add(tar, f"{n}.png", p.encoded(Image.fromarray(pixels), "PNG"))
            p.add(tar, f"{n}.cls", str(about[n]).encode())
    images = opened(tmp_path, "validation")
    assert images.labels.tolist() == about
    assert all(np.array_equal(np.asarray(Image.open(io.BytesIO(images.item(n)))), strip[n]) for n in range(200))


def test_without_pillow_one_sentence_names_the_extra(tmp_path):
    p.make_folder(tmp_path / "set", 3, 0)
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from tokenformer.config_data import DataConfig; from tokenformer.data.images.opening import open_images\n"
        f"try: open_images(DataConfig(path={str(tmp_path / 'set')!r}), 'train')\n"
        "except Exception as e: print(type(e).__name__, e, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert ran.stdout == "UserError images need Pillow: pip install 'tokenformer[vision]' False\n", ran


def test_two_ways_to_validate_at_once_are_refused():
    with pytest.raises(UserError, match=r"data.images.hold_back is 3 and validation is 'other': give one of them"):
        ImagesConfig(hold_back=3, validation="other")


def test_a_list_with_a_file_and_no_label_behind_it_is_refused(tmp_path):
    (tmp_path / "labels.txt").write_text("a.png cat\nb.png,\n")
    with pytest.raises(UserError, match=r"labels.txt has no label of b.png: add its line"):
        _labels(tmp_path / "labels.txt", ["a.png", "b.png"])


SHARDS = {"train-000": [0, 1], "train-001": [2], "val-000": [3, 4], "Test-000": [5]}


def make_shards(root, names=SHARDS) -> None:
    for name, pictures in names.items():
        (root / f"{name}.tar").parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(root / f"{name}.tar", "w") as tar:
            for n in pictures:
                p.add(tar, f"{n}.jpg", p.encoded(p.picture(n)))
                p.add(tar, f"{n}.cls", b"0")


@pytest.mark.parametrize("pattern", ["", "*.tar", "{train,val,Test}-*.tar", "[tvT]*-00[01].tar"])
def test_shards_belong_to_the_part_in_their_name_however_they_are_named(tmp_path, pattern):
    make_shards(tmp_path)
    found = {part: numbers(opened(f"{tmp_path}/{pattern}", part)) for part in ("train", "validation", "test")}
    assert found == {"train": [0, 1, 2], "validation": [3, 4], "test": [5]}


def test_shards_belong_to_the_part_in_the_name_of_a_folder(tmp_path):
    make_shards(tmp_path / "a", {"TRAIN/0": [0], "Val/0": [1], "Val/train-1": [2]})
    for path in (tmp_path / "a", f"{tmp_path}/a/*/*.tar", f"{tmp_path}/a/{{TRAIN,Val}}/*.tar"):
        assert numbers(opened(path)) == [0]
        assert numbers(opened(path, "validation")) == [1, 2]
    make_shards(tmp_path / "b", {"0": [0], "1": [1], "validation-2": [2]})
    assert numbers(opened(f"{tmp_path}/b/*.tar")) == [0, 1]  # they were named: what is of no part is trained on
    assert numbers(opened(f"{tmp_path}/b/{{0,1}}.tar", "validation")) == []
    assert numbers(opened(f"{tmp_path}/b/validation-2.tar", "validation")) == [2]
    make_shards(tmp_path / "c", {"imagenet1k-train-0": [0], "imagenet1k-validation-0": [1], "coco_test2017": [2]})
    for path in (tmp_path / "c", f"{tmp_path}/c/*.tar"):
        assert [numbers(opened(path, part)) for part in ("train", "validation", "test")] == [[0], [1], [2]]
    for path in (f"{tmp_path}/b/validation-*.tar", f"{tmp_path}/b/validation-2.tar"):
        with pytest.raises(UserError, match=r"has no .tar files for train \(.*validation-2.tar is for validation\)"):
            opened(path)


def test_folders_of_parts_are_known_in_capitals(tmp_path):
    root = p.make_folder(tmp_path / "set")
    (root / "train").rename(root / "Train")
    (root / "val").rename(root / "VAL")
    assert len(opened(root)) == 12 and sorted(numbers(opened(root, "validation"))) == [12, 13, 14, 15, 16, 17]


@pytest.mark.parametrize("place", ["ant/val", "bee/Test", "dev"])
def test_images_for_validation_inside_of_what_is_trained_on_are_refused(tmp_path, place):
    """Classes above parts: the parts come first."""
    root = p.make_folder(tmp_path / "set", 12, 0) / "train"
    (root / place).mkdir()
    (root / "ant" / "000.jpg").rename(root / place / "000.jpg")
    where = f"set/train/{place} is called like images for (validation|test), but"
    do = "there is no .*/train: put" if place == "dev" else "lies in a class: put them into .*/(val|test)/CLASS"
    with pytest.raises(UserError, match=f"{where} {do}"):
        opened(root)
    assert len(opened(root.parent)) == 12  # a folder train/ says so itself


def said(warned) -> list[str]:
    """Sentences that were said, without the folders that they name."""
    return sorted({re.sub(r"/\S*/(?=\w)", "", str(one.message)) for one in warned if one.category is UserWarning})


def test_images_of_other_formats_and_empty_folders_are_said(tmp_path):
    root = p.make_folder(tmp_path / "set") / "train"
    for name in ("a.AVIF", "b.heic", "c.heic", "notes.txt", ".d.heic"):
        (root / "bee" / name).write_bytes(b"")
    (root / "dog").mkdir()
    read = "passed over: .avif, .heic (jpg, jpeg, png, webp, gif, bmp, tif, tiff, ppm, pgm are read)"
    with pytest.warns(UserWarning) as warned:
        assert len(opened(root)) == 12
    assert said(warned) == [f"3 files in train are {read}", "dog has no images: nothing is there of its class"]
    with pytest.warns(UserWarning) as warned:
        assert len(find_images([str(root / "bee")])) == 4
    assert said(warned) == [f"3 files in bee are {read}"]
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, data in {"a.png": p.encoded(p.picture(1), "PNG"), "a.cls": b"1", "b.tga": b"", "b.cls": b"0"}.items():
            p.add(tar, name, data)
    for _ in range(2):  # the second time its index is there
        with pytest.warns(UserWarning, match=r"1 file in .*x.tar is passed over: .tga \(jpg, "):
            assert len(opened(tmp_path / "x.tar")) == 1


def test_class_names_that_look_the_same_are_the_same(tmp_path):
    """An é of one character, or an e and an accent, as macOS writes it."""
    one, two = "caf\u00e9", "cafe\u0301"
    for part, name in (("train", one), ("val", two)):
        for folder in (name, "zoo"):
            (tmp_path / part / folder).mkdir(parents=True)
            (tmp_path / part / folder / "0.png").write_bytes(p.encoded(p.picture(1), "PNG"))
    train, held = opened(tmp_path), opened(tmp_path, "validation", [one, "zoo"])
    assert train.classes == held.classes == [one, "zoo"] and held.labels.tolist() == [0, 1]
    assert renumbered(np.array([0, 1]), ["zoo", two], [one, "zoo"], "set").tolist() == [1, 0]
    (tmp_path / "train" / two).mkdir()
    with pytest.raises(UserError, match=r"train has two folders that are both called 'café': put their images into"):
        opened(tmp_path)


def test_what_is_no_tar_and_no_number_is_said_as_what_it_is(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "train-0.tar.gz").write_bytes(b"")
    for path in ("shards", "shards/train-0.tar.gz", "shards/*.tgz"):
        with pytest.raises(UserError, match=r"is compressed, and shards are read at random: unpack it \(gunzip\)"):
            opened(tmp_path / path)
    p.make_tars(tmp_path / "shards")
    with pytest.warns(UserWarning, match=r"train-0.tar.gz is compressed, so it is not read: unpack it \(gunzip\)"):
        assert len(opened(tmp_path / "shards")) == 12
    cifar = p.make_cifar(tmp_path / "cifar")
    (cifar / "cifar-10-binary.tar.gz").write_bytes(b"")  # what was unpacked may lie beside it
    assert len(opened(cifar)) == 12
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        p.add(tar, "b.jpg", b"")
        p.add(tar, "b.json", b"{")
    with pytest.raises(UserError, match=r"^b.json in .*x.tar is not JSON"):
        opened(tmp_path / "x.tar")
    with pytest.raises(UserError, match=r"name a list of their labels with data.images.labels \(eval: --labels\)"):
        opened(p.make_folder(tmp_path / "flat") / "train" / "ant")


def test_parquet_without_rows_or_with_names_of_classes_is_refused_by_its_own_name(tmp_path):
    import pyarrow
    from pyarrow import parquet

    for name, labels in (("empty", []), ("names", ["cat"])):
        images = [{"bytes": p.encoded(p.picture(1)), "path": None}] * len(labels)
        image = pyarrow.array(images, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
        label = pyarrow.array(labels, pyarrow.string() if labels else pyarrow.int64())
        parquet.write_table(pyarrow.table({"image": image, "label": label}), tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match=r"/empty.parquet has no images: check data.path"):
        opened(tmp_path / "empty.parquet")
    with pytest.raises(UserError, match=r"row 1, has the text 'cat' in 'label'.*: give their numbers, from 0"):
        opened(tmp_path / "names.parquet")
