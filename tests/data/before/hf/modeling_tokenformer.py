"""TokenFormer for transformers in one file, for folders that are loaded with `trust_remote_code=True`.

Written by tokenformer 0.1.0 from its own sources (Apache-2.0, the tokenformer authors): change those, not this.
The model: "TokenFormer: Rethinking Transformer Scaling with Tokenized Model Parameters" (arXiv 2410.23168).
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from torch import Tensor
from torch import nn
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin
from transformers import PreTrainedConfig
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from typing import Any
from typing import Literal
from typing import NamedTuple
from typing import Protocol
from typing import cast
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib
import itertools
import math
import os
import torch
import torch.nn.functional as F
import types
import typing
import warnings


# tokenformer.errors
# The one exception for what a user can mend. The command line prints its sentence alone and leaves with code 2.


class UserError(Exception):
    """One sentence that names the thing, says what is wrong with it, and what to do."""


# tokenformer.strict
# Strict YAML ↔ dataclasses: a typo is refused with a suggestion, types are checked, nothing is guessed.
#
# Unusual: `1e-3` is a number (PyYAML alone reads text), a key that stands twice is refused, `1e9` is a whole number.


def key(doc: str, default: Any = dataclasses.MISSING, make: Any = dataclasses.MISSING) -> Any:
    """A config key: what it means, and its default (or the function that makes it)."""
    return dataclasses.field(default=default, default_factory=make, metadata={"doc": doc})


def need(holds: bool, sentence: str) -> None:
    if not holds:
        raise UserError(sentence)


def build(cls: Any, raw: Any, at: str = "") -> Any:
    """A dataclass from a raw mapping: unknown keys refused with a suggestion, types checked."""
    need(isinstance(raw, dict), f"{at or 'the config'} should hold keys and values, not {raw!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in raw:
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known keys are {', '.join(fields)}"
            raise UserError(f"unknown key '{_join(at, name)}': {hint}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        need(not required or name in raw, f"key '{_join(at, name)}' is missing: {field.metadata.get('doc', name)}")
    return cls(**{name: _convert(hints[name], value, _join(at, name)) for name, value in raw.items()})


def _join(at: str, name: object) -> str:
    return f"{at}.{name}" if at else str(name)


def _convert(kind: Any, value: Any, at: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return build(kind, value, at)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            if (option is bool) != isinstance(value, bool):
                continue
            with_container = typing.get_origin(option) in (list, dict) or dataclasses.is_dataclass(option)
            if with_container == isinstance(value, list | dict) and (value is None) == (option is type(None)):
                return _convert(option, value, at)
    elif origin is Literal:
        if value in args:
            return value
        close = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise UserError(f"{at} is {value!r}, but must be one of {', '.join(map(str, args))}{hint}")
    elif origin is list and isinstance(value, list):
        return [_convert(args[0], item, f"{at}[{i}]") for i, item in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        return {_convert_key(args[0], k, at): _convert(args[1], v, _join(at, k)) for k, v in value.items()}
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif kind is int and isinstance(value, float) and float(value).is_integer():
        return int(value)  # 1e9 is a whole number
    elif kind is Any or (
        isinstance(kind, type) and isinstance(value, kind) and (kind is bool) == isinstance(value, bool)
    ):
        return value
    raise UserError(f"{at} is {value!r}, but must be {_words(kind)}")


def _convert_key(kind: Any, name: Any, at: str) -> Any:
    if kind is int and str(name).isdigit():  # JSON's keys are strings
        return int(name)
    return _convert(kind, name, f"a key of {at}")


def _words(kind: Any) -> str:
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if kind in plain:
        return plain[kind]
    args = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, args))}"
    if typing.get_origin(kind) is list:
        return f"a list ({_words(args[0])} each)"
    if typing.get_origin(kind) is dict:
        return "a mapping"
    return " or ".join(_words(a) for a in args) if args else "a mapping"


def to_dict(config: Any) -> dict:
    """Plain containers of a config; keys that say nothing (null, empty) are left out."""
    raw = dataclasses.asdict(config)

    def prune(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: prune(v) for k, v in value.items() if v is not None and v != {}}
        return value

    return prune(raw)


# tokenformer.config
# What can be configured: every key is declared, typed, defaulted and documented here. Files and presets are read here.
#
# Unusual: `tau` absent means √n; `resolved()` writes the numbers out once, so that later growth can hold them.


Theta = Literal["l2_norm_gelu", "gelu_l2_norm", "softmax", "l1_norm_gelu"]


Tokens = int | list[int]


PROJECTIONS = ("qkv", "proj", "ffn")


@dataclass(frozen=True)
class LayerOverride:
    """Where one layer differs from the rest: after shrinking per layer, or growth in depth."""

    qkv_tokens: Tokens | None = key("as in the model", None)
    proj_tokens: Tokens | None = key("as in the model", None)
    ffn_tokens: Tokens | None = key("as in the model", None)
    tau: dict[str, list[float]] = key("as in the model", make=dict)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model; everything that decides the function and nothing else."""

    layers: int = key("blocks")
    dim: int = key("width of the residual stream")
    heads: int = key("attention heads; must divide dim")
    kind: Literal["tokenformer", "transformer", "llama"] = key(
        "projections: parameter tokens; linear with a GELU MLP; linear with SwiGLU, RMSNorm and grouped heads",
        "tokenformer",
    )
    qkv_tokens: Tokens | None = key("parameter tokens of each of q, k and v; a list gives one number a segment", None)
    proj_tokens: Tokens | None = key("parameter tokens of the projection after attention", None)
    ffn_tokens: Tokens | None = key("parameter tokens of the feed-forward Pattention", None)
    theta: Theta = key("Θ, the score normalisation", "l2_norm_gelu")
    tau: dict[str, list[float]] = key(
        "the scale inside Θ, e.g. {ffn: [48.0]}: one number a segment; absent = √n", make=dict
    )
    layer_overrides: dict[int, LayerOverride] = key("layer number → where that layer differs", make=dict)
    ffn_dim: int | None = key("hidden width of the MLP (transformer, llama); absent = 4·dim", None)
    kv_heads: int | None = key("key/value heads (llama); absent = heads", None)
    context: int = key("longest sequence the model is trained on", 2048)
    vocab: int = key("rows of the embedding: the tokenizer's size padded to a multiple of 128", 50304)
    tied: bool = key("output head = embedding", True)
    rotary_fraction: float = key("share of each head's channels that is rotated", 0.25)
    rotary_base: float = key("base of the rotary frequencies", 10000.0)
    norm_eps: float = key("epsilon of LayerNorm or RMSNorm", 1e-5)
    init: Literal["official", "centred"] = key(
        "centred subtracts from all values their mean over the tokens", "official"
    )

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "context", "vocab"):
            need(getattr(self, name) > 0, f"model.{name} is {getattr(self, name)}: give a number above 0")
        need(self.dim % self.heads == 0, f"model.heads is {self.heads}, which does not divide dim {self.dim}")
        need(self.norm_eps > 0, f"model.norm_eps is {self.norm_eps}: give a number above 0")
        need(self.rotary_base > 0, f"model.rotary_base is {self.rotary_base}: give a number above 0")
        need(0 <= self.rotary_fraction <= 1, f"model.rotary_fraction is {self.rotary_fraction}: give 0 to 1")
        need(
            self.rotary_dims % 2 == 0,
            f"model.rotary_fraction {self.rotary_fraction} of {self.head_dim} channels a head rotates "
            f"{self.rotary_dims} of them: choose a fraction that gives an even number",
        )
        if self.kind == "tokenformer":
            for name in ("ffn_dim", "kv_heads"):
                need(getattr(self, name) is None, f"model.{name} has no meaning for kind tokenformer: remove it")
            for layer in [None, *self.layer_overrides]:
                need(
                    layer is None or 0 <= layer < self.layers,
                    f"model.layer_overrides names layer {layer}, but layers go from 0 to {self.layers - 1}",
                )
                for which in PROJECTIONS:
                    self.segments(which, layer)
            return
        for name in ("qkv_tokens", "proj_tokens", "ffn_tokens", "tau", "layer_overrides"):
            need(not getattr(self, name), f"model.{name} has no meaning for kind {self.kind}: remove it")
        need(self.ffn_dim is None or self.ffn_dim > 0, f"model.ffn_dim is {self.ffn_dim}: give a number above 0")
        need(self.kv_heads is None or self.kind == "llama", "model.kv_heads belongs to kind llama: remove it")
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        need(
            kv_heads > 0 and self.heads % kv_heads == 0,
            f"model.kv_heads is {kv_heads}, which does not divide heads {self.heads}",
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def rotary_dims(self) -> int:
        return int(self.head_dim * self.rotary_fraction)

    @property
    def mlp_dim(self) -> int:
        return self.ffn_dim or 4 * self.dim

    def segments(self, which: str, layer: int | None = None) -> list[tuple[int, float]]:
        """(parameter tokens, τ) of each segment of a projection (`qkv`, `proj` or `ffn`) in a layer.

        >>> tiny = ModelConfig(layers=1, dim=32, heads=2, qkv_tokens=9, proj_tokens=4, ffn_tokens=[4, 16])
        >>> tiny.segments("ffn")
        [(4, 2.0), (16, 4.0)]
        """
        tokens, tau = getattr(self, f"{which}_tokens"), self.tau
        override = self.layer_overrides.get(layer) if layer is not None else None
        if override is not None:
            own = getattr(override, f"{which}_tokens")
            if own is not None:
                tokens, tau = own, {}  # other tokens: the model's τ was not made for them
            tau = {**tau, **override.tau}
        at = f"model.{which}_tokens" if override is None else f"model.layer_overrides.{layer}.{which}_tokens"
        need(tokens is not None, f"{at} is missing: give a number of parameter tokens, or a list (segments)")
        sizes = tokens if isinstance(tokens, list) else [tokens]
        need(len(sizes) > 0 and min(sizes) > 0, f"{at} is {tokens}: every segment needs at least one token")
        for name in tau:
            need(name in PROJECTIONS, f"tau names '{name}': its keys are qkv, proj and ffn")
        scales = tau.get(which) or [math.sqrt(n) for n in sizes]
        need(
            len(scales) == len(sizes),
            f"{at} has {len(sizes)} segments but tau.{which} has {len(scales)} numbers: give one number a segment",
        )
        need(all(0 < t < math.inf for t in scales), f"tau.{which} is {scales}: every τ is a finite number above 0")
        return list(zip(sizes, scales, strict=True))

    def resolved(self) -> "ModelConfig":
        """The same model with every τ written out."""
        if self.kind != "tokenformer":
            return self

        def scales(layer: int | None) -> dict[str, list[float]]:
            return {w: [t for _, t in self.segments(w, layer)] for w in PROJECTIONS}

        overrides = {i: dataclasses.replace(o, tau=scales(i)) for i, o in self.layer_overrides.items()}
        return dataclasses.replace(self, tau=scales(None), layer_overrides=overrides)


# tokenformer.models.init
# One function fills any model. A parameter's values depend on (seed, its name, its full shape) and on nothing else,
#
# so that one process and a thousand, on any device, begin with the same model. Drawn in fp32 on the CPU for that reason.


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """The official initialisation: keys, embeddings and inward matrices N(0, 0.02); all values and outward matrices

    N(0, 2/(layers·√dim)). `config.init: centred` subtracts from values their mean over the tokens of a segment.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(initial(name, tuple(parameter.shape), config, seed))


def initial(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The first values of one parameter."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("norm.bias"):
        return torch.zeros(shape)
    outward = name.endswith(("value_tokens", "proj.weight", "down.weight"))
    values = draw(seed, name, shape) * (2 / (config.layers * config.dim**0.5) if outward else 0.02)
    if config.init == "centred" and name.endswith("value_tokens"):
        values -= values.mean(0)
    return values


def draw(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers that belong to (seed, name, shape).

    >>> torch.equal(draw(0, "a", (2, 3)), draw(0, "a", (2, 3))), torch.equal(draw(0, "a", (3,)), draw(0, "b", (3,)))
    (True, False)
    """
    digest = hashlib.sha256(f"{seed}/{name}/{shape}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1))


# tokenformer.models.cost
# What a model costs, from its config alone: parameters, FLOPs (with parameters and with other tokens apart), cache.
#
# Attention is counted causally, once: 2·layers·dim·context forward a token. Many tools count it twice.


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts of one model. FLOPs are per data token; training is three times forward."""

    parameters: int
    matmul_parameters: int  # in the blocks; the output head is counted apart
    head_parameters: int  # read by the output head (the embedding's own, if tied)
    projections: dict[str, int]  # matmul parameters of each projection, all layers together
    layers: int
    dim: int
    cache_values: int  # numbers that the key/value cache holds for a token

    @property
    def parameter_flops(self) -> int:
        """Forward, between a token and the parameters; free of the context."""
        return 2 * (self.matmul_parameters + self.head_parameters)

    def token_flops(self, context: int) -> int:
        """Forward, between a token and those before it, in the mean over a causal context."""
        return 2 * self.layers * self.dim * context

    def training_flops(self, context: int) -> int:
        return 3 * (self.parameter_flops + self.token_flops(context))

    def cache_bytes(self, width: int = 2) -> int:
        return width * self.cache_values


def cost(config: ModelConfig) -> Cost:
    """
    >>> from tokenformer.config import load
    >>> cost(load("lm/150m").model).parameters
    151881216
    """
    c, kv = config, (config.kv_heads or config.heads) * config.head_dim
    if c.kind == "tokenformer":
        tokens = {w: sum(n for i in range(c.layers) for n, _ in c.segments(w, i)) for w in PROJECTIONS}
        each = {"query": "qkv", "key": "qkv", "value": "qkv", "proj": "proj", "ffn": "ffn"}
        projections = {name: 2 * c.dim * tokens[which] for name, which in each.items()}
    else:
        ffn = (3 if c.kind == "llama" else 2) * c.dim * c.mlp_dim
        one = {"query": c.dim**2, "key": c.dim * kv, "value": c.dim * kv, "proj": c.dim**2, "ffn": ffn}
        projections = {name: c.layers * n for name, n in one.items()}
    matmul, embedding = sum(projections.values()), c.vocab * c.dim
    norms = (2 * c.layers + 1) * c.dim if c.kind == "llama" else 2 * c.dim
    return Cost(
        parameters=matmul + norms + embedding * (1 if c.tied else 2),
        matmul_parameters=matmul,
        head_parameters=embedding,
        projections=projections,
        layers=c.layers,
        dim=c.dim,
        cache_values=2 * c.layers * kv,
    )


# tokenformer.ops.attention
# Causal attention between data tokens, through PyTorch's fused kernels. Every attention mask is made here.
#
# Legend: B batch, H heads, G key/value heads, T queries, S keys, C head_dim.


# Best first, by measurement on Hopper: forward and backward by cuDNN take two thirds of the time of flash. It prepares
# itself for every new length, so it is for training.
TRAINING = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    *,
    documents_BT: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention, scale 1/√C. Causal, the last query being at the last key, unless `mask` says what is seen.

    `documents` (B, T) numbers the document of each position: they do not see each other (without a cache, T = S).
    `mask` (B or 1, H or 1, T, S), True = is seen, replaces the causal mask: what a cache with padding gives.
    """
    length, keys = q_BHTC.shape[-2], k_BGSC.shape[-2]
    if mask is None and documents_BT is not None:
        mask = causal(length, keys, q_BHTC.device) & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])
    elif mask is None and 1 < length != keys:
        mask = causal(length, keys, q_BHTC.device)
    flash = False
    if mask is None and length > 1:  # a branch: under compile a length may be symbolic, and its comparison no bool
        flash = True
    with sdpa_kernel(TRAINING, set_priority=True) if flash and q_BHTC.requires_grad else contextlib.nullcontext():
        return F.scaled_dot_product_attention(
            q_BHTC,
            k_BGSC,
            v_BGSC,
            attn_mask=mask,
            is_causal=flash,
            enable_gqa=q_BHTC.shape[1] != k_BGSC.shape[1],
        )


