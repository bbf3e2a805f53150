"""Optimizer state through a growth: old rows keep theirs, new rows begin at zero, and first updates are of one size."""

from pathlib import Path

import pytest
import torch
from growing import config, planned

from tokenformer.config_train import OptimizerConfig
from tokenformer.growth.model import apply_plan
from tokenformer.growth.state import grow_state, warn_of_beta2
from tokenformer.models import build
from tokenformer.parallel.layout import Layout
from tokenformer.train.optim import Optimizer

TEXT = torch.tensor(list((Path(__file__).parents[2] / "LICENSE").read_bytes()))
RATE = {"adamw": 2e-3, "muon": 3e-3}
HALVES = [("key", "old"), ("key", "new"), ("value", "old"), ("value", "new")]


def train(model, optimizer, steps, start=0, watch=None):
    one, zero = torch.ones(()), torch.zeros(())
    for step in range(start, start + steps):
        first = torch.randint(len(TEXT) - 49, (12,), generator=torch.Generator().manual_seed(step))
        ids = torch.stack([TEXT[i : i + 49] for i in first])
        output = model(ids[:, :-1], labels=ids[:, 1:])
        model.zero_grad()
        (output.loss_sum / output.count).backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()} if watch else {}
        optimizer.step(optimizer.config.rate, one, zero)
        if watch:
            watch(before)


@pytest.fixture(scope="module", params=["adamw", "muon"])
def trained(request):
    """A real tiny model, trained on real text until its moments mean something."""
    shape = config(layers=2, vocab=256)
    model = build(shape)
    optimizer = Optimizer(Layout(model), OptimizerConfig(kind=request.param, rate=RATE[request.param]))
    train(model, optimizer, 150)
    return model, optimizer


def updates(trained, **how):
    """RMS of each of 20 updates of keys and values, old and new rows, after a growth to three times the tokens."""
    model, optimizer = trained
    growth = planned(model, qkv_tokens=72, proj_tokens=60, ffn_tokens=144, **how)
    bigger = apply_plan(model, growth)
    new = Optimizer(Layout(bigger), optimizer.config)
    new.load_state_by_name(grow_state(growth, optimizer.state_by_name()))
    found = []

    def watch(before):
        sums = {which: [0.0, 0] for which in HALVES}
        for name, parameter in bigger.named_parameters():
            if name.endswith("_tokens"):
                moved, rows = (parameter.detach() - before[name]), growth.recipes[name].new_rows
                parts = {"old": moved[: len(moved) - rows], "new": moved[len(moved) - rows :]}
                for age, part in parts.items():
                    entry = sums[name.split(".")[-1].split("_")[0], age]
                    entry[0], entry[1] = entry[0] + part.square().sum().item(), entry[1] + part.numel()
        found.append({which: (s / max(n, 1)) ** 0.5 for which, (s, n) in sums.items()})

    train(bigger, new, 20, start=150, watch=watch)
    return found


def test_with_a_segment_new_and_old_tokens_move_alike_by_step_20(trained):
    last = updates(trained)[-1]
    for half in ("key", "value"):
        assert 0.2 <= last[half, "new"] / last[half, "old"] <= 2, last


def test_no_rule_makes_first_updates_huge_at_the_official_betas(trained):
    for rule in ("zero_key", "zero_value", "random"):
        for step in updates(trained, new_tokens=rule)[1:]:
            for half in ("key", "value"):
                assert 1e-3 < step[half, "new"] / step[half, "old"] <= 4, (rule, step)


@pytest.mark.parametrize("rule", ["segment", "zero_key"])
def test_old_rows_keep_their_state_and_new_ones_begin_at_zero(trained, rule):
    model, optimizer = trained
    state = optimizer.state_by_name()
    growth = planned(model, ffn_tokens=144, new_tokens=rule)
    grown = grow_state(growth, state)
    name = "blocks.0.ffn.segments.0.key_tokens"
    if rule == "segment":
        assert set(grown) == set(state)  # the new segment is fresh, with its own step count
        assert all(grown[n][k] is t for n, entry in state.items() for k, t in entry.items())
        return
    for key, tensor in state[name].items():
        assert torch.equal(grown[name][key] if tensor.ndim == 0 else grown[name][key][:48], tensor)
        assert tensor.ndim == 0 or (grown[name][key].shape == (144, 32) and not grown[name][key][48:].any())


def test_state_follows_its_block_when_blocks_are_put_between(trained):
    model, optimizer = trained
    state = optimizer.state_by_name()
    grown = grow_state(planned(model, layers=3, positions=[1]), state)
    assert grown["blocks.2.ffn.segments.0.key_tokens"] is state["blocks.1.ffn.segments.0.key_tokens"]
    assert not any(name.startswith("blocks.1.") for name in grown)


def test_appended_rows_warn_above_beta2_of_098():
    shape = config()
    assert warn_of_beta2(planned(build(shape), ffn_tokens=60).recipes, 0.999) is None
    appended = planned(build(shape), ffn_tokens=60, new_tokens="zero_value").recipes
    assert warn_of_beta2(appended, 0.95) is None
    assert "0.999" in (warn_of_beta2(appended, 0.999) or "")
