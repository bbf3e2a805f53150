"""Tokenizers, and the places where a text may be cut: pieces must give the tokens of the whole."""

import itertools
import json
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

from tokenformer import UserError
from tokenformer.data.text import cutting
from tokenformer.data.text.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    load_tokenizer,
    padded_vocab,
    same_tokenizer,
    train_tokenizer,
)

ALICE = (Path(__file__).parents[1] / "alice.txt").read_text()
NEOX = load_tokenizer("gpt-neox-20b")


def test_neox_is_the_official_file():
    assert (NEOX.vocab_size, NEOX.end_of_document, padded_vocab(NEOX.vocab_size)) == (50277, 0, 50304)
    assert NEOX.encode("Hello world") == [12092, 1533]
    assert NEOX.encode("a<|endoftext|>b") == [66, 0, 67]


@settings(deadline=None)
@given(st.text())
def test_byte_is_bytes_plus_one_and_its_json_agrees(text):
    byte = ByteTokenizer()
    assert byte.encode(text) == [b + 1 for b in text.encode()] == byte.encode_batch([text])[0].tolist()
    assert byte.decode(byte.encode(text)) == text
    twin = FileTokenizer(byte.to_json(), "twin")
    assert twin.encode(text) == byte.encode(text)
    assert (twin.vocab_size, twin.end_of_document) == (257, 0)


def variants() -> dict[str, FileTokenizer]:
    """Tokenizers with each kind of splitting that we cut."""
    base = train_tokenizer([ALICE], 600)
    raw = {"bundled": NEOX.to_json(), "trained": base.to_json()}
    for number, pattern in enumerate(sorted(cutting._KNOWN)):
        tree = json.loads(base.to_json())
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
        tree["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "Lowercase"}]}
        raw[f"split {number}"] = json.dumps(tree)
    return {name: FileTokenizer(text, name) for name, text in raw.items()}


VARIANTS = variants()
LETTERS = "abzAZ09 \n\t\r  '.,|<>_-\"’sé\u0301\u0308ñ漢字。、ひカ한글\u1161\u11a8अक\u093f🙂\u00a0\u2028٣½ΣσЖ"
PIECES = st.lists(
    st.one_of(
        st.text(alphabet=LETTERS, min_size=1, max_size=6),
        st.text(max_size=3),
        st.sampled_from(["<|endoftext|>", "<|padding|>", " " * 24, "don't", "he'll", "x 1 y", "\r\n\r\n", "a  b"]),
    ),
    max_size=12,
)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=60, deadline=None)
@given(pieces=PIECES)
def test_cutting_at_every_allowed_place_gives_the_tokens_of_the_whole(name, pieces):
    tokenizer, text = VARIANTS[name], "".join(pieces)
    assert tokenizer.cuts is not None
    places = [0, *(m.start() for m in tokenizer.cuts.finditer(text)), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    assert [i for ids in tokenizer.encode_batch(parts) for i in ids] == tokenizer.encode(text)


def test_what_stands_before_a_cut_is_a_letter_or_digit_for_the_library_too():
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    before = re.compile(f"[{cutting._BEFORE}]")
    letters = [c for c in map(chr, range(0x110000)) if before.match(c)]
    assert len(letters) > 30000
    assert {unicodedata.category(c)[0] for c in letters} <= {"L", "N"}
    runs = splitter.pre_tokenize_str(" ".join(letters[:3000]) + " " + "".join(c for c in letters if c > "9"))
    assert len(runs) == 3001  # each letter by itself is one match, and all letters together are one


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES, {"type": "Punctuation"}]}},
    ],
)
def test_a_tokenizer_whose_cuts_are_not_proven_is_not_cut(change):
    tree = {**json.loads(VARIANTS["trained"].to_json()), **change}
    assert cutting.cut_rule(tree) is None
    assert cutting.fragments("word " * 200_000, None, "x") == ["word " * 200_000]


def test_a_tokenizer_of_bytes_from_a_file_may_be_cut_anywhere():
    tokenizer = FileTokenizer(ByteTokenizer().to_json(), "bytes")
    text = "漢字、<|endoftext|> abc" * 40_000
    parts = cutting.fragments(text, tokenizer.cuts, "x")
    assert len(parts) > 2 and "".join(parts) == text
    assert [id for part in parts for id in tokenizer.encode(part)] == tokenizer.encode(text)


def test_added_tokens_are_never_cut():
    tree = json.loads(VARIANTS["trained"].to_json())
    library = Library.from_str(json.dumps(tree))
    library.add_special_tokens(["<new york, city>"])
    tokenizer = FileTokenizer(library.to_str(), "t")
    assert tokenizer.cuts is not None
    assert tokenizer.cuts.search("<new york, city>") is None
    assert tokenizer.cuts.search("cut here.") is not None


def test_fragments_join_to_the_text_and_stay_small():
    text = (ALICE + "漢字、" * 1000) * 20
    parts = cutting.fragments(text, NEOX.cuts, "x")
    assert "".join(parts) == text and len(parts) > 8
    assert max(map(len, parts)) <= cutting.FRAGMENT


def test_a_run_without_a_place_to_cut_is_refused_by_name():
    assert len(cutting.fragments("a" * (cutting.LONGEST - 1), NEOX.cuts, "x")) == 1
    with pytest.raises(UserError, match=r"book\.txt has 1,048,576 characters without a place to cut it"):
        cutting.fragments("a" * (cutting.LONGEST + 2), NEOX.cuts, "book.txt")


def test_tokenizers_are_the_same_by_what_their_files_say():
    trained = VARIANTS["trained"]
    rewritten = FileTokenizer(json.dumps(json.loads(trained.to_json()), indent=3), "as another program writes it")
    assert same_tokenizer(trained, rewritten) and not same_tokenizer(trained, NEOX)


def test_training_makes_the_size_asked_for(tmp_path):
    tokenizer = train_tokenizer([ALICE], 1000)
    assert tokenizer.vocab_size == 1000 and tokenizer.end_of_document == 0
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    again = load_tokenizer(tmp_path)
    assert again.encode(ALICE[:2000]) == tokenizer.encode(ALICE[:2000])
    assert again.decode(again.encode(ALICE[:2000])) == ALICE[:2000]
    with pytest.raises(UserError, match="give 257 or more"):
        train_tokenizer([ALICE], 100)


def test_bad_tokenizers_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no tokenizer 'gtp-neox'"):
        load_tokenizer("gtp-neox")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "t.json")
    (tmp_path / "u.json").write_text(VARIANTS["trained"].to_json().replace("<|endoftext|>", "<other>"))
    with pytest.raises(UserError, match="no end-of-document token"):
        load_tokenizer(tmp_path / "u.json")
    assert load_tokenizer(tmp_path / "u.json", end="<other>").end_of_document == 0
