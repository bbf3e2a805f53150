"""Megatron's format: the golden files byte for byte, and what damaged files do."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.text.writing import write_set
from tokenformer import UserError
from tokenformer.config import DataConfig
from tokenformer.data.text import indexed, sets
from tokenformer.data.text.indexed import Indexed

GOLDEN = Path(__file__).parents[1] / "golden" / "indexed"
TRUTH = json.loads((GOLDEN / "documents.json").read_text())


def texts(found: Indexed) -> list[list[int]]:
    return [found.document(i).tolist() for i in range(found.documents)]


@pytest.mark.parametrize("name", ["uint16", "int32"])
def test_golden_documents_read_back(name):
    found = Indexed(GOLDEN / f"{name}_text_document")
    assert texts(found) == TRUTH["documents"]


def test_golden_sentences_read_back():
    found = Indexed(GOLDEN / "sentences")
    items = [item for document in TRUTH["sentences"] for item in document]
    assert np.array_equal(found.tokens, np.concatenate(items)) and found.sizes.tolist() == [len(i) for i in items]
    assert [found.document(i).tolist() for i in range(found.documents)] == [
        [i for item in d for i in item] for d in TRUTH["sentences"]
    ]


@pytest.mark.parametrize("name, dtype", [("uint16", np.uint16), ("int32", np.int32), ("sentences", np.uint16)])
def test_writing_the_same_documents_gives_the_same_bytes(tmp_path, name, dtype):
    documents = TRUTH["sentences"] if name == "sentences" else [[d] for d in TRUTH["documents"]]
    write_set(tmp_path / "x_text_document", documents, dtype)
    for ending in ("bin", "idx"):
        golden = (GOLDEN / f"{name}_text_document.{ending}").read_bytes()
        assert (tmp_path / f"x_text_document.{ending}").read_bytes() == golden


@settings(deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), max_size=6))
def test_any_documents_come_back(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("set") / "any"
    write_set(prefix, documents)
    found = Indexed(prefix)
    assert [found.document(i).tolist() for i in range(found.documents)] == [
        [i for item in d for i in item] for d in documents
    ]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One of: a bit, a byte, a word overwritten, cut off, lengthened, a range removed or doubled."""
    at, kind = rng.randrange(len(data)), rng.randrange(7)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + bytes([(data[at] + rng.randrange(1, 256)) % 256]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + rng.randbytes(8) + data[at + 8 :]
    if kind == 3:
        return data[:at]
    if kind == 4:
        return data + rng.randbytes(rng.randrange(1, 20))
    stop = min(len(data), at + rng.randrange(1, 30))
    return data[:at] + data[stop:] if kind == 5 else data[:at] + data[at:stop] + data[at:]


@pytest.mark.parametrize("name", ["uint16", "int32", "sentences"])
def test_a_mutated_index_is_refused_or_reads_inside_file_and_vocabulary(tmp_path, name):
    rng, vocab = random.Random(13), 50304
    for ending in ("bin", "idx"):
        shutil.copy(GOLDEN / f"{name}_text_document.{ending}", tmp_path / f"m.{ending}")
    original = (tmp_path / "m.idx").read_bytes()
    refused = 0
    for _ in range(1500):
        (tmp_path / "m.idx").write_bytes(mutate(original, rng))
        try:
            found = Indexed(tmp_path / "m", vocab=vocab)
            ids = [found.document(i) for i in range(found.documents)]
            assert all(len(d) == 0 or (d.min() >= 0 and d.max() < vocab) for d in ids)
        except UserError:
            refused += 1
    assert refused > 1300


@pytest.mark.parametrize("code", range(256))
def test_every_type_code_is_refused_or_safe(tmp_path, code):
    raw = bytearray((GOLDEN / "uint16_text_document.idx").read_bytes())
    raw[17] = code
    (tmp_path / "m.idx").write_bytes(raw)
    shutil.copy(GOLDEN / "uint16_text_document.bin", tmp_path / "m.bin")
    if code == 8:
        assert len(Indexed(tmp_path / "m")) == 21
        return
    with pytest.raises(UserError):  # 3 is int16: same size, but ids above 32,767 turn negative
        found = Indexed(tmp_path / "m", vocab=50304)
        [found.document(i) for i in range(found.documents)]


def described(folder: Path) -> Path:
    prefix = folder / "s_text_document"
    for ending in ("bin", "idx"):
        shutil.copy(GOLDEN / f"uint16_text_document.{ending}", f"{prefix}.{ending}")
    for file in ("tokens", "index"):
        shutil.copy(indexed.set_files(prefix)[file], folder / file)
    (folder / "s.json").write_text(indexed.describe(prefix, folder, {"documents": 21}))
    return prefix


def test_with_its_description_every_mutation_is_caught(tmp_path):
    prefix, rng = described(tmp_path), random.Random(7)
    assert Indexed(prefix, verify="full").documents == 21
    tried = 0
    for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), tmp_path / "s.json"):
        original = path.read_bytes()
        for _ in range(900):
            changed = mutate(original, rng)
            if changed == original:
                continue
            path.write_bytes(changed)
            tried += 1
            with pytest.raises(UserError):
                Indexed(prefix, verify="full")
            with pytest.raises(UserError):
                sets.verify(prefix)
        path.write_bytes(original)
    assert tried > 2000
    assert Indexed(prefix, verify="full").documents == 21


