"""`tokenformer tokenizer` as a user meets it."""

from pathlib import Path

from tokenformer.cli.main import main

ALICE = Path(__file__).parents[1] / "data" / "alice.txt"


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    return code, *capsys.readouterr()


def test_a_tokenizer_is_trained_used_and_described(capsys, tmp_path):
    path = tmp_path / "t" / "tokenizer.json"
    code, out, _ = run(capsys, "tokenizer", "train", ALICE, "--vocab", 800, "--out", path)
    assert code == 0 and out.strip() == str(path)
    assert run(capsys, "tokenizer", "train", ALICE, "--vocab", 800, "--out", path)[0] == 2
    code, out, _ = run(capsys, "tokenizer", "info", path, "--text", "Alice was")
    assert code == 0 and "800" in out and "896" in out and "Alice" in out.splitlines()[-1]
    code, out, _ = run(capsys, "prepare", ALICE, "--tokenizer", path, "--out", tmp_path, "--name", "a")
    assert code == 0
    assert run(capsys, "data", "peek", out.strip(), "--tokens", 5)[1].startswith("Alice")
    code, _, err = run(capsys, "tokenizer", "train", ALICE, "--vocab", 900_000, "--out", tmp_path / "big.json")
    assert code == 2 and "give more text or a smaller --vocab" in err and not (tmp_path / "big.json").exists()


def test_bad_documents_are_skipped_and_a_place_that_cannot_be_written_is_said_at_once(capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": oops}\n' + '{"text": "many words, and more words"}\n' * 9)
    arguments = ["tokenizer", "train", tmp_path / "a.jsonl", "--vocab", 260, "--out", tmp_path / "t.json"]
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "--on-error skip" in err and not (tmp_path / "t.json").exists()
    assert run(capsys, *arguments, "--on-error", "skip")[0] == 0
    code, _, err = run(capsys, *arguments[:-1], tmp_path / "a.jsonl" / "t.json")
    assert code == 2 and "cannot be written" in err
