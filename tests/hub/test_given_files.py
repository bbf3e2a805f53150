"""No output replaces a file unasked; states, sets, rows and prompts that cannot be read are refused in one sentence."""

import json
import os
import shutil

import pytest

import tokenformer
from tests.hub.conftest import SHAPE, refused, remade, write
from tests.test_adapters import make_adapter
from tests.train.conftest import config_file, one_thread, prepared, tiny  # noqa: F401 (fixtures)
from tokenformer import config as native
from tokenformer.cli.main import main
from tokenformer.data.text.tokenizer import ByteTokenizer, train_tokenizer
from tokenformer.files import write_manifest
from tokenformer.hub.open import open_model
from tokenformer.models import build

# Outputs that exist


def test_no_verb_replaces_a_file_or_folder_unasked(originals, tmp_path, capsys):
    ours, out, made = originals / "ours", tmp_path / "file", tmp_path / "folder"
    for command in (
        [*write(ours), "--output-file", out],
        ["eval", ours, "--text", __file__, "--limit", "1", "--device", "cpu", "--out", out],
        ["tokenizer", "train", __file__, "--vocab", "260", "--out", out],
    ):
        out.write_text("mine")
        assert "is there already" in refused(capsys, *command) and out.read_text() == "mine"
        assert main([str(word) for word in [*command, "--force"]]) == 0 and out.read_text() != "mine"
    for command in (
        ["grow", ours, "--ffn-tokens", "32", "--out", made],
        ["grow", ours, "--ffn-tokens", "32", "--no-verify", "--out", made],
        ["shrink", ours, "--ratio", "0.5", "--by", "newest", "--out", made],
        ["convert", ours, "--to", "hf", "--out", made],
        ["convert", ours, "--to", "ours", "--out", made],
        ["convert", ours, "--to", "official", "--out", made],
    ):
        made.mkdir(exist_ok=True)
        (made / "mine").write_text("mine")
        assert "is there already" in refused(capsys, *command)
        if not (made / "manifest.json").exists():
            assert "which we did not write" in refused(capsys, *command, "--force")
            shutil.rmtree(made)
        assert main([str(word) for word in [*command, "--force"]]) == 0 and not (made / "mine").exists()
        tokenformer.load(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_no_verb_writes_onto_what_it_reads(originals, tmp_path, capsys):
    ours, books = tmp_path / "models" / "ours", tmp_path / "models" / "books"
    shutil.copytree(originals / "ours", ours)
    make_adapter(books, tokenformer.load(ours), 1, ffn=4)
    write_manifest(tmp_path / "models")  # as if we had written this folder too
    (tmp_path / "link").symlink_to(ours)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    convert = ["convert", ours, "--to", "hf", "--force", "--out"]
    assert f"--out {tmp_path}/link is {ours}, which is read here" in refused(capsys, *convert, tmp_path / "link")
    for command in (
        convert,
        ["shrink", ours, "--ratio", "0.5", "--by", "newest", "--force", "--out"],
        ["adapter", "merge", ours, books, "--force", "--out"],
        ["adapter", "add", books, "--force", "--out"],
    ):
        read = books if command[1] == "add" else ours
        assert "which is read here: give a folder outside of it" in refused(capsys, *command, read)
        assert f"models holds {read}, which is read here" in refused(capsys, *command, tmp_path / "models")
        assert f"new lies in {read}, which is read here" in refused(capsys, *command, read / "new")
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before
    grow = ["grow", ours, "--ffn-tokens", "32", "--force", "--out"]
    assert "lies in" in refused(capsys, *grow, ours / "new") and "holds" in refused(capsys, *grow, tmp_path / "models")
    assert main([str(word) for word in [*grow, ours]]) == 0  # it computes the same, and is replaced once it is whole
    assert len(tokenformer.load(ours).history) == 1


def test_a_generation_file_replaces_nothing(originals, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    settings = f"text-gen-type: unconditional\nnum-samples: 1\nmaximum-tokens: 2\nsample-output-file: {tmp_path}/mine\n"
    (tmp_path / "text.yml").write_text(settings)
    said = refused(capsys, "generate", originals / "ours", tmp_path / "text.yml", "--device", "cpu")
    assert "is there already" in said and (tmp_path / "mine").read_text() == "mine"


# States, sets, tasks and prompts


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.clear(),
        lambda state: state.update(step=4),
        lambda state: state.update(step="3"),
        lambda state: state.update(growth=[]),
        lambda state: state.update(growth={"steps": 7}),
        lambda state: state.update(loader={}),
        lambda state: state.update(loader=7),
        lambda state: state.update(guard=None),
        lambda state: state.update(totals={"seconds": "x"}),
        lambda state: state.update(rng={"cpu": [1, 2]}),
        lambda state: state.update(rng={"cpu": ["x"]}),
        lambda state: state.pop("spikes"),
    ],
)
def test_a_state_that_is_not_ours_is_one_sentence(config_file, tmp_path, capsys, change):  # noqa: F811
    run = tmp_path / "run"
    assert main(["train", str(config_file), "--out", str(run), "steps=3"]) == 0
    checkpoint = run / "checkpoints" / "step-00000003"
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    remade(checkpoint)
    capsys.readouterr()
    assert main(["train", str(run), "--resume", "steps=4"]) == 2
    said = capsys.readouterr().err
    assert "state" in said and said.count("\n") == 1


