"""The layers that blocks are made of: Pattention, plain matrices, norms.

Unusual: weights are cast to the type of the input, so one cast after the embedding decides the compute type. Several
projections of one input are separate parameters but one product. A segment with a switch counts only in calls that name
that switch.
"""

import functools
import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.config_data import IGNORED
from tokenformer.errors import UserError
from tokenformer.ops.pattention import THETAS, Segments, normalise, pattention, pattention_group


class CheckedOnLoad(nn.Module):
    """A module with plain values beside its tensors that change what it computes, such as τ.

    They are kept in the metadata of a `state_dict`, which `torch.save` writes and safetensors cannot. `load_state_dict`
    refuses other values, and accepts a state without them, such as official weights: nothing then tells τ.
    """

    checked: ClassVar[tuple[str, ...]]

    def checked_values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.checked}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if prefix[:-1] in getattr(destination, "_metadata", {}):
            destination._metadata[prefix[:-1]] |= self.checked_values()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        for name, ours in self.checked_values().items():
            theirs = local_metadata.get(name, ours)
            if _plain(ours) != _plain(theirs):
                error_msgs.append(
                    f"{prefix}{name} is {_plain(theirs)} in the state_dict but {_plain(ours)} in this model, so the "
                    "same tensors would compute something else: make the model from the config that belongs to them"
                )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _plain(value: Any) -> Any:
    """Return a value as the config writes it; no switch of any segment is null, however many segments there are."""
    return value if not isinstance(value, tuple) else list(value) if any(value) else "null"


class Segment(CheckedOnLoad):
    """Parameter tokens that are normalised together, with their own τ."""

    checked = ("tau",)

    def __init__(self, d_in: int, d_out: int, tokens: int, tau: float, **place: Any) -> None:
        """`place`: device and dtype."""
        super().__init__()
        self.tau = tau
        self.key_tokens = nn.Parameter(torch.empty(tokens, d_in, **place))
        self.value_tokens = nn.Parameter(torch.empty(tokens, d_out, **place))

    def forward(self, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, float]:
        """Keys, values and τ. Layers call this instead of reading the tensors, so that hooks on a segment (offloading,
        LoRA) work.
        """
        keys, values = self.key_tokens.to(dtype), self.value_tokens.to(dtype)
        if type(self) is not Segment:  # fully_shard made it a class of its own, and frees the parameters after this
            keys, values = keys.clone(), values.clone()
        return keys, values, self.tau

    def extra_repr(self) -> str:
        return f"tokens={len(self.key_tokens)}, tau={self.tau:g}"


