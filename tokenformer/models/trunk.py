"""The trunk of every model: blocks of attention and feed-forward, then a norm, causal or not.

Unusual: all that a block gets beside its input is one `View`; a block draws no random numbers (recomputing it in
backward would draw others). Legend: B batch, T positions, S keys, D dim, H heads, C head_dim.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.models.cost import Cost, cost
from tokenformer.models.layers import (
    CheckedOnLoad,
    Linear,
    Norm,
    Pattention,
    call_layer,
    hooked,
    per_sample,
    project,
    projection,
    readable,
    warn_one_by_one,
)
from tokenformer.models.names import ONE, ZERO, Role
from tokenformer.ops.attention import attention
from tokenformer.ops.pattention import backend, fused
from tokenformer.ops.rotary import angles, rotate


class AnyCache(Protocol):
    """The interface of a key/value cache: how many positions it holds, and `update`, which appends and returns all."""

    @property
    def length(self) -> int: ...

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


class Cache:
    """The reference cache: it appends."""

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


class View(NamedTuple):
    """What a block gets beside its input. It never crosses a pipeline boundary: each stage makes its own."""

    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin of the positions; None: no positions
    causal: bool = True
    documents: Tensor | None = None  # (B, T): a position sees only its own document
    mask: Tensor | None = None  # (B or 1, H or 1, T, S), True = is seen; instead of causal
    switches: Mapping[str, Tensor] | None = None  # name → (B,) weight of its segments in each sample
    drop: Tensor | None = None  # (layers, 2, B): factors of each block's two branches; a block gets its own (2, B)
    cache: AnyCache | None = None
    more: Mapping[str, Any] | None = None  # keywords of other engines, which their attention gets untouched


class Attention(nn.Module):
    """Attention between data tokens."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        d_kv = (config.kv_heads or config.heads) * config.head_dim
        self.query = projection(config, layer, "qkv", config.dim)
        self.key = projection(config, layer, "qkv", d_kv)
        self.value = projection(config, layer, "qkv", d_kv)
        self.proj = projection(config, layer, "proj", config.dim)

    def forward(self, x_BTD: Tensor, view: View) -> Tensor:
        return call_layer(self.proj, self.attend(self.qkv(x_BTD, view), view), view.switches)

    def attend(self, qkv: Sequence[Tensor], view: View) -> Tensor:
        """Attention of q, k and v (B, T, D) → (B, T, D)."""
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)) for p in qkv)  # (B, T, H, C), a view
        if view.rotary is not None:
            q, k = rotate(q, *view.rotary), rotate(k, *view.rotary)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if view.cache is not None:
            k, v = view.cache.update(self.layer, k, v)
        return self.mix(q, k, v, view).transpose(1, 2).flatten(2)

    def mix(self, q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, view: View) -> Tensor:
        return attention(q_BHTC, k_BGSC, v_BGSC, causal=view.causal, documents_BT=view.documents, mask=view.mask)

    def qkv(self, x: Tensor, view: View) -> Sequence[Tensor]:
        return project(x, [self.query, self.key, self.value], view.switches)


