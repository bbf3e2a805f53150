"""The model in JAX: against the official tensors, and against the PyTorch model through our folders."""

import doctest
import importlib

import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'tokenformer[jax]'")
import jax
import jax.numpy as jnp
import numpy as np
import torch

import tokenformer
from tokenformer.config import ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.errors import UserError
from tokenformer.files import check_manifest
from tokenformer.growth.plan import plan_growth
from tokenformer.hub.official import to_official
from tokenformer.models import init
from tokenformer_jax import folder, generate, model, values

TINY = {"layers": 2, "dim": 32, "heads": 4, "qkv_tokens": 12, "proj_tokens": 8, "ffn_tokens": 16, "vocab": 64}


def lively(config: ModelConfig) -> tokenformer.LanguageModel:
    """Weights large enough that every part matters."""
    made = tokenformer.LanguageModel(config)
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name) + p.numel())) * 0.4)
    return made


def ids(*shape: int, vocab: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab, shape)


def far(ours, theirs) -> float:
    """Largest difference over the largest magnitude."""
    theirs = theirs.detach().numpy()
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def test_golden_logits_loss_and_gradients(golden):
    place, expected = golden
    theirs = tokenformer.load(place)
    config, labels = model.check(theirs.config), expected["labels"].numpy()
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in theirs.named_parameters()}
    assert {name: p.shape for name, p in params.items()} == model.shapes(config)

    @jax.jit
    def both(params, ids):
        mean = lambda params: jnp.divide(*model.loss(params, config, ids, labels))  # noqa: E731
        return model.logits(params, config, ids)[0], jax.value_and_grad(mean)(params)

    logits, (loss, gradients) = both(params, expected["input_ids"].numpy())
    assert far(logits, expected["logits"]) < 2e-5
    assert abs(loss - expected["loss"].item()) < 1e-5
    for name, gradient in gradients.items():
        assert far(gradient, expected["grad." + to_official(name, 3)]) < 1e-4, name


def changed(how: str) -> tokenformer.LanguageModel:
    if how == "untied":
        return lively(ModelConfig(**TINY, tied=False, theta="gelu_l2_norm"))
    made = lively(ModelConfig(**TINY))
    if how == "grown":
        grown = tokenformer.grow(made, qkv_tokens=20, ffn_tokens=24, layers=3)
        grown = tokenformer.grow(grown, ffn_tokens=32, new_tokens="zero_key")
        with torch.no_grad():  # as if it had learned since
            for name, p in grown.named_parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
        return grown
    if how == "shrunk":
        return tokenformer.shrink(made, torch.from_numpy(ids(2, 16)), ratio=0.6, across="model")
    return made.bfloat16()


@pytest.mark.parametrize("how", ["untied", "grown", "shrunk", "bf16"])
def test_a_folder_gives_the_logits_of_pytorch_and_the_way_back_is_bit_equal(tmp_path, how):
    theirs = changed(how)
    tokenformer.save(theirs, tmp_path / "theirs", tokenizer_json=None)
    ours = folder.load(tmp_path / "theirs")
    assert len(model.runs(ours.config)) == {"shrunk": 2}.get(how, 1)  # layers of equal shape are run by one scan
    if how != "bf16":
        logits, _ = model.logits(jax.tree.map(jnp.asarray, ours.params), ours.config, jnp.asarray(ids(2, 9)))
        assert far(logits, theirs(torch.from_numpy(ids(2, 9))).logits) < 1e-5
    folder.save(ours, tmp_path / "ours")
    check_manifest(tmp_path / "ours")
    back = tokenformer.load(tmp_path / "ours")
    assert back.config == theirs.config and back.history == theirs.history
    for (name, one), (other, two) in zip(back.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and one.dtype == two.dtype and torch.equal(one, two)


def test_greedy_text_is_that_of_the_reference_and_sampled_text_belongs_to_its_seed():
    theirs = lively(ModelConfig(**TINY, theta="softmax"))
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in theirs.named_parameters()}
    write, prompt = generate.generator(model.check(theirs.config)), ids(2, 5)
    assert np.array_equal(write(params, prompt, 12), theirs.generate(torch.from_numpy(prompt), 12).numpy())
    one, again, other = (write(params, prompt, 12, temperature=1.5, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    with pytest.raises(UserError, match="0 to 63"):
        write(params, np.array([[64]]), 1)


def test_a_long_loss_is_computed_in_chunks_and_documents_do_not_see_each_other(monkeypatch):
    theirs, data, labels = lively(ModelConfig(**TINY)), ids(2, 11), ids(2, 11)
    labels[0, 3:6] = -100
    documents = np.repeat([[0, 1], [0, 0]], [5, 6], axis=1)
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in theirs.named_parameters()}
    expected = theirs(
        *map(torch.from_numpy, [data]), labels=torch.from_numpy(labels), documents=torch.tensor(documents)
    )
    monkeypatch.setattr(model, "LOGITS", 2 * 4 * 64)  # of the 11 positions 4 at once
    total, count = model.loss(params, model.check(theirs.config), data, labels, documents)
    assert abs(total / expected.loss_sum.item() - 1) < 1e-6 and count == expected.count


def test_bf16_computes_what_pytorch_computes_in_bf16():
    theirs, data = tokenformer.LanguageModel(ModelConfig(**TINY), seed=2), ids(2, 8)
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in theirs.named_parameters()}
    ours, _ = model.logits(params, theirs.config, data, model.How(jnp.bfloat16))
    theirs.compute_dtype = torch.bfloat16
    expected = theirs(torch.from_numpy(data)).logits
    assert ours.dtype == jnp.bfloat16 and far(ours.astype(jnp.float32), expected.float()) < 0.02


