"""First values of a model, and those that a growth adds: the numbers of `tokenformer`, made by numpy.

Unusual: `draw` follows PyTorch's CPU generator (Mersenne Twister, then Box–Muller in blocks of 16), so that a run, and
a growth inside it, begins with the same model on both sides, up to the last bit or two of a logarithm or sine.
"""

import hashlib
import math
from collections.abc import Mapping

import numpy as np

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.growth.plan import Plan, Recipe
from tokenformer.models.names import parse
from tokenformer_jax.model import ENDS, shapes

Arrays = dict[str, np.ndarray]
State = dict[str, dict[str, np.ndarray]]  # parameter → what the optimizer keeps for it


def draw(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return standard normal numbers in fp32 that belong to (seed, name, shape).

    >>> draw(0, "a", (2, 8)).std() > 0.5
    np.True_
    """
    digest = hashlib.sha256(f"{seed}/{name}/{shape}".encode()).digest()
    number, count = int.from_bytes(digest[:8], "little") >> 1, math.prod(shape)
    twister = np.random.RandomState(number & 0xFFFFFFFF)._bit_generator
    uniform = lambda n: (twister.random_raw(n) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)  # noqa: E731
    values = _normal(np.append(uniform(count), np.zeros(-count % 16, np.float32)))[:count]
    if count % 16:  # PyTorch draws the last 16 anew
        values[-16:] = _normal(uniform(16))[-count:]
    return values.reshape(shape)


def _normal(uniform: np.ndarray) -> np.ndarray:
    first, second = np.split(uniform.reshape(-1, 2, 8), 2, axis=1)
    radius, angle = np.sqrt(-2 * np.log(1 - first)), np.float32(2 * math.pi) * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def initial(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int, key: str | None = None) -> np.ndarray:
    """Return the first values of one parameter, as models/init.py of `tokenformer` describes them."""
    found = parse(name, ENDS)
    role = found.role.kind
    if not found.role.drawn:
        return np.full(shape, float(role == "one"), np.float32)
    if config.init == "zero" and role == "value" and found.projection in ("proj", "ffn") and key is None:
        return np.zeros(shape, np.float32)
    scale = 2 / (config.layers * config.dim**0.5) if role == "value" else 0.02
    values = draw(seed, key or name, shape) * np.float32(scale)
    return values - values.mean(0) if config.init == "centred" and role == "value" else values


def initial_params(config: ModelConfig, seed: int) -> Arrays:
    return {name: initial(name, shape, config, seed) for name, shape in shapes(config).items()}


def start_from(given: Mapping[str, np.ndarray], first: Arrays, where: str) -> Arrays:
    """Put other weights in the place of first values; the parameter tokens of a smaller model fill the first rows."""
    made = dict(first)
    for name, array in given.items():
        own = made.get(name, np.zeros(0))
        more = len(own) - len(array) if parse(name, ENDS).token else 0
        if more < 0 or own.shape != (len(array) + more, *array.shape[1:]):
            why = f"does not fit into this model's {list(own.shape)}: only the number of parameter tokens may differ"
            raise UserError(f"start: {name} of {where} is {list(array.shape)}, which {why}")
        made[name] = np.concatenate([array.astype(np.promote_types(array.dtype, own.dtype)), own[len(array) :]])
    return made


def grow(plan: Plan, old: Mapping[str, np.ndarray], state: State) -> tuple[Arrays, State]:
    """Return the arrays and the optimizer's state after a growth: old rows keep theirs, new ones begin at zero."""
    made, kept = {}, {}
    for name, recipe in plan.recipes.items():
        made[name] = old[recipe.old] if recipe.old else _new_rows(plan, name, recipe, old)
        if recipe.old and recipe.new_rows:
            made[name] = np.concatenate([made[name], _new_rows(plan, name, recipe, old)])
        if name in plan.noise:
            rows, made[name] = len(old[recipe.source]), made[name].copy()
            noise = draw(plan.seed, f"growth {plan.number} noise/{name}", (rows, *made[name].shape[1:]))
            made[name][:rows] += noise.astype(made[name].dtype) * (plan.noise[name] * rms([made[name][:rows]]))
        if recipe.old in state:
            more = [(0, recipe.new_rows), (0, 0)]
            kept[name] = {k: np.pad(v, more[: v.ndim]) if v.ndim else v for k, v in state[recipe.old].items()}
    return made, kept


def _new_rows(plan: Plan, name: str, recipe: Recipe, old: Mapping[str, np.ndarray]) -> np.ndarray:
    like, key = [old[name] for name in recipe.like], f"growth {plan.number}/{name}"
    shape = (len(like[0]) if recipe.new_rows < 0 else recipe.new_rows, *like[0].shape[1:])
    if recipe.fill in ("zero", "one"):
        return np.full(shape, float(recipe.fill == "one"), like[0].dtype)
    size = rms(like) if recipe.fill == "matched" else 0.0
    if not math.isfinite(size):
        raise UserError(f"the old rows beside '{key}' hold values that are not finite: grow from weights that are")
    # rows of RMS 0 (values of a growth that never trained) would be dead: begin as a new model does
    rows = draw(plan.seed, key, shape) * np.float32(size) if size else None
    return (initial(name, shape, plan.config, plan.seed, key) if rows is None else rows).astype(like[0].dtype)


def rms(arrays: list[np.ndarray]) -> float:
    """Root mean square over all arrays."""
    squares = sum(float(np.square(a.astype(np.float64)).sum()) for a in arrays)
    return math.sqrt(squares / max(1, sum(a.size for a in arrays)))