class Pattention(CheckedOnLoad):
    """A layer whose parameters are tokens; replaces an `nn.Linear(in_features, out_features, bias=False)`.

    >>> layer = Pattention(16, 32, tokens=64)
    >>> layer(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 32])
    """

    checked = ("theta", "switch")
    fp8: Any = None  # `Products` of train/fp8.py: they compute this layer where gradients are wanted

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tokens: int | Sequence[int],
        *,
        theta: str = "l2_norm_gelu",
        tau: Sequence[float] | None = None,
        switch: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`tau` and `switch`: one per segment. Absent: √n, and no switch ("": the segment always counts)."""
        super().__init__()
        sizes = [_whole(n) for n in (tokens if isinstance(tokens, Sequence) else [tokens])]
        if not sizes or any(n < 1 for n in sizes):
            raise ValueError(f"tokens is {tokens}: give a whole number above 0, or a list of them (segments)")
        self.in_features, self.out_features = _whole(in_features), _whole(out_features)
        if min(self.in_features, self.out_features) < 1:
            raise ValueError(f"in_features is {in_features} and out_features {out_features}: give numbers above 0")
        if theta not in THETAS:
            raise ValueError(f"theta is '{theta}', not one of {', '.join(THETAS)}")
        scales = [math.sqrt(n) for n in sizes] if tau is None else list(tau)
        self.theta = theta
        self.switch = tuple(switch or [""] * len(sizes))
        shape, place = (self.in_features, self.out_features), {"device": device, "dtype": dtype}
        segments = [Segment(*shape, n, t, **place) for n, t in zip(sizes, scales, strict=True)]
        self.segments = cast(Sequence[Segment], nn.ModuleList(segments))
        if self.segments[0].key_tokens.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise a layer outside our models: each segment's output has RMS 0.65 at any scale of the input (L2)."""
        for segment in self.segments:
            nn.init.normal_(segment.key_tokens, std=0.02)
            nn.init.normal_(segment.value_tokens, std=len(segment.value_tokens) ** -0.5)

    def parts(self, dtype: torch.dtype | None, switch: str = "") -> Segments:
        """The segments of one switch; without a name, those that always count."""
        return [segment(dtype) for segment, name in zip(self.segments, self.switch, strict=True) if name == switch]

    def forward(self, x: Tensor, mask: Tensor | None = None, switches: Mapping[str, Tensor] | None = None) -> Tensor:
        """`mask`: see `pattention`. `switches`: name → (B,) weights, by which its segments' outputs are multiplied."""
        if not x.is_floating_point():
            raise TypeError(f"a Pattention reads floating point numbers, not {x.dtype}")
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"this Pattention reads (…, {self.in_features}), not {tuple(x.shape)}: give another input")
        if mask is None:
            return _with_switches(x, [self], switches)[0]
        if any(self.switch):
            raise ValueError("a mask of parameter tokens cannot be given to a layer with switches: switch segments off")
        return pattention(x, self.parts(x.dtype), theta=self.theta, mask=mask)

    def activations(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Scores and Θ(scores) of each segment. A token adds its activation, Θ, times its value to the output."""
        scores = [(x @ key_ND.T, tau) for key_ND, _, tau in (segment(x.dtype) for segment in self.segments)]
        return [(score, normalise(score, self.theta, tau)) for score, tau in scores]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, theta={self.theta}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "a Pattention has no weight: its parameters are segments[i].key_tokens and .value_tokens. Callers that "
                "multiply by the weight themselves, such as MultiheadAttention, cannot use it; TransformerEncoderLayer "
                "calls its layers after torch.backends.mha.set_fastpath_enabled(False)"
            )
        return super().__getattr__(name)


def _whole(number: Any) -> int:
    """Return a whole number of any library as Python's; what is none becomes 0, which callers refuse."""
    try:
        return 0 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return 0


class Linear(nn.Linear):
    """A linear layer, without bias unless asked for, that computes in the type of its input."""

    fp8: Any = None  # as of Pattention

    def __init__(self, d_in: int, d_out: int, bias: bool = False) -> None:
        super().__init__(d_in, d_out, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        return _linear(input, self.weight, self.bias, _in_fp8(self))


def _in_fp8(layer: Any) -> Any:
    """What computes a layer in fp8, or None: without gradients a model computes what it will after training."""
    return layer.fp8 if torch.is_grad_enabled() else None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Any) -> Tensor:
    weight, bias = weight.to(x.dtype), bias if bias is None else bias.to(x.dtype)
    if fp8 is None:
        return F.linear(x, weight, bias)
    out = fp8.linear(x, weight)
    return out if bias is None else out + bias


def look_up(embedding: nn.Module, ids: Any, vocab: int) -> Tensor:
    """The embeddings (B, T, D) of ids (B, T)."""
    if ids.ndim != 2:
        raise UserError(f"ids have the shape {tuple(ids.shape)}, but must be (batch, positions): add a dimension")
    if ids.dtype not in (torch.int64, torch.int32):
        raise UserError(f"ids are {ids.dtype}: give whole numbers (ids.long())")
    if torch.compiler.is_compiling():
        return embedding(ids)
    try:
        return embedding(ids)
    except IndexError:
        raise outside_vocabulary("ids", ids, vocab) from None


def outside_vocabulary(what: str, ids: Tensor, vocab: int) -> UserError:
    ids = ids[ids != IGNORED]
    most = f"{what} go from {ids.min()} to {ids.max()}, but the vocabulary from 0 to {vocab - 1}"
    return UserError(f"{most}: encode the text with the model's own tokenizer")


def guard_hooks() -> None:
    """Make a compiled block notice hooks that come later: it is compiled anew. PyTorch's default is to ignore them."""
    if torch.compiler.is_compiling():
        _guard_hooks()


@torch.compiler.assume_constant_result
def _guard_hooks() -> None:  # is run while a block is traced, before its guards are made
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def hooked(module: nn.Module) -> bool:
    """Whether calling this module runs more than its own forward: a hook, FSDP, a replaced forward."""
    m = module
    hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return bool(hooks) or "forward" in m.__dict__


def readable(layer: nn.Module) -> bool:
    """Whether a layer's parameters may be read without calling it."""
    return isinstance(layer, Pattention | Linear) and not hooked(layer)


@torch.compiler.assume_constant_result
def warn_one_by_one() -> bool:
    """Warn, once and outside of what is compiled; True, for use in an expression."""
    _warn_once()
    return True


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "a projection has a hook, or was replaced: the projections of its block are called one by one, "
        "which is slower than one product for q, k and v",
        stacklevel=2,
    )