def causal(length: int, keys: int, device: torch.device) -> Tensor:
    """(T, S), True = is seen, the last query at the last key.

    >>> causal(2, 3, torch.device("cpu"))
    tensor([[ True,  True, False],
            [ True,  True,  True]])
    """
    return torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)


# tokenformer.ops.pattention
# Pattention, y = Θ(x·Kᵀ)·V: data tokens attend to parameter tokens. The reference here is the specification.
#
# Unusual: a layer is a list of segments, each normalised by itself with its own τ, their outputs added; one segment is
# the paper's layer. Legend: T rows of data (any leading shape), D d_in, E d_out, N parameter tokens of one segment.


THETAS = ("l2_norm_gelu", "gelu_l2_norm", "softmax", "l1_norm_gelu")


BACKENDS = ("auto", "reference", "triton")


CHOICE = os.environ.get("TOKENFORMER_PATTENTION", "auto")  # what computes it where a call does not say


INTERPRETED = ("1", "true", "yes", "on", "y")  # what Triton takes for a yes


MISSING = "triton is not installed: pip install 'tokenformer[kernels]'"


Segments = Sequence[tuple[Tensor, Tensor, float]]  # keys (N, D), values (N, E), τ


def pattention(
    x_TD: Tensor,
    segments: Segments,
    *,
    theta: str = "l2_norm_gelu",
    mask: Tensor | None = None,
    choice: str | None = None,
) -> Tensor:
    """One Pattention. `mask` (ΣN,) or (…, ΣN), True = counts: a masked token counts in no sum, and τ stays.

    >>> keys, values = torch.eye(2), torch.eye(2)
    >>> pattention(torch.tensor([3.0, 4.0]), [(keys, values, 5.0)])  # gelu([3, 4] · 5 / 5)
    tensor([2.9959, 3.9999])
    """
    return pattention_group(x_TD, [segments], theta=theta, masks=[mask], choice=choice)[0]


