"""The layers that blocks are made of: Pattention, plain matrices, norms.

Unusual: weights are cast to the type of what flows in, so one choice at the embedding decides the compute type; several
projections of one input are separate parameters but one product; a segment may have a switch, and then counts only in
calls that give it.
"""

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.ops.pattention import THETAS, Segments, normalise, pattention, pattention_group


class Described(nn.Module):
    """A module whose plain values decide what its tensors compute. They travel in the metadata of a `state_dict`, where

    no file and no other tool meets them, and `load_state_dict` refuses others; tensors without them are accepted.
    """

    described: ClassVar[tuple[str, ...]]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if prefix[:-1] in getattr(destination, "_metadata", {}):
            destination._metadata[prefix[:-1]] |= {name: getattr(self, name) for name in self.described}

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        for name in self.described:
            here, there = getattr(self, name), local_metadata.get(name, getattr(self, name))
            if here != there:
                error_msgs.append(
                    f"{prefix}{name} is {there} in the state_dict and {here} here: the same tensors would compute "
                    "something else; make the model from the config that belongs to them"
                )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class Segment(Described):
    """Parameter tokens that are normalised together, with their own τ."""

    described = ("tau",)

    def __init__(self, d_in: int, d_out: int, tokens: int, tau: float) -> None:
        super().__init__()
        self.tau = tau
        self.key_tokens = nn.Parameter(torch.empty(tokens, d_in))
        self.value_tokens = nn.Parameter(torch.empty(tokens, d_out))

    def forward(self, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, float]:
        """Keys, values and τ. Layers call this instead of reading the tensors: hooks on a segment (offloading, LoRA)

        work by its call.
        """
        return self.key_tokens.to(dtype), self.value_tokens.to(dtype), self.tau

    def extra_repr(self) -> str:
        return f"tokens={len(self.key_tokens)}, tau={self.tau:g}"


