"""`tokenformer compare`: several configs trained on the same samples, drawn on one page, resumable."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.train.conftest import config_file, one_thread, prepared  # noqa: F401 (fixtures)
from tokenformer.cli.compare import read_configs
from tokenformer.cli.main import main
from tokenformer.config import load
from tokenformer.models import cost
from tokenformer.train.report import read_rows


def test_a_model_and_a_transformer_as_large_are_trained_on_the_same_samples_and_drawn(config_file, tmp_path, capsys):  # noqa: F811
    out, words = tmp_path / "out", [str(config_file), "--transformer", "steps=6", "log.every=2"]
    words.append("growth=[{at: {step: 2}, ffn_tokens: 48}]")
    assert main(["compare", *words, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    ours, rival = (load(out / name) for name in ("tiny", "tiny-transformer"))
    assert (
        rival.model.kind == "transformer" and rival.growth == [] and (ours.data, ours.seed) == (rival.data, rival.seed)
    )
    assert cost(rival.model).parameters == pytest.approx(cost(load(config_file).model).parameters, rel=0.02)
    page = (out / "compare.html").read_text()
    assert "tiny and tiny-transformer" in page and (out / "compare.png").is_file()
    assert "validation loss" in said and str(out / "compare.html") in said
    rows = len(read_rows(out / "tiny"))
    assert main(["compare", *words, "--out", str(out)]) == 0  # nothing is trained twice
    trained = [row["step"] for row in read_rows(out / "tiny") if row["kind"] == "train"]
    assert trained == sorted(set(trained)) and len(read_rows(out / "tiny")) <= rows + 2
    others = {
        "optimizer.rate=0.5": "was begun with other settings (optimizer.rate: ",
        "steps=4": "has 6 steps behind it",
    }
    for other, said in others.items():  # the results would be shown as those of these settings
        assert main(["compare", *words, other, "--out", str(out)]) == 2
        assert f"tiny {said}" in capsys.readouterr().err
    assert load(out / "tiny").optimizer.rate == ours.optimizer.rate
    assert main(["compare", *words, "log.every=1", "--out", str(out)]) == 0


def test_a_transformer_beside_progressive_growth_may_compute_as_much(config_file, tmp_path):  # noqa: F811
    words = ["growth={progressive: {budget: 0.5, from: 0.5, at: [0.2]}}", "steps=40", "schedule.steps=null"]
    found = read_configs([str(config_file), *words], transformer=True)
    assert [config.steps for config in found.values()] == [40, 20]


def test_what_was_interrupted_goes_on_and_ends_as_if_it_had_not_been(config_file, tmp_path):  # noqa: F811
    words = [str(config_file), "--transformer", "steps=200", "log.every=1"]
    command = [sys.executable, "-m", "tokenformer", "compare", *words, "--out"]
    child = subprocess.Popen([*command, str(tmp_path / "a")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    metrics = tmp_path / "a" / "tiny" / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_text().count("\n") < 3:
        assert child.poll() is None
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGINT)
    said = child.communicate()[1]
    assert child.returncode == 130 and b"the same command continues with tiny" in said
    assert not (tmp_path / "a" / "compare.html").exists()
    assert main(["compare", *words, "--out", str(tmp_path / "a")]) == 0
    assert main(["train", str(config_file), "steps=200", "--out", str(tmp_path / "b")]) == 0
    ends = [
        [row["loss"] for row in read_rows(run) if row["kind"] == "validation"][-1]
        for run in (tmp_path / "a" / "tiny", tmp_path / "b")
    ]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["CONFIG"], "nothing to compare with: give a second config, or --transformer"),
        (["CONFIG", "CONFIG"], "two configs are called tiny"),
        (["CONFIG", "OTHER"], "tiny and other differ in seed, so they would not see the same samples"),
        (["CONFIG", "--transformer", "data.path=nowhere"], "there is no prepared set 'nowhere'"),
        (
            ["CONFIG", "--transformer", "start=runs/x"],
            "tiny starts with the weights of runs/x, and a Transformer would",
        ),
        (["CONFIG", "--transformer", "stepz=9"], "did you mean 'steps'"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(config_file, tmp_path, capsys, words, sentence):  # noqa: F811
    other = tmp_path / "other.yml"
    other.write_text(f"base: {config_file}\nseed: 5\n")
    names = {"CONFIG": str(config_file), "OTHER": str(other)}
    assert main(["compare", *(names.get(word, word) for word in words), "--out", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "out").exists()
