"""The update rules against short float64 references, and that a skipped step changes nothing."""

import dataclasses

import pytest
import torch

from tokenformer.config import ModelConfig
from tokenformer.config_train import OptimizerConfig
from tokenformer.models import LanguageModel, build
from tokenformer.models.names import parse
from tokenformer.parallel.layout import Layout
from tokenformer.train.optim import Optimizer, blocks_after
from tokenformer.train.rules.adamw import AdamW
from tokenformer.train.rules.muon import Muon

TINY = ModelConfig(layers=2, dim=32, heads=2, qkv_tokens=24, proj_tokens=[16, 40], ffn_tokens=48, vocab=64, context=16)
ONE, GO = torch.tensor(1.0), torch.tensor(0.0)


def with_gradients(seed: int, dtype=torch.float64, config=TINY) -> LanguageModel:
    model = build(config, seed).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return model


def made(model: LanguageModel, config: OptimizerConfig) -> Optimizer:
    return Optimizer(Layout(model), config)


def muon_of(optimizer: Optimizer) -> Muon:
    return next(rule for rule in optimizer.rules if isinstance(rule, Muon))


def adamw_of(optimizer: Optimizer) -> AdamW:
    return next(rule for rule in optimizer.rules if isinstance(rule, AdamW))


def without_decay(optimizer: Optimizer) -> set[str]:
    rule = adamw_of(optimizer)
    plain = {p for group in rule.torch.param_groups if not group["weight_decay"] for p in group["params"]}
    return {name for name, p in rule.parameters.items() if p in plain}


def muon_reference(w, g, m, rate, c):
    """The law: Nesterov momentum, five quintic Newton–Schulz steps, RMS-matched length, decoupled weight decay."""
    m = c.momentum * m + (1 - c.momentum) * g
    x = c.momentum * m + (1 - c.momentum) * g
    x = x if len(x) <= len(x.T) else x.T
    x = x / x.norm()
    for _ in range(c.orthogonal_steps):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    x = x if x.shape == w.shape else x.T
    return w * (1 - rate * c.weight_decay) - rate * 0.2 * max(w.shape) ** 0.5 * x, m


