"""`tokenformer prepare` as a user meets it."""

import json

from tokenformer.cli.main import main
from tokenformer.data.text.indexed import Indexed


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
