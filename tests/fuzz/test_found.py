"""What the fuzzer found once, each as a test of its own."""

import json
import lzma
import os
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml

from tests.eval.rows import write_rows
from tests.fuzz import sandbox
from tests.fuzz.material import DATA
from tokenformer.cli.main import main
from tokenformer.config import ModelConfig
from tokenformer.data.text.indexed import Indexed
from tokenformer.data.text.inputs import find_inputs
from tokenformer.data.text.prepare import prepare
from tokenformer.data.text.tokenizer import ByteTokenizer, FileTokenizer, with_end
from tokenformer.errors import UserError
from tokenformer.eval.tasks import read_rows as task_rows
from tokenformer.files import write_manifest
from tokenformer.hub import load, save
from tokenformer.hub.folder import Stored
from tokenformer.hub.official import find, infer_shape
from tokenformer.hub.official_config import translate_all
from tokenformer.infer.requests import Request
from tokenformer.models import build
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


@pytest.mark.parametrize(
    "value", [[1], "x", 10**400, float("inf"), ...], ids=["list", "text", "huge", "inf", "missing"]
)
@pytest.mark.parametrize("key", ["loss", "tokens_per_second", "tokens"])
def test_a_row_of_metrics_of_another_form_is_refused(tmp_path, capsys, key, value):
    shutil.copytree(DATA / "before" / "run", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    changed = max(i for i, row in enumerate(rows) if row["kind"] == "train")
    rows[changed] = {k: v for k, v in {**rows[changed], key: value}.items() if v is not ...}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = main(["plot", str(tmp_path / "run"), "--x", "tokens", "--out", str(tmp_path / "page.html")])
    said = capsys.readouterr().err
    fine = (key, value) in (("loss", ...), ("loss", float("inf")), ("tokens", float("inf")))  # as null: not known
    assert (drawn, said.count("\n")) in ([(0, 0)] if fine else [(2, 1)])


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


def test_prompts_of_a_name_that_no_file_can_have_are_refused():
    with pytest.raises(UserError, match=r"cannot be read .embedded null byte."):
        Request(text_gen_type="input-file", sample_input_file="a\0b").prompts()


def test_a_run_whose_environment_is_of_another_form_is_not_resumed(tmp_path, monkeypatch, capsys):
    for name in ("run", "set"):
        shutil.copytree(DATA / "before" / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    Path("run/environment.json").write_text('{"starts": "a"}')
    assert main(["train", "run", "--resume", "data.path=set/alice"]) == 2
    assert "environment.json is not what a run writes" in capsys.readouterr().err


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


@pytest.mark.parametrize("words", [["info", "x=" + "y" * 5000], ["convert", "x", "--to", "y" * 5000], ["y" * 5000]])
def test_a_message_repeats_no_word_of_any_length(words, capsys):
    try:
        code = main(words)
    except SystemExit as end:  # argparse's
        code = end.code
    assert code == 2 and len(capsys.readouterr().err.splitlines()[-1]) < 1100


@pytest.mark.parametrize(
    "words", [["data", "stats"], ["data", "verify"], ["prepare", "--out", "out", "--tokenizer", "byte"]]
)
def test_a_name_that_no_file_can_have_is_refused(words, capsys):
    assert main([*words, "x" * 5000]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_changed_tokenizer_or_config_beside_official_weights_with_a_manifest_is_refused(tmp_path):
    shutil.copytree(DATA / "golden" / "softmax", tmp_path / "official", ignore=shutil.ignore_patterns("golden*"))
    config = tmp_path / "official" / "config.yml"
    write_manifest(tmp_path / "official")
    load(tmp_path / "official")
    config.write_text(config.read_text().replace("softmax", "l2_norm_gelu"))
    with pytest.raises(UserError, match=r"config.yml is not the file that its manifest describes"):
        load(tmp_path / "official")


def test_weights_are_not_searched_for_on_the_whole_disk(tmp_path):
    deep = tmp_path / "a" / "b" / "c"
    shutil.copytree(DATA / "zero" / "world2", deep)
    assert find(tmp_path / "a") == deep and find(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("zero/latest", ["convert", "zero", "--to", "ours", "--out", "new"], "which its 'latest' names"),
        ("run/checkpoints/last", ["info", "run"], "is used"),
        ("run/metrics.jsonl", ["plot", "run", "--out", "new.html"], "which no run writes"),
    ],
)
def test_a_file_with_a_hole_of_a_terabyte_does_not_fill_the_memory(tmp_path, name, words, said):
    shutil.copytree(DATA / "zero" / "world2", tmp_path / "zero")
    shutil.copytree(DATA / "before" / "run", tmp_path / "run")
    os.truncate(tmp_path / name, 10**12)
    ended = sandbox.run(lambda: main(words), tmp_path, tmp_path / "said")  # bounds its memory
    assert said in ended.err and ended.how == ("exit 0" if name.endswith("last") else "exit 2"), ended.err


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("run/checkpoints/last", ["info", "run"], "last cannot be read (Input/output error): run/checkpoints/step-"),
        (
            "run/metrics.jsonl",
            ["plot", "run", "--out", "new.html"],
            "metrics.jsonl cannot be read (Input/output err",
        ),
        ("zero/latest", ["convert", "zero", "--to", "ours", "--out", "new"], "latest cannot be read (Input/output err"),
        ("set/alice_text_document.bin", ["data", "verify", "set/alice"], "alice_text_document.bin"),
    ],
)
def test_a_file_at_which_the_disk_fails_is_named_in_one_sentence(tmp_path, name, words, said):
    """A link to /proc/self/mem is a plain file of which every read fails, like one on a bad disk."""
    shutil.copytree(DATA / "zero" / "world2", tmp_path / "zero")
    for folder in ("run", "set"):
        shutil.copytree(DATA / "before" / folder, tmp_path / folder)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/proc/self/mem")
    ended = sandbox.run(lambda: main(words), tmp_path, tmp_path / "said")
    assert said in ended.err and ended.err.count("\n") == 1, ended.err
    assert ended.how == ("exit 0" if name.endswith("last") else "exit 2")