def test_muon_is_its_ten_line_float64_reference_over_several_steps():
    config = OptimizerConfig(kind="muon", rate=0.02)
    model = with_gradients(1)
    optimizer = made(model, config)
    matrices, generator = muon_of(optimizer).matrices, torch.Generator().manual_seed(7)
    expected = {n: (p.detach().clone(), torch.zeros_like(p)) for n, p in matrices.items()}
    assert len({p.shape for p in matrices.values()}) == 4  # wide and tall ones
    for _ in range(3):  # other gradients each time: collinear ones would hide how momentum and gradient are mixed
        for name, p in matrices.items():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            expected[name] = muon_reference(expected[name][0], p.grad, expected[name][1], 0.02, config)
        optimizer.step(0.02, ONE, GO)
    for name, p in matrices.items():
        torch.testing.assert_close(p.detach(), expected[name][0], rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(muon_of(optimizer).momentum[name], expected[name][1], rtol=1e-12, atol=1e-14)


def test_joint_muon_takes_the_segments_of_a_projection_as_one_matrix():
    config = OptimizerConfig(kind="muon", rate=0.02, segments="joint")
    model = with_gradients(1)
    optimizer = made(model, config)
    rule = muon_of(optimizer)
    pairs = [[f"blocks.{i}.attention.proj.segments.{j}.value_tokens" for j in (0, 1)] for i in (0, 1)]
    expected = []
    for pair in pairs:
        w, g = (torch.cat([_one(rule, name)[i] for name in pair]) for i in (0, 1))
        expected.append(muon_reference(w.detach(), g, torch.zeros_like(w), 0.02, config))
    alone = muon_reference(*_one(rule, pairs[0][0]), 0.02, config)[0].detach()
    optimizer.step(0.02, ONE, GO)
    for pair, (weight, momentum) in zip(pairs, expected, strict=True):
        torch.testing.assert_close(torch.cat([rule.matrices[n].detach() for n in pair]), weight)
        torch.testing.assert_close(torch.cat([rule.momentum[n] for n in pair]), momentum)
    assert not torch.allclose(rule.matrices[pairs[0][0]], alone)


def _one(rule: Muon, name: str):
    matrix = rule.matrices[name]
    return matrix, matrix.grad, torch.zeros_like(matrix)


def test_muon_is_close_to_torch_muon_which_orthogonalises_in_bf16():
    config = OptimizerConfig(kind="muon", rate=0.01, orthogonal_dtype="bf16")
    ours, theirs = with_gradients(2, torch.float32), with_gradients(2, torch.float32)
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    made(ours, config).step(0.01, ONE, GO)
    matrices = muon_of(made(theirs, config)).matrices
    torch.optim.Muon(matrices.values(), lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    for name, p in matrices.items():
        mine, other = dict(ours.named_parameters())[name] - before[name], p - before[name]
        assert (mine - other).norm() < 3e-2 * other.norm()


@pytest.mark.parametrize("tokens", [64, 256, 16])
def test_a_muon_step_has_the_rms_of_an_adamw_step(tokens):
    config = ModelConfig(layers=1, dim=64, heads=2, qkv_tokens=8, proj_tokens=8, ffn_tokens=tokens, vocab=64)
    model = with_gradients(0, torch.float32, config)
    parameter = model.blocks[0].ffn.segments[0].key_tokens
    before = parameter.detach().clone()
    made(model, OptimizerConfig(kind="muon", weight_decay=0)).step(1e-3, ONE, GO)
    assert 0.14e-3 < (parameter.detach() - before).square().mean().sqrt() < 0.26e-3  # 0.2 of the rate


def test_adamw_is_torchs_with_decay_on_everything_but_norms():
    config = OptimizerConfig(kind="adamw", rate=1e-2)
    ours, theirs = with_gradients(3, torch.float32), with_gradients(3, torch.float32)
    optimizer = made(ours, config)
    assert without_decay(optimizer) == {"norm.bias", "norm.weight"}
    assert len(optimizer.rules) == 1
    plain, decayed = [theirs.norm.weight, theirs.norm.bias], [p for p in theirs.parameters() if p.ndim == 2]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):  # other gradients each time: of equal ones AdamW takes the same step whatever its betas
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        optimizer.step(1e-2, ONE, GO)
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_the_recipe_muon_leaves_embedding_head_and_norms_to_adamw():
    config = ModelConfig(kind="llama", layers=1, dim=32, heads=2, vocab=64, tied=False, context=16)
    optimizer = made(build(config), OptimizerConfig(kind="muon"))
    plain = without_decay(optimizer)
    assert plain == {"norm.weight", "blocks.0.attention_norm.weight", "blocks.0.ffn_norm.weight"}
    assert adamw_of(optimizer).parameters.keys() - plain == {"embedding.weight", "head.weight"}
    matrices = muon_of(optimizer).matrices
    assert all(name.startswith("blocks.") for name in matrices) and len(matrices) == 7


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_skipped_step_changes_no_bit_and_the_divisor_scales_gradients(kind):
    model = with_gradients(4, torch.float32)
    optimizer = made(model, OptimizerConfig(kind=kind))
    optimizer.step(1e-2, ONE, GO)
    before = snapshot(model, optimizer)
    for p in model.parameters():
        p.grad.fill_(torch.nan)
    optimizer.step(1e-2, torch.tensor(torch.nan), torch.tensor(1.0))
    after = snapshot(model, optimizer)
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)

    half, whole = with_gradients(5, torch.float32), with_gradients(5, torch.float32)
    for p in half.parameters():
        p.grad *= 8
    made(half, OptimizerConfig(kind=kind)).step(1e-2, torch.tensor(8.0), GO)
    made(whole, OptimizerConfig(kind=kind)).step(1e-2, ONE, GO)
    assert all(torch.equal(p, q) for p, q in zip(half.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_by_name_restores_exactly_and_a_new_parameter_starts_fresh(kind):
    model, other = with_gradients(6, torch.float32), with_gradients(6, torch.float32)
    optimizer = made(model, OptimizerConfig(kind=kind))
    optimizer.step(1e-2, ONE, GO)
    second = made(other, OptimizerConfig(kind=kind))
    other.load_state_dict(model.state_dict())
    state = optimizer.state_by_name()
    keys = {"momentum"} if kind == "muon" else {"exp_avg", "exp_avg_sq", "step"}
    assert set(state["blocks.1.ffn.segments.0.key_tokens"]) == keys and set(state) == set(
        dict(model.named_parameters())
    )
    second.load_state_by_name(state)
    optimizer.step(1e-2, ONE, GO)
    second.step(1e-2, ONE, GO)
    one, two = snapshot(model, optimizer), snapshot(other, second)
    assert all(torch.equal(one[k], two[k]) for k in one)

    state = {name: entry for name, entry in state.items() if "proj.segments.1" not in name}
    second.load_state_by_name(state)
    second.step(1e-2, ONE, GO)
    fresh = second.state_by_name()["blocks.0.attention.proj.segments.1.key_tokens"]
    if kind == "adamw":
        assert fresh["step"] == 1 and second.state_by_name()["embedding.weight"]["step"] == 3
    else:
        gradient = other.blocks[0].attention.proj.segments[1].key_tokens.grad
        torch.testing.assert_close(fresh["momentum"], gradient * 0.05)


def snapshot(model, optimizer) -> dict:
    state = {f"{n}/{k}": t.clone() for n, e in optimizer.state_by_name().items() for k, t in e.items()}
    return {**state, **{n: p.detach().clone() for n, p in model.named_parameters()}}


def test_the_rate_of_added_ids_is_that_of_the_ends_they_belong_to():
    model = build(dataclasses.replace(TINY, tied=False, added_vocab=8))
    depth = {name: blocks_after(parse(name, model.ends), model.config) for name, _ in model.named_parameters()}
    assert depth["added_head.weight"] == depth["head.weight"] == 0
    assert depth["added_embedding.weight"] == depth["embedding.weight"] == 3
