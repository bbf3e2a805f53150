"""The language model as pure functions over a dictionary of arrays, whose names and shapes are those of our folders.

Unusual: layers of equal shape are stacked inside the program and run by one `lax.scan`, so compiling takes as long for
96 layers as for one, and what is stored stays one array per parameter. One cast, after the embedding and of the weights
where they are stacked, decides the compute type.
Legend: B batch, T positions, S keys, D dim, H heads, C head_dim, N parameter tokens of a segment, W vocabulary.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from tokenformer.config import PROJECTION_OF, PROJECTIONS, ModelConfig
from tokenformer.config_data import IGNORED
from tokenformer.errors import UserError
from tokenformer.models.names import ONE, TABLE, ZERO, Role
from tokenformer_jax.mesh import ROWS, constrain

Params = Mapping[str, Array]
Cache = list[tuple[Array, Array]]  # keys and values (layers, B, S, H, C) of each run of equal layers
THETAS = ("l2_norm_gelu", "gelu_l2_norm", "softmax")
PARTS = ("attention.query", "attention.key", "attention.value", "attention.proj", "ffn")
ENDS: dict[str, Role] = {"embedding.weight": TABLE, "norm.weight": ONE, "norm.bias": ZERO, "head.weight": TABLE}
EXACT = "highest"  # fp32 products in fp32: TPUs would round their inputs to bf16, GPUs to TF32
LOGITS = 1 << 27  # held at once; backward computes them again


class How(NamedTuple):
    """How the model is computed."""

    dtype: Any = None  # as the parameters
    remat: str = "none"  # what backward recomputes, as train.activation_checkpointing says it
    mesh: Mesh | None = None


def check(config: ModelConfig) -> ModelConfig:
    """Refuse what this twin does not compute; return the config with every τ written out."""
    refused = {"of": config.of != "language" and config.of, "kind": config.kind != "tokenformer" and config.kind}
    refused |= {"theta": config.theta not in THETAS and config.theta, "added_vocab": config.added_vocab}
    refused |= {"switch": ", ".join(sorted(config.switch_names()))}
    for name, value in refused.items():
        if value:
            raise UserError(f"model.{name} is {value}, which there is not in JAX: use the package `tokenformer` for it")
    return config.resolved()


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by name, in the order of the PyTorch model.

    >>> tiny = ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=[4, 2], vocab=16)
    >>> shapes(tiny)["blocks.0.ffn.segments.1.value_tokens"]
    (2, 16)
    """
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab, config.dim)}
    for layer in range(config.layers):
        for part in PARTS:
            for i, (n, _) in enumerate(config.segments(PROJECTION_OF[part.rpartition(".")[2]], layer)):
                for leaf in ("key_tokens", "value_tokens"):
                    found[f"blocks.{layer}.{part}.segments.{i}.{leaf}"] = (n, config.dim)
    found |= {"norm.weight": (config.dim,), "norm.bias": (config.dim,)}
    return found if config.tied else {**found, "head.weight": (config.vocab, config.dim)}


@functools.partial(jax.checkpoint, static_argnums=(1, 2), prevent_cse=False)  # backward computes it again
def normalise(score_TN: Array, theta: str, tau: float) -> Array:
    """Θ of one segment's scores, in fp32 or better. Where the norm is zero: zeros, and zero gradients.

    Where the tokens of a segment are split over devices, the sum here is the one number per row that they all-reduce.
    """
    score_TN = score_TN.astype(jnp.promote_types(score_TN.dtype, jnp.float32))
    if theta == "softmax":
        return jax.nn.softmax(score_TN) * tau**2
    score_TN = _gelu(score_TN) if theta == "gelu_l2_norm" else score_TN
    total_T1 = jnp.square(score_TN).sum(-1, keepdims=True)
    zero = total_T1 == 0  # the inner `where` keeps NaN out of backward
    score_TN = score_TN * jnp.where(zero, 0, tau * jnp.where(zero, 1, total_T1) ** -0.5)
    return _gelu(score_TN) if theta == "l2_norm_gelu" else score_TN


_gelu = functools.partial(jax.nn.gelu, approximate=False)


def pattention(x_TD: Array, layer: Params, part: str, taus: list[float], theta: str, mesh: Mesh | None) -> Array:
    """y = Θ(x·Kᵀ)·V, summed over the segments. Weights that are sharded over `fsdp` are gathered here."""
    outputs = []
    for i, tau in enumerate(taus):
        leaves = (f"{part}.segments.{i}.key_tokens", f"{part}.segments.{i}.value_tokens")
        key_ND, value_ND = (constrain(layer[leaf], mesh, "token", None) for leaf in leaves)
        score_TN = constrain(x_TD @ key_ND.T, mesh, ROWS, None, "token")
        outputs.append(normalise(score_TN, theta, tau).astype(x_TD.dtype) @ value_ND)
    return sum(outputs[1:], outputs[0])


