"""`tokenformer grow`: the certificate, official weights, one sentence for what cannot be, and the memory it takes."""

import gzip
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tokenformer import LanguageModel, ModelConfig, load, save
from tokenformer.cli.main import main
from tokenformer.data.text.tokenizer import load_tokenizer

SHAPE = {"layers": 2, "dim": 32, "heads": 4, "qkv_tokens": 16, "proj_tokens": 16, "ffn_tokens": 32, "context": 64}


@pytest.fixture
def folder(tmp_path):
    save(
        LanguageModel(ModelConfig(**SHAPE, vocab=384)),
        tmp_path / "old",
        tokenizer_json=load_tokenizer("byte").to_json(),
    )
    (tmp_path / "text.txt").write_text("The certificate is written on real text. " * 40)
    return tmp_path


def test_grow_prints_a_certificate_and_writes_a_folder_that_computes_the_same(folder, capsys):
    out = str(folder / "new")
    rules = ["--new-tokens", "ffn=segment", "qkv=zero_key"]
    words = ["grow", str(folder / "old"), "--ffn-tokens", "64", "--qkv-tokens", "24", *rules, "--layers", "3"]
    assert main([*words, "--text", str(folder / "text.txt"), "--out", out]) == 0
    said = capsys.readouterr().out
    assert said.index("verifying holds both models") < said.index("rule:")  # memory is said first
    assert "qkv zero_key, ffn segment" in said and "exact up to rounding" in said
    assert "random tokens" in said and "text.txt" in said and "within two steps" in said
    *_, verdict, last = said.splitlines()
    assert verdict.startswith("computes the same: yes, largest change ") and "parameters" in last
    held = json.loads((folder / "new" / "certificate.json").read_text())
    assert held["same"] and held["largest_change"] < 1e-5 and set(held["on"]) == {"random tokens", "text.txt"}
    page = (folder / "new" / "certificate.html").read_text()
    assert verdict in page and "text.txt" in page and "<td>ffn: value tokens</td>" in page
    old, new = load(folder / "old"), load(out)
    ids = torch.randint(384, (2, 32), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(old(ids).logits, new(ids).logits, atol=1e-6)
    assert new.history[0]["after"] == {"layers": 3, "qkv_tokens": 24, "proj_tokens": 16, "ffn_tokens": 64}
    assert (folder / "new" / "tokenizer.json").is_file()


def test_a_growth_that_changes_the_model_is_certified_as_that(folder, capsys):
    words = ["grow", str(folder / "old"), "--ffn-tokens", "64", "--new-tokens", "random", "--out", str(folder / "new")]
    assert main(words) == 0
    assert "computes the same: no, largest change 0." in capsys.readouterr().out
    assert not json.loads((folder / "new" / "certificate.json").read_text())["same"]


def test_a_prepared_set_is_a_text_to_verify_on(folder, capsys):
    words = [str(folder / "text.txt"), "--out", str(folder), "--name", "set", "--tokenizer", "byte", "--workers", "1"]
    assert main(["prepare", *words]) == 0
    for verb, size in ("grow", "64"), ("shrink", "16"):
        words = [verb, str(folder / "old"), "--ffn-tokens", size, "--text", str(folder / "set"), "--out"]
        assert main([*words, str(folder / verb)]) == 0
        assert "set" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["grow", "shrink", "convert"])
def test_a_text_is_whatever_eval_reads(folder, capsys, verb):
    text = (folder / "text.txt").read_text()
    with gzip.open(folder / "text.txt.gz", "wt") as file:
        file.write(text)
    (folder / "many").mkdir()
    for i in range(4):
        (folder / "many" / f"{i}.txt").write_text(text[:400])
    (folder / "rows.jsonl").write_text(json.dumps({"body": text}) + "\n")
    sizes = {"grow": ["--ffn-tokens", "64"], "shrink": ["--ffn-tokens", "16"], "convert": ["--to", "ours"]}[verb]
    if verb == "convert":
        assert main(["grow", str(folder / "old"), "--ffn-tokens", "64", "--out", str(folder / "two")]) == 0
        sizes += ["--merge-segments"]
    words = [verb, str(folder / ("two" if verb == "convert" else "old")), *sizes]
    several = ["--text", str(folder / "text.txt"), "--text", str(folder / "many")]
    for i, given in enumerate(
        [["--text", str(folder / "text.txt.gz")], ["--text", str(folder / "rows.jsonl"), "--field", "body"], several]
    ):
        assert main([*words, *given, "--out", str(folder / f"new{i}")]) == 0, capsys.readouterr().err
    assert "text.txt and 1 more" in capsys.readouterr().out
    assert main([*words, "--text", str(folder / "many"), "b.txt", "--out", str(folder / "new")]) == 2
    assert "b.txt is one word too many" in capsys.readouterr().err


