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
from tokenformer_jax.model import Cache, How, Params, empty_cache, exact, head, hidden

Generate = Callable[..., np.ndarray]


def generator(config: ModelConfig, how: How = How()) -> Generate:
    """Return `generate(params, ids (B, T), n, temperature=0.0, top_k=0, seed=0)` → (B, T + n) for a model.

    It is compiled once for each T and n. `top_k`: only the k most likely tokens; 0 = all.

    >>> from tokenformer_jax.values import initial_params
    >>> tiny = ModelConfig(layers=1, dim=8, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=8, vocab=16).resolved()
    >>> generator(tiny)(initial_params(tiny, seed=0), np.array([[1, 2]]), 3).shape
    (1, 5)
    """

    def next_logits(params: Params, ids_BT: Array, cache: Cache, start: Array | int) -> tuple[Array, Cache]:
        x_BTD, cache = hidden(params, config, ids_BT, how, cache=cache, start=start)
        return (x_BTD[:, -1] @ head(params, x_BTD.dtype, how.mesh).T).astype(jnp.float32), cache

    @functools.partial(jax.jit, static_argnames=("n", "top_k"))
    @exact
    def run(params: Params, ids_BT: Array, n: int, temperature: Array, top_k: int, key: Array) -> Array:
        batch, length = ids_BT.shape
        cache = empty_cache(config, batch, length + n, how.dtype or params["embedding.weight"].dtype)
        logits_BW, cache = next_logits(params, ids_BT, cache, 0)

        def step(held: tuple[Array, Cache], at: Array) -> tuple[tuple[Array, Cache], Array]:
            logits_BW, cache = held
            token_B = choose(logits_BW, temperature, top_k, jax.random.fold_in(key, at))
            return next_logits(params, token_B[:, None], cache, at), token_B

        (logits_BW, _), tokens = jax.lax.scan(step, (logits_BW, cache), length + jnp.arange(n - 1))
        last_B = choose(logits_BW, temperature, top_k, jax.random.fold_in(key, length + n - 1))
        return jnp.concatenate([ids_BT, tokens.T, last_B[:, None]], axis=1)

    def generate(
        params: Params, ids: np.ndarray, n: int, temperature: float = 0.0, top_k: int = 0, seed: int = 0
    ) -> np.ndarray:
        ids = np.asarray(ids)
        if ids.ndim != 2 or not ids.size or ids.min() < 0 or ids.max() >= config.vocab:
            raise UserError(f"ids have the shape {ids.shape}: give (batch, positions) of 0 to {config.vocab - 1}")
        if n < 1 or temperature < 0 or not 0 <= top_k <= config.vocab:
            raise UserError(f"n is {n}, temperature {temperature} and top_k {top_k}: give numbers that are not below 0")
        return np.asarray(run(params, jnp.asarray(ids), n, jnp.float32(temperature), top_k, jax.random.key(seed)))

    return generate


def choose(logits_BW: Array, temperature: Array, top_k: int, key: Array) -> Array:
    """Choose the next token of each row."""
    if top_k:
        least_B1 = jax.lax.top_k(logits_BW, top_k)[0][:, -1:]
        logits_BW = jnp.where(logits_BW < least_B1, -jnp.inf, logits_BW)
    drawn_B = jax.random.categorical(key, logits_BW / jnp.where(temperature == 0, 1, temperature))
    return jnp.where(temperature == 0, logits_BW.argmax(-1), drawn_B)