def attention(q_BTHC: Array, k_BSHC: Array, v_BSHC: Array, seen: Array | None = None) -> Array:
    """Softmax attention, scale 1/√C; causal, or by `seen` (B or 1, 1, T, S). On a GPU by cuDNN in 16 bits."""
    if seen is None and jax.default_backend() == "gpu" and q_BTHC.dtype in (jnp.bfloat16, jnp.float16):
        return jax.nn.dot_product_attention(q_BTHC, k_BSHC, v_BSHC, is_causal=True, implementation="cudnn")
    better = jnp.promote_types(q_BTHC.dtype, jnp.float32)
    score = jnp.einsum("bthc,bshc->bhts", q_BTHC, k_BSHC, preferred_element_type=better) / math.sqrt(q_BTHC.shape[-1])
    seen = jnp.tril(jnp.ones(score.shape[-2:], bool)) if seen is None else seen
    share = jax.nn.softmax(jnp.where(seen, score, -jnp.inf)).astype(v_BSHC.dtype)
    return jnp.einsum("bhts,bshc->bthc", share, v_BSHC)


def rotate(x_BTHC: Array, cos_TA: Array, sin_TA: Array) -> Array:
    """Rotate the first 2·A channels of each head by angles (T, A): channel i is paired with channel i + A."""
    half, cos, sin = cos_TA.shape[-1], cos_TA[:, None], sin_TA[:, None]
    first, second, rest = jnp.split(x_BTHC, [half, 2 * half], axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(part.astype(x_BTHC.dtype) for part in turned), rest], axis=-1)


def angles(positions_T: Array, config: ModelConfig, dtype: Any) -> tuple[Array, Array]:
    """cos and sin (T, A) of positions, in fp32 or better."""
    dtype, dims = jnp.promote_types(dtype, jnp.float32), config.rotary_dims
    frequency_A = (config.rotary_base ** (-np.arange(0, dims, 2) / max(dims, 1))).astype(dtype)
    angle_TA = positions_T.astype(dtype)[:, None] * frequency_A
    return jnp.cos(angle_TA), jnp.sin(angle_TA)


@functools.partial(jax.checkpoint, static_argnums=1, prevent_cse=False)
def norm(x: Array, eps: float, weight: Array | None = None, bias: Array | None = None) -> Array:
    """LayerNorm, in fp32 or better; backward computes it again."""
    better = jnp.promote_types(x.dtype, jnp.float32)
    off = x.astype(better) - x.astype(better).mean(-1, keepdims=True)
    off = off * jax.lax.rsqrt(jnp.square(off).mean(-1, keepdims=True) + eps)
    off = off if weight is None or bias is None else off * weight.astype(better) + bias.astype(better)
    return off.astype(x.dtype)


def runs(config: ModelConfig) -> list[tuple[list[int], dict[str, list[tuple[int, float]]]]]:
    """Return neighbouring layers of equal segments and τ, and these segments by projection."""
    every = [{which: config.segments(which, layer) for which in PROJECTIONS} for layer in range(config.layers)]
    groups = itertools.groupby(range(config.layers), key=every.__getitem__)
    return [(list(layers), segments) for segments, layers in groups]


def empty_cache(config: ModelConfig, batch: int, length: int, dtype: Any) -> Cache:
    """Return a cache for `length` positions, which never changes its shape."""
    shape = (batch, length, config.heads, config.head_dim)
    return [tuple(jnp.zeros((len(layers), *shape), dtype) for _ in range(2)) for layers, _ in runs(config)]  # type: ignore


def stack_layers(params: Params, config: ModelConfig, dtype: Any) -> list[dict[str, Array]]:
    """Return the parameters of each run of equal layers, (layers, …) by their name in a block, in the compute type."""
    found = []
    for layers, _ in runs(config):
        first = f"blocks.{layers[0]}."
        names = [name.removeprefix(first) for name in params if name.startswith(first)]
        found.append({n: jnp.stack([params[f"blocks.{i}.{n}"].astype(dtype) for i in layers]) for n in names})
    return found


def hidden(
    params: Params, config: ModelConfig, ids_BT: Array, how: How = How(),
    documents_BT: Array | None = None, stacks: list | None = None, cache: Cache | None = None, start: Array | int = 0,
) -> tuple[Array, Cache]:  # fmt: skip
    """Return the input of the output head (B, T, D), and the cache with these positions.

    With a cache, either a prompt is read into an empty one, or one token is added at position `start`. `stacks`: what
    `stack_layers` made, where many calls use it.
    """
    table_WD = constrain(params["embedding.weight"], how.mesh, "token", None)
    x_BTD = constrain(table_WD[ids_BT].astype(how.dtype or table_WD.dtype), how.mesh, ROWS)
    dtype, length = x_BTD.dtype, ids_BT.shape[1]
    cos_sin = angles(start + jnp.arange(length), config, dtype)
    seen = None
    if documents_BT is not None:
        same = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
        seen = same & jnp.tril(jnp.ones((length, length), bool))
    elif cache is not None and length == 1:
        seen = jnp.arange(cache[0][0].shape[2])[None, None, None] <= start
    stacks, held = stack_layers(params, config, dtype) if stacks is None else stacks, Cache()
    for number, (_, segments) in enumerate(runs(config)):
        block = functools.partial(_block, config, segments, cos_sin, seen, how.mesh, start)
        if how.remat != "none":
            keep = None if how.remat == "full" else jax.checkpoint_policies.dots_saveable
            block = jax.checkpoint(block, policy=keep, prevent_cse=False)  # a scan needs no barrier against merging
        x_BTD, kept = jax.lax.scan(block, x_BTD, (stacks[number], cache and cache[number]))
        held.append(kept)
    return norm(x_BTD, config.norm_eps, params["norm.weight"], params["norm.bias"]), held


