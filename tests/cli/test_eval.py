"""The verb eval: texts, tasks natively and by the harness, the paper's table, JSON, mistakes."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))

from rows import ROWS, write_rows

from tokenformer import hub
from tokenformer.cli.main import main
from tokenformer.config import ModelConfig
from tokenformer.data.tokenizer import ByteTokenizer
from tokenformer.eval.paper import PAPER
from tokenformer.eval.tasks import TASKS
from tokenformer.models import LanguageModel


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("eval")
    config = ModelConfig(layers=1, dim=32, heads=4, qkv_tokens=8, proj_tokens=8, ffn_tokens=8, vocab=384, context=160)
    model = LanguageModel(config)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    hub.save(model, root / "ours", tokenizer_json=ByteTokenizer().to_json())
    hub.save(model, root / "hf", format="hf", tokenizer_json=ByteTokenizer().to_json())
    hub.save(model, root / "official", format="official", tokenizer_json=ByteTokenizer().to_json())
    (root / "book.txt").write_text("It was a dark and stormy night. " * 20, encoding="utf-8")
    (root / "zero-shot").mkdir()
    write_rows(root / "zero-shot")
    return root


def test_perplexity_is_the_same_for_all_formats_of_the_weights(place, capsys, tmp_path):
    results = []
    for source in ("ours", "hf", "official", "official/pytorch_model.bin"):
        out = tmp_path / source.replace("/", "-")
        command = ["eval", str(place / source), "--text", str(place / "book.txt"), "--stride", "80", "--out", str(out)]
        assert main(command) == 0
        results.append(json.loads(out.read_text())["texts"][str(place / "book.txt")])
    assert {r["bytes"] for r in results} == {640} and {r["tokens"] for r in results} == {640}
    assert max(r["loss"] for r in results) - min(r["loss"] for r in results) < 1e-9
    assert f"{results[0]['bits_per_byte']:.4f}" in capsys.readouterr().out


def test_all_six_tasks_by_either_scorer_stand_beside_the_papers_rows(place, capsys, tmp_path):
    found = {}
    for scorer, options in (("native", ["--native"]), ("lm_eval", [])):
        out = tmp_path / scorer
        data = ["--tasks", "all", "--data-dir", str(place / "zero-shot"), "--out", str(out)]
        assert main(["eval", str(place / "ours"), *data, *options]) == 0
        found[scorer] = json.loads(out.read_text())
        assert found[scorer]["scorer"] == scorer
        shown = capsys.readouterr().out
        assert all(name in shown for name in [*PAPER, *TASKS])
        assert len(PAPER) == 13
    for task in TASKS:
        for name in TASKS[task].measures:
            assert found["native"]["tasks"][task][name] == pytest.approx(
                found["lm_eval"]["tasks"][task][name], rel=1e-6
            )
        assert found["native"]["tasks"][task]["rows"] == len(ROWS[TASKS[task].file])
    average = sum(found["native"]["tasks"][t][TASKS[t].printed] for t in TASKS) / 6
    line = next(line for line in shown.splitlines() if line.startswith("ours"))
    assert line.split()[-1] == f"{100 * average:.1f}"


def test_the_papers_means_are_the_means_of_its_rows_but_for_rounding():
    for name, numbers in PAPER.items():
        assert abs(sum(numbers[2:8]) / 6 - numbers[8]) < 1.1, name


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is nothing to measure"),
        (["--tasks", "piqa", "--native"], "say with --data-dir where they are"),
        (["--tasks", "mmlu", "--data-dir", "{place}/zero-shot"], "'mmlu' has no local form"),
        (["--tasks", "piqa", "--data-dir", "{place}"], "has no piqa_valid.jsonl"),
        (["--text", "missing.txt"], "there is no file, folder or match for 'missing.txt'"),
        (["--text", "{place}/book.txt", "--stride", "999"], "stride is 999"),
        (["--text", "{place}/book.txt", "--tokenizer", "nothing"], "there is no tokenizer 'nothing'"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_written(place, tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    arguments = [a.replace("{place}", str(place)) for a in arguments]
    assert main(["eval", str(place / "ours"), *arguments, "--out", "out.json"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_broken_rows_are_named_by_file_and_line(place, tmp_path, capsys):
    for text, sentence in (('{"goal": "a"}\n', "line 1 lacks sol1, sol2, label"), ("{\n", "is not JSON lines")):
        (tmp_path / "piqa_valid.jsonl").write_text(text)
        command = ["eval", str(place / "ours"), "--tasks", "piqa", "--data-dir", str(tmp_path), "--native"]
        assert main(command) == 2
        assert sentence in capsys.readouterr().err
