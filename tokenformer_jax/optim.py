"""AdamW by optax, and Muon as `tokenformer` has it: every parameter is updated by the first that wants its role.

Unusual: each parameter has a step count of its own, since growth adds parameters later; the state has the names under
which checkpoints keep it. Muon is ours: optax's corrects the bias of its momentum and so mixes gradients otherwise.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from tokenformer.config_train import OptimizerConfig
from tokenformer.models.names import parse
from tokenformer_jax.mesh import AXES, constrain
from tokenformer_jax.model import ENDS, Params

QUINTIC = (3.4445, -4.7750, 2.0315)  # Newton–Schulz: drives singular values of a matrix of norm ≤ 1 to about 0.7–1.2
State = dict[str, dict[str, Array]]


def fresh(name: str, shape: tuple[int, ...], config: OptimizerConfig, dtype: Any) -> dict[str, np.ndarray]:
    """Return the state of a parameter that was never updated."""
    zeros = np.zeros(shape, dtype)
    if config.kind == "muon" and parse(name, ENDS).role.matrix:
        return {"momentum": zeros}
    return {"exp_avg": zeros, "exp_avg_sq": zeros, "step": np.zeros((), np.float32)}


def update(
    params: Params,
    gradients: Params,
    state: State,
    config: OptimizerConfig,
    rate: Array,
    shares: Mapping[str, float],
    mesh: Mesh | None,
) -> tuple[dict[str, Array], State]:
    """Return what has a gradient after one step, and its state. `shares`: of the rate, where it is not whole."""
    new, kept = {}, {}
    adam = optax.scale_by_adam(config.betas[0], config.betas[1], config.eps)
    for name, gradient in gradients.items():
        if "momentum" in state[name]:
            continue
        old, decay = state[name], config.weight_decay if parse(name, ENDS).role.decays else 0.0
        was = optax.ScaleByAdamState(old["step"].astype(jnp.int32), old["exp_avg"], old["exp_avg_sq"])
        move, now = adam.update(gradient, was)
        kept[name] = {"exp_avg": now.mu, "exp_avg_sq": now.nu, "step": now.count.astype(jnp.float32)}
        pace = (rate * shares.get(name, 1.0)).astype(gradient.dtype)
        new[name] = params[name] * (1 - pace * decay) - pace * move
    for units in _alike(gradients, state, config.segments == "joint").values():
        stack = lambda arrays: jnp.stack([jnp.concatenate([arrays[n] for n in unit]) for unit in units])  # noqa: B023, E731
        gradient, momentum = stack(gradients), stack({n: state[n]["momentum"] for unit in units for n in unit})
        momentum = momentum + (1 - config.momentum) * (gradient - momentum)
        direction = gradient + config.momentum * (momentum - gradient)  # Nesterov
        direction = orthogonalise(direction, config.orthogonal_steps, _dtype(config, gradient.dtype), mesh)
        length = 0.2 * max(gradient.shape[1:]) ** 0.5  # an orthogonal update of this length has AdamW's RMS
        for number, unit in enumerate(units):
            edges = np.cumsum([len(params[n]) for n in unit])[:-1]
            parts = zip(unit, jnp.split(direction[number], edges), jnp.split(momentum[number], edges), strict=True)
            for name, move, kept_momentum in parts:
                pace = (rate * shares.get(name, 1.0)).astype(gradient.dtype)
                new[name] = params[name] * (1 - pace * config.weight_decay) - (pace * length) * move
                kept[name] = {"momentum": kept_momentum}
    return new, kept


def _alike(gradients: Params, state: State, joint: bool) -> dict[tuple, list[list[str]]]:
    """Return the names of matrices that are orthogonalised as one, by their shapes: equal ones are solved at once."""
    units: dict[str, list[str]] = {}
    for name in gradients:
        if "momentum" in state[name]:
            units.setdefault(parse(name, ENDS)._replace(segment=0).text if joint else name, []).append(name)
    found: dict[tuple, list[list[str]]] = {}
    for unit in units.values():
        found.setdefault(tuple(gradients[name].shape for name in unit), []).append(unit)
    return found


def _dtype(config: OptimizerConfig, like: Any) -> Any:
    if config.orthogonal_dtype == "auto":
        return like if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.bfloat16 if config.orthogonal_dtype == "bf16" else jnp.float32


@jax.default_matmul_precision("highest")
def orthogonalise(matrices: Array, steps: int, dtype: Any, mesh: Mesh | None = None) -> Array:
    """Replace each of (K, rows, columns) by nearly the closest orthogonal matrix; the devices share the matrices.

    >>> q = orthogonalise(jnp.array([[[3.0, 0.0], [0.0, 2.0]]]), 5, jnp.float32)
    >>> bool((jnp.diagonal(q[0]) > 0.6).all()), q[0, 0, 1].item()
    (True, 0.0)
    """
    count, tall = len(matrices), matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).astype(dtype)
    if mesh is not None and mesh.size > 1:
        x = constrain(jnp.pad(x, ((0, -count % mesh.size), (0, 0), (0, 0))), mesh, AXES)
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(1, 2), keepdims=True), 1e-7)
    a, b, c = QUINTIC
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x)[:count].astype(matrices.dtype)
