"""Update rules, one per file, with one interface. optim.py says which recipe has which rules."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from tokenformer.config_train import OptimizerConfig
from tokenformer.models.names import Role
from tokenformer.parallel.layout import Layout

State = dict[str, dict[str, Tensor]]  # parameter → what a rule keeps for it


class Learner(NamedTuple):
    """A parameter (this rank's part of it) that a rule updates."""

    parameter: nn.Parameter
    role: Role
    share: float | None = None  # of the rate; None: all of it


class Rule(Protocol):
    """An update rule for some of a model's parameters, by name. A parameter without a gradient is left alone."""

    def __init__(self, learners: Mapping[str, Learner], config: OptimizerConfig, layout: Layout) -> None: ...

    @staticmethod
    def wants(role: Role) -> bool:
        """Tell whether the rule updates parameters of this role."""
        ...

    def step(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Update by the gradients / divisor; if `skip` is 1, parameters and state stay what they were."""
        ...

    def state_by_name(self) -> State:
        """Return the state of each parameter that was updated before: tensors of its shape, and a number `step`."""
        ...

    def load_state_by_name(self, state: State) -> None:
        """Copy a state; a parameter that is not named starts fresh."""
        ...
