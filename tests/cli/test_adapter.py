"""Adapters on the command line: generate and eval with them, list, merge and add."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import tokenformer
from tests.test_adapters import make_adapter, make_base
from tokenformer.cli.main import main
from tokenformer.data.text.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    base = make_base(vocab=384)
    tokenformer.save(base, tmp_path / "base", tokenizer_json=load_tokenizer("byte").to_json())
    make_adapter(tmp_path / "books", base, 1, qkv=5, ffn=7)
    make_adapter(tmp_path / "poems", base, 2, ffn=4, layers=[1])
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 3)
    return tmp_path


def loss(folder: Path, model: str, *words: str) -> float:
    out = folder / "out.json"
    measure = ["eval", str(folder / model), "--text", str(folder / "text.txt"), "--out", str(out), "--force"]
    assert main([*measure, *words]) == 0
    results = json.loads(out.read_text())
    (found,) = results["texts"].values()
    assert results.get("adapters", []) == [word for word in words if word != "--adapter"]
    return found["loss"]


def test_eval_with_adapters_is_eval_of_the_merged_model_and_of_the_sum(folder, capsys):
    plain, books = loss(folder, "base"), f"{folder / 'books'}=0.5"
    attached = loss(folder, "base", "--adapter", books, "--adapter", str(folder / "poems"))
    assert abs(attached - plain) > 1e-3
    assert abs(loss(folder, "base", "--adapter", f"{folder / 'books'}=0") - plain) < 1e-6
    two = [books, str(folder / "poems")]
    assert main(["adapter", "merge", str(folder / "base"), *two, "--out", str(folder / "merged")]) == 0
    assert main(["adapter", "add", *two, "--out", str(folder / "sum")]) == 0
    assert abs(loss(folder, "merged") - attached) < 1e-6
    assert abs(loss(folder, "base", "--adapter", str(folder / "sum")) - attached) < 1e-6
    said = capsys.readouterr().out
    assert "merged: a model of" in said and "sum: an adapter of" in said
    assert main(["adapter", "list", *two]) == 0
    said = capsys.readouterr().out
    assert "ffn 7, qkv 5" in said and "base" in said and "1,600" not in said.split("poems")[1]
    make_adapter(folder / "norms", make_base(vocab=384), 3, ffn=4, also=("norm.weight",))
    assert main(["adapter", "list", str(folder / "sum"), str(folder / "norms")]) == 0
    said = capsys.readouterr().out
    assert "ffn 7/11, qkv 5" in said and "ffn 4, also 1 tensors of the base" in said  # those of all segments together


def test_generate_with_an_adapter_is_generate_of_the_merged_model(folder, capsys):
    def text(model: str, *words: str) -> str:
        assert main(["generate", str(folder / model), "--prompt", "It was", "--tokens", "12", *words]) == 0
        return capsys.readouterr().out

    books = str(folder / "books")
    assert main(["adapter", "merge", str(folder / "base"), books, "--out", str(folder / "merged")]) == 0
    capsys.readouterr()
    assert text("base", "--adapter", books) == text("merged") != text("base")


def test_prompts_of_one_file_name_their_adapters(folder, capsys):
    """A row that names none has those of the command."""
    rows = [{"prompt": "It", "adapter": "books"}, {"prompt": "It", "adapter": {"poems": 2.0}}, {"prompt": "It"}]
    (folder / "in.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "It", "adapter": {}}])
    )

    def texts(*words: str) -> list[str]:
        capsys.readouterr()
        assert main(["generate", str(folder / "base"), "--tokens", "16", *words]) == 0
        return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]

    books, poems = str(folder / "books"), str(folder / "poems")
    found = texts("--input-file", str(folder / "in.jsonl"), "--adapter", books, "--adapter", f"{poems}=0.5")
    (folder / "one.jsonl").write_text('{"prompt": "It"}\n')
    one = ["--input-file", str(folder / "one.jsonl")]
    both = ["--adapter", books, "--adapter", f"{poems}=0.5"]
    each = [["--adapter", books], ["--adapter", f"{poems}=2"], both, []]
    assert found == [texts(*one, *adapters)[0] for adapters in each] and len(set(found)) > 2
    (folder / "in.jsonl").write_text('{"prompt": "It", "adapter": "poems"}\n')
    two = [*both[:3], f"{poems}=-4"]
    named = texts("--input-file", str(folder / "in.jsonl"), *two)  # with the weight that the command gives
    assert named == texts(*one, "--adapter", f"{poems}=-4") != texts(*one, "--adapter", poems)
    no_weights = ("7", '{"books": NaN}', '{"books": "x"}', '{"books": Infinity}')
    for wrong, said in (*((wrong, "write .adapter.:") for wrong in no_weights), ('"c"', "there are books")):
        (folder / "in.jsonl").write_text(f'{{"prompt": "It", "adapter": {wrong}}}')
        assert (
            main(["generate", str(folder / "base"), "--input-file", str(folder / "in.jsonl"), "--adapter", books]) == 2
        )
        assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "It", "adapters": "books"}', """has 'adapters', which is not read: write "adapter\""""),
        ('{"prompt": "It", "Adapter": "books"}', "has 'Adapter', which is not read"),
        ('{"prompt": "It", "adapter": {"books": 1%s}}' % ("0" * 400), "the weight of 'books' is too large"),
        (
            '{"prompt": "It", "adapter": {"norms": 0.5}}',
            "so it counts for all rows as the engine was made (1): give its",
        ),
    ],
)
def test_a_row_that_asks_for_what_cannot_be_is_a_sentence(folder, capsys, row, said):
    make_adapter(folder / "norms", make_base(vocab=384), 3, ffn=4, also=("norm.weight",))
    (folder / "in.jsonl").write_text(f"{row}\n")
    adapters = ["--adapter", str(folder / "books"), "--adapter", str(folder / "norms")]
    assert main(["generate", str(folder / "base"), "--input-file", str(folder / "in.jsonl"), *adapters]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    (folder / "in.jsonl").write_text('{"prompt": "It", "chapter": 3, "length": 5}\n')  # keys of one's own
    assert main(["generate", str(folder / "base"), "--input-file", str(folder / "in.jsonl"), "--tokens", "2"]) == 0


def test_logits_are_those_of_the_adapters_of_their_prompt(folder, capsys):
    (folder / "in.jsonl").write_text('{"prompt": "It", "adapter": {"books": -2}}\n{"prompt": "It"}\n')
    settings = folder / "settings.yml"
    keys = {"text_gen_type": "input-file", "sample_input_file": str(folder / "in.jsonl"), "return_logits": True}
    settings.write_text(json.dumps({**keys, "maximum_tokens": 3, "temperature": 0.0}))
    words = [str(folder / "base"), str(settings), "--adapter", str(folder / "books"), "--logprobs"]
    assert main(["generate", *words]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["logits"] != rows[1]["logits"]
    for row in rows:
        chosen = torch.tensor(row["logits"]).log_softmax(-1)[:, : load_tokenizer("byte").vocab_size].amax(-1)
        assert (chosen - torch.tensor(row["logprobs"])).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "merged", "--prompt", "x", "--adapter", "books"], "these are other weights"),
        (["generate", "base", "--prompt", "x", "--adapter", "books=much"], "is no adapter with a weight"),
        (["generate", "base", "--prompt", "x", "--adapter", "nowhere/at/all"], "there is nothing at"),
        (["generate", "base", "--prompt", "x", "--adapter", "books", "--adapter", "books"], "a switch 'books' already"),
        (["generate", "books", "--prompt", "x"], "is an adapter, not a model: give its base, and --adapter"),
        (["adapter", "add", "books", "--out", "poems"], "is there already"),
        (
            ["generate", "base", "--prompt", "x", "--adapter", "books", "--adapter", "copy/books"],
            "rename or copy copy/b",
        ),
        (["adapter", "merge", "base", "base", "--out", "new"], "holds no adapter"),
        (["adapter", "merge", "base", "books=1e39", "--out", "new"], "is 1e+39, too large for float32"),
        (["adapter", "add", "books=1e39", "--out", "new"], "is not finite: give a smaller weight"),
    ],
)
def test_one_sentence_for_what_cannot_be(folder, capsys, monkeypatch, words, said):
    monkeypatch.chdir(folder)
    assert main(["adapter", "merge", "base", "poems", "--out", "merged"]) == 0
    shutil.copytree("books", "copy/books")
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (folder / "new").exists()
