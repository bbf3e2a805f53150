"""Drawing the icons of examples/: learned, killed, resumed, grown, around a frozen language model; palettes."""

import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.conftest import result, same
from tests.train.test_caption import ICONS, child_of, held_out_damage, language, train  # noqa: F401 (a fixture)
from tokenformer import attach, grow, save
from tokenformer import load as load_model
from tokenformer.cli.main import main
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.errors import UserError
from tokenformer.hub.open import read_config
from tokenformer.infer.draw import Drawer
from tokenformer.infer.sampling import Sampling
from tokenformer.models.draw import picture_sequences
from tokenformer.ops.palette import find_palette, quantise
from tokenformer.strict import to_yaml
from tokenformer.train.draw import DrawTask
from tokenformer.train.report import read_rows

CONFIG = f"""
task: draw
model: {{layers: 1, dim: 32, heads: 4, qkv_tokens: 24, proj_tokens: 24, ffn_tokens: 48, context: 96, vocab: 384,
         added_vocab: 9, added_switch: draw, rotary_fraction: 1.0}}
data: {{path: {ICONS}, tokenizer: byte, workers: 0, images: {{size: 8, crop: centre, crop_pct: 1.0}}}}
steps: 6
batch: 8
micro_batch: 4
optimizer: {{rate: 4e-3}}
train: {{precision: fp32, device: cpu}}
checkpoint: {{every: 2, keep: 0}}
validation: {{every: 3, samples: 11, generate: 1}}
log: {{every: 1}}
"""
GROWS = "growth=[{at: {images: 24}, ffn_tokens: 80, switch: draw}]"  # after three steps
IDS = torch.arange(60).view(2, 30) * 7 % 384


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "draw.yml").write_text(CONFIG)
    return tmp_path / "draw.yml"


def two_icons(folder: Path) -> Path:
    """Write a table of two icons, which lie beside it: their order depends on their paths from it."""
    for name in ("avocado", "carrot"):
        shutil.copy(ICONS / "train" / "food" / f"{name}.png", folder)
    (folder / "two.csv").write_text("image,caption\navocado.png,avocado\ncarrot.png,carrot\n")
    return folder / "two.csv"


class Dying(DrawTask):
    """Kills its process in step 5, between two micro-batches."""

    calls = 0

    def loss(self, model, batch):
        self.calls += torch.is_grad_enabled()
        if self.calls == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def test_it_learns_by_heart_to_draw_what_a_text_says(file, tmp_path):
    """Two icons: each text gives its own, pixel by pixel, in the colours of the palette."""
    heart = [f"data.path={two_icons(tmp_path)}", "data.images.flip=0", "steps=100", "checkpoint.every=0"]
    run = train(file, tmp_path / "run", *heart, "optimizer.rate=1e-2", "micro_batch=8", "model.init=zero")
    model = load_model(tmp_path / "run").eval()
    drawer = Drawer(model, ByteTokenizer())
    made = drawer.draw(["avocado", "carrot"], Sampling())
    fields = {name: np.zeros((2, *f.shape), f.dtype) for name, f in run.task.loader.sources[0].fields.items()}
    run.task.loader.sources[0].read(np.arange(2), np.zeros(2, int), fields)
    right = run.task.codes.palette[quantise(torch.from_numpy(fields["pixels"]), run.task.codes.palette)]
    assert (torch.from_numpy(made).flatten(1, 2) == right).float().mean() > 0.9
    assert made.shape == (2, 8, 8, 3) and not np.array_equal(made[0], made[1])
    guided = drawer.draw(["avocado", "carrot"], Sampling(), guidance=3.0)
    assert (torch.from_numpy(guided).flatten(1, 2) == right).float().mean() > 0.8


def test_an_adapter_learns_to_draw_and_draws_on_the_command_line(file, tmp_path):
    """Only its tokens learn; with it another picture is drawn, and without it that of the base."""
    train(file, tmp_path / "base", "checkpoint.every=0", "steps=2")
    base = load_model(tmp_path / "base")
    settings = ["task=draw", f"data.path={ICONS}", "adapter.ffn_tokens=16", "steps=3", "optimizer.rate=0.5"]
    assert main(["train", str(tmp_path / "base"), *settings, "--out", str(tmp_path / "run")]) == 0
    tuned = load_model(tmp_path / "base")
    attach(tuned, tmp_path / "run", "run")
    drawn = {}
    with_run = ["--adapter", str(tmp_path / "run")]
    for name, words in {"base": [], "tuned": with_run, "off": ["--adapter", f"{with_run[1]}=0"]}.items():
        out = tmp_path / f"{name}.png"
        assert main(["draw", str(tmp_path / "base"), "fox", "--out", str(out), "--temperature", "0", *words]) == 0
        drawn[name] = out.read_bytes()
    assert drawn["off"] == drawn["base"] != drawn["tuned"]
    assert all(torch.equal(p, dict(tuned.named_parameters())[n]) for n, p in base.named_parameters())


