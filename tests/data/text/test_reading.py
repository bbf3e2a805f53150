"""Sources and documents: every format in every packing, and what bad input does."""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from pathlib import Path

import pyarrow
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tokenformer import UserError
from tokenformer.data.text import reading
from tokenformer.data.text.cutting import FRAGMENT
from tokenformer.data.text.inputs import find_inputs
from tokenformer.data.text.named import SETS
from tokenformer.data.text.reading import Reading, read_units
from tokenformer.data.text.tokenizer import ByteTokenizer, load_tokenizer

DOCUMENTS = ["first one", "zweites, mit Ümlaut\nund Zeile", "третий 🙂", "x" * 5000]
NEOX = load_tokenizer("gpt-neox-20b")


def documents(*inputs, cuts=NEOX.cuts, **how) -> list[str]:
    """Documents put together from their units."""
    out, text = [], ""
    for source in find_inputs([str(i) for i in inputs]):
        for unit in read_units(source, Reading(**how), cuts):
            if unit.left_out:
                out.append(f"[{unit.left_out}]")
                continue
            text += unit.text
            if unit.last:
                out.append(text)
                text = ""
    assert text == ""
    return out


def content(kind: str) -> bytes:
    if kind == "txt":
        return "@@".join(DOCUMENTS).encode()
    if kind == "jsonl":
        return "".join(
            json.dumps({"text": d}, ensure_ascii=i % 2 == 0) + "\n" for i, d in enumerate(DOCUMENTS)
        ).encode()
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": [0, 1, 2, 3], "text": DOCUMENTS}), out)
    return out.getvalue()


