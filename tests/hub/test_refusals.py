"""Weights that are not what they should be are refused in one sentence, quickly: nobody computes with another model."""

import json
import os
import zipfile

import pytest
from safetensors.torch import load_file, save_file

from tests.hub.conftest import flip, refused, remade, write
from tests.train.conftest import config_file, one_thread, prepared, tiny  # noqa: F401 (fixtures)
from tokenformer.cli.main import main

SHARDED = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


# A weight file that no manifest lists, manifests that say nothing, manifests that nobody asked


def test_weights_that_no_manifest_lists_are_refused(folder, capsys):
    ours = folder("ours")
    save_file(load_file(ours / "model.safetensors"), ours / "modelz.safetensors", metadata={"format": "pt"})
    assert "modelz.safetensors is not in the folder's manifest.json" in refused(capsys, *write(ours))


@pytest.mark.parametrize("name", ["tokenizer.json", "history.json"])
def test_what_else_is_read_must_be_listed_too(folder, capsys, name):
    ours = folder("ours")
    manifest = json.loads((ours / "manifest.json").read_text())
    del manifest["files"][name]
    (ours / "manifest.json").write_text(json.dumps(manifest))
    assert f"{name} is not in the folder's manifest.json" in refused(capsys, *write(ours))


def test_a_stray_shard_in_a_checkpoint_is_not_trained_on(config_file, tmp_path, capsys):  # noqa: F811
    run = tmp_path / "run"
    assert main(["train", str(config_file), "--out", str(run), "steps=3"]) == 0
    shards = run / "checkpoints" / "step-00000003" / "model"
    data = next(shards.glob("*.safetensors")).read_bytes()
    (shards / "zzz.safetensors").write_bytes(data[:-6000] + bytes(6000))
    capsys.readouterr()
    assert "zzz.safetensors is not in the folder's manifest.json" in refused(
        capsys, "train", run, "--resume", "steps=4"
    )
    assert "zzz.safetensors is not in the folder's manifest.json" in refused(capsys, *write(run))


@pytest.mark.parametrize(
    "text",
    [
        *('{"files": {}}', "{}", '{"files": {"a": 3}}', '{"files": {"a": {"bytes": 1}}}', '{"files": {"../x": {}}}'),
        '{"files": {"' + "x" * 300 + '": {"bytes": 1, "sha256": ""}}}',
        *('{"files": {}, "files": {}}', "[" * 100_000, "\xff"),
    ],
)
def test_a_manifest_that_is_none_is_refused(folder, capsys, text):
    ours = folder("ours")
    (ours / "manifest.json").write_bytes(text.encode("latin-1"))
    refused(capsys, *write(ours))


def test_an_export_is_checked_where_our_manifest_lies_in_it(folder, capsys):
    hf = folder("hf")
    (hf / "README.md").write_text("mine")
    assert main([str(word) for word in write(hf)]) == 0
    capsys.readouterr()
    flip(hf / "model.safetensors")
    assert "is not the file that its manifest describes" in refused(capsys, *write(hf))
    (hf / "manifest.json").unlink()  # as transformers saves
    assert main([str(word) for word in write(hf)]) == 0


def test_a_tensor_under_two_names_is_refused(folder, capsys):
    hf = folder("hf", manifest=False)
    tensors = load_file(hf / "model.safetensors")
    tensors["norm.bias"] = tensors["model.norm.bias"] + 1
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    assert "is there twice" in refused(capsys, *write(hf))


def test_a_tensor_in_two_files_is_refused(folder, capsys):
    hf = folder("hf", manifest=False)
    tensors = load_file(hf / "model.safetensors")
    (hf / "model.safetensors").unlink()
    for i, name in enumerate(SHARDED):
        save_file({n: t + i for n, t in tensors.items()}, hf / name, metadata={"format": "pt"})
    files = dict.fromkeys(tensors, SHARDED[0]) | {"model.norm.bias": SHARDED[1]}
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert "is there twice" in refused(capsys, *write(hf))