@pytest.mark.multi
def test_killed_and_resumed_around_a_frozen_language_model_it_ends_in_the_same_bits(file, language, tmp_path):  # noqa: F811
    """The vocabulary of the language model grows first; what it says of texts stays what it was, bit for bit."""
    base = load_model(language)
    bigger = grow(base, vocab=393, ffn_tokens=64, switch="draw")
    save(bigger, tmp_path / "bigger", tokenizer_json=ByteTokenizer().to_json())
    (tmp_path / "recipe.yml").write_text(CONFIG[: CONFIG.index("model:")] + CONFIG[CONFIG.index("data:") :])
    config = read_config(tmp_path / "recipe.yml", tmp_path / "bigger", overrides=["model.context=96"])
    words = (GROWS, "train.freeze=language")
    file.write_text(to_yaml(config))
    train(file, tmp_path / "whole", *words)
    call = "train(*sys.argv[1:], task=Dying)"
    assert child_of("test_draw", call, file, tmp_path / "run", *words, "data.workers=1").wait() == -signal.SIGKILL
    again = train(file, tmp_path / "run", *words, resume=True)
    assert again.found.path.name == "step-00000004" and same(result(tmp_path / "whole"), result(tmp_path / "run"))
    model = load_model(tmp_path / "run")
    assert model.config.ffn_tokens == [48, 16, 16] and model.codes.side == 8 and model.codes.palette.shape == (8, 3)
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    assert torch.equal(model(IDS, labels=IDS).loss_sum, base(IDS, labels=IDS).loss_sum)
    mixed = model(IDS, switches={"draw": torch.tensor([0.0, 1.0])}).logits
    torch.testing.assert_close(mixed[0, :, :384], base(IDS).logits[0], rtol=0, atol=1e-6)
    assert not torch.allclose(mixed[1, :, :384], base(IDS).logits[1], atol=1e-4)
    growth = next(row for row in read_rows(tmp_path / "whole") if row.get("what") == "growth")
    assert growth["losses"][0] == pytest.approx(growth["losses"][1], rel=1e-5)
    assert (tmp_path / "run" / "samples" / "6" / "drawings.png").read_bytes()[:4] == b"\x89PNG"
    # a run that starts with these weights draws in their colours, whatever its own pictures are
    save(model, tmp_path / "drawn")
    settings = (f"data.path={two_icons(tmp_path)}", "steps=1")
    config = read_config(tmp_path / "recipe.yml", tmp_path / "drawn", overrides=settings)
    file.write_text(to_yaml(config))
    more = train(file, tmp_path / "more")
    assert torch.equal(more.task.codes.palette, model.codes.palette)
    with pytest.raises(UserError, match=r"draw 8 × 8 pixels, but data.images.size is 4"):
        train(file, tmp_path / "other", "data.images.size=4")


def test_the_loss_is_that_of_codes_alone_and_the_figure_is_in_bits(file, tmp_path):
    run = train(file, tmp_path / "run", "steps=1", "checkpoint.every=0")
    found = [row for row in read_rows(tmp_path / "run") if row["kind"] == "validation"][-1]
    assert found["bits_per_code"] == pytest.approx(found["loss"] / np.log(2))
    task, model = run.task, run.model
    batch = task.on_device(next(iter(task.loader)))
    total, count = task.loss(model, {k: v for k, v in batch.items() if k != "draws"})
    assert count == 4 * 64
    codes = quantise(batch["pixels"], task.palette)
    ids, labels = picture_sequences(batch["ids"], batch["length"], codes, 0, 384)
    logits = model(ids, switches={"draw": torch.ones(4)}).logits
    assert logits.shape[-1] == 393 and (labels[labels >= 0] > 384).all()
    torch.testing.assert_close(total, torch.nn.functional.cross_entropy(logits.mT, labels, reduction="sum"))


