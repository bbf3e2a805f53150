"""A model's weights laid out once for decoding, and its forward pass over them. Tied to the model by tests.

Unusual: q, k and v are one product, their values one batched product; positions are tensors, each row at its own place.
Legend: B batch, T positions, D dim, M members (q, k, v), N parameter tokens of each, E output dim, H heads, C head_dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.infer.cache import StaticCache
from tokenformer.models import LanguageModel, Pattention
from tokenformer.models.layers import Block, Linear, Norm, Segment, hooked
from tokenformer.ops.attention import attention
from tokenformer.ops.pattention import normalise
from tokenformer.ops.rotary import angles, rotate


class PackedTokens:
    """Several Pattentions of one input, all of the same segments: x (…, D) → (M, …, E)."""

    def __init__(self, members: Sequence[Pattention], dtype: torch.dtype) -> None:
        keys = [s.key_tokens.detach().to(dtype) for member in members for s in member.segments]
        self.key_ND = keys[0] if len(keys) == 1 else torch.cat(keys)
        values = [[s.value_tokens.detach().to(dtype) for s in member.segments] for member in members]
        if len(keys) == 1:
            self.value_MNE = values[0][0][None]  # no copy
        else:
            self.value_MNE = torch.stack([torch.cat(parts) for parts in values])
        self.theta, self.members = members[0].theta, len(members)
        self.sizes = [len(s.key_tokens) for s in members[0].segments]
        self.taus = [s.tau for s in members[0].segments]

    def __call__(self, x: Tensor) -> Tensor:
        scores = (x @ self.key_ND.T).unflatten(-1, (self.members, -1)).split(self.sizes, dim=-1)
        parts = [normalise(a, self.theta, tau) for a, tau in zip(scores, self.taus, strict=True)]
        weight = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(self.value_MNE.dtype)
        rows_MTN = weight.flatten(0, -3).transpose(0, 1)
        return torch.bmm(rows_MTN, self.value_MNE).unflatten(1, x.shape[:-1])


class PackedLinear:
    """Several matrices of one input: x (…, D) → a list of (…, E)."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        weights = [layer.weight.detach().to(dtype) for layer in layers]
        self.weight, self.sizes = weights[0] if len(weights) == 1 else torch.cat(weights), [len(w) for w in weights]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        return F.linear(x, self.weight).split(self.sizes, dim=-1)


def pack(layers: Sequence[Any], dtype: torch.dtype) -> PackedTokens | PackedLinear:
    return (PackedTokens if isinstance(layers[0], Pattention) else PackedLinear)(layers, dtype)


class PackedLayer:
    """One block."""

    def __init__(self, block: Any, dtype: torch.dtype) -> None:
        self.attention_norm, self.ffn_norm = block.attention_norm, block.ffn_norm
        a, f = block.attention, block.ffn
        self.qkv, self.proj = pack([a.query, a.key, a.value], dtype), pack([a.proj], dtype)
        self.head_dim = a.head_dim
        if isinstance(f, Pattention):
            self.ffn, self.down = pack([f], dtype), None
        else:
            self.ffn = pack([f.up] if f.gate is None else [f.gate, f.up], dtype)
            self.down = pack([f.down], dtype)

    def feed_forward(self, x: Tensor) -> Tensor:
        parts = self.ffn(x)
        if self.down is None:
            return parts[0]
        return self.down(F.gelu(parts[0]) if len(parts) == 1 else F.silu(parts[0]) * parts[1])[0]


def check_readable(model: LanguageModel) -> None:
    """Refuse a model whose weights are not what its modules compute with."""
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if any(parameter.is_meta for parameter in own):
            raise UserError(f"the weights of {name} are offloaded, and the engine reads them once: load them whole")
        strange = own and not isinstance(module, Segment | Linear | Norm | torch.nn.Embedding)
        # a block's own forward may be compiled or recomputed: the engine's is another one anyway
        if strange or (hooked(module) and not (isinstance(module, Block) and "_hf_hook" not in module.__dict__)):
            raise UserError(
                f"{name or 'the model'} carries a hook or an adapter, and the engine, which reads the weights once, "
                "would leave it out: merge or remove it, or use the model's own generate"
            )


class Packed:
    """All layers; `hidden(ids, positions, cache)` gives what the output head reads."""

    def __init__(self, model: LanguageModel, dtype: torch.dtype | None = None) -> None:
        check_readable(model)
        self.config = model.config
        self.dtype = dtype or model.compute_dtype or model.embedding.weight.dtype
        self.embedding = model.embedding.weight.detach().to(self.dtype)
        self.head = self.embedding if model.head is None else model.head.weight.detach().to(self.dtype)
        self.norm = model.norm
        self.layers = [PackedLayer(block, self.dtype) for block in model.blocks]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, cache: StaticCache, start: int | None = None) -> Tensor:
        """(B, T, D) after the final norm. `start`: all rows stand at start, start + 1, …: written as a slice, and from
        0 with the flash kernel's own causal mask; without it every row writes where its positions say.
        """
        x_BTD = self.embedding[ids_BT]
        rotary = angles(positions_BT, self.config.rotary_dims, self.config.rotary_base, x_BTD.dtype)
        mask = None if start is not None else cache.mask(positions_BT)
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.attention_norm(x_BTD))
            q, k, v = (p.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for p in qkv)
            q, k = rotate(q, *rotary), rotate(k, *rotary)
            k, v = cache.put(i, k, v, start) if start is not None else cache.put_at(i, k, v, positions_BT)
            seen = attention(q, k, v, mask=mask)
            x_BTD = x_BTD + layer.proj(seen.transpose(1, 2).flatten(2))[0]
            x_BTD = x_BTD + layer.feed_forward(layer.ffn_norm(x_BTD))
        return self.norm(x_BTD)

    def logits(self, hidden: Tensor) -> Tensor:
        """In fp32 or better."""
        out = hidden @ self.head.T
        return out.to(torch.promote_types(out.dtype, torch.float32))
