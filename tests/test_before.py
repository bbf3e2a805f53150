"""What an earlier commit (330f0f6) wrote still loads, goes on and says the same: a run that grew, a folder, an export.

Made by `train`, `grow RUN --qkv-tokens 20` and `convert --to hf`; the run's checkpoint is that of step 1490 of 1500,
and the losses are those of the run that was not interrupted.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import tokenformer
from tokenformer.cli.main import main

BEFORE = Path(__file__).parent / "data" / "before"
PROMPT = [ord(letter) + 1 for letter in "The Rabbit"]  # the byte tokenizer: 0 ends a document
GREEDY = {
    "run": [33, 111, 112, 33, 117, 105, 102, 115, 102, 33, 117, 105, 102, 33, 120, 98],
    "folder": [33, 117, 112, 33, 117, 105, 102, 115, 102, 33, 117, 105, 102, 33, 120, 98],
}
GREEDY["hf"] = GREEDY["folder"]
SHAPE = ["layers=3", "dim=16", "heads=2", "qkv_tokens=[16, 4]", "proj_tokens=16", "ffn_tokens=[24, 8]"]
SHAPE += ["context=32", "vocab=384", "tau={qkv: [4.0, 2.0], ffn: [4.898979485566356, 2.8284271247461903]}"]
FIRST_LOSS = 1.586425542831421


@pytest.fixture
def before(tmp_path, monkeypatch):
    """A copy to write in; the run names its set by a relative path."""
    shutil.copytree(BEFORE, tmp_path / "before")
    monkeypatch.chdir(tmp_path / "before")
    return tmp_path / "before"


@pytest.mark.parametrize("name", GREEDY)
def test_weights_of_before_load_and_write_the_same_tokens(name):
    model = tokenformer.load(BEFORE / name)
    assert model.history[0]["before"]["layers"] == 2 and model.config.layers == 3
    assert len(model.history) == (1 if name == "run" else 2)
    written = model.generate(torch.tensor([PROMPT]), 16, temperature=0)
    assert written[0].tolist()[-16:] == GREEDY[name]


@pytest.mark.parametrize("name", GREEDY)
def test_the_command_line_generates_from_what_was_written_before(name, capsys):
    assert not main(["generate", str(BEFORE / name), "--prompt", "The Rabbit", "--tokens", "16", "--device", "cpu"])
    assert "".join(chr(i - 1) for i in GREEDY[name]) in capsys.readouterr().out


def test_transformers_opens_an_export_of_before():
    from transformers import AutoModelForCausalLM

    import tokenformer.hub.hf  # noqa: F401  registers the classes

    model = AutoModelForCausalLM.from_pretrained(BEFORE / "hf")
    written = model.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)
    assert written[0].tolist()[-16:] == GREEDY["hf"]


def test_a_run_of_before_resumes_and_ends_where_it_would_have_ended(before):
    assert not main(["train", "run", "--resume"])
    rows = [json.loads(line) for line in (before / "run" / "metrics.jsonl").read_text().splitlines()]
    ends = {row["kind"]: row["loss"] for row in rows if row["step"] == 1500 and "loss" in row}
    assert ends == pytest.approx({"train": 1.6454369306564331, "validation": 2.5112602710723877}, abs=1e-4)
    assert (before / "run" / "checkpoints" / "last").read_text().strip() == "step-00001500"


def test_a_folder_of_before_can_be_trained_on(before):
    """The loss begins where the folder's weights left it: from scratch it would be near 5.9."""
    words = ["start=folder", "data.path=set/alice", "steps=2", "batch=8", "log.every=1", "optimizer.rate=1e-9"]
    words += [f"model.{key}" for key in SHAPE]
    (before / "on.yml").write_text("train: {device: cpu, precision: fp32}\n")
    assert not main(["train", "on.yml", *words, "--out", "on"])
    first = json.loads((before / "on" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(FIRST_LOSS, abs=1e-4)