def project(
    x: Tensor, layers: Sequence[Pattention | Linear], switches: Mapping[str, Tensor] | None = None
) -> Sequence[Tensor]:
    """Several projections of one input in one product; called one by one where a hook needs the calls."""
    guard_hooks()
    if not all(readable(layer) for layer in layers):
        return warn_one_by_one() and [call_layer(layer, x, switches) for layer in layers]
    tokens = [layer for layer in layers if isinstance(layer, Pattention)]
    if tokens:
        return _with_switches(x, tokens, switches)
    weights = [layer.weight for layer in layers if isinstance(layer, Linear)]
    biases: list[Tensor] = [layer.bias for layer in layers if isinstance(layer, Linear) and layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    return _linear(x, torch.cat(weights), bias, _in_fp8(layers[0])).split([len(w) for w in weights], dim=-1)


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
    """Make a projection: parameter tokens, or the matrix of a baseline. `which`: qkv, proj or ffn."""
    if config.kind != "tokenformer":
        return Linear(config.dim, d_out, config.bias)
    sizes, scales = zip(*config.segments(which, layer), strict=True)
    return Pattention(config.dim, d_out, sizes, theta=config.theta, tau=scales, switch=config.switches(which, layer))


def call_layer(layer: nn.Module, x: Tensor, switches: Mapping[str, Tensor] | None) -> Tensor:
    """Call a layer, with switches where there are some: only a Pattention takes them."""
    return layer(x) if switches is None else layer(x, switches=switches)


def _with_switches(x: Tensor, layers: Sequence[Pattention], switches: Mapping[str, Tensor] | None) -> list[Tensor]:
    """Several Pattentions of one input, with the same switches. A segment whose switch is absent is not computed."""
    names, theta, fp8 = layers[0].switch, layers[0].theta, _in_fp8(layers[0])
    if fp8 is not None:  # which is refused where there are switches
        return fp8.pattention(x, [layer.parts(x.dtype) for layer in layers], theta)
    if "" in names:
        outputs = pattention_group(x, [layer.parts(x.dtype) for layer in layers], theta=theta)
    else:
        outputs = [x.new_zeros(*x.shape[:-1], layer.out_features) for layer in layers]
    for name in dict.fromkeys(names):
        if name and switches is not None and name in switches:
            weight = per_sample(switches[name], x)
            added = pattention_group(x, [layer.parts(x.dtype, name) for layer in layers], theta=theta)
            outputs = [output + weight * part for output, part in zip(outputs, added, strict=True)]
    return outputs


def per_sample(factor_B: Tensor, x: Tensor) -> Tensor:
    """Reshape one factor per sample so that it multiplies x (B, …)."""
    return factor_B.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
