"""Pictures on the command line, and the engine on ids that were added behind a padded vocabulary."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tests.models.test_caption import larger
from tokenformer import LanguageModel, grow, load, save
from tokenformer.cli.main import main
from tokenformer.config import ModelConfig
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.infer.draw import Drawer
from tokenformer.infer.engine import Engine
from tokenformer.infer.sampling import Sampling
from tokenformer.ops.palette import Codes

TINY = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=64, vocab=384, context=64)
PALETTE = torch.tensor([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255]], dtype=torch.uint8)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """Random weights, larger than at first; 4 colours, pictures of 4 × 4."""
    made = grow(LanguageModel(TINY, seed=3), vocab=389, ffn_tokens=96, switch="draw")
    made.codes = Codes(PALETTE, 4)
    with torch.no_grad():
        made.blocks[0].ffn.segments[1].value_tokens.normal_(0, 0.1)
    return larger(larger(made))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("draw") / "model"
    save(model, path, tokenizer_json=ByteTokenizer().to_json())
    return path


def reference(model: LanguageModel, text: str, guidance: float) -> np.ndarray:
    """Without cache and engine: the likeliest code, one after another."""
    made: list[int] = []
    on = {"draw": torch.ones(1)}
    for _ in range(16):
        with_, without = (
            model(torch.tensor([[0, *(b + 1 for b in t.encode()), 384, *made]]), switches=on).logits[0, -1, 385:]
            for t in (text, "")
        )
        made.append(385 + int((without + guidance * (with_ - without)).argmax()))
    return PALETTE[torch.tensor(made) - 385].view(4, 4, 3).numpy()


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_a_picture_is_that_of_the_reference(model, folder, tmp_path, capsys, guidance):
    words = ["--temperature", "0", "--guidance", str(guidance), "--scale", "1"]
    main(["draw", str(folder), "a red heart", "sea", *words, "--out", str(tmp_path / "two.png")])
    assert f"{tmp_path / 'two.png'}: 2 pictures of 4 × 4 pixels" in capsys.readouterr().out
    found = np.asarray(Image.open(tmp_path / "two.png"))
    assert found.shape == (4 + 4 + 4, 4, 3)
    for top, text in ((0, "a red heart"), (8, "sea")):
        np.testing.assert_array_equal(found[top : top + 4], reference(model, text, guidance))


def test_a_grid_is_drawn_by_seeds_and_the_codes_lie_beside_the_weights(folder, tmp_path):
    words = ["draw", str(folder), "a", "b", "--count", "3", "--scale", "2", "--batch", "4"]
    main([*words, "--out", str(tmp_path / "one.png")])
    main([*words, "--out", str(tmp_path / "same.png")])
    main([*words, "--seed", "9", "--out", str(tmp_path / "other.png")])
    one, same, other = ((tmp_path / f"{name}.png").read_bytes() for name in ("one", "same", "other"))
    assert one == same != other
    assert Image.open(io.BytesIO(one)).size == (3 * 8 + 2 * 4, 2 * 8 + 4)
    with safe_open(folder / "codes.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("palette"), PALETTE) and file.metadata()["side"] == "4"


@pytest.mark.parametrize("how", [["--no-verify"], []])
def test_codes_survive_growth_and_shrinking(folder, tmp_path, how):
    main(["grow", str(folder), "--ffn-tokens", "128", "--out", str(tmp_path / "grown"), *how])
    again = load(tmp_path / "grown")
    assert again.codes is not None and torch.equal(again.codes.palette, PALETTE) and again.codes.side == 4


def test_ids_between_and_behind_are_chosen_or_not_as_the_range_says(model):
    """The padding 257 … 383 is never chosen, the added ids only where they count; greedy and sampled."""
    strange = load_like(model)
    with torch.no_grad():
        strange.embedding.weight[257:] *= 50  # such a model would choose nothing else
    engine, prompts = Engine(strange, vocab=257), [[5, 6], [7]]
    for how in (Sampling(), Sampling(temperature=3.0), Sampling(repetition_penalty=1.2)):
        plain = engine.generate(prompts, 20, how)
        assert all(id < 257 for row in plain for id in row.ids)
        mixed = engine.generate(prompts, 20, how, switches=[{}, {"draw": 1.0}])
        assert all(id < 257 for id in mixed[0].ids) and mixed[0].ids == plain[0].ids
        assert all(id < 257 or id >= 384 for id in mixed[1].ids)
    with torch.no_grad():
        strange.added_embedding.weight.mul_(200)
    assert max(Engine(strange, vocab=257).generate(prompts, 9, switches=[{"draw": 1.0}] * 2)[0].ids) >= 384
    assert max(Engine(strange, vocab=257).generate(prompts, 9)[0].ids) < 257


def load_like(model: LanguageModel) -> LanguageModel:
    other = LanguageModel(model.config)
    other.load_state_dict(model.state_dict())
    return other.eval()


def test_a_text_may_fill_the_context_but_for_the_picture(model):
    assert Drawer(model, ByteTokenizer()).draw(["x" * 46, "y"]).shape == (2, 4, 4, 3)


def test_the_engine_reads_and_writes_added_ids_as_the_reference_does(model):
    """With ids that always count, tied and untied."""
    import dataclasses

    for tied in (True, False):
        small = LanguageModel(dataclasses.replace(TINY, vocab=40, tied=tied), seed=4)
        always = larger(larger(grow(small, vocab=60)))
        prompts = [[50, 3], [2, 59, 41]]
        found = Engine(always, every=4).generate(prompts, 8)
        right = [always.generate(torch.tensor([p]), 8)[0, len(p) :].tolist() for p in prompts]
        assert [row.ids for row in found] == right


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["draw", "PLAIN", "a"], "no codes.safetensors beside it"),
        (["draw", "MODEL", " "], "a text is empty"),
        (["draw", "MODEL", "x" * 47], "the text has 47 tokens, and 46 fit before a picture"),
        (["draw", "MODEL", "a", "--count", "0"], "--count is 0"),
        (["draw", "BROKEN", "a"], "should hold a palette"),
        (["draw", "MODEL", "a", "--guidance", "nan"], "guidance is nan: give a number, such as 2"),
        (["draw", "MODEL", "a", "--scale", "5000"], "--scale 5000 makes a file of more than 100,000,000 pixels"),
    ],
)
def test_what_is_refused(folder, tmp_path, capsys, words, said):
    save(LanguageModel(TINY), tmp_path / "plain", tokenizer_json=ByteTokenizer().to_json())
    broken = load(folder)
    broken.codes = Codes(torch.zeros(90, 3, dtype=torch.uint8), 4)
    save(broken, tmp_path / "broken")
    names = {"MODEL": str(folder), "PLAIN": str(tmp_path / "plain"), "BROKEN": str(tmp_path / "broken")}
    assert main([*(names.get(word, word) for word in words), "--out", str(tmp_path / "a.png")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "a.png").exists()