def test_some_texts_are_left_out_in_training_and_none_in_validation(file, tmp_path):
    run = train(file, tmp_path / "run", "steps=0", "data.images.drop_caption=0.5")
    source = run.task.loader.sources[0]
    texts = [source.caption(0, epoch) for epoch in range(100)]
    assert 30 < texts.count("") < 70 and texts == [source.caption(0, epoch) for epoch in range(100)]
    assert "" not in [run.task.held_out.sources[0].caption(0, epoch) for epoch in range(100)]


def test_texts_that_are_cut_are_said(file, tmp_path, capsys):
    train(file, tmp_path / "run", "model.context=70", "steps=0")  # 64 codes, and 6 tokens with the end
    assert re.search(r"[1-9]\d* of the first 120 captions are longer than the 5 tokens", capsys.readouterr().out)


def test_damaged_pictures_are_named_or_left_out(file, tmp_path):
    lines = ["image,caption", f"{ICONS}/train/food/avocado.png,avocado", "gone.png,gone"]
    (tmp_path / "bad.csv").write_text("\n".join(lines) + "\n")
    bad = f"data.path={tmp_path / 'bad.csv'}"
    with pytest.raises(UserError, match=r"gone.png is damaged"):
        train(file, tmp_path / "run", bad)
    assert not (tmp_path / "run").exists()
    train(file, tmp_path / "other", bad, "data.images.damaged=skip")
    rows = [row for row in read_rows(tmp_path / "other") if row["kind"] == "train"]
    assert sum(row["damaged"] for row in rows) == 24
    assert held_out_damage(file, tmp_path) == ([0] * 6, [1, 1])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.added_vocab=2"], r"has 2 added ids: grow a language model .* to 3 or more"),
        (["model.added_switch=other"], "the switch 'other', but drawing gives 'draw'"),
        (["model.context=64"], "has 64 codes, but model.context is 64"),
        (["data.images.cutmix=1"], "data.images.cutmix is 1"),
        (["task=caption"], "task is caption, but the model is of language: begin with caption/icons"),
        (
            [GROWS.replace("switch: draw", "switch: image")],
            "growth.switch is 'image', but this task gives 'draw' alone",
        ),
    ],
)
def test_what_is_refused_before_anything_is_written(file, tmp_path, settings, said):
    with pytest.raises(UserError, match=said):
        train(file, tmp_path / "run", *settings)
    assert not (tmp_path / "run").exists()


def test_a_palette_is_near_all_colours_and_the_same_whatever_the_order():
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (40, 8, 8, 3)).astype(np.uint8)
    palette = find_palette([pixels], 32)
    assert torch.equal(palette, find_palette([pixels[20:], pixels[:20]], 32))
    near = palette[quantise(torch.from_numpy(pixels), palette)].float().view(40, 8, 8, 3)
    other = torch.from_numpy(random.integers(0, 256, (32, 3)).astype(np.uint8))
    worse = other[quantise(torch.from_numpy(pixels), other)].float().view(40, 8, 8, 3)
    errors = [(torch.from_numpy(pixels).float() - guess).square().mean() for guess in (near, worse)]
    assert errors[0] < 0.8 * errors[1]
    some = np.array([[[9, 8, 7], [200, 0, 0]]], np.uint8)  # fewer colours than asked for
    assert set(map(tuple, find_palette([some], 4).tolist())) == {(9, 8, 7), (200, 0, 0)}


READS = """
model:
  of: caption
  trunks:
    image: {of: image, layers: 1, dim: 32, heads: 4, qkv_tokens: 24, proj_tokens: 24, ffn_tokens: 48, image_size: 32,
            patch: 8, classes: 0, pool: mean}
    text: {layers: 1, dim: 32, heads: 4, qkv_tokens: 24, proj_tokens: 24, vocab: 384, context: 96, rotary_fraction: 1.0,
           %s}
"""
REST = CONFIG[CONFIG.index("data:") :].replace("images: {size: 8, crop: centre, crop_pct: 1.0}", "images: {size: %d}")
BOTH = 'ffn_tokens: [48, 32, 16], switch: {ffn: ["", draw, image]}, added_vocab: 9, added_switch: draw'