def tarred(name: str, data: bytes, mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for inner in (f"._{name}", name):
            info = tarfile.TarInfo(f"folder/{inner}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zipped(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"folder/{name}", data)
        archive.writestr(f"__MACOSX/._{name}", b"\xff")
    return out.getvalue()


PACKINGS = {
    "": lambda name, data: data,
    ".gz": lambda name, data: gzip.compress(data),
    ".xz": lambda name, data: lzma.compress(data),
    ".zst": lambda name, data: zstandard.compress(data[:40]) + zstandard.compress(data[40:]),  # two frames
    ".bz2": lambda name, data: bz2.compress(data),
    ".zip": zipped,
    ".tar": tarred,
    ".tar.gz": lambda name, data: tarred(name, data, "w:gz"),
    ".tgz": lambda name, data: tarred(name, data, "w:gz"),
    ".tar.zst": lambda name, data: zstandard.compress(tarred(name, data)),
    ".zip.tar": lambda name, data: tarred(f"{name}.zip", zipped(name, data)),
    ".zst.tar": lambda name, data: tarred(f"{name}.zst", zstandard.compress(data)),  # as openwebtext2
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_every_format_in_every_packing_gives_the_documents(tmp_path, kind, packing):
    path = tmp_path / f"a.{kind}{packing}"
    path.write_bytes(PACKINGS[packing](f"a.{kind}", content(kind)))
    assert documents(path, separator="@@" if kind == "txt" else None) == DOCUMENTS


@pytest.mark.parametrize("packing", [p for p in PACKINGS if p])
def test_a_packed_file_that_was_cut_off_is_refused_by_name(tmp_path, packing):
    rng = random.Random(3)
    data = json.dumps({"text": "".join(chr(rng.randrange(33, 126)) for _ in range(60_000))}).encode()
    whole = PACKINGS[packing]("a.jsonl", data)
    path = tmp_path / f"a.jsonl{packing}"
    for size in (len(whole) // 2, len(whole) * 9 // 10):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"a\.jsonl.* (is damaged or cut off|cannot be read)"):
            documents(path)


def test_damaged_parquet_is_refused_by_name(tmp_path):
    (tmp_path / "a.parquet").write_bytes(content("parquet")[:-20])
    with pytest.raises(UserError, match=r"a\.parquet is not a whole Parquet file"):
        documents(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has no column 'body'"):
        (tmp_path / "b.parquet").write_bytes(content("parquet"))
        documents(tmp_path / "b.parquet", field="body")


def test_folders_and_globs_come_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden/d.txt", "sub/.e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]
    assert documents(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert documents(tmp_path / "b.txt", tmp_path / "a.txt") == ["b.txt", "a.txt"]
    with pytest.raises(UserError, match=r"there is no file, folder or match for '.*\.md'"):
        documents(tmp_path / "*.md")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there are no files in"):
        documents(tmp_path / "empty")


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.text(alphabet="ab \n.<|endoftxt>é漢", max_size=30), max_size=8),
    separator=st.sampled_from(["<|endoftext|>", "\n\n", "ab", ".", "aa"]),
    fragment=st.integers(1, 9),
    block=st.integers(1, 40),
    byte=st.booleans(),
)
@example(parts=["", "<<<<<<"], separator=".", fragment=1, block=1, byte=True)  # the last fragment ends the text
def test_separators_cut_like_split_whatever_the_blocks(tmp_path_factory, parts, separator, fragment, block, byte):
    """Fragments and blocks of any size change nothing: the documents are those of str.split."""
    text = separator.join(parts)
    path = tmp_path_factory.mktemp("sep") / "a.txt"
    path.write_bytes(text.encode())

    class Blocks(io.BytesIO):
        def read(self, size=-1):
            return super().read(block)

    out, open_ = [], ""
    old = reading.FRAGMENT
    reading.FRAGMENT = fragment
    try:
        cuts = ByteTokenizer.cuts if byte else NEOX.cuts
        for unit in reading._text(Blocks(text.encode()), Reading(separator=separator), cuts, "a.txt"):
            open_ += unit.text
            if unit.last:
                out.append(open_)
                open_ = ""
    finally:
        reading.FRAGMENT = old
    expected = text.split(separator)
    assert open_ == "" and out == (expected if expected[-1] or len(expected) == 1 else expected[:-1])


def test_a_page_line_begins_a_document_and_documents_joined_are_the_file(tmp_path):
    text = "<mediawiki>\n  <page>\n one\n  </page>\n  <page>\n two <page> in a line\n  </page>\n</mediawiki>"
    (tmp_path / "enwik8").write_text(text)
    found = documents(tmp_path / "enwik8", before=SETS["enwik8"].reading.before)
    assert "".join(found) == text
    assert [d.startswith("  <page>\n") for d in found] == [False, True, True]


def test_wikitext_lines_are_joined_to_articles(tmp_path):
    lines = ["", " = Title = \n", "text\n", " = = Section = = \n", "more\n", " = Other = \n", "end\n"]
    parquet.write_table(pyarrow.table({"text": lines}), tmp_path / "w.parquet")
    found = documents(tmp_path / "w.parquet", heading=SETS["wikitext"].reading.heading)
    assert found == ["[empty]", " = Title = \ntext\n = = Section = = \nmore\n", " = Other = \nend\n"]


BAD_LINES = {
    b'{"text": "a"\n': "is not JSON",
    b"[1, 2]\n": "has no field 'text'",
    b'{"body": "a"}\n': "has no field 'text'",
    b'{"text": 3}\n': "has a field 'text' that is not text",
    b'{"text": null}\n': "has a field 'text' that is not text",
    b'{"text": "\xff"}\n': "is not UTF-8",
    b'{"text": "\\ud800"}\n': "is not valid Unicode",
    b"[" * 100_000 + b"\n": "is not JSON",
    b"\x00\n": "is not JSON",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda b: b[:12].decode("latin1").strip())
def test_a_bad_line_is_named_and_can_be_skipped(tmp_path, bad):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\n' + bad + b'{"text": "two"}')
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3, {BAD_LINES[bad]}.*--on-error skip"):
        documents(tmp_path / "a.jsonl")
    assert documents(tmp_path / "a.jsonl", on_error="skip") == ["one", "[skipped]", "two"]


def test_invalid_utf8_in_a_text_is_named_by_its_byte_and_skipped_by_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("é one@@".encode() + b"bad \xff here@@fine")
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 \(byte 12\).*--on-error skip"):
        documents(tmp_path / "a.txt", separator="@@")
    assert documents(tmp_path / "a.txt", separator="@@", on_error="skip") == ["é one", "[skipped]", "fine"]
    (tmp_path / "b.txt").write_bytes(b"x" * ((1 << 20) - 1) + "é".encode() + b"\xc3")
    with pytest.raises(UserError, match=r"\(byte 1,048,577\)"):
        documents(tmp_path / "b.txt")


def test_empty_documents_are_named_as_such(tmp_path):
    (tmp_path / "a.txt").write_text("one@@@@two@@")
    assert documents(tmp_path / "a.txt", separator="@@") == ["one", "[empty]", "two"]
    (tmp_path / "b.txt").write_text("")
    assert documents(tmp_path / "b.txt") == ["[empty]"]


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}')
    assert documents(tmp_path / "a.txt", tmp_path / "b.jsonl") == ["one", "two"]


@pytest.mark.parametrize("how", [{}, {"on_error": "skip"}])
def test_long_texts_come_in_fragments_that_join_to_them(tmp_path, how):
    text = (Path(__file__).parents[1] / "alice.txt").read_text() * 12
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    for name in ("a.txt", "b.jsonl"):
        [source] = find_inputs([tmp_path / name])
        units = list(read_units(source, Reading(**how), NEOX.cuts))
        assert "".join(u.text for u in units) == text and len(units) > 5
        assert [u.last for u in units] == [False] * (len(units) - 1) + [True]
        assert max(len(u.text) for u in units) <= 2 * FRAGMENT


def test_a_run_without_a_place_to_cut_is_refused_or_skipped(tmp_path):
    (tmp_path / "a.txt").write_text("z" * 1_500_000)
    with pytest.raises(UserError, match=r"a\.txt has 1,048,576 characters without"):
        documents(tmp_path / "a.txt")
    assert documents(tmp_path / "a.txt", on_error="skip") == ["[skipped]"]
    (tmp_path / "b.txt").write_text("one@@" + "z" * 1_500_000)
    for name, how, said in (("a.txt", {}, "a.txt has"), ("b.txt", {"separator": "@@"}, "b.txt, document 2, has")):
        [source] = find_inputs([tmp_path / name])
        *_, unit = read_units(source, Reading(on_error="skip", **how), NEOX.cuts)
        assert unit.left_out and f"{said} 1,048,576 characters" in unit.text