def test_without_verifying_the_folder_is_the_same(folder):
    words = ["grow", str(folder / "old"), "--ffn-tokens", "64", "--layers", "4", "--seed", "3", "--out"]
    assert main([*words, str(folder / "a")]) == main([*words, str(folder / "b"), "--no-verify"]) == 0
    one, other = load(folder / "a"), load(folder / "b")
    assert one.config == other.config and one.history == other.history
    tensors = dict(other.named_parameters())
    assert all(torch.equal(p, tensors[n]) for n, p in one.named_parameters())


def test_the_chain_of_presets_is_named(folder, capsys):
    wanted = folder / "wanted.yml"
    wanted.write_text("model: {layers: 2, dim: 32, heads: 4, qkv_tokens: 16, proj_tokens: 20, ffn_tokens: 99}\n")
    assert main(["grow", str(folder / "old"), "--to", str(wanted), "--out", str(folder / "new")]) == 0
    assert load(folder / "new").config.ffn_tokens == [32, 67]
    assert main(["grow", str(folder / "old"), "--to", "grow/354m", "--out", str(folder / "x")]) == 2
    assert "dim 768" in capsys.readouterr().err


@pytest.mark.parametrize("vocab", [384, 512])  # as always with --to, the size of the vocabulary itself does not count
def test_a_wanted_model_may_have_ids_that_a_growth_added(folder, vocab):
    wanted = folder / "wanted.yml"
    sizes = "layers: 2, dim: 32, heads: 4, qkv_tokens: 16, proj_tokens: 16, ffn_tokens: 64"
    wanted.write_text(f"model: {{{sizes}, vocab: {vocab}, added_vocab: 9, added_switch: draw}}\n")
    how = ["--to", str(wanted), "--switch", "draw", "--no-verify", "--out", str(folder / "new")]
    assert main(["grow", str(folder / "old"), *how]) == 0
    grown = load(folder / "new").config
    assert (grown.vocab, grown.added_vocab, grown.added_switch, grown.ffn_tokens) == (384, 9, "draw", [32, 32])


def test_golden_official_weights_grown_keep_their_golden_logits(golden, tmp_path):
    official, tensors = golden
    sizes = ["--qkv-tokens", "100", "--proj-tokens", "50", "--ffn-tokens", "200", "--layers", "5"]
    assert main(["grow", str(official), *sizes, "--out", str(tmp_path / "once")]) == 0
    assert (
        main(["grow", str(tmp_path / "once"), "--ffn-tokens", "300", "--no-verify", "--out", str(tmp_path / "twice")])
        == 0
    )
    for name in ("once", "twice"):
        logits = load(tmp_path / name)(tensors["input_ids"]).logits
        assert ((logits - tensors["logits"]).abs().max() / tensors["logits"].abs().max()).item() <= 1e-5


def test_a_file_written_one_tensor_at_a_time_is_a_plain_safetensors_file(folder):
    assert main(["grow", str(folder / "old"), "--ffn-tokens", "64", "--no-verify", "--out", str(folder / "new")]) == 0
    tensors = load_file(folder / "new" / "model.safetensors")
    assert tensors["blocks.1.ffn.segments.1.value_tokens"].shape == (32, 32)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ffn-tokens", "10"], "32 already"),
        ([], "nothing to grow"),
        (["--ffn-tokens", "64", "--new-tokens", "zero_key", "zero_value"], "dead"),
        (["--ffn-tokens", "64", "--new-tokens", "sement"], "one of segment"),
        (["--ffn-tokens", "64", "--no-verify", "--text", "x"], "one of them"),
        (["--ffn-tokens", "64", "--text", "missing.txt"], "no file, folder or match for 'missing.txt'"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_nothing_is_written(folder, capsys, words, sentence):
    assert main(["grow", str(folder / "old"), *words, "--out", str(folder / "new")]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and not (folder / "new").exists()


PEAK = """
import resource, sys
from tokenformer.cli.main import main
assert main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_growing_without_verifying_takes_no_more_memory_than_the_new_model_and_a_layer(tmp_path):
    """The peak of a real process, less that of one that grows a model of nothing."""
    shape = {"layers": 6, "dim": 512, "heads": 8, "qkv_tokens": 512, "proj_tokens": 512, "ffn_tokens": 1024}
    save(LanguageModel(ModelConfig(**SHAPE, vocab=384)), tmp_path / "tiny")
    save(LanguageModel(ModelConfig(**shape, vocab=1024)), tmp_path / "real")

    def peak(source, *sizes):
        words = ["grow", str(tmp_path / source), *sizes, "--new-tokens", "zero_key", "--no-verify"]
        words += ["--out", str(tmp_path / f"{source}-new")]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *words],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return int(done.stdout.split()[-1]) * 1024

    took = peak("real", "--ffn-tokens", "4096", "--qkv-tokens", "1024") - peak("tiny", "--ffn-tokens", "64")
    size = (tmp_path / "real-new" / "model.safetensors").stat().st_size
    layer = 2 * 4 * 512 * (3 * 1024 + 512 + 4096)
    assert size > 180e6 and took <= size + layer, (took, size, layer)
    assert took <= 0.6 * size, "it streams: far less than the new model"
