"""A language model that reads images on the command line: captions, questions, a conversation, figures, refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.test_caption import IMAGE, larger
from tests.train.conftest import child_environment
from tokenformer import load, save
from tokenformer.cli.main import main
from tokenformer.config import ModelConfig
from tokenformer.data.images.folders import find_images
from tokenformer.data.images.samples import batches
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.infer.captions import as_input, captions
from tokenformer.infer.images import reading
from tokenformer.models import build

ICONS = Path(__file__).parents[2] / "examples" / "icons"
FOOD = ICONS / "val" / "food"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Random weights that are larger than at first, so that it tells images apart."""
    tokens = {"qkv_tokens": 24, "proj_tokens": 16, "ffn_tokens": [48, 16], "switch": {"ffn": ["", "image"]}}
    text = ModelConfig(layers=2, dim=32, heads=4, context=64, vocab=257, **tokens)
    model = larger(larger(build(ModelConfig(of="caption", trunks={"image": IMAGE, "text": text}), seed=3)))
    model.images = {"size": 16, "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0, "interpolation": "bicubic"}
    path = tmp_path_factory.mktemp("caption") / "model"
    save(model, path, tokenizer_json=ByteTokenizer().to_json())
    return path


def expected(folder: Path, image: Path, prompt: str, n: int) -> str:
    """By the reference: the end token 0, bytes + 1."""
    model = load(folder).eval()
    settings, size = reading(model)
    _, pixels, _, _ = next(iter(batches(find_images([str(image)]), settings, size, 1)))
    ids = torch.tensor([[0, *(b + 1 for b in prompt.encode())]])
    made = model.generate(as_input(model, pixels, settings), ids, n)[0, ids.shape[1] :].tolist()
    return ByteTokenizer().decode(made[: made.index(0)] if 0 in made else made)


def test_it_writes_about_images_and_answers_after_them(folder, capsys, tmp_path):
    egg, potato = FOOD / "egg.png", FOOD / "potato.png"
    assert main(["generate", str(folder), "--image", str(egg), "--tokens", "8"]) in (0, None)
    assert capsys.readouterr().out.rstrip("\n") == expected(folder, egg, "", 8).rstrip("\n")
    main(["generate", str(folder), "--image", str(egg), "--image", str(potato), "--prompt", "Is it", "--tokens", "6"])
    said = [f"{path}: Is it{expected(folder, path, 'Is it', 6)}" for path in (egg, potato)]
    assert capsys.readouterr().out.rstrip("\n") == "\n".join(said).rstrip("\n")
    bad = tmp_path / "bad.png"
    bad.write_bytes(egg.read_bytes()[:100])
    assert main(["generate", str(folder), "--image", str(bad), "--image", str(egg), "--tokens", "2"]) == 2
    found = capsys.readouterr()
    assert f"{bad} is damaged" in found.err and f"{egg}: " in found.out


def test_json_lines_name_the_image_they_are_about(folder, capsys):
    images = [str(FOOD / f"{name}.png") for name in ("egg", "potato")]
    main(["generate", str(folder), "--image", images[0], "--image", images[1], "--tokens", "3", "--logprobs"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["image"] for line in lines] == images and all(len(line["logprobs"]) <= 3 for line in lines)


def test_the_logits_of_a_text_are_those_behind_its_image(folder, capsys, tmp_path):
    keys = {"text_gen_type": "unconditional", "return_logits": True, "maximum_tokens": 6}
    (tmp_path / "settings.yml").write_text(json.dumps(keys))
    words = ["generate", str(folder), str(tmp_path / "settings.yml"), "--prompt", "Is it", "--logprobs"]
    for name in ("egg", "potato"):
        main([*words, "--image", str(FOOD / f"{name}.png")])
        line = json.loads(capsys.readouterr().out)
        best = [max(torch.tensor(row).log_softmax(0).tolist()) for row in line["logits"]]
        assert best == pytest.approx(line["logprobs"], abs=1e-4) and best


def test_a_text_without_an_image_is_measured_by_its_language_model(folder, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("An egg is an egg, and a potato is none. " * 20)
    save(load(folder).text, tmp_path / "language", tokenizer_json=ByteTokenizer().to_json())
    losses = []
    for model in (folder, tmp_path / "language"):
        out = tmp_path / f"{model.name}.json"
        assert main(["eval", str(model), "--text", str(tmp_path / "text.txt"), "--out", str(out)]) in (0, None)
        losses.append(next(iter(json.loads(out.read_text())["texts"].values()))["loss"])
    assert losses[0] == losses[1]


def test_a_conversation_is_about_the_image(folder, capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("What\n/quit\n"))
    main(["generate", str(folder), "--image", str(FOOD / "egg.png"), "--interactive", "--tokens", "5"])
    assert capsys.readouterr().out.rstrip("\n") == expected(folder, FOOD / "egg.png", "What", 5).rstrip("\n")


def test_without_an_image_it_is_the_language_model(folder, capsys):
    main(["generate", str(folder), "--prompt", "It was", "--tokens", "6"])
    ids = torch.tensor([[b + 1 for b in b"It was"]])
    made = load(folder).text.generate(ids, 6)[0].tolist()
    made = made[: made.index(0)] if 0 in made else made
    assert capsys.readouterr().out.rstrip("\n") == ByteTokenizer().decode(made).rstrip("\n")


def test_a_warning_is_a_sentence_that_names_no_code(folder, tmp_path):
    (tmp_path / "images").symlink_to(ICONS / "val")
    for name in ("val.csv", "more.csv"):
        (tmp_path / name).write_text("image,caption\nimages/food/egg.png,egg\n")
    command = [sys.executable, "-m", "tokenformer", "eval", str(folder), "--pairs", str(tmp_path), "--limit", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    line = next(line for line in done.stderr.splitlines() if "more.csv is of no part" in line)
    assert done.returncode == 0 and line.startswith("tokenformer: ") and "warnings.warn" not in done.stderr


def test_what_is_measured_counts_only_whole_images(folder, capsys, tmp_path):
    out = tmp_path / "found.json"
    assert main(["eval", str(folder), "--pairs", str(ICONS), "--limit", "12", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["images"] == 12 and found["among"] == 12 and len(found["captions"]) == 12
    assert 0 <= found["first"] <= found["first_five"] <= 1
    assert "the right name is the likeliest of 12" in capsys.readouterr().out
    rows = ["image,caption", f"{FOOD}/egg.png,egg", f"{tmp_path}/bad.png,bad", f"{FOOD}/potato.png,potato"]
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "some.csv").write_text("\n".join(rows) + "\n")
    assert main(["eval", str(folder), "--pairs", str(tmp_path / "some.csv")]) == 2
    found = capsys.readouterr()
    assert "bad.png is damaged" in found.err and "2 images" in found.out
    assert "100.00%" in found.out  # by chance the right one of 3 is among the five likeliest


def test_a_text_that_was_cut_is_not_called_whole(folder):
    """So that none is exact because it was cut where the caption ends."""
    model = load(folder).eval()
    settings, size = reading(model)
    _, pixels, _, _ = next(iter(batches(find_images([str(FOOD / "egg.png")]), settings, size, 1)))
    made = model.generate(x := as_input(model, pixels, settings), torch.tensor([[0]]), 40)[0, 1:].tolist()
    length = made.index(0) if 0 in made else 40
    assert [ended for _, ended in captions(model, x, ByteTokenizer(), length)] == [False]
    assert captions(model, x, ByteTokenizer(), 40)[0][1] == (0 in made)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "MODEL", "--image", "EGG", "--image", "EGG", "--interactive"], "about one image"),
        (["generate", "MODEL", "--image", "gone.png"], "there is no image and no folder gone.png"),
        (["eval", "MODEL", "--images", str(ICONS)], "`tokenformer generate --image` writes with it"),
        (["eval", "MODEL", "--text", "x"], "x"),
        (["convert", "MODEL", "--to", "hf", "--out", "OUT"], "transformers has no class for a model of caption"),
        (
            ["edit", "MODEL", "--mute", "0:ffn:1", "--out", "OUT"],
            "is a model of caption, but one of language is needed",
        ),
        (
            ["generate", "MODEL", "--image", "EGG", "--prompt", "a" * 60],
            "has 61 tokens, the model's context is 59 behind the image: shorten it",
        ),
    ],
)
def test_what_is_refused(folder, tmp_path, capsys, words, said):
    names = {"MODEL": str(folder), "EGG": str(FOOD / "egg.png"), "OUT": str(tmp_path / "out")}
    assert main([names.get(word, word) for word in words]) == 2
    assert said in capsys.readouterr().err


def test_info_and_grow_know_it(folder, capsys, tmp_path):
    main(["info", str(folder)])
    assert "a language model that reads images as 5 positions" in capsys.readouterr().out
    words = ["--on", "text.", "--ffn-tokens", "80", "--switch", "image", "--out", str(tmp_path / "grown")]
    main(["grow", str(folder), *words])
    assert "computes the same: yes" in capsys.readouterr().out
    assert load(tmp_path / "grown").config.trunk("text.").ffn_tokens == [48, 16, 16]


def test_a_growth_is_verified_on_rows_of_the_language_models_own_context(folder, tmp_path, capsys):
    text = tmp_path / "short.txt"
    text.write_text("a row is 64 tokens long, not 512 " * 4)
    how = ["--on", "text.", "--ffn-tokens", "80", "--text", str(text), "--out", str(tmp_path / "bigger")]
    assert main(["grow", str(folder), *how]) in (0, None)
    assert "computes the same: yes" in capsys.readouterr().out
