"""Samples: a function of (data, seed, epoch, number) with every random choice, however they are read."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.data.images import pictures as p
from tokenformer.config_data import DRAWS, IGNORED, DataConfig, ImagesConfig
from tokenformer.data.images.drawing import draw, generator
from tokenformer.data.images.opening import open_images
from tokenformer.data.images.samples import ImageSource, check_even, image_loader
from tokenformer.data.images.stored import Files
from tokenformer.errors import UserError

ALL = {"randaugment_ops": 2, "erase": 0.25, "mixup": 0.8, "cutmix": 1.0}


def settings(path: object, **keys) -> DataConfig:
    return DataConfig(path=str(path), prefetch=3, images=ImagesConfig(**keys))


def loader(data: DataConfig, part="train", training=True, seed=1, batch=4, workers=0, **cut):
    images = open_images(data, part)
    return image_loader(data, images, size=24, seed=seed, training=training, batch=batch, workers=workers, **cut)


def steps(batches, count: int) -> dict[str, np.ndarray]:
    """All rows of so many micro-batches."""
    found = [batch.fields for batch, _ in zip(batches, range(count), strict=False)]
    return {name: np.concatenate([fields[name] for fields in found]) for name in found[0]}


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def tars(tmp_path_factory) -> str:
    return p.make_tars(tmp_path_factory.mktemp("tars"))


def test_workers_micro_batches_and_ranks_change_no_bit(tars):
    data = settings(tars, **ALL)
    alone = steps(loader(data), 8)
    assert len(np.unique(alone["draws"], axis=0)) == 32 and (alone["pixels"].reshape(32, -1).std(1) > 0).all()
    assert_same(alone, steps(loader(data, workers=2), 8))
    assert_same(alone, steps(loader(data, workers=3, micro_batch=2), 16))
    ranks = [steps(loader(data, rank=rank, world=2), 8) for rank in range(2)]
    joined = {name: np.stack([r[name].reshape(8, 2, *r[name].shape[1:]) for r in ranks], 1) for name in alone}
    assert_same(alone, {name: a.reshape(32, *a.shape[3:]) for name, a in joined.items()})
    other = steps(loader(data, seed=2), 8)
    assert len(np.unique(np.concatenate([alone["draws"], other["draws"]]), axis=0)) == 64


def test_a_run_that_was_killed_in_the_middle_of_a_tar_goes_on_with_the_same_bits(tars):
    """Another process reads with two workers and dies without a word; its state is resumed at other sizes."""
    data = settings(tars, **ALL)
    code = f"""