def pattention_group(
    x_TD: Tensor,
    members: Sequence[Segments],
    *,
    theta: str = "l2_norm_gelu",
    masks: Sequence[Tensor | None] | None = None,
    choice: str | None = None,
) -> list[Tensor]:
    """Several Pattentions of one input (q, k and v), the scores of all of them in one product.

    `choice` of auto, reference or triton: what computes it (see `backend`).
    """
    masked = masks is not None and any(mask is not None for mask in masks)
    if backend(x_TD, choice, masked) == "triton":
        return fused(x_TD, members, theta)
    keys = [key_ND for segments in members for key_ND, _, _ in segments]
    scores = iter((x_TD @ (keys[0] if len(keys) == 1 else torch.cat(keys)).T).split([len(k) for k in keys], dim=-1))
    outputs = []
    for segments, mask in zip(members, masks or [None] * len(members), strict=True):
        sizes = [len(key_ND) for key_ND, _, _ in segments]
        counts = [None] * len(sizes) if mask is None else mask.split(sizes, dim=-1)
        parts = [
            normalise(next(scores), theta, tau, count_TN).to(value_NE.dtype) @ value_NE
            for (_, value_NE, tau), count_TN in zip(segments, counts, strict=True)
        ]
        outputs.append(sum(parts[1:], parts[0]))
    return outputs


