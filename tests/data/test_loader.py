"""The loader: one global sequence, however it is cut, and resumed exactly."""

import hashlib
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.text.writing import write_set
from tokenformer import UserError
from tokenformer.config import DataConfig
from tokenformer.data.loader import Loader
from tokenformer.data.text.samples import text_loader

pytestmark = pytest.mark.filterwarnings("ignore:.*cut by tokens")
GOLDEN = Path(__file__).parent / "golden" / "indexed"


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    """Two sets in which every token is its place in the stream (the second counts from 10,000)."""
    folder, rng = tmp_path_factory.mktemp("sets"), random.Random(1)
    for name, start in (("a", 0), ("b", 10_000)):
        documents, place = [], start
        for _ in range(200):
            length = rng.randrange(1, 60)
            documents.append([list(range(place, place + length))])
            place += length
        write_set(folder / name, documents)
    return folder


def run(loader: Loader, steps: int) -> list[list[int]]:
    """First tokens of the samples that a rank sees, micro-batch by micro-batch; padding left out."""
    out = []
    for batch in itertools.islice(iter(loader), steps * loader.micro_batches):
        ids, labels = batch.fields["ids"], batch.fields["labels"]
        real = (labels != -100).any(axis=1)
        assert np.array_equal(ids[real][:, 1:], labels[real][:, :-1])
        out.append(ids[real][:, 0].tolist())
    return out


def sequence(config: DataConfig, world: int, steps: int, state: dict | None = None, batch: int = 12, **kwargs):
    """The global sequence of samples, put together from all ranks, and the state after it."""
    loaders = [text_loader(config, context=16, batch=batch, rank=r, world=world, **kwargs) for r in range(world)]
    for loader in loaders:
        if state:
            loader.load_state_dict(json.loads(json.dumps(state)))
    seen = [run(loader, steps) for loader in loaders]
    assert all(loader.state_dict() == loaders[0].state_dict() for loader in loaders)
    micro = loaders[0].micro_batches
    rows = [x for s in range(steps) for rank in seen for rows in rank[s * micro : (s + 1) * micro] for x in rows]
    return rows, loaders[0].state_dict()


