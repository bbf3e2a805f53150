"""What a plan consists of: for each parameter of the grown model, a recipe that says where its rows come from.

A recipe is plain data and needs no torch; make.py follows it, state.py follows it for what an optimizer keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenformer.config import ModelConfig
from tokenformer.models.names import Role

Fill = Literal["zero", "one", "matched", "official"]
Size = tuple[int, int]  # units before and after; unit j after is a copy of unit j mod before
ALL = -1  # as many new rows as the parameter has that they are like


@dataclass(frozen=True)
class Appended:
    """The rows of an old parameter, then new rows."""

    old: str | None  # the old parameter whose rows come first; None: all rows are new
    new_rows: int = 0
    fill: Fill = "zero"  # matched: random with the RMS of `like`; official: the initialisation of a new model
    like: tuple[str, ...] = ()  # old parameters whose width, type and RMS the new rows take

    def reads(self) -> set[str]:
        return {*self.like, *([self.old] if self.old else [])}


@dataclass(frozen=True)
class Widened:
    """An old parameter with rows and columns copied, and weights that read copies divided between them."""

    old: str
    rows: Size | None = None
    columns: Size | None = None
    divide: str | None = None  # `rows` or `columns`: the side that reads copied units
    block: bool = False  # the paper's form: the old matrix in a corner, a new model's values elsewhere
    noise: float = 0.0  # relative to the RMS, summing to zero over the copies of a unit

    @property
    def new_rows(self) -> int:
        return ALL if self.rows or self.columns else 0

    def reads(self) -> set[str]:
        return {self.old}


@dataclass(frozen=True)
class Copied:
    """A second copy of an old parameter, with a copy of what the optimizer keeps for it."""

    old: str
    new_rows = ALL

    def reads(self) -> set[str]:
        return {self.old}


Recipe = Appended | Widened | Copied


@dataclass(frozen=True)
class Plan:
    """What a growth will do. `event` is what the model's history keeps of it."""

    config: ModelConfig
    recipes: Mapping[str, Recipe]
    event: dict
    exact: bool  # the rule leaves every output as it was, up to rounding
    noise: Mapping[str, float] = field(default_factory=dict)  # parameter → random numbers on old rows, by their RMS
    ends: Mapping[str, Role] = field(default_factory=dict)  # what the model declares outside its blocks

    @property
    def seed(self) -> int:
        return self.event["seed"]

    @property
    def number(self) -> int:
        return self.event["number"]

    @property
    def kept(self) -> set[str]:
        """Parameters of the grown model that were there before."""
        return {name for name, recipe in self.recipes.items() if recipe.old and not isinstance(recipe, Copied)}
