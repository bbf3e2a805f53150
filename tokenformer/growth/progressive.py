"""`growth: progressive`: a final model and its budget become the first model, plain stages and a number of steps.

Unusual: this is arithmetic on the config, done once when a run begins. The run's config.yml holds what came out, and
nothing else reads the word `progressive`.
"""

import dataclasses
import itertools
import math
from fractions import Fraction

from tokenformer.config import PROJECTIONS, Config, ModelConfig
from tokenformer.config_growth import GrowthStage, Progressive
from tokenformer.growth.stages import chain, spent
from tokenformer.models.cost import cost, training_flops_per_sample
from tokenformer.strict import need

# Growths on the way → share of the final tokens to begin with, share of the compute before each growth: the best arm of
# each kind so far in experiments/progressive. The first row is what `growth: progressive` alone does.
RECIPES: dict[int, tuple[float | dict[str, float], list[float]]] = {
    1: ({"qkv": 1 / 9, "proj": 1 / 9, "ffn": 1.0}, [0.1]),
    2: (1 / 9, [0.02, 0.1]),
    3: (1 / 18, [0.02, 0.06, 0.16]),
}
MEASURED = (
    "measured so far (experiments/progressive; three seeds, 7 M parameters, init: official, bytes of enwik8, 10 and 20 "
    "tokens per parameter): the loss of the final model from scratch with 18 % less compute; a smaller model that "
    "never grows is as good at 20 and better at 10"
)
EIGHTS = 8  # sizes stay multiples of it where the final one is: 16-bit matrix products are slow elsewhere


def resolve(config: Config) -> tuple[Config, list[GrowthStage]]:
    """Return the same run with plain stages, each at a step, a number of tokens or a plateau; and these stages.

    >>> from tokenformer.config import load
    >>> config, stages = resolve(load("lm/150m", overrides=["growth=progressive", "steps=1000"]))
    >>> config.model.qkv_tokens, stages[0].at, stages[0].qkv_tokens, config.steps, config.schedule.count
    (88, {'step': 142.0}, 768, 1041, 'compute')
    """
    if isinstance(config.growth, list):
        config = _with_steps(config, config.growth)
    else:
        config = _begun_small(config, Progressive() if config.growth == "progressive" else config.growth.progressive)
    assert isinstance(config.growth, list)
    return config, config.growth


def describe(config: Config) -> list[str]:
    """Say what a resolved run that begins small will do, beside training its final model from scratch, and what is
    known about the gain.
    """
    stages = resolve(config)[1]
    models = chain(config.model, stages)
    starts = sorted({0, *(int(stage.at["step"]) for stage in stages)})  # trunks may grow at the same step
    seen = [models[sum(stage.at["step"] <= start for stage in stages)] for start in starts]
    lengths = [end - begin for begin, end in itertools.pairwise([*starts, config.steps])]
    legs = [f"{_size(model)} for {steps:,} steps" for model, steps in zip(seen, lengths, strict=True)]
    costs = [training_flops_per_sample(model) for model in seen]
    total = spent(costs, starts[1:], config.steps)
    flops = f"{total * config.batch:.3g} FLOPs, " if config.batch else ""
    scratch = f"{flops}those of {total / costs[-1]:,.1f} steps of the final model from scratch"
    return [f"grows on the way: {', then '.join(legs)}", f"together {config.steps:,} steps and {scratch}", MEASURED]


def _size(model: ModelConfig) -> str:
    parameters = f"{cost(model).parameters:,} parameters"
    if model.trunks:
        return parameters
    tokens = "/".join(str(sum(n for n, _ in model.segments(which))) for which in PROJECTIONS)
    return f"{tokens} tokens ({parameters})"


def _with_steps(config: Config, stages: list[GrowthStage]) -> Config:
    """Put a step in the place of every `at: {compute: SHARE}`."""
    if not any("compute" in stage.at for stage in stages):
        return config
    need(
        all("compute" in stage.at for stage in stages),
        "growth.at names a share of the compute for some growths and something else for others, which together do not "
        "say when: give all of them a share of the compute, or none",
    )
    shares = [0.0, *(stage.at["compute"] for stage in stages), 1.0]
    need(sorted(shares) == shares, f"growth comes after {shares[1:-1]} of the compute: sort the stages")
    costs = [training_flops_per_sample(model) for model in chain(config.model, stages)]
    lengths = [(b - a) / cost for (a, b), cost in zip(itertools.pairwise(shares), costs, strict=True)]
    ends = [round(config.steps * done / sum(lengths)) for done in itertools.accumulate(lengths)]
    found = [dataclasses.replace(s, at={"step": float(max(1, end))}) for s, end in zip(stages, ends, strict=False)]
    return dataclasses.replace(config, growth=found)


