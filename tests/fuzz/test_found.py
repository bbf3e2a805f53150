"""What the fuzzer found once, each as a test of its own."""

import json
import lzma
import os
import shutil

import pytest

from tests.eval.rows import write_rows
from tests.fuzz.material import DATA
from tokenformer.cli.main import main
from tokenformer.data.text.indexed import Indexed
from tokenformer.errors import UserError
from tokenformer.eval.tasks import read_rows as task_rows
from tokenformer.infer.requests import Request
from tokenformer.train.report import read_rows as metric_rows

DEEP = '{"a":' * 50_000


def test_a_row_of_a_task_that_is_nested_too_deeply_is_refused(tmp_path):
    write_rows(tmp_path)
    (tmp_path / "lambada_openai_test.jsonl").write_text(DEEP)
    with pytest.raises(UserError, match="nested too deeply"):
        task_rows("lambada_openai", tmp_path)


@pytest.mark.parametrize("query", [0, ["a"], {"a": 1}])
def test_a_row_of_a_task_whose_text_is_none_is_refused(tmp_path, query):
    row = {"query": query, "choices": ["a", "b"], "gold": 0}
    (tmp_path / "hellaswag_val.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="line 1 cannot be asked"):
        task_rows("hellaswag", tmp_path)


@pytest.mark.parametrize("byte", [b"a", b"\n"])
def test_a_task_that_unpacks_to_a_bomb_is_refused(tmp_path, byte):
    with lzma.open(tmp_path / "piqa_valid.jsonl.xz", "wb", preset=0) as file:
        file.write(byte * 5_000_000)
    with pytest.raises(UserError, match="that a task may have"):
        task_rows("piqa", tmp_path)


def test_a_row_of_metrics_without_a_loss_is_not_drawn(tmp_path):
    shutil.copytree(DATA / "before" / "run", tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 1491}\n{"kind": "validation", "step": 1491}\n')
    assert main(["plot", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0


def test_a_set_whose_tokens_are_a_pipe_is_refused(tmp_path):
    shutil.copytree(DATA / "before" / "set", tmp_path / "set", ignore=shutil.ignore_patterns("*.json"))
    tokens = tmp_path / "set" / "alice_text_document.bin"
    tokens.unlink()
    os.mkfifo(tokens)
    with pytest.raises(UserError, match="is no plain file"):
        Indexed(tmp_path / "set" / "alice_text_document")


def test_a_prompt_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(f'{{"text": "a"}}\n{DEEP}\n')
    with pytest.raises(UserError, match="line 2 is nested too deeply"):
        Request(text_gen_type="input-file", sample_input_file=str(tmp_path / "prompts.jsonl")).prompts()


def test_a_line_of_metrics_that_is_nested_too_deeply_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{DEEP}\n{{"kind": "train", "step": 1, "loss": 2.0}}\n')
    assert [row["step"] for row in metric_rows(tmp_path)] == [1]


def test_a_set_whose_tokens_are_a_link_to_nowhere_is_refused(tmp_path, capsys):
    shutil.copytree(DATA / "before" / "set", tmp_path / "set")
    tokens = tmp_path / "set" / "alice_text_document.bin"
    tokens.unlink()
    os.symlink("nowhere", tokens)
    assert main(["data", "verify", str(tmp_path / "set" / "alice")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
