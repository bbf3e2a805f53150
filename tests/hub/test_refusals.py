"""Files that are not what they should be are refused in one sentence, quickly: nobody computes with another model."""

import json
import os
import re
import shutil
import sys
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

import tokenformer
from tests.train.conftest import config_file, one_thread, prepared, tiny  # noqa: F401 (fixtures)
from tokenformer import ModelConfig
from tokenformer.cli.main import main
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.files import write_manifest
from tokenformer.hub import save
from tokenformer.models import build

SHAPE = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=8, proj_tokens=8, ffn_tokens=16, vocab=384, context=32)
SHARDED = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A model as our folder and as an export."""
    root = tmp_path_factory.mktemp("originals")
    for kind in ("ours", "hf", "official"):
        save(build(SHAPE, seed=1), root / kind, format=kind, tokenizer_json=ByteTokenizer().to_json())
    return root


@pytest.fixture
def folder(originals, tmp_path):
    """Copies that a test may harm, by kind."""

    def copy(kind: str, manifest: bool = True):
        shutil.copytree(originals / kind, tmp_path / kind)
        if not manifest:
            (tmp_path / kind / "manifest.json").unlink()
        return tmp_path / kind

    return copy


def remade(folder):
    """As somebody would who knows how: the manifest fits the files again."""
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    return folder


def refused(capsys, *words) -> str:
    """One sentence and code 2."""
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("tokenformer: ") and said.err.count("\n") == 1 and len(said.err) < 1500, said.err
    return said.err


def write(folder, *more):
    return ["generate", folder, "--prompt", "a", "--tokens", "2", "--device", "cpu", *more]


def flip(path, at=-5):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


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


# What a name means


@pytest.mark.parametrize("verb", ["info", "generate", "eval", "grow", "shrink", "convert", "train", "plan", "slurm"])
@pytest.mark.parametrize("name", ["runs/demo2", "./demo/x", "~/x", "a/b/c", "x" * 5000, "nothing", "\0"])
def test_a_mistyped_path_is_not_asked_of_the_hub(tmp_path, monkeypatch, capsys, verb, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # asking would fail
    more = {
        "generate": ["--prompt", "a"],
        "eval": ["--text", str(__file__)],
        "grow": ["--ffn-tokens", "99", "--out", "out"],
        "shrink": ["--ratio", "0.5", "--by", "newest", "--out", "out"],
        "convert": ["--to", "hf", "--out", "out"],
        "train": ["--out", "out", "batch=1"],
        "plan": ["--gpus", "1", "batch=1"],
        "slurm": ["--nodes", "1", "--gpus-per-node", "1", "--out", "out"],
    }
    said = refused(capsys, verb, name, *more.get(verb, []))
    assert "there is nothing at" in said
    assert name != "runs/demo2" or "did you mean runs/demo?" in said


def test_a_name_of_the_hub_is_announced_before_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, revision in (("owner/model", ""), ("hub:owner/model", ""), ("owner/model@v2", "v2")):
        assert main(["info", name]) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[0].startswith("owner/model: no local path, so the hub is asked") and revision in said[0]
    assert "is a config without weights" in refused(capsys, *write("lm/150m"))
    assert "did you mean the preset 'lm/150m'" in refused(capsys, *write("lm/151m"))


# Weights given to `train`


def steps(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_weights_given_to_train_are_begun_with(config_file, tmp_path, capsys):  # noqa: F811
    run, grown, on = tmp_path / "run", tmp_path / "grown", tmp_path / "on"
    settings = ["log.every=1", "growth=[{at: {step: 2}, ffn_tokens: 48}]"]
    assert main(["train", str(config_file), "--out", str(run), "steps=4", *settings]) == 0
    trained = tokenformer.load(run)
    assert main(["grow", str(run), "--ffn-tokens", "64", "--out", str(grown)]) == 0
    capsys.readouterr()
    data = next(line for line in (run / "config.yml").read_text().splitlines() if line.strip().startswith("path:"))
    more = [f"data.{data.strip().replace(': ', '=')}", "batch=4", "steps=0", "train.device=cpu"]
    assert "give --out RUN" in refused(capsys, "train", grown, *more)
    assert "give --out RUN" in refused(capsys, "train", run)
    assert "no run to resume" in refused(capsys, "train", grown, *more, "--resume")
    assert main(["train", str(grown), *more, "--out", str(on)]) == 0
    assert f"begins with the weights of {grown}" in capsys.readouterr().out
    began, before = tokenformer.load(on), tokenformer.load(grown)
    assert began.config == before.config
    assert all(torch.equal(p, q) for p, q in zip(began.parameters(), before.parameters(), strict=True))
    assert main(["train", str(run), "steps=1", "--out", str(tmp_path / "run2")]) == 0  # its growth is behind it
    assert tokenformer.load(tmp_path / "run2").config == trained.config
    assert main(["train", str(run), "start=null", "growth=[]", "steps=1", "--out", str(tmp_path / "run3")]) == 0
    assert tokenformer.load(tmp_path / "run3").config != trained.config  # the first model of the plan
    assert main(["train", str(run), "--resume", "steps=5"]) == 0 and main(["train", str(on), "--resume"]) == 0
    again = ["train", str(grown), *more, "--out", str(on), "--resume"]  # as a job script says it each time
    assert main(again) == 0


# Sets of another tokenizer


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A set of the same text by a tokenizer of 300 ids, which fit into the vocabulary of 384."""
    from tests.train.conftest import TEXT
    from tokenformer.data.text.prepare import prepare
    from tokenformer.data.text.tokenizer import train_tokenizer

    root = tmp_path_factory.mktemp("other")
    (root / "tokenizer.json").write_text(train_tokenizer([TEXT.read_text()[:20_000]], 300).to_json())
    return prepare([TEXT], root, "alice", tokenizer=str(root / "tokenizer.json"), workers=1)


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "OURS", "--text", "SET", "--device", "cpu"],
        ["shrink", "OURS", "--ratio", "0.5", "--text", "SET", "--out", "OUT"],
        ["grow", "OURS", "--ffn-tokens", "32", "--text", "SET", "--out", "OUT"],
        ["train", "OURS", "data.path=SET", "batch=4", "steps=0", "train.device=cpu", "--out", "OUT"],
        [
            "train",
            "OURS/config.yml",
            "start=OURS",
            "data.path=SET",
            "batch=4",
            "steps=0",
            "train.device=cpu",
            "--out",
            "OUT",
        ],
    ],
    ids=["eval", "shrink", "grow", "train", "train start="],
)
def test_a_set_of_another_tokenizer_is_refused(originals, other, tmp_path, capsys, words):
    out = tmp_path / "out"
    names = {"OURS": str(originals / "ours"), "SET": str(other), "OUT": str(out)}
    for name, path in names.items():
        words = [word.replace(name, path) for word in words]
    assert main(words) == 2 and not out.exists()
    assert re.search("was prepared with (the tokenizer|another tokenizer than)", capsys.readouterr().err)


def test_a_set_of_the_same_tokenizer_is_taken(originals, prepared, tmp_path):  # noqa: F811
    ours = originals / "ours"
    assert main(["eval", str(ours), "--text", str(prepared), "--limit", "1", "--device", "cpu"]) == 0
    shrink = ["shrink", str(ours), "--ratio", "0.5", "--text", str(prepared), "--tokens", "64"]
    assert main([*shrink, "--out", str(tmp_path / "smaller")]) == 0
    rewritten = tmp_path / "rewritten"  # as another program would write the same tokenizer
    shutil.copytree(ours, rewritten)
    text = json.dumps(json.loads((rewritten / "tokenizer.json").read_text()), indent=3)
    (rewritten / "tokenizer.json").write_text(text)
    remade(rewritten)
    assert main(["eval", str(rewritten), "--text", str(prepared), "--limit", "1", "--device", "cpu"]) == 0


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


def test_a_tokenizer_does_not_come_back_as_a_message(folder, capsys):
    hf = folder("hf", manifest=False)
    raw = json.loads((hf / "tokenizer.json").read_text())
    raw["model"]["vocab"]["a"] = "y" * 70_000
    (hf / "tokenizer.json").write_text(json.dumps(raw))
    refused(capsys, *write(hf))
