"""One training step as one compiled program: micro-batches → gradients → clip, check → AdamW or Muon.

Unusual: each parameter has a step count of its own, since growth adds parameters later. AdamW is optax's; Muon is that
of `tokenformer`, since optax's corrects the bias of its momentum and so mixes gradients otherwise.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from tokenformer.config import Config, ModelConfig, OptimizerConfig
from tokenformer.models.names import parse
from tokenformer_jax.mesh import AXES, constrain, placement
from tokenformer_jax.model import ENDS, EXACT, How, Params, loss

QUINTIC = (3.4445, -4.7750, 2.0315)  # Newton–Schulz: drives singular values of a matrix of norm ≤ 1 to about 0.7–1.2
State = dict[str, dict[str, Array]]


def train_step(config: Config, model: ModelConfig, how: How, frozen: set[str], shares: Mapping[str, float]) -> Callable:
    """Return the step: (params, state, batch, rate) → (params, state, [mean loss, gradient norm, was skipped]).

    The fields of a batch are (micro-batches, rows, T). The gradient is that of the mean loss over all labels of all
    micro-batches, as in the PyTorch trainer; a step whose loss or gradient is not finite changes nothing. `frozen`
    parameters do not learn; `shares` of the rate are for those that learn more slowly.
    """
    assert config.batch is not None and how.mesh is not None
    expected, mesh = config.batch * model.context, how.mesh

    def lay(name: str, tensor: Array) -> Array:
        return jax.lax.with_sharding_constraint(tensor, placement(name, tensor.shape, mesh))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch, rate):
        learning = {name: param for name, param in params.items() if name not in frozen}

        def of(learning, micro):
            documents = micro.get("documents")
            total, count = loss({**params, **learning}, model, micro["ids"], micro["labels"], documents, how)
            return total / expected, (total, count.astype(total.dtype))

        def accumulate(sums, micro):
            (_, found), gradients = jax.value_and_grad(of, has_aux=True)(learning, micro)
            gradients = {name: lay(name, gradient) for name, gradient in gradients.items()}
            return jax.tree.map(jnp.add, sums, (gradients, found)), None

        zero = jnp.zeros((), jnp.promote_types(how.dtype or rate.dtype, jnp.float32))
        nothing = jax.tree.map(jnp.zeros_like, learning), (zero, zero)
        (gradients, (total, count)), _ = jax.lax.scan(accumulate, nothing, batch)
        divisor = count / expected
        norm = jnp.sqrt(sum(jnp.square(gradient).sum() for gradient in gradients.values())) / divisor
        good = jnp.isfinite(norm) & jnp.isfinite(total)
        if config.train.clip:
            divisor = divisor * jnp.maximum(norm / config.train.clip, 1)
        gradients = {name: gradient / divisor for name, gradient in gradients.items()}
        moves, kept = update(gradients, state, config.optimizer, mesh)
        new = {}
        for name, param in learning.items():
            pace = rate * shares.get(name, 1.0)
            decay = config.optimizer.weight_decay if parse(name, ENDS).role.decays else 0.0
            new[name] = lay(name, jnp.where(good, param * (1 - pace * decay) - pace * moves[name], param))
            kept[name] = {k: lay(name, jnp.where(good, v, state[name][k])) for k, v in kept[name].items()}
        return {**params, **new}, {**state, **kept}, jnp.stack([total / count, norm, 1.0 - good])

    return step


def fresh(name: str, shape: tuple[int, ...], config: OptimizerConfig) -> dict[str, np.ndarray]:
    """Return the state of a parameter that was never updated."""
    zeros = np.zeros(shape, np.float32)
    if config.kind == "muon" and parse(name, ENDS).role.matrix:
        return {"momentum": zeros}
    return {"exp_avg": zeros, "exp_avg_sq": zeros, "step": np.zeros((), np.float32)}


def update(gradients: Params, state: State, config: OptimizerConfig, mesh: Mesh | None) -> tuple[dict, State]:
    """Return the direction in which each parameter moves, before the rate and the decay, and the new state."""
    moves, kept = {}, {}
    adam = optax.scale_by_adam(config.betas[0], config.betas[1], config.eps)
    for name, gradient in gradients.items():
        if "momentum" not in (old := state[name]):
            was = optax.ScaleByAdamState(old["step"].astype(jnp.int32), old["exp_avg"], old["exp_avg_sq"])
            moves[name], (count, *moments) = cast(Any, adam.update(gradient, was))
            kept[name] = dict(
                zip(("step", "exp_avg", "exp_avg_sq"), (count.astype(jnp.float32), *moments), strict=True)
            )
    for units in _alike(gradients, state, config.segments == "joint").values():
        stack = lambda arrays: jnp.stack([jnp.concatenate([arrays[n] for n in unit]) for unit in units])  # noqa: B023, E731
        gradient, momentum = stack(gradients), stack({n: state[n]["momentum"] for unit in units for n in unit})
        momentum = momentum + (1 - config.momentum) * (gradient - momentum)
        direction = gradient + config.momentum * (momentum - gradient)  # Nesterov
        own = gradient.dtype if jax.default_backend() == "cpu" else jnp.bfloat16
        dtype = {"auto": own, "bf16": jnp.bfloat16, "fp32": jnp.float32}[config.orthogonal_dtype]
        direction = orthogonalise(direction, config.orthogonal_steps, dtype, mesh)
        direction *= 0.2 * max(gradient.shape[1:]) ** 0.5  # an orthogonal update of this length has AdamW's RMS
        for unit, parts in zip(units, zip(direction, momentum, strict=True), strict=True):
            edges = np.cumsum([len(gradients[name]) for name in unit])[:-1]
            for name, move, own in zip(unit, *(jnp.split(part, edges) for part in parts), strict=True):
                moves[name], kept[name] = move, {"momentum": own}
    return moves, kept


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


@jax.default_matmul_precision(EXACT)
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