def test_a_model_that_reads_learns_to_draw_and_reads_and_writes_as_before(language, tmp_path):  # noqa: F811
    """A language model, then one that reads around it, then one that draws around that: each stays what it was."""
    recipe = READS % 'ffn_tokens: [48, 16], switch: {ffn: ["", image]}' + REST % 32
    recipe = recipe.replace(", rotary_fraction: 1.0", "")
    (tmp_path / "read.yml").write_text(recipe)
    train(tmp_path / "read.yml", tmp_path / "read", f"start={language}", "train.freeze=language")
    grown = ["grow", tmp_path / "read", "--on", "text.", "--vocab", 393, "--ffn-tokens", 96, "--switch", "draw"]
    assert main([str(word) for word in [*grown, "--out", tmp_path / "grown"]]) == 0
    (tmp_path / "draw.yml").write_text("task: draw\n" + REST % 8)
    config = read_config(tmp_path / "draw.yml", tmp_path / "grown", overrides=["train.freeze=language"])
    (tmp_path / "draws.yml").write_text(to_yaml(config))
    train(tmp_path / "draws.yml", tmp_path / "both")
    base, reads, both = load_model(language), load_model(tmp_path / "read"), load_model(tmp_path / "both")
    assert both.config.trunks["text"].ffn_tokens == [48, 16, 32] and both.images == reads.images
    assert torch.equal(both(IDS).logits, base(IDS).logits)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(both(IDS, pixels).logits, reads(IDS, pixels).logits)
    before = dict(load_model(tmp_path / "grown").named_parameters())
    moved = {name for name, value in both.named_parameters() if not torch.equal(value, before[name])}
    of = "text.blocks.0.ffn.segments.2."
    assert moved == {"text.added_embedding.weight", f"{of}key_tokens", f"{of}value_tokens"}
    words = ["draw", tmp_path / "both", "avocado", "--out", tmp_path / "drawn.png"]
    assert main([str(word) for word in words]) == 0 and (tmp_path / "drawn.png").exists()
    # going on reading, and saving, keep the colours
    save(both, tmp_path / "saved")
    (tmp_path / "more.yml").write_text(REST % 32)
    config = read_config(tmp_path / "more.yml", tmp_path / "saved", overrides=["steps=1"])
    (tmp_path / "mores.yml").write_text(to_yaml(config))
    train(tmp_path / "mores.yml", tmp_path / "more")
    assert torch.equal(load_model(tmp_path / "more").codes.palette, both.codes.palette)


def test_a_model_that_draws_learns_to_read_and_draws_as_before(file, tmp_path):
    shape = [f"model.{one}" for one in ("ffn_tokens=[48, 32]", 'switch={ffn: ["", draw]}')]
    train(file, tmp_path / "draw", *shape)
    (tmp_path / "read.yml").write_text(READS % BOTH + REST % 32)
    words = (f"start={tmp_path / 'draw'}", "train.freeze=language")
    train(tmp_path / "read.yml", tmp_path / "both", *words)
    draws, both = load_model(tmp_path / "draw").eval(), load_model(tmp_path / "both").eval()
    assert torch.equal(both.text(IDS).logits, draws(IDS).logits)
    pictures = [Drawer(m, ByteTokenizer()).draw(["avocado"], Sampling(temperature=1.0)) for m in (draws, both)]
    assert np.array_equal(*pictures)
    # a run killed before goes on although what it began with is gone
    shutil.rmtree(tmp_path / "draw")
    again = train(tmp_path / "read.yml", tmp_path / "both", *words, "steps=7", resume=True)
    assert again.step == 7 and load_model(tmp_path / "both").codes is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOTH.replace('"", draw, image', '"", image, draw').replace("32, 16", "16, 32"), "put those with"),
        (BOTH.replace("added_vocab: 9", "added_vocab: 10"), "added_vocab is 10"),
        ('ffn_tokens: [48, 16], switch: {ffn: ["", image]}', "ffn_tokens is 48 .*, and \\[48, 32\\] there"),
    ],
)
def test_a_model_that_is_not_that_of_the_drawer_is_refused(file, tmp_path, text, said):
    shape = [f"model.{one}" for one in ("ffn_tokens=[48, 32]", 'switch={ffn: ["", draw]}')]
    train(file, tmp_path / "draw", *shape, "steps=1")
    (tmp_path / "read.yml").write_text(READS % text + REST % 32)
    with pytest.raises(UserError, match=said):
        train(tmp_path / "read.yml", tmp_path / "both", f"start={tmp_path / 'draw'}")


def test_a_language_model_of_random_values_is_not_frozen(file, tmp_path):
    with pytest.raises(UserError, match="random values would be frozen: give start"):
        train(file, tmp_path / "run", "train.freeze=language")