@pytest.mark.parametrize("order", ["permutation", "official"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [1, 2, 5, None])
def test_every_world_and_micro_batch_sees_the_same_global_sequence(sets, tmp_path, order, world, micro):
    config = DataConfig(path=str(sets / "a"), order=order, cache=str(tmp_path), split=[1])
    whole, _ = sequence(config, 1, 40, samples=480)
    again, state = sequence(config, world, 40, samples=480, micro_batch=micro)
    assert again == whole and len(whole) == 480 and state["samples_seen"] == 480


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_resume_at_any_point_and_any_shape_goes_on_exactly(sets, data):
    worlds = st.sampled_from([1, 2, 3, 8])
    config = DataConfig(path=str(sets / "a"), workers=data.draw(st.integers(0, 3)))
    whole, _ = sequence(config, 1, 60)
    first = data.draw(st.integers(0, 30))
    head, state = sequence(config, data.draw(worlds), first, micro_batch=data.draw(st.integers(1, 12)))
    tail, _ = sequence(config, data.draw(worlds), 20, state, micro_batch=data.draw(st.integers(1, 12)))
    assert head + tail == whole[: 12 * (first + 20)]
    other, _ = sequence(config, data.draw(worlds), 7, state, batch=20)  # another batch size, too
    assert head + other == whole[: 12 * first + 140]


FIRST = {  # sha256 of the first 100 micro-batches, as they were at the first release
    "permutation": ({}, "def1d07ab6c63a43c21875156a68ff99"),
    "official": ({"order": "official"}, "aabaeb50ba4ddf0bc8d681602bf3b1ab"),
    "permutation, boundaries": ({"boundaries": True}, "31bcd284425168aae628c68da099318e"),
    "official, boundaries": ({"order": "official", "boundaries": True}, "4fb37f0e67198c9b176bd2c5b1cb8d68"),
    "blend": ({"path": {"a": 3, "b": 1}}, "57dbc5af9c7361f9bdfeaf5cabf6511c"),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_hundred_batches_are_those_of_the_first_release(sets, tmp_path, monkeypatch, name):
    monkeypatch.chdir(sets)
    keys, expected = FIRST[name]
    config = DataConfig(**{"path": "a", "boundary_labels": "ignore", "cache": str(tmp_path), **keys})
    loader = text_loader(config, context=16, batch=12, micro_batch=5, samples=900)
    digest = hashlib.sha256()
    for batch in itertools.islice(loader, 100):  # into the second epoch
        for field in ("ids", "labels", "documents"):
            digest.update(batch.fields[field].astype("<i8").tobytes() if field in batch.fields else b"")
    assert digest.hexdigest()[:32] == expected and loader.samples_seen == 396


def test_a_state_of_the_first_release_resumes(sets):
    """There the identity was one text."""
    text = "data=cc5f78980115224c*3/4+97b7626181a0d959*1/4 order=permutation context=16 split=969,30,1 part=train"
    config = DataConfig(path={str(sets / "a"): 3, str(sets / "b"): 1})
    whole, _ = sequence(config, 1, 20)
    tail, state = sequence(config, 2, 5, {"fingerprint": text, "seed": 1234, "samples_seen": 48})
    assert tail == whole[48:108] and " ".join(f"{k}={v}" for k, v in state["identity"].items()) == text
    with pytest.raises(UserError, match=r"\(split was 969,30,1, is 9,1\)"):
        other = text_loader(DataConfig(path=config.path, split=[9, 1]), context=16, batch=4)
        other.load_state_dict({"fingerprint": text, "seed": 1234, "samples_seen": 48})


@pytest.mark.parametrize("state", [{}, {"identity": 3, "seed": 1, "samples_seen": 0}, {"fingerprint": "x y"}])
def test_a_state_of_another_form_is_refused_in_a_sentence(sets, state):
    with pytest.raises(UserError, match="the saved state of the data is not one of ours"):
        text_loader(DataConfig(path=str(sets / "a")), context=16, batch=4).load_state_dict(state)


def test_a_state_counts_whole_steps_that_were_handed_out(sets):
    loader = text_loader(DataConfig(path=str(sets / "a")), context=16, batch=8, micro_batch=2)
    stream = iter(loader)
    seen = [(next(stream).last, loader.samples_seen) for _ in range(6)]
    assert seen == [(False, 0), (False, 0), (False, 0), (True, 8), (False, 8), (False, 8)]


def test_an_epoch_sees_every_sample_once_and_the_next_in_another_order(sets):
    config = DataConfig(path=str(sets / "a"), split=[1])
    loader = text_loader(config, context=16, batch=1)
    both = [x for batch in run(loader, 2 * loader.samples) for x in batch]
    first, second = both[: loader.samples], both[loader.samples :]
    assert sorted(first) == sorted(second) == [16 * i for i in range(loader.samples)]
    [source] = loader.sources
    assert loader.samples == (len(source.set.tokens) - 1) // 16
    assert first != second and first != sorted(first)
    assert [x for b in run(text_loader(config, context=16, batch=1, seed=5), 9) for x in b] != first[:9]


def test_one_epoch_ends_and_pads_the_last_step_for_every_rank(sets):
    config = DataConfig(path=str(sets / "a"), split=[8, 1, 1])
    loaders = [text_loader(config, context=16, batch=8, rank=r, world=3, part="validation", epochs=1) for r in range(3)]
    rows = [list(loader) for loader in loaders]
    fields = [b.fields for r in rows for b in r]
    assert len({len(r) for r in rows}) == 1 and {f["ids"].shape for f in fields} == {(3, 16)}
    real = [i for f in fields for i in f["ids"][(f["labels"] != -100).all(axis=1)][:, 0].tolist()]
    assert len(real) == len(set(real)) == loaders[0].samples


def test_batches_are_long_integers_with_the_next_token_as_label(sets):
    fields = next(iter(text_loader(DataConfig(path=str(sets / "a")), context=16, batch=4))).fields
    assert list(fields) == ["ids", "labels"] and {a.dtype for a in fields.values()} == {np.dtype(np.int64)}
    assert {a.shape for a in fields.values()} == {(4, 16)} and all(a.flags.c_contiguous for a in fields.values())
    assert np.array_equal(fields["labels"], fields["ids"] + 1)  # a stream of consecutive numbers


@pytest.mark.parametrize("order", ["permutation", "official"])
@pytest.mark.parametrize("labels", ["next", "ignore"])
def test_boundaries_number_the_documents_of_each_sample(sets, tmp_path, order, labels):
    config = DataConfig(
        path=str(sets / "a"), boundaries=True, boundary_labels=labels, order=order, cache=str(tmp_path), split=[1]
    )
    loader = text_loader(config, context=40, batch=64, samples=64)
    fields = next(iter(loader)).fields
    starts = {loader.sources[0].set.document_start(i) for i in range(200)}
    assert fields["documents"].dtype == np.int32
    rows = zip(fields["ids"].tolist(), fields["labels"], fields["documents"].tolist(), strict=True)
    for ids, row_labels, documents in rows:
        number = 0
        for t, token in enumerate(ids):
            number += t > 0 and token in starts  # tokens are places: these begin a document
            assert documents[t] == number
            if t + 1 < len(ids):
                ends = ids[t + 1] in starts
                assert row_labels[t] == (-100 if ends and labels == "ignore" else ids[t + 1])


def test_a_blend_keeps_its_proportions_and_resumes(sets):
    config = DataConfig(path={str(sets / "a"): 3, str(sets / "b"): 1})
    whole, state = sequence(config, 1, 20)
    counts = np.cumsum([x >= 10_000 for x in whole])
    assert np.abs(counts - np.arange(1, 241) / 4).max() < 1
    tail, _ = sequence(config, 3, 5, {**state, "samples_seen": 48}, micro_batch=2)
    assert tail == whole[48:108]


def test_other_data_or_settings_are_refused_by_name(sets, tmp_path):
    base = {"path": str(sets / "a"), "cache": str(tmp_path)}
    loader = text_loader(DataConfig(**base), context=16, batch=4)
    changed = {
        "data": ({**base, "path": str(sets / "b")}, {}),
        "order": ({**base, "order": "official"}, {"samples": 10}),
        "context": (base, {"context": 8}),
        "split": ({**base, "split": [9, 1]}, {}),
        "part": (base, {"part": "validation"}),
        "seed": (base, {"seed": 2}),
    }
    for name, (keys, shape) in changed.items():
        other = text_loader(DataConfig(**keys), **{"context": 16, "batch": 4, **shape})
        with pytest.raises(UserError, match=rf"not those of the saved state \({name} was .*, is .*\)"):
            other.load_state_dict(loader.state_dict())
    blend = {str(sets / "a"): 1, str(sets / "b"): 1}
    with pytest.raises(UserError, match=r"\(data was"):
        text_loader(DataConfig(path=blend), context=16, batch=4).load_state_dict(loader.state_dict())
    official = [
        text_loader(DataConfig(**{**base, "order": "official"}), context=16, batch=4, samples=n) for n in (10, 20)
    ]
    with pytest.raises(UserError, match="samples was 10, is 20"):
        official[1].load_state_dict(official[0].state_dict())


def test_the_same_contents_under_another_name_are_the_same_data(sets, tmp_path):
    for ending in ("bin", "idx"):
        (tmp_path / f"moved.{ending}").write_bytes((sets / f"a.{ending}").read_bytes())
    state = text_loader(DataConfig(path=str(sets / "a")), context=16, batch=4).state_dict()
    text_loader(DataConfig(path=str(tmp_path / "moved")), context=16, batch=4).load_state_dict(state)
    raw = bytearray((tmp_path / "moved.bin").read_bytes())
    raw[0] ^= 1
    (tmp_path / "moved.bin").write_bytes(raw)
    with pytest.raises(UserError, match="data was"):
        text_loader(DataConfig(path=str(tmp_path / "moved")), context=16, batch=4).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_token_beyond_the_vocabulary_reaches_the_caller_as_a_sentence(sets, workers):
    loader = text_loader(DataConfig(path=str(sets / "a"), workers=workers), context=16, batch=64, vocab=1000)
    with pytest.raises(UserError, match=r"a\.bin holds token .* outside the vocabulary of 1000"):
        for _ in zip(range(10), loader, strict=False):
            pass


@pytest.mark.parametrize(
    "keys, shape, sentence",
    [
        ({"path": None}, {}, "data.path is missing"),
        ({}, {"part": "training"}, "there is no part 'training'"),
        ({}, {"batch": 0}, "batch is 0: give a number above 0"),
        ({}, {"context": 60000}, "has no sample of 60000 \\+ 1 tokens"),
        ({"order": "official"}, {}, "needs the number of samples"),
        ({"path": {"{a}": 1, "{b}": 1}, "order": "official"}, {"samples": 9}, "knows one set"),
        ({"path": {"{a}": 1, "{b}": 1}}, {"epochs": 1}, "a blend has no common epoch"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(sets, tmp_path, keys, shape, sentence):
    path = keys.get("path", "{a}")
    named = {"{a}": str(sets / "a"), "{b}": str(sets / "b"), None: None}
    path = {named[k]: w for k, w in path.items()} if isinstance(path, dict) else named[path]
    with pytest.raises(UserError, match=sentence):
        text_loader(
            DataConfig(**{**keys, "path": path, "cache": str(tmp_path)}), **{"context": 16, "batch": 4, **shape}
        )


def test_held_out_text_stays_out_of_training_where_one_document_is_cut(tmp_path):
    write_set(tmp_path / "one", [[list(range(1000))]])
    parts = {}
    for part in ("train", "test"):
        config = DataConfig(path=str(tmp_path / "one"), split=[90, 0, 10], workers=0)
        fields = [b.fields for b in text_loader(config, context=9, batch=4, part=part, epochs=1)]
        parts[part] = {i for f in fields for i in f["labels"][f["labels"] >= 0].tolist()}
    assert max(parts["train"]) < 900 < min(parts["test"])


def test_a_part_that_is_cut_by_tokens_says_so(sets):
    with pytest.warns(UserWarning, match="a: test is cut by tokens, since 200 documents"):
        loader = text_loader(DataConfig(path=str(sets / "a")), context=4, batch=1, part="test")
    assert loader.samples == 1


def test_an_empty_official_part_can_be_opened_but_not_read(tmp_path):
    config = DataConfig(path=str(GOLDEN / "uint16"), order="official", cache=str(tmp_path))
    loader = text_loader(config, context=16, batch=4, samples=8, part="test", empty=True)
    assert loader.samples == 0
    with pytest.raises(UserError, match=r"the data are empty .*part test"):
        next(iter(loader))


def test_settings_from_python_are_checked_too(sets):
    with pytest.raises(UserError, match=r"data\.verify is 'ful', but must be one of auto, quick, full"):
        DataConfig(path="a", verify="ful")
    with pytest.raises(UserError, match="rank is 3 of a world of 2"):
        text_loader(DataConfig(path=str(sets / "a")), context=8, batch=4, rank=3, world=2)
