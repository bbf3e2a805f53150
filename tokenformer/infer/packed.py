"""Packs a model's weights for decoding: what is multiplied together lies together, in the compute type.

Unusual: it is the model itself with other projections, so the forward pass is not written a second time. q, k and v
are one product, their values one batched product. Legend: B batch, T positions, D dim, M members (q, k, v), N parameter
tokens of each, E output dim.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.errors import UserError
from tokenformer.infer.cache import Placed, StaticCache
from tokenformer.models import LanguageModel, Pattention, View, build
from tokenformer.models.layers import Linear, Norm, Segment, hooked, per_sample
from tokenformer.models.trunk import MLP, Attention, Block
from tokenformer.ops.pattention import normalise


class PackedTokens:
    """Several Pattentions of one input, all with the same segments: x (…, D) → (M, …, E)."""

    def __init__(self, members: Sequence[Pattention], dtype: torch.dtype, switch: str = "") -> None:
        parts = [[(k.detach(), v.detach(), tau) for k, v, tau in member.parts(dtype, switch)] for member in members]
        if not parts[0]:
            raise UserError("a projection of this model has no segment without a switch: the engine cannot compute it")
        keys = [key_ND for member in parts for key_ND, _, _ in member]
        self.key_ND = keys[0] if len(keys) == 1 else torch.cat(keys)
        if len(keys) == 1:
            self.value_MNE = parts[0][0][1][None]  # no copy
        else:
            self.value_MNE = torch.stack([torch.cat([value_NE for _, value_NE, _ in member]) for member in parts])
        self.theta, self.members = members[0].theta, len(members)
        self.sizes, self.taus = [len(key_ND) for key_ND, _, _ in parts[0]], [tau for _, _, tau in parts[0]]
        names = set(members[0].switch) - {""} if not switch else ()
        self.switched = {name: PackedTokens(members, dtype, name) for name in names}

    def weights(self, x: Tensor) -> Tensor:
        """Return Θ(x·Kᵀ) (…, M, N): how much each token counts, without switches."""
        scores = (x @ self.key_ND.T).unflatten(-1, (self.members, -1)).split(self.sizes, dim=-1)
        parts = [normalise(a, self.theta, tau) for a, tau in zip(scores, self.taus, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def sums(self, weight: Tensor) -> Tensor:
        """Return (M, …, E): the sums of values by their weights (…, M, N)."""
        rows_MTN = weight.to(self.value_MNE.dtype).flatten(0, -3).transpose(0, 1)
        return torch.bmm(rows_MTN, self.value_MNE).unflatten(1, weight.shape[:-2])

    def __call__(self, x: Tensor, switches: Mapping[str, Tensor] | None = None) -> Tensor:
        out = self.sums(self.weights(x))
        for name in self.switched.keys() & (switches or {}).keys():
            out = out + per_sample(switches[name], x) * self.switched[name](x)  # pyrefly: ignore
        return out


class PackedLinear:
    """Several matrices of one input: x (…, D) → a list of (…, E)."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        weights = [layer.weight.detach().to(dtype) for layer in layers]
        self.weight, self.sizes = weights[0] if len(weights) == 1 else torch.cat(weights), [len(w) for w in weights]

    def __call__(self, x: Tensor, _switches: Mapping[str, Tensor] | None = None) -> Sequence[Tensor]:
        return F.linear(x, self.weight).split(self.sizes, dim=-1)


