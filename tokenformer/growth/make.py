"""Make the tensors of a grown model from its plan and the old tensors, one at a time.

New values depend on (seed, how many growths came before, name) and on no global random state. They take the width, type
and device of the rows that they join.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.growth.plan import ALL, Fill, Plan, Recipe
from tokenformer.models.init import draw, initial


def make_tensors(plan: Plan, old: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The new tensors one by one, layer by layer; from a lazy mapping the old ones are read as they are needed."""
    for name in plan.recipes:
        yield name, make_tensor(plan, name, old)


def make_tensor(plan: Plan, name: str, old: Mapping[str, Tensor]) -> Tensor:
    """One tensor of the grown model: the old one itself where nothing changes."""
    recipe = plan.recipes[name]
    if recipe.old is None:
        return _new_rows(plan, name, recipe, old)
    tensor = old[recipe.old]
    if recipe.new_rows:
        tensor = torch.cat([tensor.detach(), _new_rows(plan, name, recipe, old)])
    return _add_noise(plan, name, tensor, recipe.new_rows) if name in plan.noise else tensor


def _add_noise(plan: Plan, name: str, tensor: Tensor, new_rows: int) -> Tensor:
    """Add random numbers to the old rows, as a share of their RMS."""
    rows, tensor = len(tensor) - new_rows, tensor.detach().clone()
    noise = draw(plan.seed, f"growth {plan.number} noise/{name}", (rows, *tensor.shape[1:])).to(tensor)
    tensor[:rows] += noise * (plan.noise[name] * rms([tensor[:rows]]))
    return tensor


def _new_rows(plan: Plan, name: str, recipe: Recipe, old: Mapping[str, Tensor]) -> Tensor:
    like, key = [old[name] for name in recipe.like], f"growth {plan.number}/{name}"
    rows = len(like[0]) if recipe.new_rows == ALL else recipe.new_rows
    first = functools.partial(initial, name, config=plan.config, seed=plan.seed, ends=plan.ends, key=key)
    return fill_rows(like, rows, recipe.fill, plan.seed, key, first)


def fill_rows(
    like: list[Tensor], rows: int, fill: Fill, seed: int, key: str, first: Callable[[tuple[int, ...]], Tensor]
) -> Tensor:
    """Make `rows` new rows with the width, type and device of `like`. `first(shape)`: the values of a new model."""
    shape = (rows, *like[0].shape[1:])
    if fill in ("zero", "one"):
        return like[0].new_full(shape, float(fill == "one"))
    size = rms(like) if fill == "matched" else 0.0
    if not math.isfinite(size):
        raise UserError(f"the old rows beside '{key}' hold values that are not finite: grow from weights that are")
    # rows of RMS 0 (values of a growth that never trained) would be dead: begin as a new model does
    values = draw(seed, key, shape) * size if size else first(shape)
    return values.to(device=like[0].device, dtype=like[0].dtype)


def rms(tensors: list[Tensor]) -> float:
    """Root mean square over all tensors.

    >>> rms([torch.ones(2, 2), torch.full((2, 2), 7.0)])
    5.0
    """
    squares = sum(t.detach().double().square().sum().item() for t in tensors)
    return math.sqrt(squares / max(1, sum(t.numel() for t in tensors)))