def test_a_fifo_in_a_set_is_not_waited_for(prepared, config_file, tmp_path, capsys):  # noqa: F811
    for path in prepared.parent.iterdir():
        shutil.copy(path, tmp_path)
    stream = next(tmp_path.glob("*.bin"))
    stream.unlink()
    os.mkfifo(stream)
    for path in tmp_path.glob("*.json"):
        path.unlink()  # without a description nothing else looks
    refused(capsys, "train", config_file, f"data.path={stream.with_suffix('')}", "--out", tmp_path / "run")


@pytest.mark.parametrize(
    "row",
    [
        '{"query": "a", "choices": ["b", "c"], "gold": -Infinity}',
        '{"query": 1.5, "choices": ["b", "c"], "gold": 0}',
        '{"query": "a", "choices": [1, 2], "gold": 0}',
        '{"query": "a", "choices": "bc", "gold": [0]}',
        '{"query": "\\ud800", "choices": ["b", "c"], "gold": 0}',
        '{"query": "a", "query": "b", "choices": ["b", "c"], "gold": 0}',
        "[" * 100_000,
    ],
)
def test_a_row_that_cannot_be_asked_is_one_sentence(originals, tmp_path, capsys, row):
    (tmp_path / "hellaswag_val.jsonl").write_text(row + "\n")
    more = ["--tasks", "hellaswag", "--data-dir", tmp_path, "--native", "--device", "cpu"]
    assert "line 1" in refused(capsys, "eval", originals / "ours", *more)


def test_a_packed_task_cannot_fill_memory(originals, tmp_path, capsys):
    import lzma

    with lzma.open(tmp_path / "hellaswag_val.jsonl.xz", "wb", preset=0) as file:
        for _ in range(100):
            file.write(b" " * (1 << 20))
    more = ["--tasks", "hellaswag", "--data-dir", tmp_path, "--native", "--device", "cpu"]
    assert "that a task may have" in refused(capsys, "eval", originals / "ours", *more)


def test_half_a_surrogate_pair_is_one_sentence(originals, tmp_path, capsys):
    ours = originals / "ours"
    refused(capsys, "generate", ours, "--prompt", "a\udc80", "--device", "cpu")
    (tmp_path / "in.jsonl").write_text('"\\ud800"\n')
    refused(capsys, "generate", ours, "--input-file", tmp_path / "in.jsonl", "--device", "cpu")


def test_prompts_without_an_end_are_refused(originals, capsys):
    said = refused(capsys, "generate", originals / "ours", "--input-file", "/dev/zero", "--device", "cpu")
    assert "give fewer at a time" in said


# The tokenizer of a model that is loaded and saved


@pytest.mark.parametrize("format", ["ours", "hf", "official"])
def test_a_loaded_model_is_saved_with_its_tokenizer(tmp_path, format):
    text = train_tokenizer(["to be or not to be"] * 9, 270).to_json()
    tokenformer.save(build(SHAPE, seed=1), tmp_path / "first", format=format, tokenizer_json=text)
    model = tokenformer.load(tmp_path / "first")
    tokenformer.save(tokenformer.grow(model, ffn_tokens=32), tmp_path / "second")
    assert (tmp_path / "second" / "tokenizer.json").read_text() == text
    assert len(open_model(tmp_path / "second").tokenizer.encode("to be")) < 5  # bytes would be five


def test_a_model_without_a_tokenizer_is_not_taken_for_bytes(tmp_path, capsys):
    tokenformer.save(build(SHAPE, seed=1), tmp_path / "m")
    assert "no tokenizer beside it" in refused(capsys, *write(tmp_path / "m"))
    assert "--tokenizer byte" in refused(capsys, "eval", tmp_path / "m", "--text", __file__, "--device", "cpu")
    assert main([str(word) for word in write(tmp_path / "m", "--tokenizer", "byte")]) == 0


def test_a_run_that_starts_without_a_tokenizer_says_so(config_file, tmp_path, capsys):  # noqa: F811
    config = native.load(config_file).model
    for name, text in (("with", ByteTokenizer().to_json()), ("without", None)):
        tokenformer.save(build(config), tmp_path / name, tokenizer_json=text)
        out = ["--out", str(tmp_path / f"run-{name}"), f"start={tmp_path / name}", "steps=1"]
        assert main(["train", str(config_file), *out]) == 0
        said = capsys.readouterr()
        assert ("no tokenizer lies beside these weights" in said.out + said.err) == (name == "without")