def test_weights_that_are_replaced_or_removed_while_they_are_read_are_refused(tmp_path):
    shutil.copytree(DATA / "before" / "folder", tmp_path / "folder")
    tensors = Stored(tmp_path / "folder")
    file = tmp_path / "folder" / "model.safetensors"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(UserError, match=r"model.safetensors changed or was removed while it was read"):
        tensors["embedding.weight"]
    file.unlink()
    with pytest.raises(UserError, match=r"model.safetensors changed or was removed while it was read"):
        tensors["embedding.weight"]


def test_a_note_of_the_last_checkpoint_is_one_line(tmp_path, capsys):
    shutil.copytree(DATA / "before" / "run", tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "last").write_text("step-1\nstep-2")
    assert main(["info", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().err.count("\n") == 1


OTHERS = [True, [1], {"a": 1}, "x", "1,x", -1, 1e400, {"enabled": True, "loss_scale": "x"}, {"params": {"lr": 0}}]


@pytest.mark.parametrize("value", OTHERS, ids=str)
def test_official_training_keys_of_another_kind_are_taken_or_refused_by_name(value):
    raw = yaml.safe_load((DATA / "golden" / "softmax" / "config.yml").read_text())
    raw |= {"split": "90,10,0", "load": "there"}
    refused = {}
    for key in [*raw, "fp16", "precision", "zero_optimization", "optimizer", "min_lr", "gradient_clipping"]:
        try:
            translate_all({"official.yml": raw | {key: value}}, training=True)
        except UserError as error:
            refused[key] = str(error)
    assert refused and all(key in sentence for key, sentence in refused.items())


def test_a_text_with_a_point_behind_its_name_is_that_text(tmp_path):
    (tmp_path / "text.txt").write_text("one")
    assert [given.path for given in find_inputs([f"{tmp_path}/text.txt/."])] == [str(tmp_path / "text.txt")]


def test_a_tokenizer_at_which_the_library_panics_is_refused():
    """A panic is no Exception: `except Exception` lets it through, and the command ends in a traceback."""
    plain = json.loads(ByteTokenizer().to_json())
    panics = plain | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    with pytest.raises(BaseException, match="charsmap") as found:
        tokenizers.Tokenizer.from_str(json.dumps(panics))
    assert not isinstance(found.value, Exception)
    with pytest.raises(UserError, match=r"is not a tokenizer.json \(Precompiled"):
        FileTokenizer(json.dumps(panics), "this one")


def test_a_tokenizer_that_cannot_encode_a_text_is_refused_also_in_a_batch():
    plain = json.loads(ByteTokenizer().to_json())
    words = plain | {"model": {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "?"}}
    tokenizer = FileTokenizer(json.dumps(words), "this one")
    assert [list(ids) for ids in tokenizer.encode_batch(["a", "a"])] == [[0], [0]]
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text])):
        with pytest.raises(UserError, match="this one cannot encode 'Rabbit'"):
            encode("Rabbit")


