"""What a name means in every verb; weights given to `train` are begun with; a set of another tokenizer is refused."""

import json
import re
import shutil
import sys

import pytest
import torch

import tokenformer
from tests.hub.conftest import flip, refused, remade, write
from tests.train.conftest import config_file, one_thread, prepared, tiny  # noqa: F401 (fixtures)
from tokenformer import files
from tokenformer.cli.main import main
from tokenformer.data.text.tokenizer import ByteTokenizer, load_tokenizer
from tokenformer.hub.open import open_model

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
    inside, copied = run / "checkpoints" / "step-00000004" / "model", tmp_path / "copied"
    capsys.readouterr()
    assert main(["train", str(inside), "steps=0", "--out", str(tmp_path / "run4")]) == 0  # as a run's log names it
    assert "begins with the weights of" in capsys.readouterr().out
    same = zip(tokenformer.load(tmp_path / "run4").parameters(), tokenformer.load(inside).parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in same)
    shutil.copytree(inside, copied)
    assert "holds no weights that we know" in refused(capsys, "train", copied, "steps=0", "--out", tmp_path / "run5")
    assert main(["train", str(run), "--resume", "steps=5"]) == 0 and main(["train", str(on), "--resume"]) == 0
    again = ["train", str(grown), *more, "--out", str(on), "--resume"]  # as a job script says it each time
    assert main(again) == 0


def test_what_no_shape_of_the_weights_shows_is_said(config_file, tmp_path, capsys):  # noqa: F811
    small, grown = tmp_path / "small", tmp_path / "grown"
    assert main(["train", str(config_file), "steps=0", "--out", str(tmp_path / "run")]) == 0
    tokenformer.save(tokenformer.load(tmp_path / "run"), small)
    tokenformer.save(tokenformer.grow(tokenformer.load(small), ffn_tokens=40, new_tokens="zero_key"), grown)

    def said(start, *settings):
        capsys.readouterr()
        words = ["train", str(config_file), "steps=0", f"start={start}", *settings]
        assert main([*words, "--out", str(tmp_path / f"run{len(list(tmp_path.iterdir()))}")]) == 0
        return re.findall("model.* is .*, but .* compute something else", capsys.readouterr().out)

    assert said(small) == [] and said(small, "model.ffn_tokens=40") == []  # more rows, and τ of them: documented
    assert said(small, "model.theta=softmax", "model.heads=1") == [
        f"model.heads is 1, but 2 in {small}: the same weights compute something else",
        f"model.theta is softmax, but l2_norm_gelu in {small}: the same weights compute something else",
    ]
    (held,) = said(grown, "model.ffn_tokens=40")  # whose τ was held
    assert held.startswith("model.tau is ") and str(32**0.5) in held and str(40**0.5) in held


def test_a_run_given_to_train_is_checked_once_and_a_damaged_grown_one_is_not_half_used(
    config_file,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
):
    run, read = tmp_path / "run", []
    settings = ["checkpoint.every=2", "growth=[{at: {step: 3}, ffn_tokens: 48}]"]
    assert main(["train", str(config_file), "--out", str(run), "steps=4", *settings]) == 0
    sha256 = files.sha256
    monkeypatch.setattr(files, "sha256", lambda path, *more: read.append(path) or sha256(path, *more))
    assert main(["train", str(run), "steps=0", "--out", str(tmp_path / "on")]) == 0
    last = run / "checkpoints" / "step-00000004"
    weights = [path for path in read if path.suffix == ".safetensors" and last in path.parents]
    assert weights and len(weights) == len(set(weights))
    flip(next((last / "model").glob("*.safetensors")))
    capsys.readouterr()
    assert main(["train", str(run), "steps=0", "--out", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert f"{last} is damaged, and the whole one before it has another model" in said.splitlines()[-1]
    assert not (tmp_path / "none").exists()
    assert main(["train", str(last.with_name("step-00000002")), "steps=0", "--out", str(tmp_path / "before")]) == 0


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


def test_the_token_that_ended_documents_in_training_ends_them_ever_after(tmp_path, capsys):
    """Also where the tokenizer has one of a better known name: it travels beside the weights, and adds nothing."""
    import transformers

    plain = json.loads(ByteTokenizer().to_json())
    plain["added_tokens"] = [
        {"id": 257, "content": "<turn>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    (tmp_path / "a.txt").write_text("one two three four " * 40)
    words = ["prepare", tmp_path / "a.txt", "--tokenizer", tmp_path / "tokenizer.json", "--end", "<turn>"]
    assert main([str(word) for word in [*words, "--workers", 1, "--out", tmp_path, "--name", "set"]]) == 0
    shape = "{layers: 1, dim: 16, heads: 2, qkv_tokens: 4, proj_tokens: 4, ffn_tokens: 4, vocab: 384, context: 16}"
    words = [f"model={shape}", f"data.path={tmp_path / 'set'}", "batch=2", "steps=0", "data.split=[1]"]
    assert main(["train", "lm/3m", *words, "train.device=cpu", "--out", str(tmp_path / "run")]) == 0
    assert main(["grow", str(tmp_path / "run"), "--ffn-tokens", "8", "--out", str(tmp_path / "grown")]) == 0
    assert main(["convert", str(tmp_path / "grown"), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    for name in ("run", "grown", "hf"):
        assert open_model(tmp_path / name).tokenizer.end_of_document == 257
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.eos_token_id == 257 and theirs("ab")["input_ids"] == [98, 99]
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 257
    assert load_tokenizer(tmp_path / "tokenizer.json").end_of_document == 0
    more = ["train", str(tmp_path / "grown"), f"data.path={tmp_path / 'set'}", "batch=2", "steps=0", "data.split=[1]"]
    assert main([*more, "train.device=cpu", "--out", str(tmp_path / "on")]) == 0  # it is the same tokenizer