def _begun_small(config: Config, asked: Progressive) -> Config:
    """The first model, its stages and as many steps as the budget allows."""
    final, schedule = config.model, config.schedule
    need(
        schedule.steps in (None, config.steps),
        f"schedule.steps is {schedule.steps}, but growth is progressive, whose rate ends with the budget: leave it out "
        "(schedule.steps=null)",
    )
    hops = asked.hops or len(asked.at) or 1
    need(
        hops in RECIPES or bool(asked.at and asked.from_),
        f"growth.progressive.hops is {hops}: give at most {max(RECIPES)}, or `from` and `at` beside it",
    )
    first, at = RECIPES.get(hops, (1.0, []))
    models = [_share_of(final, asked.from_ or first, 1 - hop / hops) for hop in range(hops + 1)]
    costs = [training_flops_per_sample(model) for model in models]
    total = math.floor(Fraction(asked.budget) * config.steps * costs[-1])
    done, starts = 0, [0]
    for share, one in zip(asked.at or at, costs, strict=False):
        steps = max(1, round((share * total - done) / one))
        done, starts = done + steps * one, [*starts, starts[-1] + steps]
    last = (total - done) // costs[-1]
    need(
        last > 0,
        f"steps is {config.steps}, of which growth.progressive.budget is {asked.budget}: too few to grow "
        f"{_times(hops)} on the way and train the final model then: give more steps",
    )
    stages = [
        stage
        for small, big, start in zip(models, models[1:], starts[1:], strict=False)
        for stage in _stages(small, big, start)
    ]
    steps = starts[-1] + last
    for name in ("warmup", "decay"):
        amount = getattr(schedule, name)
        need(amount < max(1, steps), f"schedule.{name} is {amount:g} steps, but the run has {steps}: give fewer")

    def before(step: float) -> float:
        """Return the share of the compute that is spent before a step."""
        return spent(costs, starts[1:], round(step)) / spent(costs, starts[1:], steps)

    by_compute = {
        "warmup": schedule.warmup if schedule.warmup < 1 else before(schedule.warmup),
        "decay": schedule.decay if schedule.decay < 1 else 1 - before(steps - schedule.decay),
    }
    schedule = dataclasses.replace(schedule, count="compute", steps=None, **by_compute)
    return dataclasses.replace(config, model=models[0], growth=stages, steps=steps, schedule=schedule)


def _times(count: int) -> str:
    return f"{count} times" if count > 1 else "once"


def _prefixes(model: ModelConfig) -> list[str]:
    """Of the trunks that have parameter tokens."""
    every = [f"{name}." for name in model.trunks] or [""]
    return [prefix for prefix in every if model.trunk(prefix).kind == "tokenformer"]


def _share_of(final: ModelConfig, shares: float | dict[str, float], power: float) -> ModelConfig:
    """The final model with `share ** power` of its parameter tokens, in eights where it has eights."""
    need(bool(_prefixes(final)), "growth is progressive, but the model has no parameter tokens: leave growth out")
    for prefix in _prefixes(final):
        trunk, sizes = final.trunk(prefix), {}
        for which in PROJECTIONS:
            share = shares.get(which, 1.0) if isinstance(shares, dict) else shares
            tokens = getattr(trunk, f"{which}_tokens")
            plain = dataclasses.replace(trunk, tau={}, layer_overrides={}) if isinstance(tokens, int) else None
            need(
                plain is not None and plain.resolved() == trunk.resolved(),
                f"growth is progressive, which makes the segments itself, but model.{prefix}{which}_tokens is in "
                "segments, or layers differ, or τ is not √n: give one number of tokens for all layers, or list growths",
            )
            unit = math.gcd(tokens, EIGHTS)
            sizes[f"{which}_tokens"] = min(tokens, max(unit, round(tokens * share**power / unit) * unit))
        final = final.with_trunk(prefix, dataclasses.replace(trunk, **sizes, tau={}))
    return final


def _stages(small: ModelConfig, big: ModelConfig, step: int) -> list[GrowthStage]:
    """The growth of every trunk that differs."""
    found = []
    for prefix in _prefixes(big):
        names = [f"{which}_tokens" for which in PROJECTIONS]
        pairs = {name: (getattr(small.trunk(prefix), name), getattr(big.trunk(prefix), name)) for name in names}
        grown = {name: after for name, (before, after) in pairs.items() if before != after}
        found += [GrowthStage(on=prefix, at={"step": float(step)}, **grown)] if grown else []
    need(
        bool(found),
        "growth is progressive, but a growth on the way would change nothing: the model is too small to begin with a "
        "share of it; give a smaller `from`, fewer hops, or leave growth out",
    )
    return found
