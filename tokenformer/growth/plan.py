"""A growth before it happens: the new config, and for each new parameter a recipe that says where its rows come from.

Unusual: a plan is made from names alone, in no time and memory, and followed one tensor at a time. New values belong
to (seed, how many growths came before, name), never to a global random state.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.models.init import draw, initial

State = dict[str, dict[str, Tensor]]  # parameter → what an optimizer keeps for it: exp_avg, exp_avg_sq, step, momentum
Fill = Literal["zero", "one", "matched", "official"]
ALL = -1  # as many new rows as the parameter has that they are like


class Making(Protocol):
    """What makes one parameter of the grown model."""

    @property
    def old(self) -> str | None: ...
    @property
    def new_rows(self) -> int: ...
    def reads(self) -> set[str]: ...
    def make(self, name: str, tensors: Mapping[str, Tensor], plan: "Plan") -> Tensor: ...
    def grow_state(self, entry: dict[str, Tensor]) -> dict[str, Tensor] | None: ...


@dataclass(frozen=True)
class Recipe:
    """One parameter of the grown model: the rows of an old one, then new rows."""

    old: str | None  # the old parameter whose rows come first, untouched; None: all rows are new
    rows: int = 0  # new rows after them
    fill: Fill = "zero"  # matched: random with the RMS of `like`; official: the initialisation of a new model
    like: tuple[str, ...] = ()  # old parameters whose width, type and RMS the new rows take

    @property
    def new_rows(self) -> int:
        return self.rows

    def reads(self) -> set[str]:
        return {*self.like, *([self.old] if self.old else [])}

    def make(self, name: str, tensors: Mapping[str, Tensor], plan: "Plan") -> Tensor:
        if not self.rows:
            return tensors[self.old or ""]
        new = _rows(name, self, tensors, plan)
        return new if self.old is None else torch.cat([tensors[self.old].detach(), new])

    def grow_state(self, entry: dict[str, Tensor]) -> dict[str, Tensor]:
        """New rows have done nothing yet: zero moments, zero momentum; the step count is the parameter's."""
        if not self.rows:
            return entry
        return {k: t if t.ndim == 0 else torch.cat([t, t.new_zeros(self.rows, *t.shape[1:])]) for k, t in entry.items()}


def _rows(name: str, recipe: Recipe, tensors: Mapping[str, Tensor], plan: "Plan") -> Tensor:
    """The new rows of one parameter, with the width, type and device of those they join."""
    model = tensors[recipe.like[0]]
    shape = tuple(model.shape) if recipe.rows == ALL else (recipe.rows, *model.shape[1:])
    key = f"growth {plan.number}/{name}"
    if recipe.fill == "zero":
        return model.new_zeros(shape)
    if recipe.fill == "one":
        return model.new_ones(shape)
    size = rms([tensors[like] for like in recipe.like]) if recipe.fill == "matched" else 0.0
    if not math.isfinite(size):
        raise UserError(f"'{recipe.like[0]}' holds values that are not finite: grow from weights that are whole")
    # an RMS of 0 (values of a growth that never trained) would make dead rows: begin as a new model does
    values = draw(plan.seed, key, shape) * size if size else initial(name, shape, plan.config, plan.seed, {}, key)
    return values.to(device=model.device, dtype=model.dtype)


def rms(tensors: list[Tensor]) -> float:
    """Root mean square over all of them.

    >>> rms([torch.ones(2, 2), torch.full((2, 2), 7.0)])
    5.0
    """
    squares = sum(t.detach().double().square().sum().item() for t in tensors)
    return math.sqrt(squares / max(1, sum(t.numel() for t in tensors)))


@dataclass(frozen=True)
class Plan:
    """What a growth will do. `event` is what the model's history keeps of it."""

    config: ModelConfig
    recipes: Mapping[str, Making]
    event: dict
    exact: bool  # the rule leaves every output as it was, up to rounding

    @property
    def seed(self) -> int:
        return self.event["seed"]

    @property
    def number(self) -> int:
        return self.event["number"]

    def tensors(self, old: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The new tensors one by one, layer by layer; from a lazy mapping the old ones are read as they are needed."""
        for name, recipe in self.recipes.items():
            yield name, recipe.make(name, old, self)

    def state(self, old: State) -> State:
        """The optimizer's state after the growth. New parameters have none: their optimizer begins them itself."""
        found = {}
        for name, recipe in self.recipes.items():
            if recipe.old in old and (entry := recipe.grow_state(old[recipe.old])) is not None:
                found[name] = entry
        return found


class Grown(NamedTuple):
    """(config, tensors, optimizer state) after a growth, and what the history keeps of it."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    state: State | None
    event: dict


def apply(plan: Plan, tensors: Mapping[str, Tensor], state: State | None = None) -> Grown:
    """All of a plan at once; the old tensors stay as they are, and those that did not change are shared.

    `state=None` drops the optimizer's state, as the official code does.
    """
    return Grown(plan.config, dict(plan.tensors(tensors)), None if state is None else plan.state(state), plan.event)
