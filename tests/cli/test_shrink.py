"""`tokenformer shrink`: what goes, what stays, the change in loss, and one sentence for what cannot be."""

import pytest
import torch

from tokenformer import LanguageModel, ModelConfig, grow, load, save
from tokenformer.cli.main import main
from tokenformer.data.text.tokenizer import load_tokenizer

SHAPE = {"layers": 2, "dim": 32, "heads": 4, "qkv_tokens": 16, "proj_tokens": 16, "ffn_tokens": 32, "context": 64}


@pytest.fixture
def folder(tmp_path):
    model = grow(LanguageModel(ModelConfig(**SHAPE, vocab=384)), ffn_tokens=48)
    save(model, tmp_path / "old", tokenizer_json=load_tokenizer("byte").to_json())
    (tmp_path / "text.txt").write_text("What does least on this text goes first. " * 40)
    return tmp_path


def test_shrink_by_energy_reports_the_change_in_loss(folder, capsys):
    words = ["shrink", str(folder / "old"), "--ratio", "0.5", "--across", "model", "--tokens", "1024"]
    words += ["--text", str(folder / "text.txt")]
    assert main([*words, "--out", str(folder / "new")]) == 0
    said = capsys.readouterr().out
    new = load(folder / "new")
    assert "loss on" in said and "text.txt" in said and f"{new.cost().parameters:,} parameters" in said
    assert new.history[-1]["what"] == "shrink" and (folder / "new" / "tokenizer.json").is_file()
    counts = [sum(n for n, _ in new.config.segments("ffn", layer)) for layer in range(2)]
    assert sum(counts) == 48


def test_shrink_by_the_newest_undoes_a_growth(folder):
    words = ["shrink", str(folder / "old"), "--by", "newest", "--ffn-tokens", "32", "--out", str(folder / "new")]
    assert main(words) == 0
    ids = torch.randint(384, (2, 32), generator=torch.Generator().manual_seed(0))
    new = load(folder / "new")
    assert new.config.ffn_tokens == 32
    assert torch.allclose(load(folder / "old")(ids).logits, new(ids).logits, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ratio", "0.5"], "--text"),
        (["--ratio", "1.5", "--by", "newest"], "between 0 and 1"),
        (["--by", "newest"], "not both"),
        (["--by", "newest", "--ffn-tokens", "48"], "at most 48"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_nothing_is_written(folder, capsys, words, sentence):
    assert main(["shrink", str(folder / "old"), *words, "--out", str(folder / "new")]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and not (folder / "new").exists()
