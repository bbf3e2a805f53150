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
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.eval.paper import PAPER
from tokenformer.eval.tasks import TASKS
from tokenformer.infer.quantised import rounded
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


def test_weights_in_fp8_are_measured_as_the_rounded_model(place, capsys, tmp_path):
    hub.save(rounded(hub.load(place / "ours")), tmp_path / "rounded", tokenizer_json=ByteTokenizer().to_json())
    losses = []
    for source, options in ((tmp_path / "rounded", []), (place / "ours", ["--weights", "fp8"]), (place / "ours", [])):
        command = ["eval", str(source), "--text", str(place / "book.txt"), "--out", str(tmp_path / "out"), "--force"]
        assert main([*command, *options]) == 0
        losses.append(json.loads((tmp_path / "out").read_text())["texts"][str(place / "book.txt")]["loss"])
    assert losses[0] == losses[1] != losses[2]
    assert main(["eval", str(place / "ours"), "--images", str(tmp_path), "--weights", "fp8"]) == 2
    assert "--weights fp8 is for language models" in capsys.readouterr().err


def test_all_six_tasks_by_either_scorer_stand_beside_the_papers_rows(place, capsys, tmp_path):
    found = {}
    for scorer, options in (("native", ["--native"]), ("lm_eval", [])):
        out = tmp_path / scorer
        data = ["--tasks", "all", "--data-dir", str(place / "zero-shot"), "--out", str(out)]
        assert main(["eval", str(place / "ours"), *data, *options]) == 0
        found[scorer] = json.loads(out.read_text())
        assert found[scorer]["scorer"] == scorer
        shown = capsys.readouterr().out
        assert all(name in shown for name in [*(name for name, *_ in PAPER), *TASKS])
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
    for name, _, _, *numbers in PAPER:
        *accuracies, mean = map(float, numbers)
        assert abs(sum(accuracies) / 6 - mean) < 1.1, name


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is nothing to measure"),
        (["--tasks", "piqa", "--native"], "say with --data-dir where they are"),
        (["--tasks", "mmlu", "--data-dir", "{place}/zero-shot"], "'mmlu' has no local form"),
        (["--tasks", "piqa", "--data-dir", "{place}"], "has no piqa_valid.jsonl"),
        (["--text", "missing.txt"], "there is no file, folder or match for 'missing.txt'"),
        (["--text", "{place}/book.txt", "--stride", "999"], "stride is 999"),
        (["--text", "{place}/book.txt", "--stride", "0"], "--stride is 0: give 1 or more"),
        (["--text", "{place}/book.txt", "--context", "-1"], "--context is -1: give 1 or more"),
        (["--text", "{place}/book.txt", "--batch-tokens", "0"], "--batch-tokens is 0: give 1 or more"),
        (["--text", "{place}/book.txt", "--batch-tokens", "-5"], "--batch-tokens is -5: give 1 or more"),
        (["--tasks", "piqa", "--data-dir", "{place}/zero-shot", "--native", "--limit", "0"], "--limit is 0"),
        (["--tasks", "piqa", "--data-dir", "{place}/zero-shot", "--native", "--limit", "-3"], "--limit is -3"),
        (["--tasks", "piqa", "--data-dir", "{place}/missing"], "there is no folder"),
        (["--text", "{place}/book.txt", "--part", "validation"], "is no prepared set"),
        (["--text", "{place}/book.txt", "--tokenizer", "nothing"], "there is no tokenizer 'nothing'"),
        (
            ["--text", "{place}/book.txt", "--device", "gpu"],
            "device is 'gpu': give --device cpu, cuda,",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_written(place, tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    arguments = [a.replace("{place}", str(place)) for a in arguments]
    assert main(["eval", str(place / "ours"), *arguments, "--out", "out.json"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


WINO = '{"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "1"}\n'
BROKEN = [
    ("piqa", '{"goal": "a"}\n', "line 1 lacks sol1, sol2, label"),
    ("piqa", '{"goal": "a", "sol1": "b", "sol2": "c", "label": null}\n', "line 1 lacks label"),
    ("piqa", '{"goal": "a", "sol1": "b", "sol2": 3, "label": 0}\n', "line 1 cannot be asked"),
    ("piqa", '{"goal": "a", "sol1": "b", "sol2": "", "label": 0}\n', "a choice is empty"),
    ("piqa", "3\n", "line 1 lacks goal"),
    ("piqa", "{\n", "line 1 is not JSON"),
    ("piqa", "", "has no rows"),
    ("arc_easy", '{"question": "a", "choices": ["b", "c"], "gold": 2}\n', "none of the 2 choices"),
    ("winogrande", WINO + WINO.replace('1"}', '3"}'), "line 2 cannot be asked (its right answer is none of"),
    ("winogrande", WINO + "\n" + WINO.replace("_", "-"), "line 3 cannot be asked (its sentence needs one _)"),
]


@pytest.mark.parametrize("options", [["--native"], []], ids=["native", "harness"])
@pytest.mark.parametrize(("task", "text", "sentence"), BROKEN)
def test_broken_rows_are_named_by_file_and_line(place, tmp_path, capsys, task, text, sentence, options):
    (tmp_path / f"{TASKS[task].file}.jsonl").write_text(text)
    assert main(["eval", str(place / "ours"), "--tasks", task, "--data-dir", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_bad_texts_are_refused_without_options_that_are_not_there(place, tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"bad \xff")
    (tmp_path / "a.jsonl").write_text('{"body": "some text"}\n')
    for name, sentence in (("a.txt", "is not UTF-8 (byte 4): convert it\n"), ("a.jsonl", "with --field\n")):
        assert main(["eval", str(place / "ours"), "--text", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.endswith(sentence)
    assert main(["eval", str(place / "ours"), "--text", str(tmp_path / "a.jsonl"), "--field", "body"]) == 0


def test_what_was_measured_before_a_mistake_is_kept(place, tmp_path, capsys):
    (tmp_path / "bad.txt").write_bytes(b"bad \xff")
    good, out = str(place / "book.txt"), tmp_path / "out.json"
    assert (
        main(["eval", str(place / "ours"), "--text", good, "--text", str(tmp_path / "bad.txt"), "--out", str(out)]) == 2
    )
    shown = capsys.readouterr()
    assert "is not UTF-8" in shown.err and "book.txt" in shown.out
    assert list(json.loads(out.read_text())["texts"]) == [good]


@pytest.mark.parametrize("options", [["--native"], []], ids=["native", "harness"])
def test_results_say_how_they_were_measured_and_few_rows_are_marked(place, tmp_path, capsys, options):
    out = tmp_path / "out.json"
    command = ["eval", str(place / "ours"), "--tasks", " piqa, lambada_openai", "--data-dir", str(place / "zero-shot")]
    command += ["--text", str(place / "book.txt"), "--context", "120", "--limit", "2", "--out", str(out), *options]
    assert main(command) == 0
    found = json.loads(out.read_text())
    assert (found["context"], found["stride"], found["limit"], found["part"]) == (120, 60, 2, None)
    assert len(found["tokenizer"]["sha256"]) == 64
    assert set(found["tasks"]) == {"piqa", "lambada_openai"}
    assert found["tasks"]["lambada_openai"]["perplexity_stderr"] > 0
    assert "ours (first 2 rows)" in capsys.readouterr().out
    assert main([*command, "--limit", "99", "--force"]) == 0
    assert "rows)" not in capsys.readouterr().out


def test_a_part_is_cut_as_the_run_was_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("book.jsonl").write_text("".join(json.dumps({"text": f"document {i} " * 9}) + "\n" for i in range(20)))
    assert main(["prepare", "book.jsonl", "--tokenizer", "byte", "--out", "data", "--workers", "1"]) == 0
    demo = Path(__file__).parents[2] / "examples" / "demo" / "demo.yml"
    settings = ["data.path=data/book", "growth=[]", "steps=1", "batch=1", "data.split=[50,40,10]"]
    assert main(["train", str(demo), *settings, "--out", "run"]) == 0
    found = {}
    for part in ("train", "validation", "test"):
        command = ["eval", "run", "--text", "data/book", "--part", part, "--out", f"{part}.json"]
        assert main(command) == 0
        result = json.loads(Path(f"{part}.json").read_text())
        assert result["shares"] == [50, 40, 10]
        found[part] = result["texts"]["data/book"]["documents"]
    assert found == {"train": 10, "validation": 8, "test": 2}
