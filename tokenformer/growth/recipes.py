"""A plan holds a recipe for each parameter of the grown model, which says where its rows come from.

A recipe is plain data and needs no torch. make.py makes tensors by it, state.py the state that an optimizer keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenformer.config import ModelConfig
from tokenformer.models.names import Role

Fill = Literal["zero", "one", "matched", "official"]
Size = tuple[int, int]  # units before and after; unit j after is a copy of unit j mod before
ALL = -1  # new_rows: all rows are new, as many as the parameter `like` has


@dataclass(frozen=True)
class Appended:
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
class Widened:
    """An old parameter with rows and columns copied; a weight that reads copied units is divided between the copies."""

    old: str
    rows: Size | None = None
    columns: Size | None = None
    divide: str | None = None  # `rows` or `columns`: the side that reads copied units
    block: bool = False  # the paper's form: the old matrix in a corner, a new model's values elsewhere
    noise: float = 0.0  # relative to the RMS, summing to zero over the copies of a unit

    @property
    def new_rows(self) -> int:
        return ALL if self.rows or self.columns else 0

    @property
    def source(self) -> str:
        return self.old


@dataclass(frozen=True)
class Copied:
    """A second copy of an old parameter, with a copy of what the optimizer keeps for it."""

    old: str
    new_rows = ALL

    @property
    def source(self) -> str:
        return self.old


Recipe = Appended | Widened | Copied


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
        return {name for name, recipe in self.recipes.items() if recipe.old and not isinstance(recipe, Copied)}
