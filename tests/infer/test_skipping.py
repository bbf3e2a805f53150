"""Value tokens that are not read: what is found to skip, that the engine skips it in steps alone, and who cannot."""

import pytest
import torch
from small_models import make

from tokenformer.errors import UserError
from tokenformer.infer import Engine, Sampling
from tokenformer.infer.cache import StaticCache
from tokenformer.infer.packed import Packed
from tokenformer.infer.quantised import rounded
from tokenformer.infer.skipping import Skipping, projections, skipping
from tokenformer.models import LanguageModel


def own_text(model: LanguageModel, count: int = 95) -> torch.Tensor:
    return torch.tensor([[0, *Engine(model).generate([[0]], count, Sampling(temperature=1.0))[0].ids]])


@torch.no_grad()
def test_the_share_is_that_of_every_projection_and_what_is_skipped_counts_as_its_mean(tokenformer_model, relative):
    x = torch.randn(500, 32, generator=torch.Generator().manual_seed(0))
    for holder in projections(Packed(tokenformer_model).model):
        plain = holder.packed
        sparse = Skipping(plain, 0.4)
        assert relative(sparse(x), plain(x)) < 1e-6  # the first time it looks
        skip, weight_TMN, value_MNE = sparse.skip, plain.weights(x), plain.value_MNE
        kept_TMN = skip.kept(weight_TMN)
        assert ((kept_TMN.float().mean((0, 2)) - 0.6).abs() < 0.001).all()
        assert (skip.low_M < skip.centre_M).all() and (skip.centre_M < skip.high_M).all()
        rest_TMN = torch.where(kept_TMN, weight_TMN - skip.centre_M[:, None], 0.0)
        expected_MTE = rest_TMN.transpose(0, 1) @ value_MNE + skip.centre_M[:, None, None] * value_MNE.sum(1, True)
        assert relative(sparse(x), expected_MTE) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("weights", [None, "fp8"])
def test_the_engine_skips_in_steps_and_not_in_prefill(tokenformer_model, prompts, weights):
    engine = Engine(tokenformer_model, skip=0.5, weights=weights)
    model = rounded(tokenformer_model) if weights else tokenformer_model
    whole, (sparse, _) = Packed(model), skipping(model, torch.float32, own_text(model), 0.5)
    differs = 0
    for prompt in prompts:
        cache = StaticCache(model.config, 1, 96, "cpu", torch.float32)
        ids = list(prompt)
        hidden = whole.hidden(torch.tensor([ids]), torch.arange(len(ids)), cache, 0)[:, -1]
        for place in range(len(ids), len(ids) + 12):
            ids.append(whole.logits(hidden).argmax().item())
            hidden = sparse.hidden(torch.tensor([[ids[-1]]]), torch.tensor([[place]]), cache)[:, 0]
        assert engine.generate([prompt], 12)[0].ids == ids[len(prompt) :]
        differs += Engine(model).generate([prompt], 12)[0].ids != ids[len(prompt) :]
    assert differs  # a test that can fail
    assert engine.said[-1].startswith(
        "50% of the value tokens are skipped, by ranges found on 95 tokens of the model: "
    )
    assert engine.said[-1].endswith("nothing is saved without kernels")


def test_who_cannot_skip_is_told(tokenformer_model, prompts):
    with pytest.raises(UserError, match="for one text at a time, not 4"):
        Engine(tokenformer_model, skip=0.5).generate(prompts, 4)
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(UserError, match="give the share of value tokens"):
            Engine(tokenformer_model, skip=share)
    adapted = {"ffn_tokens": [16, 4], "switch": {"ffn": ["", "a"]}}
    for model in (make("llama"), make(**adapted)):
        with pytest.raises(UserError, match="only models of parameter tokens without adapters"):
            Engine(model, skip=0.5)