def test_a_flipped_byte_is_noticed_unless_somebody_asked_for_a_quick_look(tmp_path, monkeypatch):
    prefix = described(tmp_path)
    raw = bytearray(Path(f"{prefix}.bin").read_bytes())
    raw[100] ^= 1
    Path(f"{prefix}.bin").write_bytes(raw)
    for how in ({}, {"verify": DataConfig().verify}, {"verify": "full"}):
        with pytest.raises(UserError, match=r"s_text_document\.bin is not the file that s\.json describes"):
            Indexed(prefix, **how)
    assert Indexed(prefix, verify="quick").documents == 21
    monkeypatch.setattr(indexed, "SMALL", 100)  # where it would take long, it is said that it was not done
    with pytest.warns(UserWarning, match=r"s_text_document is large, .* not its checksums: `tokenformer data verify`"):
        Indexed(prefix)


def test_an_index_of_many_chunks_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "_CHUNK", 2)
    write_set(tmp_path / "c", [[[i] * (i + 1)] for i in range(5)])
    assert [d[-1] for d in texts(Indexed(tmp_path / "c"))] == list(range(5))


def test_items_of_negative_size_are_refused(tmp_path):
    (tmp_path / "n.bin").write_bytes(bytes(6))
    indexed.write_index(tmp_path / "n.idx", np.dtype(np.uint16), np.array([5, -2]))
    with pytest.raises(UserError, match="has items that do not lie one after another"):
        Indexed(tmp_path / "n")


def test_errors_name_the_file_and_what_to_do(tmp_path):
    prefix = described(tmp_path)
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match=r"s_text_document\.bin is not the file that s\.json describes: restore"):
        Indexed(prefix)
    (tmp_path / "s.json").unlink()
    with pytest.raises(UserError, match=r"describes 1,510 bytes, but the \.bin beside it has 1,511"):
        Indexed(prefix)
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(UserError, match=r"\.bin is missing"):
        Indexed(prefix)
    with pytest.raises(UserError, match="there is no prepared set"):
        Indexed(tmp_path / "nothing")
    with pytest.raises(UserError, match=f"did you mean {tmp_path}/s\\?"):  # a folder with sets in it
        Indexed(tmp_path)


def test_a_token_beyond_the_vocabulary_is_refused_where_it_is_read(tmp_path):
    write_set(tmp_path / "v", [[[1, 2]], [[300]]])
    found = Indexed(tmp_path / "v", vocab=257)
    assert found.document(0).tolist() == [1, 2]
    with pytest.raises(UserError, match=r"holds token 300 .* outside the vocabulary of 257"):
        found.document(1)
    assert Indexed(tmp_path / "v", vocab=301).document(1).tolist() == [300]
    with pytest.raises(UserError, match=r"holds token 300 .* outside the vocabulary of 300"):
        Indexed(tmp_path / "v", vocab=300).document(1)


def test_fingerprint_follows_the_contents(tmp_path):
    for name, documents in (("a", [[[1, 2]]]), ("b", [[[1, 3]]]), ("c", [[[1, 2]]]), ("d", [[[1]], [[2]]])):
        write_set(tmp_path / name, documents)
    prints = {n: Indexed(tmp_path / n).fingerprint for n in "abcd"}
    assert prints["a"] == prints["c"] and len(set(prints.values())) == 3
