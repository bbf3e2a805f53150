"""The verb generate: prompts, files, conversation, and the official generation settings as they are."""

import json
import sys
from io import StringIO

import pytest
import torch

from tokenformer.cli.main import main
from tokenformer.config import ModelConfig
from tokenformer.data.tokenizer import ByteTokenizer
from tokenformer.hub import save
from tokenformer.models import LanguageModel

KEYS = ["context", "text", "length", "finished", "message", "duration_seconds"]
OFFICIAL = """\
# the settings of the official file, in its dialect
{
  "text_gen_type": "unconditional",
  "maximum_tokens": 102,
  "prompt_end": "\\n",
  "temperature": 1.0,
  "top_p": 0.0,
  "top_k": 0,
  "recompute": false,
  "num_samples": 10,
  "sample_input_file": "sample_input.txt",
  "sample_output_file": "sample_output.txt",
}
"""


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    config = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=12, proj_tokens=8, ffn_tokens=24, vocab=384, context=160)
    model = LanguageModel(config)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.5)
        letters = [i for i in range(384) if 97 < i <= 123]
        model.embedding.weight[[i for i in range(384) if i not in letters]] *= 0.1  # texts are letters, mostly
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Ours and official, with a tokenizer beside each."""
    root = tmp_path_factory.mktemp("models")
    save(model, root / "ours", tokenizer_json=ByteTokenizer().to_json())
    save(model, root / "official", format="official", tokenizer_json=ByteTokenizer().to_json())
    return root


def greedy(model: LanguageModel, prompt: str, n: int) -> str:
    """By the reference; the padded part of the vocabulary cannot be chosen."""
    ids = ByteTokenizer().encode(prompt) or [0]
    with torch.no_grad():
        for _ in range(n):
            ids.append(model(torch.tensor([ids])).logits[0, -1, :257].argmax().item())
            if ids[-1] == 0:
                return ByteTokenizer().decode(ids[len(prompt.encode()) or 1 : -1])
    return ByteTokenizer().decode(ids[len(prompt.encode()) or 1 :])


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_prompt_is_continued_as_the_reference_does(model, folder, capsys):
    assert main(["generate", str(folder / "ours"), "--prompt", "Once upon", "--tokens", "24"]) == 0
    assert capsys.readouterr().out == "Once upon" + greedy(model, "Once upon", 24) + "\n"


def test_a_file_of_prompts_becomes_json_lines_in_order(model, folder, tmp_path, capsys):
    prompts = ["first", "a second prompt", "é"]
    (tmp_path / "in.txt").write_text("first\n\n  a second prompt \né\n")
    rows = [json.dumps("first"), json.dumps({"prompt": "a second prompt"}), json.dumps({"context": "é"})]
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    for name in ("in.txt", "in.jsonl"):
        out = tmp_path / f"out-{name}"
        arguments = ["--input-file", str(tmp_path / name), "--output-file", str(out), "--tokens", "20", "--batch", "2"]
        assert main(["generate", str(folder / "ours"), *arguments]) == 0
        records = lines(out)
        assert [list(r) for r in records] == [KEYS] * 3
        assert [r["context"] for r in records] == prompts
        assert [r["text"] for r in records] == [greedy(model, p, 20) for p in prompts]
        assert all(r["length"] <= 20 and r["message"] is None and r["duration_seconds"] > 0 for r in records)
    assert "3 texts" in capsys.readouterr().out


def official(tmp_path, folder, text: str = OFFICIAL):
    config = (folder / "official" / "config.yml").read_text()
    config += f"eval_ckpt: {folder / 'official' / 'pytorch_model.bin'}\nload: nowhere\n"
    (tmp_path / "model.yml").write_text(config)
    (tmp_path / "text_generation.yml").write_text(text)
    return [str(tmp_path / "model.yml"), str(tmp_path / "text_generation.yml")]


def check_official_samples(records: list[dict]) -> None:
    assert [list(r) for r in records] == [KEYS] * 10
    assert all(r["context"] == "" for r in records)
    assert len({r["text"] for r in records}) == 10  # sampled at temperature 1, each with its own seed
    for r in records:
        assert r["length"] == 102 or r["finished"]
        assert r["length"] <= 102


def test_the_official_settings_are_honoured_and_so_is_their_output(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = official(tmp_path, folder)
    assert main(["generate", *files]) == 0
    first = lines(tmp_path / "sample_output.txt")
    check_official_samples(first)
    assert main(["generate", *files]) == 0  # the same seed
    again = lines(tmp_path / "sample_output.txt")
    assert [r["text"] for r in again] == [r["text"] for r in first]


def test_the_official_file_itself_is_honoured_as_it_is(shared, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, _ = official(tmp_path, folder)
    assert main(["generate", model, str(shared / "golden" / "configs" / "text_generation.yml")]) == 0
    check_official_samples(lines(tmp_path / "sample_output.txt"))


def test_official_input_files_end_prompts_by_their_own_mark_and_options_win(model, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = OFFICIAL.replace("unconditional", "input-file").replace('"\\n"', '"###"')
    files = official(tmp_path, folder, text.replace('"recompute": false', '"recompute": true, "return_logits": true'))
    (tmp_path / "sample_input.txt").write_text("one\nprompt### another \n###\n")
    assert main(["generate", *files, "--temperature", "0", "--tokens", "9"]) == 0
    records = lines(tmp_path / "sample_output.txt")
    assert [r["context"] for r in records] == ["one\nprompt", "another"]
    assert [r["text"] for r in records] == [greedy(model, p, 9) for p in ("one\nprompt", "another")]
    for r in records:  # the logits that each token was the best of
        assert [max(range(257), key=row.__getitem__) - 1 for row in r["logits"]] == list(r["text"].encode())


def test_a_text_that_ends_at_once_says_so_in_its_message(model, folder, tmp_path):
    stop = greedy(model, "first", 1)
    out = tmp_path / "out.jsonl"
    arguments = ["--prompt", "first", "--stop", stop, "--output-file", str(out), "--tokens", "9"]
    assert main(["generate", str(folder / "ours"), *arguments]) == 0
    (record,) = lines(out)
    assert record["text"] is None and record["length"] == 0 and record["finished"]
    assert "no text was made" in record["message"]


def test_a_conversation_remembers_until_it_is_told_not_to(model, folder, monkeypatch, capsys):
    def talk(*words: str, options=()) -> list[str]:
        monkeypatch.setattr(sys, "stdin", StringIO("\n".join(words) + "\n"))
        arguments = ["generate", str(folder / "ours"), "--interactive", "--tokens", "8", *options]
        assert main(arguments) == 0
        return capsys.readouterr().out.split("\n")[:-1]

    first = greedy(model, "abc", 8)
    second = greedy(model, "abc" + first + "def", 8)
    assert (first + second).isalpha() and second != greedy(model, "def", 8)  # the test can fail
    assert talk("abc", "def", "/new", "abc", "/quit", "never") == [first, second, first]
    assert talk("abc", "def", options=["--no-history"]) == [first, greedy(model, "def", 8)]
    long = "x" * 150  # more than the context: the oldest is forgotten
    assert talk(long, long)[1] == greedy(model, (long + greedy(model, long, 8) + long)[-152:], 8)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is nothing to write"),
        (["--prompt", "a", "--interactive"], "give one of --prompt"),
        (["--input-file", "missing.txt"], "missing.txt cannot be read"),
        (["--prompt", "a", "--top-p", "7"], "top_p is 7.0: give 0 to 1"),
        (["--prompt", "a", "--tokens", "0"], "maximum_tokens is 0"),
        (["--prompt", "a", "--tokenizer", "gpt-neox-20b"], "has 50,277 ids but the model"),
        (["--prompt", "a" * 200], "prompt 0 has 200 tokens and the model's context is 160"),
        (["--prompt", "a", "--dtype", "int8"], "dtype is 'int8'"),
        (["another-model", "--prompt", "a"], "one model too many"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_written(folder, tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", str(folder / "ours"), *arguments, "--output-file", "out.jsonl"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
