"""The layers of every model: Pattention, attention between data tokens, the block.

Unusual: weights are cast to the type of what flows in, so one choice at the embedding decides the compute type; q, k
and v are separate parameters but one product. Legend: B batch, T positions, D dim, H heads, C head_dim.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.ops.attention import attention
from tokenformer.ops.pattention import THETAS, Segments, backend, fused, normalise, pattention, pattention_group
from tokenformer.ops.rotary import rotate


class Segment(nn.Module):
    """Parameter tokens that are normalised together, with their own τ."""

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
        return [segment(dtype) for segment in self.segments]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"a Pattention reads floating point numbers, not {x.dtype}")
        return pattention(x, self.parts(x.dtype), theta=self.theta, mask=mask)

    def activations(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Scores and Θ(scores) of each segment: a token adds its activation times its value to the output."""
        scores = [(x @ key_ND.T, tau) for key_ND, _, tau in self.parts(x.dtype)]
        return [(score, normalise(score, self.theta, tau)) for score, tau in scores]

    def extra_repr(self) -> str:
        return f"theta={self.theta}"


class Linear(nn.Linear):
    """Without bias, computing in the type of its input."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


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


def project(x: Tensor, layers: Sequence[Pattention | Linear]) -> Sequence[Tensor]:
    """Several projections of one input in one product; one by one where somebody waits for their calls."""
    if not all(readable(layer) for layer in layers):
        return called_one_by_one() and [layer(x) for layer in layers]
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
        if not (plain and x.requires_grad and backend(x) == "triton"):
            return False
        a = self.attention
        between = (self.attention_norm, self.ffn_norm, a)
        if any(map(hooked, between)) or not all(map(readable, (a.query, a.key, a.value, a.proj, self.ffn))):
            return not called_one_by_one()
        return True

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
