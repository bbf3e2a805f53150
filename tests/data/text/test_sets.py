"""Sets put together and taken apart."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.text.writing import write_set
from tokenformer import UserError
from tokenformer.data.text import sets
from tokenformer.data.text.indexed import Indexed
from tokenformer.data.text.prepare import prepare

GOLDEN = Path(__file__).parents[1] / "golden" / "indexed"


def documents(found: Indexed) -> list[list[int]]:
    return [found.document(i).tolist() for i in range(found.documents)]


def test_merged_shards_are_byte_for_byte_the_whole(tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(5):
        (tmp_path / "in" / f"{i}.txt").write_text(f"text number {i} " * (i + 1))
    prepare([tmp_path / "in"], tmp_path, "x", tokenizer="byte", workers=1)
    shards = [
        prepare([tmp_path / "in"], tmp_path / "s", "x", tokenizer="byte", workers=1, shard=(i, 3)) for i in (3, 1, 2)
    ]
    assert [p.name for p in shards] == [f"x-{i}-of-3_text_document" for i in (3, 1, 2)]
    with pytest.raises(UserError, match="shard 1 of 3 of x is not among the sets"):
        sets.merge([shards[0], shards[2]], tmp_path / "m" / "x")
    prefix = sets.merge(shards, tmp_path / "m" / "x")
    for name in ("x_text_document.bin", "x_text_document.idx", "x.json"):
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert Indexed(prefix, verify="full").documents == 5
    with pytest.raises(UserError, match="is there already"):
        sets.merge(shards, tmp_path / "m" / "x")


def test_official_files_can_be_merged(tmp_path):
    files = [GOLDEN / f"uint16_text_document.{ending}" for ending in ("bin", "idx")]  # as a glob names them: one set
    prefix = sets.merge([*files, GOLDEN / "sentences"], tmp_path / "m")
    parts = [documents(Indexed(GOLDEN / name)) for name in ("uint16", "sentences")]
    assert documents(Indexed(prefix, verify="full")) == [*parts[0], *parts[1]]
    with pytest.raises(UserError, match="one type is needed"):
        sets.merge([GOLDEN / "uint16", GOLDEN / "int32"], tmp_path / "n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.json", "m_text_document.bin", "m_text_document.idx"]


def test_sets_of_different_tokenizers_are_not_merged(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    one = prepare([tmp_path / "a.txt"], tmp_path, "one", tokenizer="byte", workers=1)
    two = prepare([tmp_path / "a.txt"], tmp_path, "two", workers=1)
    with pytest.raises(UserError, match="were prepared with different tokenizers"):
        sets.merge([one, two], tmp_path / "m")


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=15),
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(any),
)
@example(lengths=[[4]], shares=[1, 0, 1])
@example(lengths=[[3]], shares=[0, 1, 1])
def test_the_parts_joined_are_the_set(tmp_path_factory, lengths, shares):
    folder, counter = tmp_path_factory.mktemp("split"), itertools.count()
    write_set(folder / "s", [[[next(counter) for _ in range(n)] for n in d] for d in lengths])
    whole = Indexed(folder / "s")
    made = sets.split(folder / "s", shares, folder / "parts")
    parts = [Indexed(p, verify="full") for p in made.values()]
    assert [t for p in parts for t in p.tokens.tolist()] == whole.tokens.tolist()
    starts = {whole.document_start(i) for i in range(whole.documents)}
    for part in parts:  # a document begins where one began in the set, or where the part does
        assert {int(part.tokens[0]), *(int(d[0]) for d in map(np.array, documents(part)) if len(d))} <= starts | {
            int(part.tokens[0])
        }


def test_verify_finds_a_token_beyond_the_vocabulary(tmp_path):
    write_set(tmp_path / "v", [[[1, 2, 299]]])
    assert sets.verify(tmp_path / "v", vocab=300).documents == 1
    with pytest.raises(UserError, match="holds token 299"):
        sets.verify(tmp_path / "v", vocab=257)
