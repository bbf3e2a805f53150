"""The optimizer of a run: every parameter is updated by the first rule of the recipe that wants its role.

To add an optimizer, write rules/NAME.py with the methods of `Rule` and name it in `RECIPES` and in
`optimizer.kind` (config_train.py).
Unusual: a step takes a divisor for the gradients (loss scale, normaliser and clipping in one) and a skip flag, both on
the device, so that nothing waits for it. State is known by name.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.config_train import OptimizerConfig
from tokenformer.models.names import ONE, TABLE, Name, parse  # noqa: F401 (the doctest's)
from tokenformer.parallel.layout import Layout
from tokenformer.train.rules import Learner, Rule, State
from tokenformer.train.rules.adamw import AdamW
from tokenformer.train.rules.muon import Muon

RECIPES: dict[str, tuple[type[Rule], ...]] = {"adamw": (AdamW,), "muon": (Muon, AdamW)}


def blocks_after(name: Name, config: ModelConfig) -> int:
    """Return how many blocks stand between a parameter and the final norm, its own among them; the embedding's is one

    more than all.

    >>> tiny = ModelConfig(layers=2, dim=32, heads=4, kind="transformer")
    >>> ends = {"embedding.weight": TABLE, "norm.weight": ONE}
    >>> names = ("embedding.weight", "blocks.0.ffn.up.weight", "blocks.1.ffn.up.weight", "norm.weight")
    >>> [blocks_after(parse(name, ends), tiny) for name in names]
    [3, 2, 1, 0]
    """
    trunk, part = config.trunk(name.trunk), name.part
    if name.layer is None and config.trunks:  # what belongs to no trunk comes behind all of them
        prefix, _, part = part.partition(".")
        trunk = config.trunks.get(prefix, config)
        part = part if prefix in config.trunks else "head"
    layers = trunk.layers
    if name.layer is None:
        return 0 if part in ("norm", "head", "added_head") else layers + 1
    return layers - name.layer


class Optimizer:
    """One object for a whole model, or for this rank's part of it. A parameter without state starts fresh."""

    def __init__(self, layout: Layout, config: OptimizerConfig, shares: Mapping[str, float] | None = None) -> None:
        """`shares`: the share of the learning rate of parameters that learn more slowly."""
        self.config, self.rules, shares = config, list[Rule](), shares or {}
        names = {name: parse(name, layout.model.ends) for name in layout.named}
        if config.layer_decay != 1:
            decay = {n: config.layer_decay ** blocks_after(name, layout.model.config) for n, name in names.items()}
            shares = {name: share * shares.get(name, 1.0) for name, share in decay.items()}
        left = {n: Learner(p, names[n].role, shares.get(n)) for n, p in layout.named.items()}
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