def normalise(
    score_TN: Tensor, theta: str, tau: float, count_TN: Tensor | None = None, total_T1: Tensor | None = None
) -> Tensor:
    """Θ of one segment's scores, in fp32 or better. Where the statistic is zero: zeros, and zero gradients.

    `total_T1` is the statistic of the whole segment, where the scores are a part of it.
    """
    score_TN = score_TN.to(torch.promote_types(score_TN.dtype, torch.float32))
    if theta == "softmax":
        if total_T1 is not None:
            return (score_TN - total_T1).exp() * tau**2
        if count_TN is None:
            return score_TN.softmax(-1) * tau**2
        some = count_TN.any(-1, keepdim=True)  # a row that is masked whole must not become NaN on the way
        return score_TN.masked_fill(~count_TN & some, -torch.inf).softmax(-1) * count_TN * tau**2
    if count_TN is not None:
        score_TN = score_TN.masked_fill(~count_TN, 0)  # adds nothing to any norm, and gelu(0) = 0
    if theta == "gelu_l2_norm":
        score_TN = F.gelu(score_TN)
    total_T1 = _total(score_TN, theta) if total_T1 is None else total_T1
    if theta == "gelu_l2_norm":
        return score_TN * _over(total_T1, tau, 0.5)
    return F.gelu(score_TN * (_over(total_T1, tau**2, 1.0) if theta == "l1_norm_gelu" else _over(total_T1, tau, 0.5)))


def _total(score_TN: Tensor, theta: str) -> Tensor:
    _check_theta(theta)
    return (score_TN.abs() if theta == "l1_norm_gelu" else score_TN.square()).sum(-1, keepdim=True)


def _check_theta(theta: str) -> None:
    if theta not in THETAS:
        raise ValueError(f"theta is '{theta}', not one of {', '.join(THETAS)}")


def _over(total_T1: Tensor, scale: float, power: float) -> Tensor:
    """scale / total^power; 0 with zero gradient where the total is 0 (the inner `where` keeps NaN out of backward)."""
    zero = total_T1 == 0
    return torch.where(zero, 0, scale * torch.where(zero, 1, total_T1).pow(-power))


def backend(x: Tensor, choice: str | None = None, masked: bool = False) -> str:
    """What computes a Pattention of x: "triton" where it can, else "reference". `choice` forces one of them; where it

    is not given, the environment variable TOKENFORMER_PATTENTION does.
    """
    choice = choice or CHOICE
    if choice == "reference" or (choice == "auto" and (x.device.type == "cpu" or masked)):
        return "reference"
    return _found(choice, x.device.type, x.device.index, x.dtype, masked)


@torch.compiler.assume_constant_result
def _found(choice: str, device: str, index: int | None, dtype: torch.dtype, masked: bool) -> str:
    return _look(choice, device, index, dtype, masked)


@functools.cache
def _look(choice: str, device: str, index: int | None, dtype: torch.dtype, masked: bool) -> str:
    """Says once why a GPU does not get its kernels; refuses what was asked for and cannot be."""
    if choice not in BACKENDS:
        raise UserError(f"TOKENFORMER_PATTENTION or choice is '{choice}': give one of {', '.join(BACKENDS)}")
    reason = "masks are computed by the reference" if masked else ""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reason = f"there are none for {dtype}"
    elif device == "cuda" and torch.cuda.get_device_capability(index) < (8, 0):
        reason = f"{torch.cuda.get_device_name(index)} is older than they were tried on (compute capability 8.0)"
    elif not _installed():
        reason = MISSING
    elif device != "cuda" and os.environ.get("TRITON_INTERPRET", "").lower() not in INTERPRETED:
        reason = f"they do not run on {device}"
    if not reason:
        return "triton"
    if choice == "triton":
        raise UserError(f"Pattention's kernels were asked for, but {reason}")
    warnings.warn(f"Pattention is computed by the reference, without kernels: {reason}", stacklevel=2)
    return "reference"


def _installed() -> bool:
    """Triton, and this package: a model's file that was handed on has neither kernels nor package."""
    try:
        importlib.import_module("tokenformer.ops.kernels.pattention")
    except ImportError:
        return False
    return True


