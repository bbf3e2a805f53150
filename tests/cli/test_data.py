"""`tokenformer data` as a user meets it, and the mistakes that users make with all three verbs of data."""

import random
from pathlib import Path

import pytest

from tokenformer.cli.main import main
from tokenformer.data.text.indexed import Indexed


@pytest.fixture
def prepared(tmp_path, capsys) -> Path:
    (tmp_path / "in.txt").write_text("one two@@three<|endoftext|>@@four five six")
    arguments = ["prepare", str(tmp_path / "in.txt"), "--separator", "@@", "--out", str(tmp_path), "--name", "toy"]
    assert main([*arguments, "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'toy_text_document'}\n"
    assert "3 documents" in err and "1 special tokens stood in the text" in err
    return tmp_path / "toy"


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    return code, *capsys.readouterr()


def test_verify_says_what_is_right(prepared, capsys):
    code, out, _ = run(capsys, "data", "verify", prepared)
    assert code == 0 and "3 documents" in out and "checksums, structure and tokens are right" in out


def test_verify_catches_every_mutation(prepared, capsys):
    rng = random.Random(2)
    for ending in ("_text_document.bin", "_text_document.idx", ".json"):
        path = Path(f"{prepared}{ending}")
        original = path.read_bytes()
        for _ in range(40):
            data = bytearray(original)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            code, _, err = run(capsys, "data", "verify", prepared)
            assert code == 2 and err.startswith("tokenformer: ") and err.count("\n") == 1
        path.write_bytes(original)
    assert run(capsys, "data", "verify", prepared)[0] == 0


def test_stats_and_peek(prepared, capsys):
    code, out, _ = run(capsys, "data", "stats", prepared, "--context", 2, "--shares", "1,1,1")
    assert code == 0 and "gpt-neox-20b (50,277 ids)" in out and "train: samples of 2, tail" in out
    assert run(capsys, "data", "peek", prepared, "--document", 1)[1] == "three<|endoftext|><|endoftext|>\n"
    assert run(capsys, "data", "peek", prepared, "--tokens", 1)[1] == "one\n… 2 more tokens (--tokens)\n"
    assert run(capsys, "data", "peek", prepared, "--ids")[1] == "531 767 0\n"
    code, _, err = run(capsys, "data", "peek", prepared, "--document", 3)
    assert code == 2 and err == "tokenformer: toy_text_document has no document 3: give 0 to 2\n"


def test_split_then_merge_is_the_set(prepared, capsys, tmp_path):
    code, out, _ = run(capsys, "data", "split", prepared, "--shares", "1,1,1", "--out", tmp_path / "parts")
    assert code == 0 and len(out.split()) == 3
    code, out, _ = run(capsys, "data", "merge", *out.split(), "--out", tmp_path / "again")
    assert code == 0
    assert Indexed(out.strip()).tokens.tolist() == Indexed(prepared).tokens.tolist()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["data", "verify", "nowhere"], "there is no prepared set 'nowhere'"),
        (["data", "split", "nowhere", "--shares", "a,b"], "--shares a,b are not up to three numbers"),
        (["prepare", "nowhere.txt"], "there is no file, folder or match for 'nowhere.txt'"),
        (["prepare", "x", "--shard", "one"], "--shard one is not a share: write I/N"),
        (["prepare", "x", "--shard", "0/4"], "there is no shard 0 of 4"),
        (["prepare", "x", "--workers", "0"], "--workers is 0"),
        (["prepare", "x", "--separator", ""], "--separator is empty"),
        (["tokenizer", "train", "nowhere.txt", "--vocab", "300"], "there is no file, folder or match"),
        (["tokenizer", "train", __file__, "--vocab", "3"], "a vocabulary of 3 cannot hold all bytes"),
        (["tokenizer", "info", "nowhere"], "there is no tokenizer 'nowhere'"),
    ],
)
def test_mistakes_are_one_sentence_with_code_2(capsys, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and sentence in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["prepare", "data", "tokenizer"])
def test_help_has_an_example(capsys, verb):
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0 and f"tokenformer {verb}" in capsys.readouterr().out.split("\n\n", 1)[1]
