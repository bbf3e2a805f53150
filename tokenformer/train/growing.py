"""Growth as a step of a run: model and optimizer before → after. When and to what is decided in growth/schedule.py.

Unusual: Parameters that did not change stay the same objects, so nothing is held twice; old parameter tokens may learn
more slowly or not at all, which follows from the run's plan and is never saved.
"""

from collections.abc import Sequence

import torch

from tokenformer.config import ModelConfig
from tokenformer.config_growth import GrowthStage
from tokenformer.growth import follow, plan
from tokenformer.growth.model import disturb
from tokenformer.growth.state import warning
from tokenformer.models import LanguageModel
from tokenformer.train.optim import Optimizer


def grow(
    model: LanguageModel, optimizer: Optimizer, stage: GrowthStage, number: int, seed: int
) -> tuple[LanguageModel, Optimizer, str | None]:
    """The next model of the run, its optimizer, and a sentence where something should be known about them."""
    names = [name for name, _ in model.named_parameters()]
    growth = plan(model.config, names, **stage.how(), number=number, seed=seed)
    state = growth.state(optimizer.state_by_name()) if stage.state == "keep" else {}
    bigger = follow(model, growth, share=True)
    disturb(bigger, growth, stage.noise)
    said = warning(growth, optimizer.config.betas[1]) if optimizer.config.kind == "adamw" and state else None
    new = Optimizer(bigger.named_parameters(), optimizer.config, shares(bigger, model.config, stage))
    new.load_state_by_name(state)
    return bigger, new, said


def shares(model: LanguageModel, before: ModelConfig, stage: GrowthStage) -> dict[str, float]:
    """The share of the rate at which each old parameter token learns; those at 0 are frozen, the others are not."""
    with torch.device("meta"):
        names = [name for name, _ in LanguageModel(before).named_parameters()]
    growth = plan(before, names, **stage.how())
    old = {name for name, recipe in growth.recipes.items() if recipe.old and name.endswith("_tokens")}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in old or stage.old_tokens > 0)
    return dict.fromkeys(old, stage.old_tokens) if stage.old_tokens != 1 else {}


def in_force(model: LanguageModel, chain: Sequence[ModelConfig], stages: Sequence[GrowthStage], done: int) -> dict:
    """The shares of a run that goes on after `done` growths."""
    return shares(model, chain[done - 1], stages[done - 1]) if done else {}