def fused(x_TD: Tensor, members: Sequence[Segments], theta: str, **how) -> list[Tensor]:
    """`pattention_group` by kernels; what else they can do: ops/kernels/pattention.py."""
    _check_theta(theta)
    for key_ND, value_NE, _ in itertools.chain(*members):
        if len(key_ND) != len(value_NE):
            raise ValueError(f"a segment has {len(key_ND)} keys and {len(value_NE)} values: give as many of each")
    try:
        from tokenformer.ops.kernels import pattention as kernels
    except ImportError as error:
        raise UserError(MISSING) from error
    return kernels.fused(x_TD, members, theta, **how)


# tokenformer.ops.rotary
# Partial rotary positions: the first channels of each head turn with the position, the rest stay.
#
# Half-split pairs (channel i turns with i + R/2), angles in fp32 or better.
# Legend: T positions, R rotated channels, A = R/2 angles, B batch, H heads, C head_dim.


def angles(positions_T: Tensor, dims: int, base: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin (…, T, A) for positions (…, T). Computed, not stored: no buffer to place, grow or save.

    >>> cos, sin = angles(torch.arange(3), dims=4, base=10000.0)
    >>> cos.shape
    torch.Size([3, 2])
    """
    dtype = torch.promote_types(dtype, torch.float32)
    frequency_A = base ** (-torch.arange(0, dims, 2, dtype=dtype, device=positions_T.device) / max(dims, 1))
    angle_TA = positions_T.to(dtype)[..., None] * frequency_A
    return angle_TA.cos(), angle_TA.sin()


def rotate(x: Tensor, cos_TA: Tensor, sin_TA: Tensor, heads: int = 1) -> Tensor:
    """Turn the first 2·A channels of x (B, H, T, C), or (B, T, H, C) with heads=2, by angles (T, A) or (B, T, A)."""
    if heads == 2 or cos_TA.ndim == 3:  # one angle a position or sample, the same for all heads
        cos_TA, sin_TA = cos_TA.unsqueeze(-2 if heads == 2 else 1), sin_TA.unsqueeze(-2 if heads == 2 else 1)
    half = cos_TA.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = (first * cos_TA - second * sin_TA, second * cos_TA + first * sin_TA)
    return torch.cat([*(t.to(x.dtype) for t in turned), rest], dim=-1)


# tokenformer.models.layers
# The layers of every model: Pattention, attention between data tokens, the block.
#
# Unusual: weights are cast to the type of what flows in, so one choice at the embedding decides the compute type; q, k
# and v are separate parameters but one product. Legend: B batch, T positions, D dim, H heads, C head_dim.


class Segment(nn.Module):
    """Parameter tokens that are normalised together, with their own τ."""

    def __init__(self, d_in: int, d_out: int, tokens: int, tau: float) -> None:
        super().__init__()
        self.tau = tau
        self.key_tokens = nn.Parameter(torch.empty(tokens, d_in))
        self.value_tokens = nn.Parameter(torch.empty(tokens, d_out))

    def extra_repr(self) -> str:
        return f"tokens={len(self.key_tokens)}, tau={self.tau:g}"


class Pattention(nn.Module):
    """A layer whose parameters are tokens; stands wherever an `nn.Linear(d_in, d_out, bias=False)` does.

    >>> layer = Pattention(16, 32, tokens=64)
    >>> layer(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        tokens: int | Sequence[int],
        *,
        theta: str = "l2_norm_gelu",
        tau: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        sizes = list(tokens) if isinstance(tokens, Sequence) else [tokens]
        if not sizes or any(type(n) is not int or n < 1 for n in sizes):
            raise ValueError(f"tokens is {tokens}: give a whole number above 0, or a list of them (segments)")
        if theta not in THETAS:
            raise ValueError(f"theta is '{theta}', not one of {', '.join(THETAS)}")
        scales = [math.sqrt(n) for n in sizes] if tau is None else list(tau)
        self.theta = theta
        segments = [Segment(d_in, d_out, n, t) for n, t in zip(sizes, scales, strict=True)]
        self.segments = cast(Sequence[Segment], nn.ModuleList(segments))
        if self.segments[0].key_tokens.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """For a layer that stands alone: outputs of RMS 0.65 a segment whatever the scale of the input (L2 forms)."""
        for segment in self.segments:
            nn.init.normal_(segment.key_tokens, std=0.02)
            nn.init.normal_(segment.value_tokens, std=len(segment.value_tokens) ** -0.5)

    def parts(self, dtype: torch.dtype | None) -> Segments:
        return [(s.key_tokens.to(dtype), s.value_tokens.to(dtype), s.tau) for s in self.segments]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"a Pattention reads floating point numbers, not {x.dtype}")
        return pattention(x, self.parts(x.dtype), theta=self.theta, mask=mask)

    def activations(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Scores and Θ(scores) of each segment: a token adds its activation times its value to the output."""
        scores = [x @ key_ND.T for key_ND, _, _ in self.parts(x.dtype)]
        return [(a, normalise(a, self.theta, s.tau)) for a, s in zip(scores, self.segments, strict=True)]

    def extra_repr(self) -> str:
        return f"theta={self.theta}"


class Linear(nn.Linear):
    """Without bias, computing in the type of its input."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


def project(x: Tensor, layers: Sequence[Pattention | Linear]) -> Sequence[Tensor]:
    """Several projections of one input in one product."""
    tokens = [layer for layer in layers if isinstance(layer, Pattention)]
    if tokens:
        return pattention_group(x, [layer.parts(x.dtype) for layer in tokens], theta=tokens[0].theta)
    weights = [layer.weight for layer in layers if isinstance(layer, Linear)]
    return F.linear(x, torch.cat(weights).to(x.dtype)).split([len(w) for w in weights], dim=-1)


class Norm(nn.Module):
    """LayerNorm with or without weight and bias, or RMSNorm with weight."""

    def __init__(self, config: ModelConfig, *, affine: bool) -> None:
        super().__init__()
        self.eps, self.shape, self.rms = config.norm_eps, (config.dim,), config.kind == "llama"
        self.weight = nn.Parameter(torch.empty(config.dim)) if affine or self.rms else None
        self.bias = nn.Parameter(torch.empty(config.dim)) if affine and not self.rms else None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (p if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        if self.rms:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, bias, self.eps)


def projection(config: ModelConfig, layer: int, which: str, d_out: int) -> Pattention | Linear:
    """`which` of qkv, proj, ffn: parameter tokens, or a plain matrix."""
    if config.kind != "tokenformer":
        return Linear(config.dim, d_out)
    sizes, scales = zip(*config.segments(which, layer), strict=True)
    return Pattention(config.dim, d_out, sizes, theta=config.theta, tau=scales)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        d_kv = (config.kv_heads or config.heads) * config.head_dim
        self.query = projection(config, layer, "qkv", config.dim)
        self.key = projection(config, layer, "qkv", d_kv)
        self.value = projection(config, layer, "qkv", d_kv)
        self.proj = projection(config, layer, "proj", config.dim)

    def forward(self, x_BTD: Tensor, *context) -> Tensor:
        return self.proj(self.attend(self.qkv(x_BTD), *context))

    def attend(
        self, qkv: Sequence[Tensor], rotary: tuple[Tensor, Tensor] | None, documents: Tensor | None = None, cache=None
    ) -> Tensor:
        """q, k and v (B, T, D) → what each position sees (B, T, D). `rotary` is None where they are turned already."""
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)) for p in qkv)  # (B, T, H, C): so it stays in memory
        if rotary is not None:
            q, k = rotate(q, *rotary, heads=2), rotate(k, *rotary, heads=2)
        q, k, v, mask = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None
        if cache is not None:
            mask = cache.mask
            k, v = cache.update(self.layer, k, v)
        return attention(q, k, v, documents_BT=documents, mask=mask).transpose(1, 2).flatten(2)

    def qkv(self, x: Tensor) -> Sequence[Tensor]:
        return project(x, [self.query, self.key, self.value])