class MLP(nn.Module):
    """The feed-forward layer of the baselines: GELU, or SwiGLU with a gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.mlp_dim) if config.kind == "llama" else None
        self.up = Linear(config.dim, config.mlp_dim, config.bias)
        self.down = Linear(config.mlp_dim, config.dim, config.bias)
        self.activation = F.gelu if config.activation == "gelu" else quick_gelu

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        gate, up = project(x, [self.gate, self.up])
        return self.down(F.silu(gate) * up)


def quick_gelu(x: Tensor) -> Tensor:
    """An approximation of GELU, by which the first CLIP models were trained."""
    return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream. The config's kind chooses the projections."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        affine = config.norm_affine
        self.attention_norm, self.ffn_norm = Norm(config, affine=affine), Norm(config, affine=affine)
        self.attention = Attention(config, layer)
        self.ffn = projection(config, layer, "ffn", config.dim) if config.kind == "tokenformer" else MLP(config)

    def forward(self, x: Tensor, view: View) -> Tensor:
        if self.fuses(x, view):
            return self.fused_forward(x, view)
        branch = self.attention(self.attention_norm(x), view)
        x = x + (branch if view.drop is None else branch * per_sample(view.drop[0], x))
        branch = call_layer(self.ffn, self.ffn_norm(x), view.switches)
        return x + (branch if view.drop is None else branch * per_sample(view.drop[1], x))

    def fuses(self, x: Tensor, view: View) -> bool:
        """Whether `fused_forward` computes the same, and faster: in training on kernels."""
        plain = type(self.ffn) is Pattention and self.ffn.theta == "l2_norm_gelu"
        if not (plain and x.requires_grad and backend(x) == "triton"):
            return False
        a = self.attention
        layers = (a.query, a.key, a.value, a.proj, self.ffn)
        if any(map(hooked, (self.attention_norm, self.ffn_norm, a))) or not all(map(readable, layers)):
            return not warn_one_by_one()
        switched = [cast(Pattention, layer).switch for layer in layers]
        asked = any(name in names for names in switched for name in view.switches or ())
        return not asked and all("" in names for names in switched)

    def fused_forward(self, x: Tensor, view: View) -> Tensor:
        """Compute the block without norms and additions. l2_norm_gelu ignores the scale of its input, and keys without
        their mean over the channels ignore its mean: LayerNorm changes nothing. Products add to the stream themselves.
        """
        a, theta = self.attention, "l2_norm_gelu"
        layers = cast(Sequence[Pattention], (a.query, a.key, a.value, a.proj, self.ffn))
        query, key, value, proj, ffn = (layer.parts(None) for layer in layers)
        rotary = (None, None, 0) if view.rotary is None else (*(t.flatten(0, -2) for t in view.rotary), a.head_dim)
        first, second, third = (layer.fp8.fused if layer.fp8 else fused for layer in (layers[0], *layers[3:]))
        *qkv, x = first(x, [query, key, value], theta, centred=True, onto="fork", rotary=rotary)
        seen = a.attend(qkv, view._replace(rotary=None))
        if view.drop is None:
            (x,) = second(seen, [proj], theta, onto="residual", residual=x)
            return third(x, [ffn], theta, centred=True, onto="input")[0]
        x = x + second(seen, [proj], theta)[0] * per_sample(view.drop[0], x)
        return x + third(x, [ffn], theta, centred=True)[0] * per_sample(view.drop[1], x)


class Trunk(CheckedOnLoad):
    """Blocks and the final norm. A model is a trunk with ends of its own, or holds several."""

    checked = (
        "heads",
        "norm_eps",
        "rotary_fraction",
        "rotary_base",
        "activation",
    )  # no shape shows them
    ends: ClassVar[Mapping[str, Role]] = {"norm.weight": ONE, "norm.bias": ZERO}  # parameters outside the blocks

    def __init__(self, config: ModelConfig, **first: nn.Module) -> None:
        """`first`: modules that come before the blocks, such as an embedding. The order of the parameters is the order
        in which the gradient norm is summed, so it must not change.
        """
        super().__init__()
        self.config = config.resolved()
        self.compute_dtype: torch.dtype | None = None  # None: as the parameters
        self.history: list[dict] = []  # the growths that led to this model
        self.active: dict[str, float] = {}  # switches, with their weights, of calls that give none
        for name, module in first.items():
            self.add_module(name, module)
        self.blocks = nn.ModuleList(Block(self.config, layer) for layer in range(config.layers))
        self.norm = Norm(config, affine=True)

    def checked_values(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in self.checked}

    def view(self, x_BTD: Tensor, positions: Tensor | None = None, **fields: Any) -> View:
        """Make the View of x. `positions` (T,) or (B, T), absent: they continue the cache. `fields`: of the View."""
        if positions is None:
            start = 0 if fields.get("cache") is None else fields["cache"].length
            positions = torch.arange(start, start + x_BTD.shape[1], device=x_BTD.device)
        return View(angles(positions, self.config.rotary_dims, self.config.rotary_base, x_BTD.dtype), **fields)

    def run(self, x_BTD: Tensor, view: View) -> Tensor:
        """Run x through all blocks and the final norm; a pipeline stage runs those that it holds."""
        if view.switches is not None:
            self.check_switches(view.switches, len(x_BTD))
        view = self.with_active(view, x_BTD)
        for block in self.blocks.children():
            drop = None if view.drop is None else view.drop[cast(Block, block).attention.layer]
            x_BTD = block(x_BTD, view._replace(drop=drop))
        return x_BTD if self.norm is None else self.norm(x_BTD)

    def check_switches(self, switches: Mapping[str, Tensor], batch: int) -> None:
        """Refuse names that the model does not have, and weights that are not one per sample. An adapter that moves
        parameters of its base moves them for all samples, so it must count as it is active.
        """
        adapters: Mapping[str, Any] = getattr(self, "adapters", {})
        self.config.check_switches(switches, adapters)
        for name, weight_B in switches.items():
            if not isinstance(weight_B, Tensor) or weight_B.ndim != 1 or len(weight_B) not in (1, batch):
                raise UserError(f"the switch '{name}' needs one weight per sample: give a tensor of {batch} numbers")
        for name in (name for name, moved in adapters.items() if moved):
            weight_B, weight = switches.get(name, torch.zeros(1)), self.active.get(name, 0.0)
            if not bool((weight_B == torch.tensor(weight).to(weight_B)).all()):
                raise UserError(
                    f"adapter '{name}' moves parameters of its base, so all samples have it as it is active (now "
                    f"{weight:g}): set its weight by tokenformer.active"
                )

    def with_active(self, view: View, x_BTD: Tensor) -> View:
        """Give a view without switches those of `active`. Blocks without parameter tokens take none."""
        if self.config.kind != "tokenformer":
            return view._replace(switches=None)
        if view.switches is not None or not self.active:
            return view
        return view._replace(switches={name: x_BTD.new_full((len(x_BTD),), w) for name, w in self.active.items()})

    def trunks(self) -> dict[str, "Trunk"]:
        """The trunks of a model, by the prefix of their parameters' names."""
        return {"": self}

    def cost(self) -> Cost:
        """Parameters, FLOPs and cache bytes of this model."""
        return cost(self.config)
