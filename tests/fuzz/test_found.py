"""What the fuzzer found once, each as a test of its own."""

import os
import shutil

import pytest

from tests.eval.rows import write_rows
from tests.fuzz.material import DATA
from tokenformer.cli.main import main
from tokenformer.errors import UserError
from tokenformer.eval.tasks import read_rows as task_rows
from tokenformer.infer.requests import Request
from tokenformer.train.report import read_rows as metric_rows

DEEP = '{"a":' * 50_000


def test_a_row_of_a_task_that_is_nested_too_deeply_is_refused(tmp_path):
    write_rows(tmp_path)
    (tmp_path / "lambada_openai_test.jsonl").write_text(DEEP)
    with pytest.raises(UserError, match="is not JSON lines"):
        task_rows("lambada_openai", tmp_path)


def test_a_prompt_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(f'{{"text": "a"}}\n{DEEP}\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
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
