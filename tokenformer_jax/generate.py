"""Text from a model: the prompt is read at once, then token after token, all in one compiled program with a cache of
fixed size. Greedy at temperature 0, else sampled.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer_jax.model import EXACT, Cache, How, Params, empty_cache, head, hidden, stack_layers


def generator(config: ModelConfig, how: How = How()) -> Callable[..., np.ndarray]:
    """Return `generate(params, ids (B, T), n, temperature=0.0, seed=0)` → (B, T + n) for a model.

    It is compiled once for each T and n.

    >>> from tokenformer_jax.values import initial_params
    >>> tiny = ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=8, vocab=16).resolved()
    >>> generator(tiny)(initial_params(tiny, seed=0), np.array([[1, 2]]), 3).shape
    (1, 5)
    """

    @functools.partial(jax.jit, static_argnames="n")
    @jax.default_matmul_precision(EXACT)
    def run(params: Params, ids_BT: Array, n: int, temperature: Array, key: Array) -> Array:
        batch, length = ids_BT.shape
        dtype = how.dtype or params["embedding.weight"].dtype
        params = {name: param.astype(dtype) for name, param in params.items()}  # once, not for every token
        stacks, cache = stack_layers(params, config, dtype), empty_cache(config, batch, length + n, dtype)

        def next_logits(ids_BT: Array, cache: Cache, start: Array | int) -> tuple[Array, Cache]:
            x_BTD, cache = hidden(params, config, ids_BT, how, None, stacks, cache, start)
            return (x_BTD[:, -1] @ head(params, dtype, how.mesh).T).astype(jnp.float32), cache

        def step(held: tuple[Array, Cache], at: Array) -> tuple[tuple[Array, Cache], Array]:
            logits_BW, cache = held
            token_B = choose(logits_BW, temperature, jax.random.fold_in(key, at))
            return next_logits(token_B[:, None], cache, at), token_B

        (logits_BW, _), tokens = jax.lax.scan(step, next_logits(ids_BT, cache, 0), length + jnp.arange(n - 1))
        last_B = choose(logits_BW, temperature, jax.random.fold_in(key, length + n - 1))
        return jnp.concatenate([ids_BT, tokens.T, last_B[:, None]], axis=1)

    def generate(params: Params, ids: np.ndarray, n: int, temperature: float = 0.0, seed: int = 0) -> np.ndarray:
        ids = np.asarray(ids)
        if ids.ndim != 2 or not ids.size or ids.min() < 0 or ids.max() >= config.vocab:
            raise UserError(f"ids have the shape {ids.shape}: give (batch, positions) of 0 to {config.vocab - 1}")
        if n < 1 or temperature < 0:
            raise UserError(f"tokens are {n} and the temperature is {temperature}: give numbers above 0")
        return np.asarray(run(params, jnp.asarray(ids), n, jnp.float32(temperature), jax.random.key(seed)))

    return generate


def choose(logits_BW: Array, temperature: Array, key: Array) -> Array:
    """Choose the next token of each row."""
    drawn_B = jax.random.categorical(key, logits_BW / jnp.where(temperature == 0, 1, temperature))
    return jnp.where(temperature == 0, logits_BW.argmax(-1), drawn_B)
