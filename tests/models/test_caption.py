"""A language model that reads images: texts alone stay what they were, bit for bit; masks; decoding; growth."""

import dataclasses

import pytest
import torch

from tokenformer import grow
from tokenformer.config import ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.errors import UserError
from tokenformer.growth.model import apply_plan, plan_for
from tokenformer.growth.verify import verify
from tokenformer.infer.engine import Engine
from tokenformer.infer.sampling import Sampling
from tokenformer.models import CaptionModel, LanguageModel, build
from tokenformer.models.cost import training_flops_per_sample

SHAPE = {"layers": 2, "dim": 32, "heads": 4, "qkv_tokens": 24, "proj_tokens": 16}
IMAGE = ModelConfig(
    of="image", image_size=16, patch=8, classes=0, ffn_tokens=48, **SHAPE
)  # 4 patches and a class token
TEXT = ModelConfig(ffn_tokens=48, context=24, vocab=40, **SHAPE)
READS = {"ffn_tokens": [48, 16], "qkv_tokens": [24, 8], "switch": {"ffn": ["", "image"], "qkv": ["", "image"]}}
IDS = torch.randint(40, (3, 7), generator=torch.Generator().manual_seed(1))
THERE = torch.tensor([True, False, True])


def caption(**text) -> ModelConfig:
    return ModelConfig(of="caption", trunks={"image": IMAGE, "text": dataclasses.replace(TEXT, **{**READS, **text})})


