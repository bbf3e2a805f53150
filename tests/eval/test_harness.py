"""The adapter and the native scorer against `lm_eval --model hf` on the exported folder: likelihoods and accuracies."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from tokenformer.errors import UserError
from tokenformer.eval.tasks import TASKS, run_tasks
from tokenformer.hub.open import open_model
from tokenformer.infer.packed import Packed

TEXTS = ["Alice was beginning to get very tired of sitting by her sister on the bank, " * 12, "short", "two\nlines"]


@pytest.fixture(scope="module")
def theirs(hf_folder):
    from lm_eval.models.huggingface import HFLM

    import tokenformer.hub.hf  # noqa: F401 (lets AutoModel know the class)

    return HFLM(pretrained=str(hf_folder), device="cpu", batch_size=8, dtype="float32")


@pytest.fixture(scope="module")
def ours(hf_folder):
    from tokenformer.eval.harness import HarnessModel

    return HarnessModel(str(hf_folder), batch_tokens=2000, device="cpu")


def check_equal(ours, theirs, tokenizer, folder, limit=None) -> None:
    from tokenformer.eval.harness import metrics, run_harness

    a = run_harness(ours, list(TASKS), data_dir=folder, limit=limit)
    b = run_harness(theirs, list(TASKS), data_dir=folder, limit=limit)
    compared = 0
    for task in TASKS:
        for x, y in zip(a["samples"][task], b["samples"][task], strict=True):
            assert x["arguments"] == y["arguments"]
            for (mine,), (other,) in zip(x["resps"], y["resps"], strict=True):
                assert abs(mine[0] - other[0]) < 1e-4
                assert mine[1] == other[1]
                compared += 1
    native = run_tasks(Packed(ours.ours), tokenizer, list(TASKS), folder, limit=limit, tokens=900)
    for task, measured in metrics(b).items():
        for name, value in measured.items():
            if name.startswith("perplexity"):  # e to the mean: 1e-4 of a mean is 1e-4 of it
                assert math.isclose(metrics(a)[task][name], value, rel_tol=1e-4)
                assert math.isclose(native[task][name], value, rel_tol=1e-4)
            else:
                assert metrics(a)[task][name] == value
                assert math.isclose(native[task][name], value, rel_tol=1e-12)
        assert native[task].keys() == metrics(a)[task].keys()
    assert set(native) == set(metrics(b)) == set(TASKS)
    assert compared > 40


def test_the_native_errors_are_those_of_the_harness_and_one_row_has_none(ours, tokenizer, data_dir, capsys):
    from tokenformer.eval.harness import metrics, run_harness

    for limit in (1, None):
        harness = metrics(run_harness(ours, list(TASKS), data_dir=data_dir, limit=limit))
        native = run_tasks(Packed(ours.ours), tokenizer, list(TASKS), data_dir, limit=limit)
        for task in TASKS:
            assert native[task] == pytest.approx(harness[task], rel=1e-4)
            assert any(name.endswith("_stderr") for name in native[task]) == (limit is None)
    assert capsys.readouterr().out == ""  # what is shown there are results


def test_likelihoods_and_accuracies_are_those_of_the_hf_model_on_rows_of_our_own(ours, theirs, tokenizer, data_dir):
    check_equal(ours, theirs, tokenizer, data_dir)


def test_likelihoods_and_accuracies_are_those_of_the_hf_model_on_the_real_rows(ours, theirs, tokenizer, shared):
    """Also through .xz, and with contexts that do not fit: the tokenizer is small, so texts are long."""
    check_equal(ours, theirs, tokenizer, shared / "data" / "zero-shot", limit=5)


def requests(*arguments):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, a, i) for i, a in enumerate(arguments)]


def test_contexts_that_do_not_fit_and_empty_ones_are_scored_as_the_hf_model_does(ours, theirs):
    long = " ".join(f"word{i}" for i in range(90))
    pairs = [
        (long, " end"),
        (long, " " + long[:150]),
        ("", "a beginning"),
        (long + "  ", "x"),
        ("a", " b"),
        ("a", " c"),
    ]
    mine, other = ours.loglikelihood(requests(*pairs)), theirs.loglikelihood(requests(*pairs))
    assert len(ours.tok_encode(long)) > ours.max_length
    for a, b in zip(mine, other, strict=True):
        assert abs(a[0] - b[0]) < 1e-4
        assert a[1] == b[1]


def test_rolling_likelihoods_are_those_of_the_hf_model(ours, theirs):
    rolling = requests(*((t,) for t in TEXTS))
    assert len(ours.tok_encode(TEXTS[0])) > 2 * ours.max_length
    for a, b in zip(ours.loglikelihood_rolling(rolling), theirs.loglikelihood_rolling(rolling), strict=True):
        assert abs(a - b) < 1e-4 * max(1, abs(b))


def test_texts_until_a_stop_are_those_of_the_hf_model(ours, theirs):
    stop = {"until": ["e", "\n\n"], "max_gen_toks": 24, "do_sample": False}
    free = {"until": ["never seen"], "max_gen_toks": 24, "do_sample": False}
    asked = requests(("Alice was", stop), ("The Queen", free), ("Alice", free), ("x" * 400, stop))
    assert ours.generate_until(asked) == theirs.generate_until(asked)
    drawn = requests(*[("Alice", {"max_gen_toks": 9, "do_sample": True, "temperature": 1.0})] * 3)
    assert len(set(ours.generate_until(drawn))) > 1
    with pytest.raises(UserError, match="max_gen_toks is 999"):
        ours.generate_until(requests(("a", {"max_gen_toks": 999})))


def test_the_harnesss_own_command_line_knows_the_model_offline(hf_folder, data_dir, tmp_path, monkeypatch, capsys):
    from tokenformer.eval import harness

    command = ["--model", "tokenformer", "--model_args", f"pretrained={hf_folder}", "--device", "cpu"]
    command += ["--tasks", ",".join(TASKS), "--data-dir", str(data_dir), "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["harness", *command])
    assert harness.main() == 0
    assert capsys.readouterr().out.count("|winogrande ") == 1
    (results,) = (tmp_path / "out").rglob("results*.json")
    measured = json.loads(results.read_text())["results"]
    opened = open_model(hf_folder)
    for task, numbers in run_tasks(Packed(opened.model.eval()), opened.tokenizer, list(TASKS), data_dir).items():
        del numbers["rows"]
        assert {name: measured[task][f"{name},none"] for name in numbers} == pytest.approx(numbers, rel=1e-4)


MISTAKES = {
    "--tasks hellswag": "the harness knows no task 'hellswag'",
    "--tasks piqa --data-dir /nope": "there is no folder /nope",
    "--tasks piqa --data-dir=/nope": "there is no folder /nope",
    "--tasks piqa --data-dir {empty}": "has no piqa_valid.jsonl",
    "--tasks mmlu --data-dir {rows}": "'mmlu' has no local form",
    "--tasks piqa --data-dir --device cpu": "--data-dir names no folder",
    "--tasks piqa --data-dir": "--data-dir names no folder",
    "--tasks piqa --data-dir {rows} --model_args pretraind=x": "tokenformer knows no 'pretraind'",
    "--tasks piqa --data-dir {rows}": "tokenformer needs pretrained=MODEL",
    "--tasks piqa --data-dir {rows} --model nothing": "the harness knows no model 'nothing'",
    "--num_fewshot 0": "there is nothing to measure",
    "--tasks piqa --config /nope.yml": "--config /nope.yml cannot be read (Config file not found: /nope.yml)",
}


@pytest.mark.parametrize(("words", "sentence"), MISTAKES.items())
def test_mistakes_on_its_command_line_are_one_sentence(words, sentence, data_dir, tmp_path, monkeypatch, capsys):
    from tokenformer.eval import harness

    (tmp_path / "empty").mkdir()
    words = words.format(rows=data_dir, empty=tmp_path / "empty")
    monkeypatch.setattr(sys, "argv", ["harness", "--model", "tokenformer", *words.split()])
    assert harness.main() == 2
    error = capsys.readouterr().err
    assert sentence in error.splitlines()[-1]


def test_without_a_device_any_model_of_the_harness_is_measured_on_local_files(hf_folder, data_dir, tmp_path):
    """Real processes, as the docs show them: ours and the harness's own, where nothing can be fetched."""
    found = []
    for name in ("tokenformer", "hf"):
        command = [sys.executable, "-m", "tokenformer.eval.harness", "--model", name, "--model_args"]
        command += [f"pretrained={hf_folder}", "--tasks", "piqa,", "winogrande", f"--data-dir={data_dir}"]
        done = subprocess.run(
            [*command, "--output_path", str(tmp_path / name)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (results,) = (tmp_path / name).rglob("results*.json")
        found.append(json.loads(results.read_text())["results"])
    for task in ("piqa", "winogrande"):
        assert found[0][task]["acc,none"] == found[1][task]["acc,none"]


def test_with_local_files_libraries_that_are_imported_already_fetch_nothing():
    code = (
        "import datasets, huggingface_hub\n"
        "from tokenformer.eval.harness import offline\n"
        "offline()\n"
        "for fetch in (lambda: huggingface_hub.HfApi().model_info('a/b'), lambda: datasets.load_dataset('a/b')):\n"
        "    try:\n        fetch()\n    except ConnectionError as error:\n        print('refused', error)"
    )
    env = {k: v for k, v in os.environ.items() if "OFFLINE" not in k}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.count("refused") == 2 and done.stdout.lower().count("offline") >= 2
    assert "Retrying" not in done.stderr


def test_data_that_cannot_be_fetched_are_one_sentence_that_names_local_files(hf_folder, tmp_path):
    command = [sys.executable, "-m", "tokenformer", "eval", str(hf_folder), "--tasks", "piqa", "--device", "cpu"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot be fetched" in done.stderr and "--data-dir" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("scorer", ["harness", "native"])
def test_a_continuation_longer_than_the_context_is_refused_by_task_and_row_before_anything_is_scored(
    ours, tokenizer, data_dir, scorer
):
    """lm_eval's own model breaks off there by an assertion: there is no number to be equal to."""
    from tokenformer.eval.harness import run_harness

    row = {"goal": "Sleep", "sol1": "in a bed", "sol2": "on a " + "very " * 200 + "long bench", "label": 0}
    with open(data_dir / "piqa_valid.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    scored = []
    with pytest.raises(UserError, match=r"piqa, row 4, has a continuation of \d+ tokens.*1 to 128.*--tasks"):
        if scorer == "native":
            run_tasks(Packed(ours.ours), tokenizer, list(TASKS), data_dir, advance=scored.append)
        else:
            run_harness(ours, list(TASKS), data_dir=data_dir)
    assert scored == []


@pytest.mark.multi
def test_two_processes_share_the_work_and_one_speaks(hf_folder, data_dir, tmp_path):
    (tmp_path / "text.txt").write_text("Alice was beginning to get very tired of sitting by her sister. " * 20)
    rest = ["tokenformer", "eval", str(hf_folder), "--tasks", "all", "--data-dir", str(data_dir), "--native"]
    rest += ["--text", str(tmp_path / "text.txt"), "--device", "cpu", "--batch-tokens", "400", "--out"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    found = []
    for name, first in (("two", torchrun), ("one", [])):
        command = [sys.executable, "-m", *first, *rest, str(tmp_path / name)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("LAMBADA ppl") == 1
        found.append(json.loads((tmp_path / name).read_text()))
    two, one = found
    (text,) = one["texts"]
    assert math.isclose(two["texts"][text]["loss"], one["texts"][text]["loss"], rel_tol=1e-6)
    for task, measured in one["tasks"].items():
        assert two["tasks"][task] == pytest.approx(measured, rel=1e-5)


def test_a_machine_without_the_harness_is_told_what_to_install(data_dir):
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from tokenformer.errors import UserError\n"
        "try:\n    import tokenformer.eval.harness\nexcept UserError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'tokenformer[eval]'" in done.stdout


def test_prefix_reuse_and_batching_change_nothing(ours):
    """Requests that share a context go through the copied cache; each alone goes through one pass."""
    from tokenformer.infer.scoring import score

    packed = ours.engine.packed
    draw = torch.Generator().manual_seed(0)
    contexts = [torch.randint(1, 600, (n,), generator=draw).tolist() for n in (3, 40, 126)]
    tails = [torch.randint(1, 600, (n,), generator=draw).tolist() for n in (1, 2, 9, 1)]
    pairs = [(c, t) for c in contexts for t in tails]
    together = score(packed, pairs)
    assert len(together) == len(pairs)
    for tokens in (1, 130, 400):
        for a, b in zip(score(packed, pairs, tokens=tokens), together, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-4 and a.greedy == b.greedy
    for pair, b in zip(pairs, together, strict=True):
        (a,) = score(packed, [pair])
        assert abs(a.logprob - b.logprob) < 1e-4 and a.greedy == b.greedy
    with pytest.raises(UserError, match="request 0 continues by 200 tokens"):
        score(packed, [([1], [2] * 200)])
