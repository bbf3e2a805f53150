"""`growth: progressive` as arithmetic: what it makes of a final model and its budget, and the rate by compute."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tokenformer import UserError
from tokenformer.config import PROJECTIONS, Config, ModelConfig, load, to_yaml
from tokenformer.config_train import ScheduleConfig
from tokenformer.growth.progressive import describe, resolve
from tokenformer.growth.stages import Progress, chain, rate, spent
from tokenformer.models.cost import training_flops_per_sample
from tokenformer.strict import build
from tokenformer.train.schedule import factor

TOKENS = {"qkv_tokens": 96, "proj_tokens": 64, "ffn_tokens": 384}
MODEL = {"layers": 2, "dim": 32, "heads": 2, "vocab": 384, "context": 64, **TOKENS}
IMAGE = {"of": "image", "layers": 2, "dim": 32, "heads": 2, "image_size": 16, "patch": 4, "classes": 0, **TOKENS}
TEXT = {**MODEL, "of": "text", "pool": "end", "qkv_tokens": 27}
PAIR = {"of": "pair", "embed": 32, "trunks": {"image": IMAGE, "text": TEXT}}


def config(growth="progressive", model=None, **keys) -> Config:
    return build(Config, {"model": model or MODEL, "growth": growth, "steps": 200, **keys})


def totals(model: ModelConfig) -> list[list[int]]:
    trunks = model.trunks.values() or [model]
    return [[sum(n for n, _ in trunk.segments(which)) for which in PROJECTIONS] for trunk in trunks]


def sizes(resolved: tuple) -> list[tuple[int, ...]]:
    return [tuple(totals(model)[0]) for model in chain(resolved[0].model, resolved[1])]


def growth_steps(resolved: Config) -> list[int]:
    return [int(stage.at["step"]) for stage in resolve(resolved)[1]]


shares = st.floats(0.02, 0.9)
models = st.one_of(
    st.builds(
        lambda q, p, f: {**MODEL, "qkv_tokens": q, "proj_tokens": p, "ffn_tokens": f}, *[st.integers(2, 999)] * 3
    ),
    st.just(PAIR),
)


@given(
    model=models,
    steps=st.integers(1, 10**7),
    budget=st.floats(0.05, 3),
    first=st.one_of(st.none(), shares, st.fixed_dictionaries({"qkv": shares}, optional={"ffn": shares})),
    at=st.lists(st.floats(0.01, 0.9), min_size=1, max_size=4, unique=True).map(sorted),
)
def test_the_budget_is_spent_to_a_step_and_sizes_end_at_the_final_model(model, steps, budget, first, at):
    asked = {"budget": budget, "at": at, **({} if first is None else {"from": first})}
    assume(first is not None or len(at) <= 3)
    whole = config({"progressive": asked}, model, steps=steps)
    try:
        resolved, stages = resolve(whole)
    except UserError as error:  # too few steps, or a model too small for so many sizes
        assert "too few" in str(error) or "would change nothing" in str(error)
        return
    passed = chain(resolved.model, stages)
    costs, when = [training_flops_per_sample(m) for m in passed], growth_steps(resolved)
    limit, one = budget * steps * training_flops_per_sample(whole.model), costs[-1]
    total = spent(costs, when, resolved.steps)
    assert total <= limit * (1 + 1e-12) and limit - total < one * (1 + 1e-9)
    assert totals(passed[-1]) == totals(whole.model) and totals(passed[0]) != totals(whole.model)
    for small, big in itertools.pairwise(map(totals, passed)):
        assert all(a <= b for one, other in zip(small, big, strict=True) for a, b in zip(one, other, strict=True))
    trunks = [stage.on for stage in stages]
    assert when[0] > 0 and when == sorted(when) and when[-1] < resolved.steps
    assert len(set(zip(when, trunks, strict=True))) == len(stages)  # a trunk grows once at a step
    assert len(set(when)) == len(at)
    for share, step in zip(at, sorted(set(when)), strict=True):  # as near as steps allow, where the steps before fit
        before = spent(costs, when, step)
        assert abs(before - share * limit) <= one * len(at) or before < share * limit


def test_what_is_resolved_is_plain_says_nothing_of_progressive_and_resolves_to_itself(tmp_path):
    resolved, stages = resolve(config())
    text = to_yaml(resolved)
    (tmp_path / "config.yml").write_text(text)
    again = load(tmp_path / "config.yml")
    assert "progressive" not in text and again == resolved and resolve(again) == (resolved, stages)
    assert sizes((resolved, stages)) == [(8, 8, 384), (96, 64, 384)]  # a ninth, in eights; ffn whole
    assert chain(resolved.model, stages)[-1].qkv_tokens == [8, 88] and resolved.schedule.count == "compute"


def test_every_way_to_ask_for_it():
    plain = resolve(config("progressive"))
    assert resolve(config({"progressive": {}})) == plain
    assert resolve(config({"progressive": {"hops": 1, "at": [0.1]}})) == plain
    three = resolve(config({"progressive": {"hops": 3}}, steps=2000))
    assert sizes(three) == [(8, 8, 24), (16, 8, 56), (40, 24, 144), (96, 64, 384)]  # by equal factors, in eights
    two = resolve(config({"progressive": {"from": {"ffn": 0.25}, "at": [0.1, 0.5]}}))
    assert sizes(two) == [(96, 64, 96), (96, 64, 192), (96, 64, 384)]


def test_steps_of_the_schedule_keep_their_number_and_shares_their_share():
    schedule = {"kind": "wsd", "warmup": 20, "decay": 30, "floor": 0.0}
    resolved, stages = resolve(config(schedule=schedule))
    costs, when = [training_flops_per_sample(m) for m in chain(resolved.model, stages)], growth_steps(resolved)

    def at(step: int) -> float:
        return rate(stages, Progress(), step, resolved.steps, resolved.schedule, factor, before)

    def before(step: int) -> int:
        return spent(costs, when, step)

    end = resolved.steps
    assert at(0) == 0 and at(10) == pytest.approx(0.5) and at(20) == pytest.approx(1) == at(end - 30)
    assert at(end - 15) == pytest.approx(0.5, abs=1e-3) and at(end) == 0
    kept = resolve(config(schedule={"warmup": 0.05, "decay": 0.5, "steps": 200}))[0].schedule
    assert (kept.warmup, kept.decay, kept.steps) == (0.05, 0.5, None)


def test_a_warm_up_and_a_decay_across_the_growth_have_the_steps_that_were_asked_for():
    def rates(**schedule) -> tuple[int, list[float]]:
        resolved, stages = resolve(config(schedule={"kind": "wsd", "floor": 0.0, **schedule}))
        costs, when = [training_flops_per_sample(m) for m in chain(resolved.model, stages)], growth_steps(resolved)

        def at(step: int) -> float:
            how = (resolved.steps, resolved.schedule, factor, lambda step: spent(costs, when, step))
            return rate(stages, Progress(), step, *how)

        return when[0], [at(step) for step in range(resolved.steps)]

    growth, found = rates(warmup=100, decay=10)
    assert growth < 99 and found[99] < 1 - 1e-6 and found[100] == pytest.approx(1)
    growth, found = rates(warmup=5, decay=len(found) - 10)
    assert growth > 10 and found[10] == pytest.approx(1) and found[11] < found[10] - 1e-6


@given(
    costs=st.lists(st.integers(10**5, 10**12), min_size=2, max_size=4),
    kind=st.sampled_from(["cosine", "linear", "wsd"]),
    data=st.data(),
)
def test_the_rate_by_compute_is_continuous_at_growth_and_ends_at_zero(costs, kind, data):
    growths = sorted(data.draw(st.lists(st.integers(1, 199), min_size=len(costs) - 1, max_size=len(costs) - 1)))
    schedule, steps = ScheduleConfig(kind=kind, warmup=0.1, decay=0.4, floor=0.0, count="compute"), 200

    def before(step: int) -> int:
        return spent(costs, growths, step)

    rates = [rate([], Progress(), step, steps, schedule, factor, before) for step in range(steps + 1)]
    total = before(steps)
    assert rates[0] == 0 and rates[-1] == pytest.approx(0, abs=1e-9)
    for step, (a, b) in enumerate(itertools.pairwise(rates)):  # no jump beyond what a step's share of the compute gives
        assert abs(a - b) <= 20 * (before(step + 1) - before(step)) / total + 1e-9
    shares = [before(step) / total for step in range(steps + 1)]
    by_steps = dataclasses.replace(schedule, count="steps")
    for share, found in zip(shares, rates, strict=True):  # a function of the share alone, whatever the models cost
        assert found == pytest.approx(factor(by_steps, round(share * 1e9), 10**9), abs=1e-4)


def test_a_growth_at_a_share_of_the_compute_comes_at_its_step():
    listed = [{"at": {"compute": 0.25}, "qkv_tokens": 200}, {"at": {"compute": 0.5}, "ffn_tokens": 800}]
    resolved, stages = resolve(config(listed))
    costs, when = [training_flops_per_sample(m) for m in chain(resolved.model, stages)], growth_steps(resolved)
    total = spent(costs, when, 200)
    assert [spent(costs, when, step) / total for step in when] == pytest.approx([0.25, 0.5], abs=costs[-1] / total)
    assert resolved.steps == 200 and resolved.model == config(listed).model


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"start": "weights"}, "begins with a small model of its own, but start is weights"),
        ({"steps": 1}, "too few to grow once"),
        ({"schedule": {"warmup": 900}}, "schedule.warmup is 900 steps, but the run has 2"),
        ({"schedule": {"steps": 99}}, "schedule.steps is 99, but growth is progressive"),
        ({"growth": "progresive"}, "did you mean 'progressive'"),
        ({"growth": {"progressive": {"form": 0.1}}}, "did you mean 'growth.progressive.from'"),
        ({"growth": {"progressive": {"from": 0}}}, "growth.progressive.from is 0.0: give a number above 0"),
        ({"growth": {"progressive": {"from": {"mlp": 0.1}}}}, "for each of qkv, proj and ffn"),
        ({"growth": {"progressive": {"from": 1.0}}}, "would change nothing"),
        ({"growth": {"progressive": {"hops": 7}}}, "give at most 3, or `from` and `at`"),
        ({"growth": {"progressive": {"hops": 2, "at": [0.1]}}}, "names 1 growths, but hops is 2"),
        ({"growth": {"progressive": {"at": [0.2, 0.1]}}}, "a larger share than the one before"),
        ({"growth": {"progressive": {"budget": 0}}}, "give a number above 0"),
        ({"model": {**MODEL, "ffn_tokens": [300, 84]}}, "model.ffn_tokens is in segments"),
        ({"model": {**MODEL, "tau": {"ffn": [3.0]}}}, "τ is not √n"),
        ({"model": {**MODEL, "kind": "transformer", **dict.fromkeys(TOKENS)}}, "has no parameter tokens"),
        ({"growth": [{"at": {"compute": 1.5}, "qkv_tokens": 99}]}, "share of the run's compute, below 1"),
        (
            {"growth": [{"at": {"compute": 0.5}, "qkv_tokens": 99}, {"at": {"step": 9}, "qkv_tokens": 100}]},
            "give all of them a share of the compute, or none",
        ),
        (
            {"growth": [{"at": {"plateau": 0.1}, "qkv_tokens": 99}], "schedule": {"count": "compute"}},
            "not known before",
        ),
        ({"schedule": {"count": "compute", "warmup": 20}}, "schedule.count is compute: give a share below 1"),
        ({"schedule": {"count": "compute", "steps": 20}}, "schedule.count is compute: leave it out"),
    ],
)
def test_what_cannot_be_is_one_sentence(keys, sentence):
    with pytest.raises(UserError) as raised:
        resolve(config(**keys))
    assert sentence in str(raised.value)


def test_it_says_what_it_will_do():
    resolved, _ = resolve(config(batch=8))
    sizes, together, known = describe(resolved)
    assert "8/8/384 tokens (65,600 parameters) for 32 steps, then 96/64/384 tokens" in sizes
    assert "199.1 steps of the final model from scratch" in together and "18 % less compute" in known
    pair = describe(resolve(config(model=PAIR))[0])
    assert pair[0].count("parameters for") == 2  # two trunks that grow at one step are one growth


def test_it_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from tokenformer.config import load; "
        "from tokenformer.growth.progressive import resolve; "
        "print(resolve(load('lm/150m', overrides=['growth=progressive']))[0].steps)"
    )
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) > 143000