class PackedLayer(nn.Module):
    """One projection."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = _pack([layer], dtype)

    def forward(self, x: Tensor, switches: Mapping[str, Tensor] | None = None) -> Tensor:
        return self.packed(x, switches)[0]


class PackedAttention(Attention):
    packed: PackedTokens | PackedLinear

    def qkv(self, x: Tensor, view: View) -> Sequence[Tensor]:
        return tuple(self.packed(x, view.switches))


class PackedMLP(MLP):
    packed: PackedLinear

    def forward(self, x: Tensor) -> Tensor:
        gate, *up = self.packed(x)
        return self.down(F.silu(gate) * up[0] if up else F.gelu(gate))


def _pack(layers: Sequence[Any], dtype: torch.dtype) -> PackedTokens | PackedLinear:
    return (PackedTokens if isinstance(layers[0], Pattention) else PackedLinear)(layers, dtype)


def pack(model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    """Return the same model on packed weights; norms are shared, and a weight that need not be cast is not copied."""
    with torch.device("meta"):
        packed = build(model.config)
    for mine, block in zip(cast(Sequence[Block], packed.blocks), cast(Sequence[Block], model.blocks), strict=True):
        mine.attention_norm, mine.ffn_norm = block.attention_norm, block.ffn_norm
        a: Any = mine.attention
        own = block.attention
        a.__class__ = PackedAttention
        a.packed = _pack([own.query, own.key, own.value], dtype)
        del a.query, a.key, a.value
        a.proj = PackedLayer(own.proj, dtype)
        if isinstance(block.ffn, Pattention):
            mine.ffn = PackedLayer(block.ffn, dtype)  # pyrefly: ignore
            continue
        f: Any = mine.ffn
        mlp = cast(MLP, block.ffn)
        f.__class__ = PackedMLP
        f.packed = PackedLinear([mlp.up] if mlp.gate is None else [mlp.gate, mlp.up], dtype)
        f.gate, f.down = None, PackedLayer(mlp.down, dtype)
        del f.up
    packed.embedding.weight = nn.Parameter(model.embedding.weight.detach().to(dtype), requires_grad=False)
    if packed.head is not None:
        packed.head.weight = nn.Parameter(model.head_weight.detach().to(dtype), requires_grad=False)
    for name in ("added_embedding", "added_head"):
        if (own := getattr(model, name)) is not None:
            getattr(packed, name).weight = nn.Parameter(own.weight.detach().to(dtype), requires_grad=False)
    packed.norm, packed.active = model.norm, dict(model.active)
    return packed


def check_readable(model: LanguageModel) -> None:
    """Refuse a model whose weights are not what its modules compute with."""
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if any(parameter.is_meta for parameter in own):
            raise UserError(f"the weights of {name} are offloaded, and the engine reads them once: load them whole")
        strange = own and not isinstance(module, Segment | Linear | Norm | torch.nn.Embedding)
        # a block's own forward may be compiled or recomputed, since the engine does not call it
        if strange or (hooked(module) and not (isinstance(module, Block) and "_hf_hook" not in module.__dict__)):
            raise UserError(
                f"{name or 'the model'} carries a hook or an adapter, and the engine, which reads the weights once, "
                "would leave it out: merge or remove it, or use the model's own generate"
            )


class Packed:
    """A model to decode with; `hidden(ids, positions, cache)` gives what the output head reads."""

    def __init__(self, model: LanguageModel, dtype: torch.dtype | None = None) -> None:
        check_readable(model)
        self.config = model.config
        self.dtype = dtype or model.compute_dtype or model.embedding.weight.dtype
        self.model = pack(model, self.dtype)

    @property
    def head(self) -> Tensor:
        return self.model.head_weight

    @property
    def device(self) -> torch.device:
        return self.head.device

    def hidden(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        cache: StaticCache,
        start: int | None = None,
        switches: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return (B, T, D) after the final norm. With `start` all rows are at start, start + 1, …: the cache is written
        as a slice and attention is causal. Without it every row writes where its positions say, under a mask.
        `switches`: name → (B,) weights; None: those that were active when the model was packed.
        """
        mask = None if start is not None else cache.mask(positions_BT)
        placed = Placed(cache, positions_BT, start)
        return self.model.hidden(ids_BT, positions=positions_BT, mask=mask, cache=placed, switches=switches)

    def read(self, prefix_BPD: Tensor, cache: StaticCache, switches: Mapping[str, Tensor] | None = None) -> None:
        """Fill the first positions of a cache with what is no text, such as an image: it sees all of itself."""
        places = torch.arange(prefix_BPD.shape[1], device=self.device)
        fields = {"positions": places, "causal": False, "cache": Placed(cache, places, 0), "switches": switches}
        self.model.hidden(embeddings=prefix_BPD.to(self.dtype), **fields)

    def logits(self, hidden: Tensor, switches: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return logits in fp32 or better; those of added ids follow, where `switches` let them count."""
        out = self.model.logits(hidden, self.model.added_rows(switches, hidden))
        return out.to(torch.promote_types(out.dtype, torch.float32))
