"""Growth as a step of a run: model and optimizer before → after. When and to what is decided in growth/stages.py.

Unusual: Parameters that did not change stay the same objects, so nothing is held twice; which parameters are frozen or
learn more slowly after a growth follows from the run's plan and is never saved.
"""

import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.config_growth import GrowthStage
from tokenformer.growth.make import make_tensor
from tokenformer.growth.model import apply_plan
from tokenformer.growth.plan import Plan, Recipe, plan_growth
from tokenformer.growth.state import State, grow_entry, grow_state, warn_of_beta2
from tokenformer.models.names import parse
from tokenformer.parallel.layout import Layout, Wholes
from tokenformer.parallel.parallelize import Build, Parallelizer
from tokenformer.train.average import Average
from tokenformer.train.optim import Optimizer

AVERAGE = "average"  # beside what the optimizer keeps for a parameter


def grow(
    layout: Layout,
    optimizer: Optimizer,
    stage: GrowthStage,
    number: int,
    seed: int,
    parallelizer: Parallelizer,
    average: Average | None = None,
) -> tuple[Layout, Optimizer, Average | None, str | None]:
    """Return the next model of the run, its optimizer and average, and a warning about them (or None).

    Old rows keep their average; new ones enter it at their values.
    """
    model = layout.model
    growth = plan_growth(model.config, list(layout.splits), stage, ends=model.ends, seed=seed, number=number)
    old = optimizer.state_by_name() if stage.state == "keep" else {}
    averaged = {name: {AVERAGE: tensor} for name, tensor in average.tensors.items()} if average else {}
    old = {name: {**old.get(name, {}), **averaged.get(name, {})} for name in {**old, **averaged}}
    if layout.place.alone:
        bigger = apply_plan(model, growth, share=True, build=parallelizer.build)
        new, state = parallelizer.wrap_in_place(bigger), grow_state(growth, old)
        for name, entry in state.items():
            _enter(growth.recipes[name], entry, new.named[name])
    else:
        new, state = grow_sharded(layout, growth, parallelizer, old)
    tensors = {name: entry.pop(AVERAGE) for name, entry in state.items() if AVERAGE in entry}
    state = {name: entry for name, entry in state.items() if entry}
    average = Average(average.decay, new, tensors) if average else None
    adamw = optimizer.config.kind == "adamw"
    said = warn_of_beta2(growth.recipes, optimizer.config.betas[1]) if adamw and state else None
    new.freeze(frozen(growth, stage))
    grown = Optimizer(new, optimizer.config, rates(growth, stage))
    grown.load_state_by_name(state)
    return new, grown, average, said


def _enter(recipe: Recipe, entry: dict[str, Tensor], tensor: Tensor) -> None:
    """Give rows that were appended to a parameter their values as average."""
    if AVERAGE in entry and recipe.new_rows > 0:
        entry[AVERAGE][-recipe.new_rows :] = tensor.detach()[-recipe.new_rows :]


def grow_sharded(layout: Layout, growth: Plan, parallelizer: Parallelizer, old: State) -> tuple[Layout, State]:
    """Grow over many ranks: gather each parameter, grow it as in one process and cut it, one after the other."""
    wholes, new, state = Wholes(layout), parallelizer.make(growth.config, None), {}
    new.model.history = [*layout.model.history, growth.event]
    new.model.train(layout.model.training)
    for name, recipe in growth.recipes.items():
        tensor = make_tensor(growth, name, wholes)
        if name in new.named:
            new.named[name].detach().copy_(new.take(name, tensor))
        entry = layout.whole_state(recipe.old, old) if recipe.old else {}
        if entry and name in new.named:
            whole = grow_entry(recipe, entry)
            _enter(recipe, whole, tensor)
            state[name] = {kind: new.take(name, tensor) for kind, tensor in whole.items()}
    return new, state


def after_growth(layout: Layout, build: Build, before: ModelConfig, stage: GrowthStage) -> dict[str, float]:
    """Freeze what the growth that led to a resumed model froze; return the shares of the rate of what learns slower."""
    with torch.device("meta"):
        names = [name for name, _ in build(before).named_parameters()]
    growth = plan_growth(before, names, stage, ends=layout.model.ends)
    layout.freeze(frozen(growth, stage))
    return rates(growth, stage)


def frozen(growth: Plan, stage: GrowthStage) -> set[str]:
    """Return the parameters that do not learn after this growth: with `old_tokens: 0` all that were there before."""
    return growth.kept if stage.old_tokens == 0 else set()


def rates(growth: Plan, stage: GrowthStage) -> dict[str, float]:
    """Return the share of the rate at which each old parameter token learns, if it is not 1."""
    if stage.old_tokens in (0, 1):
        return {}
    return {name: stage.old_tokens for name in growth.kept if parse(name, growth.ends).token}
