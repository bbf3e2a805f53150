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
