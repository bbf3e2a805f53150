"""Ids that a growth adds to a vocabulary: the old ones keep their logits, alone or under a switch."""

import dataclasses

import pytest
import torch

import tokenformer
from tokenformer.config import ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.errors import UserError
from tokenformer.growth.model import apply_plan, plan_for
from tokenformer.growth.verify import verify

TINY = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=64, vocab=128, context=32)
IDS = torch.arange(24).view(2, 12) * 5 % 128


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> tokenformer.LanguageModel:
    return tokenformer.LanguageModel(dataclasses.replace(TINY, tied=request.param), seed=3)


def test_old_ids_keep_their_logits_bit_for_bit(model: tokenformer.LanguageModel) -> None:
    bigger = tokenformer.grow(model, vocab=200)
    assert (bigger.config.vocab, bigger.config.added_vocab) == (128, 72)
    logits = bigger(IDS).logits
    assert logits.shape[-1] == 200
    assert torch.equal(logits[..., :128], model(IDS).logits)
    assert bigger.cost().parameters == sum(p.numel() for p in bigger.parameters())


def test_under_a_switch_the_model_is_the_old_one_until_it_is_given(model: tokenformer.LanguageModel) -> None:
    bigger = tokenformer.grow(model, vocab=200, ffn_tokens=96, switch="draw")
    with torch.no_grad():
        for name, parameter in bigger.named_parameters():
            if name not in dict(model.named_parameters()):
                parameter.normal_(0, 0.1)  # as if it had learned
    assert torch.equal(bigger(IDS).logits, model(IDS).logits)
    assert bigger(IDS, labels=IDS).loss_sum == model(IDS, labels=IDS).loss_sum
    mixed = bigger(IDS, switches={"draw": torch.tensor([0.0, 1.0])}).logits
    torch.testing.assert_close(mixed[0, :, :128], model(IDS).logits[0], rtol=0, atol=1e-6)
    assert not torch.allclose(mixed[1, :, :128], model(IDS).logits[1], atol=1e-3)
    with pytest.raises(UserError, match="0 to 127"):
        bigger(IDS + 72)
    assert bigger(IDS + 72, switches={"draw": torch.ones(2)}).logits.shape[-1] == 200


@pytest.mark.parametrize("kind", ["transformer", "llama"])
def test_a_model_without_parameter_tokens_has_ids_under_a_switch_too(kind: str) -> None:
    shape = {"layers": 2, "dim": 32, "heads": 4, "vocab": 128, "context": 32}
    model = tokenformer.LanguageModel(ModelConfig(kind=kind, **shape), seed=3)
    bigger = tokenformer.grow(model, vocab=200, switch="draw")
    assert torch.equal(bigger(IDS).logits, model(IDS).logits)
    given = bigger(IDS, switches={"draw": torch.ones(2)}).logits
    assert given.shape[-1] == 200 and torch.equal(given[..., :128], model(IDS).logits)
    with pytest.raises(UserError, match="no adapter or switch 'drew': there are draw"):
        bigger(IDS, switches={"drew": torch.ones(2)})


def test_the_loss_is_that_of_all_logits(model: tokenformer.LanguageModel) -> None:
    bigger, ids = tokenformer.grow(model, vocab=200), IDS + 72
    out = bigger(ids[:, :-1], labels=ids[:, 1:])
    plain = torch.nn.functional.cross_entropy(
        bigger(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )
    torch.testing.assert_close(out.loss_sum, plain)
    with pytest.raises(UserError, match="labels go from 0 to 200, but the vocabulary from 0 to 199"):
        bigger(ids[:1, :2], labels=torch.tensor([[0, 200]]))
    with pytest.raises(UserError, match="0 to 199"):
        bigger(IDS + 190)


def test_growing_again_appends_rows_and_keeps_the_optimizers_state(model: tokenformer.LanguageModel) -> None:
    bigger = tokenformer.grow(model, vocab=160)
    optimizer = torch.optim.AdamW(bigger.parameters(), lr=1e-3)
    out = bigger(IDS + 32, labels=IDS)
    out.loss_sum.backward()
    optimizer.step()
    kept = optimizer.state[bigger.added_embedding.weight]["exp_avg"].clone()
    again = tokenformer.grow(bigger, vocab=200, optimizer=optimizer)
    moved = optimizer.state[again.added_embedding.weight]["exp_avg"]
    assert torch.equal(moved[:32], kept) and kept.any()
    assert torch.equal(moved[32:], torch.zeros(40, 32))
    assert torch.equal(again(IDS).logits[..., :160], bigger(IDS).logits)
    assert [event["after"]["vocab"] for event in again.history] == [160, 200]


def test_the_certificate_says_that_all_new_rows_learn(model: tokenformer.LanguageModel) -> None:
    plan = plan_for(model, Growth(vocab=140, ffn_tokens=80, switch="draw"))
    bigger = apply_plan(model, plan)
    found = verify(model, bigger, torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(0)), plan)
    assert found.same and found.logit_absolute == 0
    assert found.gradient["added_embedding.weight"].within_two == 12
    assert found.gradient["ffn: key tokens"].within_two == 2 * 16


def test_what_is_saved_is_what_is_loaded(model: tokenformer.LanguageModel, tmp_path) -> None:
    bigger = tokenformer.grow(model, vocab=200, ffn_tokens=96, switch="draw")
    tokenformer.save(bigger, tmp_path / "folder")
    again = tokenformer.load(tmp_path / "folder")
    assert again.config == bigger.config
    on = {"draw": torch.ones(2)}
    assert torch.equal(again(IDS, switches=on).logits, bigger(IDS, switches=on).logits)


def test_an_export_has_one_table_and_suppresses_the_padding_in_its_middle(
    model: tokenformer.LanguageModel, tmp_path
) -> None:
    from transformers import AutoModelForCausalLM

    import tokenformer.hub.hf
    from tokenformer.data.text.tokenizer import ByteTokenizer
    from tokenformer.hub.hf_folder import save_hf

    config = dataclasses.replace(model.config, vocab=384)
    bigger = tokenformer.grow(tokenformer.LanguageModel(config, seed=3), vocab=400)
    save_hf(bigger, tmp_path / "hf", tokenizer_json=ByteTokenizer().to_json())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.config.vocab_size == 400
    assert exported.generation_config.suppress_tokens == list(range(ByteTokenizer().vocab_size, 384))
    torch.testing.assert_close(exported(IDS + 270).logits, bigger(IDS + 270).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"vocab": 128}, "vocab is 128, but the model has 128 ids already: give more"),
        ({"layers": 3, "switch": "draw"}, "only new segments and ids can have one"),
        ({"ffn_tokens": 96, "new_tokens": "zero_key", "switch": "draw"}, "only new segments and ids can have one"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        tokenformer.grow(tokenformer.LanguageModel(TINY), **asked)


def test_added_ids_have_one_switch() -> None:
    bigger = tokenformer.grow(tokenformer.LanguageModel(TINY), vocab=160, switch="draw")
    with pytest.raises(UserError, match="with the switch 'draw'"):
        tokenformer.grow(bigger, vocab=200)
