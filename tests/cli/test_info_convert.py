"""The verbs info and convert, and what the command line does with mistakes."""

import os
import subprocess
import sys

import pytest
import torch

from tokenformer.cli.main import build_parser, main
from tokenformer.data.text.tokenizer import load_tokenizer
from tokenformer.hub import load, save
from tokenformer.hub.open import read_config
from tokenformer.models import LanguageModel, cost


def test_info_reports_the_exact_parameters(capsys):
    assert main(["info", "lm/150m"]) == 0
    out = capsys.readouterr().out
    assert "151,881,216" in out
    assert "113,246,208" in out
    assert "3072 (τ 55.43) tokens" in out


def test_info_shows_how_the_two_parts_grow_beside_a_transformer(capsys):
    assert main(["info", "grow/1.4b", "--context", "1k,8k,32k"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.lstrip()[:1].isdigit()]
    ours, theirs = rows[0::2], rows[1::2]
    assert [row[0] for row in ours] == ["1,024", "8,192", "32,768"]
    with_parameters = {row[-4] for row in ours}
    with_tokens = [float(row[-3]) for row in ours]
    assert len(with_parameters) == 1
    assert with_tokens == [0.019, 0.151, 0.604]
    assert all(float(t[-3]) > 3 * float(o[-3]) for o, t in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("source", ["lm/150m", "grow/354m", "baseline/124m", "vision/tiny16"])
def test_the_transformer_beside_a_model_is_as_large_and_can_be_trained_with_what_info_says(source, capsys):
    assert main(["info", source]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    words = last.removeprefix("to train that Transformer, add ").split()
    model, rival = read_config(source).model, read_config(source, overrides=words).model
    assert rival.kind == "transformer" and cost(rival).parameters == pytest.approx(cost(model).parameters, rel=1e-3)


def test_info_takes_overrides_merges_files_and_reads_weights(golden_folder, tmp_path, capsys):
    assert main(["info", "lm/150m", "model.layers=2", "model.ffn_tokens=[1024,2048]"]) == 0
    assert "1024 (τ 32) + 2048 (τ 45.25) tokens" in capsys.readouterr().out
    folder = golden_folder / "softmax"
    for source in (folder, folder / "pytorch_model.bin", folder / "config.yml"):
        assert main(["info", str(source)]) == 0
        assert "99,456" in capsys.readouterr().out
    assert main(["info", str(folder / "pytorch_model.bin"), str(folder / "config.yml")]) == 0
    assert main(["info", str(folder), "model.layers=2"]) == 2
    assert "overrides cannot change" in capsys.readouterr().err
    save(load(folder), tmp_path / "ours")
    assert main(["info", str(tmp_path / "ours")]) == 0
    assert "theta softmax" in capsys.readouterr().out
    (tmp_path / "text_generation.yml").write_text('{"text_gen_type": "unconditional", "temperature": 1.0}')
    assert main(["info", str(folder / "config.yml"), str(tmp_path / "text_generation.yml")]) == 0
    assert main(["info", str(tmp_path / "text_generation.yml")]) == 2
    assert "give a model config beside it" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["ours", "hf"])
def test_official_weights_go_there_and_back_bit_equal(golden, tmp_path, target, capsys, relative):
    folder, expected = golden
    weights, config = str(folder / "pytorch_model.bin"), str(folder / "config.yml")
    assert main(["convert", "--to", target, weights, config, "--out", str(tmp_path / "there")]) == 0
    assert "99,456 parameters" in capsys.readouterr().out
    model = load(tmp_path / "there")
    assert relative(model(expected["input_ids"]).logits, expected["logits"]) < 2e-5
    assert main(["convert", "--to", "official", str(tmp_path / "there"), "--out", str(tmp_path / "back")]) == 0
    before = torch.load(weights, weights_only=True)
    after = torch.load(tmp_path / "back" / "pytorch_model.bin", weights_only=True)
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_official_weights_get_the_tokenizer_that_all_of_them_have(tmp_path):
    config = read_config("lm/150m", overrides=["model.layers=1", "model.dim=32", "model.heads=2"]).model
    save(LanguageModel(config), tmp_path / "a", format="official")
    assert main(["convert", "--to", "hf", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 0
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert tokenizer("Hello world")["input_ids"] == [12092, 1533]
    assert tokenizer.eos_token_id == 0


def test_segments_are_merged_so_that_the_official_format_can_hold_them(tmp_path, capsys):
    config = read_config("lm/150m", overrides=[
        "model.layers=2", "model.dim=32", "model.heads=2", "model.vocab=384", "model.context=64",
        "model.qkv_tokens=[4,12]", "model.proj_tokens=16", "model.ffn_tokens=[16,8,8]",
    ]).model  # fmt: skip
    save(LanguageModel(config), tmp_path / "a")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    command = ["convert", "--to", "official", str(tmp_path / "a"), "--out", str(tmp_path / "b")]
    assert main(command) == 2
    assert "its qkv projections have 2 segments" in capsys.readouterr().err
    assert main([*command, "--merge-segments"]) == 2
    assert "--merge-segments needs --text" in capsys.readouterr().err
    assert main([*command, "--merge-segments", "--text", str(tmp_path / "text.txt"), "--tokenizer", "byte"]) == 0
    assert "segments merged: loss on text.txt" in capsys.readouterr().out
    assert load(tmp_path / "b").config.ffn_tokens == 32


def test_force_replaces_a_folder_and_merges_no_softmax(tmp_path, capsys):
    config = read_config("lm/150m", overrides=[
        "model.layers=1", "model.dim=32", "model.heads=2", "model.vocab=384", "model.context=64", "model.theta=softmax",
        "model.qkv_tokens=16", "model.proj_tokens=16", "model.ffn_tokens=[16,8]",
    ]).model  # fmt: skip
    save(LanguageModel(config), tmp_path / "a")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    command = ["convert", "--to", "official", str(tmp_path / "a"), "--out", str(tmp_path / "b"), "--merge-segments"]
    command += ["--text", str(tmp_path / "text.txt"), "--tokenizer", "byte", "--force"]
    assert main(command) == 2
    assert "--merge-softmax" in capsys.readouterr().err and not (tmp_path / "b").exists()
    assert main([*command, "--merge-softmax"]) == 0
    assert load(tmp_path / "b").config.ffn_tokens == 24


def test_a_segmented_model_goes_from_ours_to_hf_and_back(tmp_path):
    config = read_config("lm/150m", overrides=[
        "model.layers=2", "model.dim=32", "model.heads=2", "model.vocab=64", "model.qkv_tokens=[4,5]",
        "model.proj_tokens=6", "model.ffn_tokens=[8,9,10]", "model.layer_overrides={1: {ffn_tokens: [3, 4]}}",
    ]).model  # fmt: skip
    model = LanguageModel(config)
    save(model, tmp_path / "a")
    for source, to, out in (("a", "hf", "b"), ("b", "ours", "c")):
        assert main(["convert", "--to", to, str(tmp_path / source), "--out", str(tmp_path / out)]) == 0
    again = load(tmp_path / "c")
    assert again.config == model.config
    assert torch.equal(again(torch.arange(9)[None]).logits, model(torch.arange(9)[None]).logits)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["info", "lm/151m"], "did you mean the preset 'lm/150m'"),
        (["info", "lm/150m", "model.layres=3"], "did you mean 'model.layers'"),
        (["info", "lm/150m", "model.heads=7"], "does not divide dim"),
        (["info", "lm/150m", "--context", "1x"], "give lengths such as"),
        (["convert", "--to", "hf", "nowhere/at/all", "--out", "x"], "there is nothing at nowhere/at/all"),
        (
            ["convert", "--to", "hf", ".", "--out", "../x", "--tokenizer", "none.json"],
            "there is no tokenizer 'none.json'",
        ),
        (["convert", "--to", "hf", ".", "--out", "tokenformer"], "is there already"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(words, sentence, capsys, monkeypatch):
    monkeypatch.chdir(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    before = set(os.listdir())
    assert main(words) == 2
    err = capsys.readouterr().err.strip()
    assert sentence in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
    assert set(os.listdir()) == before


def test_the_program_itself_leaves_with_the_code():
    def run(*words):
        return subprocess.run([sys.executable, "-m", "tokenformer", *words], capture_output=True, text=True)

    assert run("info", "nothing").returncode == 2
    assert run("no-such-verb").returncode == 2
    done = run("info", "grow/124m")
    assert done.returncode == 0 and "123,569,664" in done.stdout


def test_a_reader_that_leaves_is_no_error():
    program = f"{sys.executable} -m tokenformer info lm/150m | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_every_verb_has_a_help_with_an_example(capsys):
    (actions,) = [a for a in build_parser()._actions if hasattr(a, "choices") and a.choices]
    assert {"info", "convert"} <= set(actions.choices)
    for name, parser in actions.choices.items():
        assert f"tokenformer {name} " in parser.format_help(), name


def test_a_tokenizer_instead_of_the_models_own_is_said(tmp_path, capsys):
    config = read_config("lm/150m", overrides=["model.layers=1", "model.dim=32", "model.heads=2"]).model
    save(LanguageModel(config), tmp_path / "a", tokenizer_json=load_tokenizer("byte").to_json())
    (tmp_path / "text.txt").write_text("text")
    verbs = {
        "convert": ["--to", "ours", "--force", "--out", str(tmp_path / "b")],
        "generate": ["--prompt", "a", "--tokens", "1", "--device", "cpu"],
        "eval": ["--text", str(tmp_path / "text.txt"), "--device", "cpu"],
    }
    for verb, words in verbs.items():
        for name in ("gpt-neox-20b", "byte"):
            assert main([verb, str(tmp_path / "a"), *words, "--tokenizer", name]) == 0
            said = f"the tokenizer {name} is used instead of {tmp_path / 'a'}'s own"
            assert (said in capsys.readouterr().err) == (name != "byte")