@pytest.mark.parametrize("theta", model.THETAS)
def test_a_row_of_zeros_gives_no_nan(theta):
    value, gradient = jax.value_and_grad(lambda score: model.normalise(score, theta, 2.0).sum())(jnp.zeros((1, 4)))
    assert float(value) == (4.0 if theta == "softmax" else 0.0) and bool(jnp.isfinite(gradient).all())


def test_random_numbers_are_those_of_pytorch():
    for shape in ((4, 4), (5, 7), (40, 64)):
        ours, theirs = values.draw(7, "a name", shape), init.draw(7, "a name", shape).numpy()
        assert np.abs(ours - theirs).max() < 1e-6
    config = ModelConfig(**TINY, init="centred").resolved()
    theirs = dict(tokenformer.LanguageModel(config, seed=5).named_parameters())
    for name, array in values.initial_params(config, 5).items():
        assert np.abs(array - theirs[name].detach().numpy()).max() < 1e-6, name


@pytest.mark.parametrize("rule", ["segment", "zero_key", "zero_value", "random"])
def test_a_growth_adds_the_rows_that_pytorch_adds(rule):
    theirs = lively(ModelConfig(**TINY))
    old = {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    keys = {"qkv_tokens": 20, "ffn_tokens": 32, "layers": 3, "new_tokens": rule, "noise": 0.1}
    plan = plan_growth(theirs.config, list(old), Growth(**keys), ends=model.ENDS, seed=3)
    made, state = values.grow(plan, old, {name: {"momentum": array} for name, array in old.items()})
    assert made.keys() == model.shapes(plan.config).keys()
    for name, p in tokenformer.grow(theirs, **keys, seed=3).named_parameters():
        assert np.abs(made[name] - p.detach().numpy()).max() < 1e-6, name
        if (was := plan.recipes[name].old) is not None:
            assert np.array_equal(state[name]["momentum"][: len(old[was])], old[was])
            assert not state[name]["momentum"][len(old[was]) :].any() and state[name]["momentum"].shape == p.shape


@pytest.mark.parametrize(
    "keys",
    [
        {"theta": "l1_norm_gelu"},
        {"ffn_tokens": [16, 4], "switch": {"ffn": ["", "image"]}},
        {"added_vocab": 8},
        {"kind": "transformer", "qkv_tokens": None, "proj_tokens": None, "ffn_tokens": None},
    ],
)
def test_what_the_twin_does_not_compute_is_refused_in_a_sentence(keys):
    with pytest.raises(UserError, match="which there is not in JAX: use the package"):
        model.check(ModelConfig(**{**TINY, **keys}))


def test_weights_that_are_not_the_configs_are_refused(tmp_path, golden_folder):
    config = ModelConfig(**TINY).resolved()
    params = values.initial_params(config, 0)
    for wrong, sentence in (
        ({"norm.bias": np.zeros(3, np.float32)}, "has shape"),
        ({"more": np.zeros(3)}, "too many"),
        ({"norm.bias": np.full(32, np.nan)}, "not finite"),
    ):
        with pytest.raises(UserError, match=sentence):
            folder.save(folder.Model({**params, **wrong}, config, []), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    with pytest.raises(UserError, match="official weights, which JAX does not read"):
        folder.load(golden_folder / "softmax")


@pytest.mark.parametrize("name", ["folder", "generate", "model", "step", "values"])
def test_the_examples_in_docstrings_run(name):
    done = doctest.testmod(importlib.import_module(f"tokenformer_jax.{name}"))
    assert done.failed == 0 < done.attempted