def test_a_name_that_stands_twice_in_a_header_is_refused(folder, capsys):
    hf = folder("hf", manifest=False)
    data = (hf / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode().strip()
    header = header[:-1] + ', "model.norm.bias": ' + json.dumps(json.loads(header)["model.norm.weight"]) + "}"
    (hf / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + data[8 + size :])
    assert "stands twice" in refused(capsys, *write(hf))


def test_a_key_that_stands_twice_in_json_is_refused(folder, capsys):
    hf = folder("hf", manifest=False)
    text = (hf / "config.json").read_text()
    (hf / "config.json").write_text(text.rstrip()[:-1] + ', "norm_eps": 0.1}')
    assert "stands twice" in refused(capsys, *write(hf))


# Numbers of a config against the weights, before anything is built


def test_a_configs_numbers_are_compared_before_a_model_is_built(folder, capsys):
    ours = folder("ours")
    text = (ours / "config.yml").read_text()
    (ours / "config.yml").write_text(text.replace("layers: 2", "layers: 9999"))
    assert "too few for 9,999 layers" in refused(capsys, *write(remade(ours)))


@pytest.mark.parametrize("setting", ["model.layers=1e9", "model.dim=1e30", "model.vocab=1e18", "steps=1e30"])
def test_numbers_are_bounded(capsys, setting):
    assert "give at most" in refused(capsys, "info", "lm/150m", setting)


def test_many_segments_are_refused(capsys):
    refused(capsys, "info", "lm/150m", f"model.ffn_tokens=[{'1,' * 2000}]")


# What one file may say: JSON, YAML, text


@pytest.mark.parametrize(
    "name, text",
    [
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b"{}"),
        ("history.json", b"\xff"),
        ("history.json", b"3"),
        ("history.json", b"[" * 100_000),
        ("config.yml", b"\xff"),
        ("config.yml", b""),
        ("config.yml", b"model: " + b"[" * 20_000),
        ("config.yml", b"? [a, b]\n: c\n"),
        ("config.yml", b"model: {layers: 2001-99-99}"),
        ("config.yml", b"model: {layers: !!int abc}"),
        ("config.yml", b"model: {tied: !!bool maybe}"),
        ("config.yml", b"model: {layers: " + b"9" * 6000 + b"}"),
        ("config.yml", b"base: null"),
        ("config.yml", b"base: [1]"),
        ("config.yml", b"base: " + b"x" * 6000),
        ("config.yml", b"model: {layer_overrides: {\xc2\xb2: {}}}"),
        ("config.yml", b"model: &a [*a]"),
        ("model.safetensors", b"{}"),
        ("model.safetensors", b"\xff" * 100),
    ],
)
def test_a_damaged_file_of_our_folder_is_one_sentence(folder, capsys, name, text):
    ours = folder("ours")
    (ours / name).write_bytes(text)
    refused(capsys, *write(remade(ours)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "history.json"])
@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 5000, b"3"])
def test_a_damaged_file_of_an_export_is_one_sentence(folder, capsys, name, text):
    hf = folder("hf", manifest=False)
    (hf / name).write_bytes(text)
    refused(capsys, *write(hf))


OFFICIAL = "num-layers: 3\nhidden-size: 8\nnum-attention-heads: 1\n"
OFFICIAL += "qkv-slot-num: 8\nproj-slot-num: 8\nffn-slot-num: 8\nattention-config: BOMB"


@pytest.mark.parametrize("text", ["model: {layers: BOMB}", "base: BOMB", OFFICIAL], ids=["layers", "base", "official"])
def test_yaml_aliases_cannot_fill_memory(tmp_path, capsys, text):
    lists = ["&a0 [x, x, x, x, x, x, x, x, x, x]"]
    lists += [f"&a{i + 1} [{', '.join([f'*a{i}'] * 10)}]" for i in range(40)]
    (tmp_path / "bomb.yml").write_text(text.replace("BOMB", f"[{', '.join(lists)}]"))
    refused(capsys, "info", tmp_path / "bomb.yml")


def test_a_long_text_does_not_come_back_as_a_message(tmp_path, capsys):
    (tmp_path / "long.yml").write_text(f"model: {{layers: {'x' * 400_000}}}")
    refused(capsys, "info", tmp_path / "long.yml")
    (tmp_path / "long.yml").write_text(f"{'x' * 400_000}: 1")
    refused(capsys, "info", tmp_path / "long.yml")


def test_a_fifo_is_not_waited_for(folder, capsys):
    hf = folder("hf", manifest=False)
    for name in ("model.safetensors", "config.json"):
        (hf / name).unlink()
        os.mkfifo(hf / name)
        refused(capsys, *write(hf))


# Pickles


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02}" + b")" + b"2\x86" * 60 + b"K\x01s.",  # tuples of tuples as a key: its hash has 2^60 leaves
        b"\x80\x02}" + b")" + b"\x85" * 300_000 + b"K\x01s.",  # … or goes down more levels than the stack has
        b"\x80\x02}(" + b")" + b"2\x86" * 60 + b"K\x01u.",
        b"\x80\x02(" + b")" + b"2\x86" * 60 + b"K\x01d.",
        b"\x80\x04\x8f(" + b")" + b"2\x86" * 60 + b"\x90.",
        b"\x80\x04(" + b")" + b"2\x86" * 60 + b"\x91.",
        b"\x80\x02cbuiltins\nset\n]" + b")" + b"2\x86" * 60 + b"a\x85R.",
        b"\x80\x02ccollections\nOrderedDict\n](" + b")" + b"2\x86" * 60 + b"K\x01\x86e\x85R.",
    ],
    ids=["setitem", "deep", "setitems", "dict", "additems", "frozenset", "set", "OrderedDict"],
)
@pytest.mark.parametrize("kind", ["bin", "zero"])
def test_a_pickle_cannot_hang_or_fell_the_reader(tmp_path, capsys, pickled, kind):
    names = {
        "bin": ["pytorch_model.bin"],
        "zero": ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    }
    for name in names[kind]:
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            file.writestr("a/data.pkl", pickled)
    assert "as a key" in refused(capsys, "info", tmp_path)


def test_a_tokenizer_does_not_come_back_as_a_message(folder, capsys):
    hf = folder("hf", manifest=False)
    raw = json.loads((hf / "tokenizer.json").read_text())
    raw["model"]["vocab"]["a"] = "y" * 70_000
    (hf / "tokenizer.json").write_text(json.dumps(raw))
    refused(capsys, *write(hf))