def _block(config: ModelConfig, segments: dict, cos_sin, seen, mesh, start, x_BTD: Array, given: tuple) -> tuple:
    """One block, as the body of a scan over layers: attention, then feed-forward, each added to the stream."""
    layer, cache = given

    def project(x: Array, part: str) -> Array:
        taus = [tau for _, tau in segments[PROJECTION_OF[part.rpartition(".")[2]]]]
        return pattention(x, layer, part, taus, config.theta, mesh)

    normed = norm(x_BTD, config.norm_eps)
    split = "token" if mesh is not None and config.heads % mesh.shape["token"] == 0 else None
    heads = (project(normed, part).reshape(*x_BTD.shape[:2], config.heads, -1) for part in PARTS[:3])
    q, k, v = (constrain(x, mesh, ROWS, None, split, None) for x in heads)
    q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
    if cache is not None:
        cache = tuple(jax.lax.dynamic_update_slice(old, new, (0, start, 0, 0)) for old, new in zip(cache, (k, v)))  # noqa: B905
        k, v = cache if x_BTD.shape[1] == 1 else (k, v)
    mixed = attention(q, k, v, seen).reshape(x_BTD.shape)
    x_BTD = constrain(x_BTD + project(mixed, "attention.proj"), mesh, ROWS)
    return constrain(x_BTD + project(norm(x_BTD, config.norm_eps), "ffn"), mesh, ROWS), cache


@jax.default_matmul_precision(EXACT)
def logits(params: Params, config: ModelConfig, ids_BT: Array, how: How = How(), **more: Any) -> tuple[Array, Cache]:
    """Return the logits (B, T, W), and the cache; `more`: see `hidden`."""
    x_BTD, cache = hidden(params, config, ids_BT, how, **more)
    return x_BTD @ head(params, x_BTD.dtype, how.mesh).T, cache


def head(params: Params, dtype: Any, mesh: Mesh | None) -> Array:
    """Return the weight (W, D) of the output head, which may be the embedding's."""
    weight_WD = params["head.weight"] if "head.weight" in params else params["embedding.weight"]
    return constrain(weight_WD.astype(dtype), mesh, "token", None)


@jax.default_matmul_precision(EXACT)
def loss(
    params: Params, config: ModelConfig, ids_BT: Array, labels_BT: Array,
    documents_BT: Array | None = None, how: How = How(),
) -> tuple[Array, Array]:  # fmt: skip
    """Return Σ −log p(label) in fp32 or better, and the number of labels that count (not -100).

    The logits of all positions are never held at once: positions are cut into equal chunks.
    """
    x_BTD, _ = hidden(params, config, ids_BT, how, documents_BT)
    weight_WD, (batch, length, dim) = head(params, x_BTD.dtype, how.mesh), x_BTD.shape
    chunks = -(-batch * length * config.vocab // LOGITS)
    size = -(-length // chunks)

    def of_chunk(total: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
        x_BtD, labels_Bt = piece
        logits_BtW = constrain(x_BtD @ weight_WD.T, how.mesh, ROWS, None, "token").astype(total.dtype)
        own = jnp.arange(config.vocab) == labels_Bt[..., None]  # of a split vocabulary each device sees its part
        nats_Bt = jax.nn.logsumexp(logits_BtW, -1) - jnp.where(own, logits_BtW, 0).sum(-1)
        return total + jnp.where(labels_Bt == IGNORED, 0, nats_Bt).sum(), None

    total = jnp.zeros((), jnp.promote_types(x_BTD.dtype, jnp.float32))
    if chunks == 1:
        total, _ = of_chunk(total, (x_BTD, labels_BT))
    else:
        short = chunks * size - length
        x = jnp.pad(x_BTD, ((0, 0), (0, short), (0, 0))).reshape(batch, chunks, size, dim).swapaxes(0, 1)
        labels = jnp.pad(labels_BT, ((0, 0), (0, short)), constant_values=IGNORED)
        labels = labels.reshape(batch, chunks, size).swapaxes(0, 1)
        total, _ = jax.lax.scan(jax.checkpoint(of_chunk, prevent_cse=False), total, (x, labels))
    return total, (labels_BT != IGNORED).sum()