@pytest.mark.parametrize("shape", [(), (8,), (2, 3, 4)])
def test_an_embedding_that_is_no_matrix_is_refused(shape):
    with pytest.raises(UserError, match="it is not an official TokenFormer weight file"):
        infer_shape({"sequential.0.word_embeddings.weight": torch.zeros(shape)}, Path("there"))


def test_parameter_tokens_that_are_a_number_are_refused():
    tensors = {"sequential.0.word_embeddings.weight": torch.zeros(4, 2)}
    tensors |= {
        f"sequential.2.{p}.key_param_tokens": torch.zeros(()) for p in ("attention.query", "attention.proj", "mlp")
    }
    with pytest.raises(UserError, match="it is not an official TokenFormer weight file"):
        infer_shape(tensors, Path("there"))


def test_more_processes_than_a_machine_can_have_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(UserError, match="--workers is 99999999999: give 1 to"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", "a", tokenizer="byte", workers=99999999999)
    assert not (tmp_path / "out").exists()


def test_more_names_than_an_image_model_has_classes_are_refused(tmp_path):
    shape = {"layers": 1, "dim": 16, "heads": 2, "qkv_tokens": 4, "proj_tokens": 4, "ffn_tokens": 4}
    model = build(ModelConfig(**shape, of="image", image_size=8, patch=4, classes=2))
    model.images = {"classes": ["ant", "bee", "bee"]}
    save(model, tmp_path / "model")
    with pytest.raises(UserError, match=r"images.json names 3 classes of a model of 2: get it anew"):
        load(tmp_path / "model")


def test_an_id_that_is_no_token_cannot_end_documents():
    plain = json.loads(ByteTokenizer().to_json())
    for number in (-1, 10**12):
        with pytest.raises(UserError, match=f"tokenizer this one has no id {number} to end documents with"):
            with_end(FileTokenizer(json.dumps(plain), "this one", number))
    marks = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [10**6], "tokens": ["<|endoftext|>"]}}
    template = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": marks}
    assert FileTokenizer(json.dumps(plain | {"post_processor": template}), "this one").end_of_document == 0


@pytest.mark.parametrize(("name", "file"), [("folder", "config.yml"), ("hf", "config.json")])
def test_info_of_a_changed_config_beside_weights_is_refused(tmp_path, capsys, name, file):
    shutil.copytree(DATA / "before" / name, tmp_path / name)
    assert main(["info", str(tmp_path / name)]) == 0
    config = tmp_path / name / file
    config.write_text(config.read_text().replace("384", "512"))
    assert main(["info", str(tmp_path / name)]) == 2
    assert f"{file} is not the file that its manifest describes" in capsys.readouterr().err
