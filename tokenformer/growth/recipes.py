"""A plan holds a recipe for each parameter of the grown model, which says where its rows come from.

A recipe is plain data and needs no torch. make.py makes tensors by it, state.py the state that an optimizer keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenformer.config import ModelConfig
from tokenformer.models.names import Role

Fill = Literal["zero", "one", "matched", "official"]
ALL = -1  # new_rows: all rows are new, as many as the parameter `like` has


@dataclass(frozen=True)
class Recipe:
    """The rows of an old parameter, then new rows."""

    old: str | None  # the old parameter whose rows come first; None: all rows are new
    new_rows: int = 0
    fill: Fill = "zero"  # matched: random with the RMS of `like`; official: the initialisation of a new model
    like: tuple[str, ...] = ()  # old parameters whose width, type and RMS the new rows take

    @property
    def source(self) -> str:
        """The old parameter whose type, and whose place in an optimizer, this one takes."""
        return self.old or self.like[0]


@dataclass(frozen=True)
class Plan:
    """What a growth will do. `event` is what the model's history keeps of it."""

    config: ModelConfig
    recipes: Mapping[str, Recipe]
    event: dict
    exact: bool  # the rule changes no output beyond rounding
    noise: Mapping[str, float] = field(default_factory=dict)  # parameter → noise on its old rows, by their RMS
    ends: Mapping[str, Role] = field(default_factory=dict)  # roles of the parameters outside the blocks
    seed: int = 0
    number: int = 0  # of growths that came before

    @property
    def kept(self) -> set[str]:
        """Parameters of the grown model that were there before."""
        return {name for name, recipe in self.recipes.items() if recipe.old}