class Pattention(Described):
    """A layer whose parameters are tokens; stands wherever an `nn.Linear(d_in, d_out, bias=False)` does.

    >>> layer = Pattention(16, 32, tokens=64)
    >>> layer(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 32])
    """

    described = ("theta", "switch")

    def __init__(
        self,
        d_in: int,
        d_out: int,
        tokens: int | Sequence[int],
        *,
        theta: str = "l2_norm_gelu",
        tau: Sequence[float] | None = None,
        switch: Sequence[str] | None = None,
    ) -> None:
        """`tau` and `switch`: one per segment; absent = √n, and no switch ("" = the segment always counts)."""
        super().__init__()
        sizes = list(tokens) if isinstance(tokens, Sequence) else [tokens]
        if not sizes or any(type(n) is not int or n < 1 for n in sizes):
            raise ValueError(f"tokens is {tokens}: give a whole number above 0, or a list of them (segments)")
        if theta not in THETAS:
            raise ValueError(f"theta is '{theta}', not one of {', '.join(THETAS)}")
        scales = [math.sqrt(n) for n in sizes] if tau is None else list(tau)
        self.theta, self.d_out = theta, d_out
        self.switch = tuple(switch or [""] * len(sizes))
        segments = [Segment(d_in, d_out, n, t) for n, t in zip(sizes, scales, strict=True)]
        self.segments = cast(Sequence[Segment], nn.ModuleList(segments))
        if self.segments[0].key_tokens.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """For a layer that stands alone: outputs of RMS 0.65 per segment whatever the scale of the input (L2 forms)."""
        for segment in self.segments:
            nn.init.normal_(segment.key_tokens, std=0.02)
            nn.init.normal_(segment.value_tokens, std=len(segment.value_tokens) ** -0.5)

    def parts(self, dtype: torch.dtype | None, switch: str = "") -> Segments:
        """The segments that a switch turns on; without a name those that always count."""
        return [segment(dtype) for segment, name in zip(self.segments, self.switch, strict=True) if name == switch]

    def forward(self, x: Tensor, mask: Tensor | None = None, switches: Mapping[str, Tensor] | None = None) -> Tensor:
        """`mask`: see `pattention`. `switches`: name → (B,) weights; a segment's output counts times its switch's."""
        if not x.is_floating_point():
            raise TypeError(f"a Pattention reads floating point numbers, not {x.dtype}")
        if mask is None:
            return _switched(x, [self], switches)[0]
        if any(self.switch):
            raise ValueError("a mask of parameter tokens cannot be given to a layer with switches: switch segments off")
        return pattention(x, self.parts(x.dtype), theta=self.theta, mask=mask)

    def activations(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Scores and Θ(scores) of each segment: a token adds its activation times its value to the output."""
        scores = [(x @ key_ND.T, tau) for key_ND, _, tau in (segment(x.dtype) for segment in self.segments)]
        return [(score, normalise(score, self.theta, tau)) for score, tau in scores]

    def extra_repr(self) -> str:
        return f"theta={self.theta}"


class Linear(nn.Linear):
    """Without bias, computing in the type of its input."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


def guard_hooks() -> None:
    """Make a compiled block notice hooks that come later: it is compiled anew. PyTorch's default is to ignore them."""
    if torch.compiler.is_compiling():
        _guard_hooks()


@torch.compiler.assume_constant_result
def _guard_hooks() -> None:  # is run while a block is traced, before its guards are made
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def hooked(module: nn.Module) -> bool:
    """Whether something waits for this module's call: a hook, FSDP, a forward that was put in place of its own."""
    m = module
    hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return bool(hooks) or "forward" in m.__dict__


def readable(layer: nn.Module) -> bool:
    """Whether a layer's parameters may be read without calling it."""
    return isinstance(layer, Pattention | Linear) and not hooked(layer)


@torch.compiler.assume_constant_result
def called_one_by_one() -> bool:
    _say_one_by_one()
    return True


@functools.cache
def _say_one_by_one() -> None:
    warnings.warn(
        "a projection carries a hook, or is not ours any more: the projections of its block are called one by one, "
        "which is slower than one product for q, k and v",
        stacklevel=2,
    )


def project(
    x: Tensor, layers: Sequence[Pattention | Linear], switches: Mapping[str, Tensor] | None = None
) -> Sequence[Tensor]:
    """Several projections of one input in one product; one by one where somebody waits for their calls."""
    guard_hooks()
    if not all(readable(layer) for layer in layers):
        return called_one_by_one() and [called(layer, x, switches) for layer in layers]
    tokens = [layer for layer in layers if isinstance(layer, Pattention)]
    if tokens:
        return _switched(x, tokens, switches)
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
    return Pattention(config.dim, d_out, sizes, theta=config.theta, tau=scales, switch=config.switches(which, layer))


def called(layer: nn.Module, x: Tensor, switches: Mapping[str, Tensor] | None) -> Tensor:
    """What a layer gives; only a Pattention knows switches."""
    return layer(x) if switches is None else layer(x, switches=switches)


def _switched(x: Tensor, layers: Sequence[Pattention], switches: Mapping[str, Tensor] | None) -> list[Tensor]:
    """Pattentions of one input, alike in their switches. What is not switched on is not computed."""
    names, theta = layers[0].switch, layers[0].theta
    if "" in names:
        outputs = pattention_group(x, [layer.parts(x.dtype) for layer in layers], theta=theta)
    else:
        outputs = [x.new_zeros(*x.shape[:-1], layer.d_out) for layer in layers]
    for name in dict.fromkeys(names):
        if name and switches is not None and name in switches:
            weight = per_sample(switches[name], x)
            more = pattention_group(x, [layer.parts(x.dtype, name) for layer in layers], theta=theta)
            outputs = [output + weight * part for output, part in zip(outputs, more, strict=True)]
    return outputs


def per_sample(factor_B: Tensor, x: Tensor) -> Tensor:
    """One factor per sample, to be multiplied with x (B, …)."""
    return factor_B.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