def pixels(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def language() -> LanguageModel:
    return larger(LanguageModel(TEXT, seed=5))


@pytest.fixture
def model(language: LanguageModel) -> CaptionModel:
    """Reads images by segments with values that are not zero, around the language model."""
    made = larger(build(caption(), seed=1))
    own = dict(language.named_parameters())
    with torch.no_grad():
        for name, parameter in made.text.named_parameters():
            if name in own:
                parameter.copy_(own[name])
    return made


def larger(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model.eval()


def test_a_batch_without_images_is_the_language_model_bit_for_bit(model, language):
    for nothing in ({}, {"pixels": pixels(), "there": torch.zeros(3, dtype=torch.bool)}):
        assert torch.equal(model(IDS, **nothing).logits, language(IDS).logits)
        losses = [m(IDS[:, :-1], labels=IDS[:, 1:], **more).loss_sum for m, more in ((model, nothing), (language, {}))]
        assert torch.equal(*losses)


def test_in_a_mixed_batch_samples_without_an_image_are_the_language_models(model, language):
    mixed = model(IDS, pixels(), THERE).logits
    torch.testing.assert_close(mixed[1], language(IDS).logits[1], rtol=0, atol=1e-6)
    assert not torch.allclose(mixed[0], language(IDS).logits[0], atol=1e-2)
    torch.testing.assert_close(mixed[THERE], model(IDS[THERE], pixels()[THERE]).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("switch", ["", "draw"])
def test_the_same_holds_after_the_vocabulary_grew(model, language, switch):
    bigger = grow(model, on="text.", vocab=60, switch=switch)
    with torch.no_grad():
        bigger.text.added_embedding.weight.normal_()
    alone, mixed = bigger(IDS).logits, bigger(IDS, pixels(), THERE).logits
    assert torch.equal(alone[..., :40], language(IDS).logits)
    assert alone.shape[-1] == mixed.shape[-1] == (40 if switch else 60)
    torch.testing.assert_close(mixed[1, :, :40], language(IDS).logits[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(mixed[..., :40], model(IDS, pixels(), THERE).logits, rtol=0, atol=1e-6)


def test_a_text_sees_its_image_and_what_comes_before_and_nothing_else(model):
    before, other = model(IDS, pixels()).logits, IDS.clone()
    other[:, 4] = (other[:, 4] + 1) % 40
    after = model(other, pixels()).logits
    torch.testing.assert_close(after[:, :4], before[:, :4], rtol=0, atol=1e-6)
    assert not torch.allclose(after[:, 4:], before[:, 4:], atol=1e-3)
    moved = pixels()
    moved[0] += 1
    again = model(IDS, moved).logits
    assert not torch.allclose(again[0], before[0], atol=1e-3)
    torch.testing.assert_close(again[1:], before[1:], rtol=0, atol=1e-6)


def test_the_positions_of_an_image_see_each_other(model, monkeypatch):
    """The last one changes what the blocks make of the first one. (The image trunk, which mixes all, is left out.)"""
    seen, features = [], model.encode_image(pixels())
    model.text.blocks[1].attention_norm.register_forward_hook(lambda _m, _x, out: seen.append(out[:, 0].detach()))
    for much in (0.0, 5.0):
        changed = features.clone()
        changed[:, -1, 0] += much
        monkeypatch.setattr(model, "_read", lambda _pixels, changed=changed: changed)
        model(IDS, pixels())
    assert not torch.allclose(seen[0], seen[1], atol=1e-4)


def test_steps_with_a_cache_give_the_logits_of_one_pass(model):
    ids = IDS[:, :1]
    made = model.generate(pixels(), ids, 6)
    for place in range(1, 7):
        best = model(made[:, :place], pixels()).logits[:, -1].argmax(-1)
        assert torch.equal(best, made[:, place])
    labels = torch.where(torch.arange(7) < 5, IDS, -100)
    found = model.likelihoods(pixels(), IDS, labels)
    for row in range(3):
        logits = model(IDS, pixels()[row : row + 1].expand(3, -1, -1, -1)).logits.log_softmax(-1)
        one = logits[:, :5].gather(-1, IDS[:, :5, None]).sum((1, 2))
        torch.testing.assert_close(found[row], one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [2, 1024])
def test_the_engine_writes_what_the_reference_writes(model, language, chunk):
    engine = Engine(model.text, chunk=chunk, every=3)
    prompts = [[5], [7, 8, 9], [3, 4]]
    plain = engine.generate(prompts, 5)
    assert [row.ids for row in plain] == [row.ids for row in Engine(language, chunk=chunk).generate(prompts, 5)]
    for number in range(2):
        x = pixels()[number : number + 1]
        engine.read(model.encode_image(x)[0])
        engine.active = {"image": 1.0}
        found = [row.ids for row in engine.generate(prompts, 5)]
        assert found == [model.generate(x, torch.tensor([p]), 5)[0, len(p) :].tolist() for p in prompts]
        assert len(engine.generate([[1]], 99)[0].ids) == 24 - 5 - 1  # the context is full
    engine.read(None)
    engine.active = {}
    assert engine.generate(prompts, 5) == plain
    with pytest.raises(UserError, match="24 positions before the text, but the model's context is 24"):
        engine.read(torch.zeros(24, 32))


def test_no_model_uses_one_way_in_inside_of_another(model):
    """FSDP takes the end of the inner one for the end of all, and gathers once more what the root holds."""
    text = dataclasses.replace(TEXT, of="text", pool="end")
    two = ModelConfig(of="pair", embed=16, trunks={"image": IMAGE, "text": text})
    images, ways = pixels(), {}
    ways["image"] = [lambda one: one(images), lambda one: type(one).forward_features(one, images)]
    ways["pair"] = [lambda one: one(images, IDS), lambda one: type(one).encode_text(one, IDS)]
    ways["caption"] = [lambda one: one(IDS, images), lambda one: type(one).likelihoods(one, images, IDS, IDS)]
    ways["caption"].append(lambda one: type(one).generate(one, images, IDS, 2))
    for one in (build(IMAGE), build(two), model):
        for name in one.entries:
            setattr(one, name, lambda *_, **__: pytest.fail("a way in is used inside of another"))
        for way in ways[one.config.of]:
            way(one)


def test_everything_learns_and_is_counted(model):
    assert model.cost().parameters == sum(p.numel() for p in model.parameters())
    assert training_flops_per_sample(model.config) > 0
    model(IDS, pixels(), labels=IDS).loss_sum.backward()
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters())


@pytest.mark.parametrize("asked", [{"on": "image."}, {"on": "text.", "switch": "image"}, {"on": "text."}])
def test_growth_of_a_trunk_changes_nothing_and_all_new_tokens_learn(model, asked):
    plan = plan_for(model, Growth(ffn_tokens=80, **asked))
    bigger = apply_plan(model, plan)
    torch.testing.assert_close(bigger(IDS, pixels()).logits, model(IDS, pixels()).logits, rtol=0, atol=1e-5)
    inputs = pixels() if asked["on"] == "image." else IDS
    found = verify(model, bigger, inputs, plan)
    assert found.same and found.gradient["ffn: key tokens"].within_two == found.gradient["ffn: key tokens"].rows
    if asked.get("switch"):
        assert torch.equal(bigger(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"trunks": {}}, "model.trunks is missing: a model of caption has two"),
        ({"trunks": {"image": IMAGE, "text": IMAGE}}, "a trunk text with `of: language`"),
        ({"trunks": {"image": IMAGE, "text": dataclasses.replace(TEXT, context=5)}}, "an image has 5 positions"),
        ({"embed": 3}, "model.embed belongs to models of pair"),
    ],
)
def test_what_cannot_be_is_refused(keys, said):
    with pytest.raises(UserError, match=said):
        ModelConfig(**{"of": "caption", "trunks": caption().trunks, **keys})


def test_sampling_by_guidance_stands_between_and_beyond_two_prompts(language):
    """At weight 1 it is the prompt alone, at 0 the other one; beyond, what `lerp` of both logits makes likeliest."""
    engine, prompts, others = Engine(language), [[5, 6], [7]], [[1], [2, 3]]
    alone = [engine.generate(some, 6) for some in (prompts, others)]
    assert engine.generate(prompts, 6, against=others, guidance=1.0) == alone[0]
    assert engine.generate(prompts, 6, against=others, guidance=0.0) == alone[1]
    found = engine.generate(prompts, 6, against=others, guidance=3.0)
    for row, (prompt, other) in enumerate(zip(prompts, others, strict=True)):
        made: list[int] = []
        for _ in range(6):
            with_, without = (language(torch.tensor([p + made])).logits[0, -1] for p in (prompt, other))
            made.append(int((without + 3.0 * (with_ - without)).argmax()))
        assert found[row].ids == made != alone[0][row].ids
    some = range(10, 20)
    for how in (Sampling(), Sampling(temperature=5.0)):
        made = engine.generate(prompts, 10, how, choices=some)
        assert all(id in some for row in made for id in row.ids) and (how.greedy or len(set(made[0].ids)) > 1)