from tests.data.images.test_samples import *
mine = loader(settings({tars!r}, **ALL), workers=2, batch=2)
for n, batch in enumerate(mine):
    print(json.dumps(mine.state_dict()), flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(7)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    state = json.loads(lines[-1])
    assert state["samples_seen"] == 14  # in the second epoch, in the middle of a shard
    again = loader(data, workers=1, micro_batch=2)
    again.load_state_dict(state)
    whole = steps(loader(data, batch=2), 20)
    assert_same({name: a[14:34] for name, a in whole.items()}, steps(again, 10))


def test_other_data_or_settings_are_not_resumed(tars, tmp_path):
    state = loader(settings(tars, **ALL)).state_dict()
    with pytest.raises(UserError, match=r"images was randaugment_ops=2 erase=0.25 mixup=0.8 cutmix=1.0, is default"):
        loader(settings(tars)).load_state_dict(state)
    with pytest.raises(UserError, match="data was"):
        loader(settings(p.make_tars(tmp_path, 11), **ALL)).load_state_dict(state)


def test_damaged_images_are_refused_or_counted_and_replaced(tmp_path):
    root = p.make_folder(tmp_path / "set")
    bad = root / "train" / "bee" / "004.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    for workers in (0, 2):
        with pytest.raises(UserError, match=r"004.jpg is damaged \(it cannot be decoded .*data.images.damaged=skip"):
            steps(loader(settings(root), workers=workers), 3)
    alone = steps(loader(settings(root, damaged="skip")), 6)
    assert alone["damaged"].tolist().count(1) == 2 and alone["damaged"].sum() == 2  # two epochs
    assert (alone["pixels"].reshape(24, -1).max(1) > 0).all() and (alone["label"] >= 0).all()
    assert_same(alone, steps(loader(settings(root, damaged="skip"), workers=2), 6))
    for path in (root / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="100 images in a row are damaged"):
        steps(loader(settings(root, damaged="skip")), 1)


def test_evaluation_sees_each_image_once_and_counts_no_damaged_one(tmp_path):
    root = p.make_folder(tmp_path / "set")
    (root / "val" / "bee" / "013.jpg").write_bytes(b"no image")
    found = steps(loader(settings(root, damaged="skip"), "validation", training=False), 2)
    assert found.keys() == {"pixels", "label", "damaged"}
    assert found["label"].tolist() == [0, 0, IGNORED, 1, 2, 2, IGNORED, IGNORED]  # two rows fill the batch
    assert found["damaged"].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_repeated_augmentation_shows_an_image_several_times_close_together(tars):
    data = settings(tars, repeats=3, **ALL)
    images = open_images(data, "train")
    source = ImageSource(images, data.images, size=24, seed=1, training=True)
    assert len(source) == 36
    shown = [source._repeated(i, 0) for i in range(36)]
    assert sorted(shown) == [(n, copy) for n in range(12) for copy in range(3)]
    assert all(shown[i][0] != shown[i ^ 1][0] for i in range(36))  # partners of mixup are different images
    assert all(len({n for n, _ in shown[i : i + 6]}) == 2 for i in range(0, 36, 6))
    assert [n for n, _ in shown] != [source._repeated(i, 1)[0] for i in range(36)]
    found = steps(loader(data, batch=6), 6)
    assert len(np.unique(found["draws"], axis=0)) == 36
    assert_same(found, steps(loader(data, batch=6, workers=2, micro_batch=2), 18))
    odd = ImageSource(open_images(settings(tars, hold_back=1), "train"), data.images, size=24, seed=1, training=True)
    assert len({odd._repeated(i, 0) for i in range(len(odd))}) == 33


def test_pairs_are_not_torn_apart(tars):
    check_even(8, 2, 2)
    check_even(6, None, 1)
    check_even(12, 4, 2)  # two rows of the last micro-batch are empty
    for batch, micro, world in ((7, None, 1), (6, 3, 1), (6, None, 2), (20, 2, 3)):
        with pytest.raises(UserError, match="splits a pair of images"):
            check_even(batch, micro, world)
    with pytest.raises(UserError, match="batch 3 splits a pair"):
        loader(settings(tars, mixup=0.2), batch=3)
    loader(settings(tars), batch=3)


def test_the_draws_have_the_distributions_that_the_config_states():
    s = ImagesConfig(**ALL, flip=0.3, mix_probability=0.6, randaugment_probability=0.5)
    found = np.stack([draw(s, 100, generator("n", n))[1] for n in range(4000)])
    column = {name: found[:, i] for i, name in enumerate(DRAWS)}
    assert abs(column["flip"].mean() - 0.3) < 0.03
    assert abs((column["erase_height"] > 0).mean() - 0.25) < 0.03
    erased = column["erase_height"] * column["erase_width"] / 1e4
    assert erased[erased > 0].min() > 0.015 and 0.3 < erased.max() < 0.35
    assert (
        (column["erase_top"] + column["erase_height"]).max()
        == 100
        == (column["erase_left"] + column["erase_width"]).max()
    )
    shares = [(column["mix"] == kind).mean() for kind in range(3)]
    assert np.abs(np.array(shares) - [0.4, 0.3, 0.3]).max() < 0.03
    for kind, alpha in ((1, 0.8), (2, 1.0)):
        share = column["mix_share"][column["mix"] == kind]
        assert abs(share.mean() - 0.5) < 0.03 and abs(share.var() - 1 / (4 * (2 * alpha + 1))) < 0.01
    assert (column["mix_share"][column["mix"] == 0] == 1).all()
    operations, levels = found[:, len(DRAWS) :: 2], found[:, len(DRAWS) + 1 :: 2]
    assert set(np.unique(operations)) == set(range(-1, 15)) and abs((operations < 0).mean() - 0.5) < 0.03
    assert (
        abs(np.abs(levels).mean() - 9) < 0.05 and abs((levels > 0).mean() - 0.5) < 0.03 and np.abs(levels).max() <= 10
    )


def test_a_million_images_travel_to_a_worker_in_a_moment():
    """An image folder as large as ImageNet, as names alone: pickled small and fast."""
    count = 300_000
    names = [f"n{n // 1300:08}/n{n // 1300:08}_{n}.JPEG" for n in range(count)]
    images = Files("/nowhere", names, [1] * count, np.zeros(count, np.int64), ["a"])
    start = time.perf_counter()
    data = pickle.dumps(images)
    again = pickle.loads(data)
    assert len(data) < 60 * count and time.perf_counter() - start < 2
    assert again.name(12345) == f"/nowhere/{names[12345]}" and again.name(0) == f"/nowhere/{names[0]}"
