"""Growth as a step of a run: model and optimizer before → after. When and to what is decided in growth/schedule.py.

Unusual: Parameters that did not change stay the same objects, so nothing is held twice; old parameter tokens may learn
more slowly or not at all, which follows from the run's plan and is never saved.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.config_growth import GrowthStage
from tokenformer.growth import Plan, follow, plan
from tokenformer.growth.model import disturb
from tokenformer.growth.state import warning
from tokenformer.parallel.layout import Layout, Wholes
from tokenformer.parallel.parallelize import Build, Parallelizer
from tokenformer.train.optim import Optimizer

State = dict[str, dict[str, Tensor]]  # an optimizer's, by parameter name


def grow(
    layout: Layout, optimizer: Optimizer, stage: GrowthStage, number: int, seed: int, parallelizer: Parallelizer
) -> tuple[Layout, Optimizer, str | None]:
    """The next model of the run, its optimizer, and a sentence where something should be known about them."""
    before = layout.model.config
    growth = plan(before, list(layout.splits), **stage.how(), number=number, seed=seed)
    old = optimizer.state_by_name() if stage.state == "keep" else {}
    if layout.place.alone:
        bigger = follow(layout.model, growth, share=True)
        for name, parameter in bigger.named_parameters():
            disturb(name, parameter, growth, stage.noise)
        new, state = parallelizer.wrap_in_place(bigger), growth.state(old)
    else:
        new, state = grow_sharded(layout, growth, stage, parallelizer, old)
    said = warning(growth, optimizer.config.betas[1]) if optimizer.config.kind == "adamw" and state else None
    grown = Optimizer(new.named.items(), optimizer.config, shares(new, before, stage, parallelizer.build), new)
    grown.load_state_by_name(state)
    return new, grown, said


def grow_sharded(
    layout: Layout, growth: Plan, stage: GrowthStage, parallelizer: Parallelizer, old: State
) -> tuple[Layout, State]:
    """Gather each parameter, grow it as one process would, and scatter it, one after the other."""
    wholes, new, state = Wholes(layout), parallelizer.make(growth.config, None), {}
    new.model.history = [*layout.model.history, growth.event]
    new.model.train(layout.model.training)
    for name, recipe in growth.recipes.items():
        tensor = recipe.make(name, wholes, growth)
        disturb(name, tensor, growth, stage.noise)
        if name in new.named:
            new.named[name].detach().copy_(new.take(name, tensor))
        entry = layout.whole_state(recipe.old, old) if recipe.old else {}
        if entry and (whole := recipe.grow_state(entry)) is not None and name in new.named:
            state[name] = {kind: new.take(name, tensor) for kind, tensor in whole.items()}
    return new, state


def shares(layout: Layout, before: ModelConfig, stage: GrowthStage, build: Build) -> dict[str, float]:
    """The share of the rate at which each old parameter token learns; those at 0 are frozen, the others are not."""
    with torch.device("meta"):
        names = [name for name, _ in build(before).named_parameters()]
    growth = plan(before, names, **stage.how())
    old = {name for name, recipe in growth.recipes.items() if recipe.old and name.endswith("_tokens")}
    for name, parameter in (*layout.own.items(), *layout.named.items()):
        parameter.requires_grad_(name not in old or stage.old_tokens > 0)
    return dict.fromkeys(old, stage.old_tokens) if stage.old_tokens != 1 else {}


def in_force(
    layout: Layout, chain: Sequence[ModelConfig], stages: Sequence[GrowthStage], done: int, build: Build
) -> dict:
    """The shares of a run that goes on after `done` growths."""
    return shares(layout, chain[done - 1], stages[done - 1], build) if done else {}
