"""The optimizer of a run: every parameter is updated by the first rule of the recipe that wants its role.

To add an optimizer, write rules/NAME.py with the methods of `Rule` and name it in `RECIPES` and in `optimizer.kind`.
Unusual: a step takes a divisor for the gradients (loss scale, normaliser and clipping in one) and a skip flag, both on
the device, so that nothing waits for it. State is known by name.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenformer.config_train import OptimizerConfig
from tokenformer.models.names import parse
from tokenformer.parallel.layout import Layout
from tokenformer.train.rules import Learner, Rule, State
from tokenformer.train.rules.adamw import AdamW
from tokenformer.train.rules.muon import Muon

RECIPES: dict[str, tuple[type[Rule], ...]] = {"adamw": (AdamW,), "muon": (Muon, AdamW)}


class Optimizer:
    """One object for a whole model, or for this rank's part of it. A parameter without state starts fresh."""

    def __init__(self, layout: Layout, config: OptimizerConfig, shares: Mapping[str, float] | None = None) -> None:
        """`shares`: the share of the learning rate of parameters that learn more slowly."""
        self.config, self.rules, shares = config, list[Rule](), shares or {}
        ends = layout.model.ends
        left = {n: Learner(p, parse(n, ends).role, shares.get(n)) for n, p in layout.named.items()}
        self.device = next(iter(layout.named.values())).device  # the host, where parameters live there
        for rule in RECIPES[config.kind]:
            mine = {name: learner for name, learner in left.items() if rule.wants(learner.role)}
            left = {name: learner for name, learner in left.items() if name not in mine}
            if mine:
                self.rules.append(rule(mine, config, layout))

    @torch.no_grad()
    def step(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Update by the gradients / divisor; if `skip` is 1, parameters and state stay what they were."""
        for rule in self.rules:
            rule.step(rate, divisor.to(self.device), skip.to(self.device))

    def state_by_name(self) -> State:
        """Return the state (AdamW: exp_avg, exp_avg_sq, step; Muon: momentum) of parameters updated before."""
        return {name: entry for rule in self.rules for name, entry in rule.state_by_name().items()}

    @torch.no_grad()
    def load_state_by_name(self, state: State) -> None:
        """Copy a state; a parameter that is not named starts fresh."""
        for rule in self.rules:
            rule.load_state_by_name(state)