class MLP(nn.Module):
    """The feed-forward layer of the baselines: GELU, or SwiGLU with a gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.mlp_dim) if config.kind == "llama" else None
        self.up = Linear(config.dim, config.mlp_dim)
        self.down = Linear(config.mlp_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        gate, up = project(x, [self.gate, self.up])
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention, then feed-forward, each added to the stream. The config's kind chooses what the projections are."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(config, affine=False), Norm(config, affine=False)
        self.attention = Attention(config, layer)
        self.ffn = projection(config, layer, "ffn", config.dim) if config.kind == "tokenformer" else MLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], documents: Tensor | None = None, cache=None) -> Tensor:
        if self.streams(x):
            return self.stream(x, rotary, documents, cache)
        x = x + self.attention(self.attention_norm(x), rotary, documents, cache)
        return x + self.ffn(self.ffn_norm(x))

    def streams(self, x: Tensor) -> bool:
        """Whether `stream` computes the same, and gains by it: training on kernels."""
        plain = type(self.ffn) is Pattention and self.ffn.theta == "l2_norm_gelu"
        return plain and x.requires_grad and backend(x) == "triton"

    def stream(self, x: Tensor, rotary: tuple[Tensor, Tensor], *context) -> Tensor:
        """Without norms and sums: l2_norm_gelu ignores the scale of its input, and keys whose mean over the channels

        is taken out ignore its mean, so nothing of LayerNorm is left; a product adds to the stream what it makes.
        """
        a, theta = self.attention, "l2_norm_gelu"
        layers = cast(Sequence[Pattention], (a.query, a.key, a.value, a.proj, self.ffn))
        query, key, value, proj, ffn = (layer.parts(None) for layer in layers)
        turn = *(t.flatten(0, -2) for t in rotary), a.head_dim
        *qkv, x = fused(x, [query, key, value], theta, centred=True, onto="fork", turn=turn)
        (x,) = fused(a.attend(qkv, None, *context), [proj], theta, onto="residual", residual=x)
        return fused(x, [ffn], theta, centred=True, onto="input")[0]


# tokenformer.ops.cross_entropy
# Output head and cross entropy in one, in chunks of rows: the logits of all rows are never held at once.
#
# Returns a sum and a count, so that accumulation and ranks can normalise globally. Legend: T rows, D dim, W vocabulary.


IGNORE = -100


LOGITS = 1 << 27  # how many are held at once


ROWS = 4096  # whose logits the kernel holds at once


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    labels_T: Tensor,
    chunk: int | None = None,
    loss_of: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    choice: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ −log p(label) in fp32 or better, and how many labels counted (those that are not -100). `chunk`: rows at once.

    `loss_of` (hidden, weight, labels of a chunk) is another way to the sum, for a vocabulary that is split over ranks.
    `choice`: what computes it, as in Pattention; the kernels' sum is NaN where a label is no row of the weight.

    >>> total, count = linear_cross_entropy(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([3, -100]))
    >>> round(total.item(), 4), count.item()
    (2.0794, 1)
    """
    hidden_TD, labels_T = hidden_TD.flatten(0, -2), labels_T.flatten()
    if loss_of is None and backend(hidden_TD, choice) == "triton":
        try:
            from tokenformer.ops.kernels.cross_entropy import fused
        except ImportError as error:
            raise UserError(MISSING) from error
        total = fused(hidden_TD, weight_WD, labels_T.contiguous(), IGNORE, chunk or ROWS)
        return total, (labels_T != IGNORE).sum()
    chunk = chunk or max(1, LOGITS // len(weight_WD))
    pairs = list(zip(hidden_TD.split(chunk), labels_T.split(chunk), strict=True))
    one = loss_of or _chunk
    if len(pairs) == 1:
        total = one(hidden_TD, weight_WD, labels_T)
    else:  # backward makes each chunk's logits again instead of keeping them
        parts = [checkpoint(one, h, weight_WD, y, use_reentrant=False, preserve_rng_state=False) for h, y in pairs]
        total = torch.stack(parts).sum()
    return total, (labels_T != IGNORE).sum()


def _chunk(hidden_TD: Tensor, weight_WD: Tensor, labels_T: Tensor) -> Tensor:
    logits_TW = hidden_TD @ weight_WD.T
    logits_TW = logits_TW.to(torch.promote_types(logits_TW.dtype, torch.float32))
    return F.cross_entropy(logits_TW, labels_T, ignore_index=IGNORE, reduction="sum")


# tokenformer.models.language
# The language model: embedding, blocks, final norm, output head tied to the embedding.
#
# `forward` with labels returns a loss sum and a count and never holds all logits. Legend: B batch, T positions, D dim.


class Output(NamedTuple):
    """`logits` without labels; `loss_sum` over `count` labels with them."""

    logits: Tensor | None = None
    loss_sum: Tensor | None = None
    count: Tensor | None = None


class AnyCache(Protocol):
    """What a key/value cache must be: how many positions it holds, what a query may see (None: causal), and update."""

    length: int
    mask: Tensor | None

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


class Cache:
    """The reference cache: it appends."""

    mask = None

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[-2] if self.layers else 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            k, v = (torch.cat(pair, dim=-2) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = (k, v)
        return k, v


class LanguageModel(nn.Module):
    """A TokenFormer, or a Transformer or Llama to compare with, as its config says.

    Built on the meta device it holds no memory: `to_empty(device=…)`, then `init_weights(model, model.config, seed)`.

    >>> config = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=64, vocab=128)
    >>> model = LanguageModel(config, seed=1)
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 128])
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config.resolved()
        self.compute_dtype: torch.dtype | None = None  # None: as the parameters
        self.history: list[dict] = []  # the growths that led to this model
        self.embedding = nn.Embedding(config.vocab, config.dim, _weight=torch.empty(config.vocab, config.dim))
        self.blocks = nn.ModuleList(Block(self.config, layer) for layer in range(config.layers))
        self.norm = Norm(config, affine=True)
        self.head = None if config.tied else Linear(config.dim, config.vocab)
        if self.embedding.weight.device.type != "meta":
            init_weights(self, self.config, seed)

    def forward(
        self,
        ids: Tensor,
        *,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: AnyCache | None = None,
    ) -> Output:
        """`ids` (B, T). `labels` (B, T): the target of each position, -100 = none. `positions` (T,) or (B, T)."""
        hidden_BTD = self.hidden(ids, positions=positions, documents=documents, cache=cache)
        weight = self.head_weight.to(hidden_BTD.dtype)
        if labels is None:
            return Output(logits=self.logits(hidden_BTD, weight))
        loss_sum, count = self.loss(hidden_BTD, weight, labels)
        return Output(loss_sum=loss_sum, count=count)

    def logits(self, hidden_BTD: Tensor, weight_WD: Tensor) -> Tensor:
        return hidden_BTD @ weight_WD.T

    def loss(self, hidden_BTD: Tensor, weight_WD: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(hidden_BTD, weight_WD, labels)

    def hidden(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: AnyCache | None = None,
    ) -> Tensor:
        """What the output head reads: (B, T, D) after the final norm."""
        x_BTD = self.embedding(ids).to(self.compute_dtype)
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + ids.shape[-1], device=ids.device)
        rotary = angles(positions, self.config.rotary_dims, self.config.rotary_base, x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary, documents, cache)
        return self.norm(x_BTD)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def cost(self) -> Cost:
        """Parameters, FLOPs and cache bytes of this model."""
        return cost(self.config)

    @torch.no_grad()
    def generate(self, ids: Tensor, n: int, temperature: float = 0.0, seed: int = 0) -> Tensor:
        """`ids` (B, T) → (B, T + n): greedy at temperature 0, else sampled. The reference for every faster way."""
        generator = torch.Generator(ids.device).manual_seed(seed)
        cache, step = Cache(), ids
        for _ in range(n):
            logits_BW = self(step, cache=cache).logits[:, -1].float()
            if temperature == 0:
                step = logits_BW.argmax(-1, keepdim=True)
            else:
                step = (logits_BW / temperature).softmax(-1).multinomial(1, generator=generator)
            ids = torch.cat([ids, step], dim=-1)
        return ids


# tokenformer.hub.hf
# The model as transformers knows it: a config with our keys, and a causal language model that holds the native one.
#
# Unusual: blocks stay native, their caches and masks are transformers' own behind our contract (`HFCache`); in training
# with labels no logits are made. `hub/remote.py` writes a file from this one that needs torch and transformers alone.


class TokenFormerConfig(PreTrainedConfig):
    """The keys of `ModelConfig` under their own names, beside what transformers adds; every τ is written out.

    >>> config = TokenFormerConfig(layers=2, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=[4, 16])
    >>> config.hidden_size, config.tau["ffn"]
    (32, [2.0, 4.0])
    """

    model_type = "tokenformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    has_no_defaults_at_init = True
    attribute_map = {  # noqa: RUF012 (transformers' own form)
        "num_hidden_layers": "layers",
        "hidden_size": "dim",
        "num_attention_heads": "heads",
        "max_position_embeddings": "context",
        "vocab_size": "vocab",
        "tie_word_embeddings": "tied",
    }

    def __init__(self, **keys: Any) -> None:
        keys = {self.attribute_map.get(name, name): value for name, value in keys.items()}
        names = [field.name for field in dataclasses.fields(ModelConfig)]
        own = {name: keys.pop(name) for name in names if keys.get(name) is not None}
        for name in keys.keys() - set(names):  # transformers keeps whatever it is given: a typo would pass in silence
            for close in difflib.get_close_matches(name, names, n=1, cutoff=0.8):
                raise UserError(f"unknown key '{name}' in a TokenFormerConfig: did you mean '{close}'?")
        super().__init__(**{name: value for name, value in keys.items() if name not in names})
        for name, value in (dict.fromkeys(names) | to_dict(build(ModelConfig, own).resolved())).items():
            setattr(self, name, value)

    @classmethod
    def from_native(cls, config: ModelConfig, **keys: Any) -> "TokenFormerConfig":
        return cls(**to_dict(config), **keys)

    def to_native(self) -> ModelConfig:
        keys = {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelConfig)}
        return build(ModelConfig, {name: value for name, value in keys.items() if value is not None})

    @property
    def num_key_value_heads(self) -> int:
        return getattr(self, "kv_heads", None) or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class HFBlock(GradientCheckpointingLayer, Block):
    """The native block, made again in backward when gradient checkpointing is on."""


class HFCache:
    """transformers' cache, or none, and the mask, as our models know them."""

    def __init__(self, past: Any, mask: Tensor | None) -> None:
        self.past, self.mask = past, mask

    @property
    def length(self) -> int:
        return 0 if self.past is None else self.past.get_seq_length()

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (k, v) if self.past is None else self.past.update(k, v, layer)


class TokenFormerForCausalLM(PreTrainedModel, GenerationMixin):
    """`self.model` is the native `LanguageModel`, its tensors under `model.`; a tied head has no tensor of its own."""

    config_class = TokenFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ["HFBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    model: LanguageModel

    def __init__(self, config: TokenFormerConfig) -> None:
        super().__init__(config)
        self._hold(LanguageModel(config.to_native(), seed=int(torch.randint(2**31, (), device="cpu"))))
        for parameter in self.parameters():
            if not parameter.is_meta:  # the native model has filled itself
                setattr(parameter, "_is_hf_initialized", True)  # noqa: B010
        self.post_init()

    @classmethod
    def from_native(cls, model: LanguageModel, **keys: Any) -> "TokenFormerForCausalLM":
        """The same tensors behind transformers' interface (no copy)."""
        with torch.device("meta"):
            wrapped = cls(TokenFormerConfig.from_native(model.config, **keys))
        wrapped._hold(model)
        return wrapped.train(model.training)

    def _hold(self, model: LanguageModel) -> None:
        for block in model.blocks:
            block.__class__ = HFBlock
        self.model = model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As every causal model of transformers: `labels` are not shifted, `num_items_in_batch` divides the loss.

        `skip_logits`: with labels make no logits, the loss comes in chunks; by default so in training.
        `inputs_embeds` and `output_attentions` are refused: the model reads ids, and fused attention keeps no weights.
        """
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise UserError("inputs_embeds cannot be given to a TokenFormer, which reads token ids: give input_ids")
        if kwargs.get("output_attentions") or self.config.output_attentions:
            raise UserError("output_attentions is not possible, since fused attention keeps no weights: leave it out")
        past, targets = past_key_values, kwargs.get("shift_labels")
        if targets is None and labels is not None:
            targets = F.pad(labels, (0, 1), value=-100)[..., 1:]
        if use_cache is None:
            use_cache = targets is None and not self.training
        if self.training and torch.is_grad_enabled() and self.is_gradient_checkpointing:
            use_cache = False
            if past is not None:  # backward would fill it a second time
                raise UserError("gradient checkpointing cannot fill past_key_values: leave the cache out in training")
        if use_cache and past is None:
            past = DynamicCache(config=self.config)
        if position_ids is None and past is not None:
            position_ids = torch.arange(input_ids.shape[-1], device=input_ids.device) + past.get_seq_length()
        mask = self._mask(input_ids, attention_mask, position_ids, past)
        inputs: dict[str, Any] = {
            "positions": position_ids,
            "cache": None if past is None and mask is None else HFCache(past, mask),
        }
        skip_logits = targets is not None and (self.training if skip_logits is None else skip_logits)
        logits: Any = None
        loss: Any = None
        count: Any = None
        with self._states(output_hidden_states) as states:
            if skip_logits:
                _, loss, count = self.model(input_ids, labels=targets, **inputs)
            else:
                hidden = self.model.hidden(input_ids, **inputs)
                if targets is None:
                    hidden = hidden[
                        :, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
                    ]
                logits = hidden @ self.model.head_weight.to(hidden.dtype).T
        if targets is not None:
            if loss is None:
                exact = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
                loss, count = F.cross_entropy(exact, targets.flatten(), reduction="sum"), (targets != -100).sum()
            items = kwargs.get("num_items_in_batch")
            loss = loss / (count.clamp(min=1) if items is None else torch.as_tensor(items, device=loss.device))
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past, hidden_states=cast(Any, tuple(states) or None)
        )

    def _mask(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, past: Any) -> Tensor | None:
        """None (causal: flash attention) where nothing else is asked for, else what each position sees."""
        seen: Any = create_causal_mask(
            config=self.config,
            inputs_embeds=torch.empty((*ids.shape, 0), dtype=self.dtype, device=ids.device),  # shape and type alone
            attention_mask=mask,
            past_key_values=past,
            position_ids=positions if positions is None or positions.ndim == 2 else positions[None],
            # a static cache has keys behind the last query: our None, the last query at the last key, is not its mask
            allow_is_causal_skip=not getattr(past, "is_compileable", False),
        )
        if seen is None or seen.dtype == torch.bool:
            return seen
        return seen.to(self.model.compute_dtype or self.dtype) if seen.is_floating_point() else seen.bool()

    @contextlib.contextmanager
    def _states(self, wanted: bool | None) -> Iterator[list[Tensor]]:
        """Gathers what flows into each block, and what leaves the final norm."""
        states: list[Tensor] = []
        hooks = []
        if self.config.output_hidden_states if wanted is None else wanted:
            hooks = [b.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])) for b in self.model.blocks]
            hooks.append(self.model.norm.register_forward_hook(lambda _, __, output: states.append(output)))
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fills what a folder did not hold, as the native model would."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter in module.parameters(recurse=False):
            if not getattr(parameter, "_is_hf_initialized", False):
                seed, name = int(torch.randint(2**31, (), device="cpu")), names.get(id(parameter), "embedding.weight")
                parameter.copy_(initial(name, tuple(parameter.shape), self.model.config, seed))

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = dataclasses.replace(self.model.config, vocab=embedding.num_embeddings)
        return embedding
