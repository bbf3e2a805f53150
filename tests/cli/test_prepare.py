"""`tokenformer prepare` as a user meets it."""

import json
import os

import pytest

from tokenformer.cli.main import main
from tokenformer.config_data import DataConfig
from tokenformer.data.text.indexed import Indexed
from tokenformer.data.text.samples import find_sets
from tokenformer.errors import UserError


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    return code, *capsys.readouterr()


def test_bad_lines_are_named_and_skipped_on_request(capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": oops}\n')
    arguments = ["prepare", tmp_path / "a.jsonl", "--out", tmp_path / "o", "--tokenizer", "byte", "--workers", 1]
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "a.jsonl, line 2, is not JSON" in err
    assert not (tmp_path / "o").exists()
    code, _, err = run(capsys, *arguments, "--on-error", "skip")
    assert code == 0 and "1 documents were skipped; the first: " in err
    assert json.loads((tmp_path / "o" / "a.json").read_text())["skipped_documents"] == 1


def test_a_named_set_reads_a_local_copy(capsys, tmp_path):
    (tmp_path / "copy").write_text("start\n  <page>\none\n")
    code, out, _ = run(capsys, "prepare", "enwik8", tmp_path / "copy", "--out", tmp_path, "--tokenizer", "byte")
    assert code == 0 and out.strip().endswith("enwik8_text_document")
    assert Indexed(out.strip()).documents == 2


def test_what_would_have_no_effect_is_refused(capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n')
    arguments = ["prepare", tmp_path / "a.jsonl", "--out", tmp_path / "o", "--tokenizer", "byte", "--workers", 1]
    code, _, err = run(capsys, *arguments, "--separator", "\\n\\n")
    assert code == 2 and "is jsonl, whose documents are its rows: leave --separator out" in err
    code, _, err = run(capsys, *arguments, "--end", "</s>")
    assert code == 2 and "leave --end </s> out" in err
    assert not list(tmp_path.glob("o/a*"))


@pytest.mark.parametrize("lines", [r"\n\n", r"\n", r"\n---\n"])
def test_a_separator_with_other_line_ends_than_the_text_is_refused(capsys, tmp_path, lines):
    windows = lines.replace(r"\n", r"\r\n")
    (tmp_path / "a.txt").write_bytes(f"one{windows}two".encode().decode("unicode_escape").encode())
    arguments = ["prepare", tmp_path / "a.txt", "--out", tmp_path / "o", "--tokenizer", "byte", "--workers", 1]
    code, _, err = run(capsys, *arguments, "--separator", lines)
    assert code == 2 and r"a.txt has the line ends of Windows (\r\n), but the separator" in err
    assert not (tmp_path / "o").exists() and f"give --separator '{windows}'" in err
    code, _, err = run(capsys, *arguments, "--separator", windows)
    assert code == 0 and "2 documents" in err


def test_the_same_file_is_read_once(capsys, tmp_path):
    (tmp_path / "books").mkdir()
    for i in range(3):
        (tmp_path / "books" / f"b{i}.txt").write_text(f"book {i}")
    (tmp_path / "link.txt").symlink_to(tmp_path / "books" / "b2.txt")
    books = tmp_path / "books"
    for given in ([books, books / "b2.txt"], [books, books], [books, tmp_path / "link.txt"], [f"{books}/b*", books]):
        code, _, err = run(capsys, "prepare", *given, "--out", tmp_path / "o", "--tokenizer", "byte", "--workers", 1)
        assert code == 2 and "given twice: give it once" in err
        assert not (tmp_path / "o").exists()
    (books / "copy.txt").write_text("book 2")  # equal text in another file is the user's business
    code, _, err = run(capsys, "prepare", books, "--out", tmp_path / "o", "--tokenizer", "byte", "--workers", 1)
    assert code == 0 and "4 documents" in err


def test_the_same_set_is_merged_and_blended_once(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    run(capsys, "prepare", tmp_path / "a.txt", "--out", tmp_path, "--tokenizer", "byte", "--workers", 1)
    for ending in ("bin", "idx"):
        (tmp_path / f"b_text_document.{ending}").symlink_to(tmp_path / f"a_text_document.{ending}")
    for given in (["a", "a"], ["a", "b"]):
        code, _, err = run(capsys, "data", "merge", *(tmp_path / name for name in given), "--out", tmp_path / "c")
        assert code == 2 and "given twice: give it once" in err
        assert not (tmp_path / "c_text_document.bin").exists()
    with pytest.raises(UserError, match="given twice"):
        find_sets(DataConfig(path={str(tmp_path / "a"): 1.0, str(tmp_path / "a_text_document.idx"): 2.0}))


def test_a_pipe_with_a_name_is_said_to_be_no_file(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code, _, err = run(capsys, "prepare", tmp_path / "pipe", "--out", tmp_path / "o", "--tokenizer", "byte")
    assert code == 2 and "pipe is neither a file nor a folder" in err
