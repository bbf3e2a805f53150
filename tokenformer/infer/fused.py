"""The single-token step on fused kernels: weights laid out for them once, buffers made once, no host in between.

Unusual: keys that read a LayerNorm lose their mean, values are transposed, segments are padded with zero tokens; the
residual stream stays in fp32. Legend: B batch, D dim, N tokens, E output dim, M members, W vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.infer.cache import StaticCache
from tokenformer.models import LanguageModel, Pattention
from tokenformer.ops.rotary import angles

PAD = 64
MOST = 64  # rows of data


@dataclass(frozen=True)
class Tuning:
    """Shapes of the kernels; what was fastest where it was measured (benchmarks/decode.py)."""

    pdl: bool = True  # a kernel begins, with its weights, while the one before it ends
    ahead: bool = False  # every kernel asks for the next one's weights
    score_rows: int = 16  # one row of data: scores a program, and outputs a program
    value_rows: int = 16
    ffn_value_rows: int = 8
    value_block: int = 1024
    head_rows: int = 4
    warps: int = 4
    attend_block: int = 32
    attend_split: int = 8
    library: bool = True  # several rows of data: matrix products by cuBLAS, or by the kernels below
    many_score_rows: int = 64
    many_value_rows: int = 64
    many_block: int = 128
    many_programs: int = 264  # about how many share one product of values
    many_warps: int = 4
    many_stages: int = 4
    many_attend_split: int = 2


def why_not(config: ModelConfig, device: torch.device) -> str | None:
    """Why the kernels cannot compute a model here, if they cannot."""
    if config.kind != "tokenformer" or config.theta != "l2_norm_gelu":
        return f"they compute theta l2_norm_gelu, not {config.theta if config.kind == 'tokenformer' else config.kind}"
    if config.dim % PAD:
        return f"dim is {config.dim}, not a multiple of {PAD}"
    if device.type != "cuda":
        return f"the weights are on {device.type}"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed: pip install 'tokenformer[kernels]'"
    return None


class FusedTokens:
    """Pattentions of one input, laid out for the kernels."""

    def __init__(self, members: Sequence[Pattention], dtype: torch.dtype, centred: bool) -> None:
        sizes = [len(s.key_tokens) for s in members[0].segments]
        padded = [-(-n // PAD) * PAD for n in sizes]
        device, self.n = members[0].segments[0].key_tokens.device, sum(padded)
        d_in, d_out = members[0].segments[0].key_tokens.shape[1], members[0].segments[0].value_tokens.shape[1]
        self.key_ND = torch.zeros(len(members) * self.n, d_in, dtype=dtype, device=device)
        self.value_MEN = torch.zeros(len(members), d_out, self.n, dtype=dtype, device=device)
        for m, member in enumerate(members):
            at = 0
            for segment, size, room in zip(member.segments, sizes, padded, strict=True):
                keys = segment.key_tokens.detach().float()
                if centred:  # Σ over channels of (x − mean)·k is Σ x·(k − mean): LayerNorm's mean goes into the keys
                    keys = keys - keys.mean(-1, keepdim=True)
                self.key_ND[m * self.n + at : m * self.n + at + size] = keys.to(dtype)
                self.value_MEN[m, :, at : at + size] = segment.value_tokens.detach().T.to(dtype)
                at += room
        ends = torch.tensor([0, *padded]).cumsum(0)
        self.bounds = ends.to(device=device, dtype=torch.int32)
        self.tau = torch.tensor([s.tau for s in members[0].segments], dtype=torch.float32, device=device)
        self.members = len(members)
        self.wide = self.n > 2 * d_out
        self.block = min(n & -n for n in padded)  # a power of two that divides all of them


class FusedModel:
    """A model's weights for the kernels; steps of any batch share them."""

    def __init__(self, model: LanguageModel, dtype: torch.dtype) -> None:
        self.config, self.dtype = model.config, dtype
        self.layers = []
        for block in model.blocks:
            part: Any = block
            a = part.attention
            self.layers.append(
                (
                    FusedTokens([a.query, a.key, a.value], dtype, centred=True),
                    FusedTokens([a.proj], dtype, centred=False),
                    FusedTokens([part.ffn], dtype, centred=True),
                )
            )
        self.embedding = model.embedding.weight.detach().to(dtype)
        self.head = self.embedding if model.head is None else model.head.weight.detach().to(dtype)
        norm: Any = model.norm
        self.norm = tuple(p.detach().float() for p in (norm.weight, norm.bias))
        self.device = self.embedding.device

    def step(self, batch: int, tuning: Tuning) -> "FusedStep | None":
        return FusedStep(self, batch, tuning) if batch <= MOST else None


class FusedStep:
    """ids (B,), positions (B,), cache → logits (B, W), for one batch size."""

    def __init__(self, model: FusedModel, batch: int, tuning: Tuning) -> None:
        self.model, self.batch, self.tuning = model, batch, tuning
        c, device = model.config, model.device
        most = max(t.members * t.n for layer in model.layers for t in layer)
        self.bb = max(16, 1 << (batch - 1).bit_length())
        wide = torch.float32 if batch == 1 else model.dtype
        self.score = torch.empty(batch, most, dtype=wide, device=device)
        self.stat = torch.empty(most // 4, self.bb, device=device)
        self.library = tuning.library and batch > 1
        kind = model.dtype if self.library else torch.float32
        self.qkv_MBD = torch.empty(3, batch, c.dim, dtype=kind, device=device)
        self.seen_BD = torch.empty(batch, c.dim, dtype=wide, device=device)
        self.copy_BD = torch.empty(batch, c.dim, dtype=model.dtype, device=device)
        split = max(self.split(t) for layer in model.layers for t in layer)
        self.part = torch.empty(3 * split * c.dim * self.bb, device=device) if batch > 1 else self.stat
        width = 1 << (c.head_dim - 1).bit_length()
        splits = tuning.attend_split if batch == 1 else tuning.many_attend_split
        self.attend_part = torch.empty(batch * c.heads * splits * (width + 2), device=device)
        self.counter = torch.zeros(max(3 * c.dim, batch * c.heads), dtype=torch.int32, device=device)
        self.logits = torch.empty(batch, len(model.head), device=device)
        self.rotary: tuple[Tensor, Tensor] | None = None

    def split(self, tokens: FusedTokens) -> int:
        """Programs that share the tokens of one tile of outputs: about enough to fill the device, whole blocks each."""
        tiles = tokens.members * (tokens.value_MEN.shape[1] // self.tuning.many_value_rows)
        blocks = tokens.n // min(self.tuning.many_block, tokens.block)
        each = -(-blocks // max(1, min(self.tuning.many_programs // tiles, blocks)))
        return -(-blocks // each)

    def __call__(self, ids_B: Tensor, positions_B: Tensor, cache: StaticCache) -> Tensor:
        from tokenformer.ops.kernels import decode

        t, c, one = self.tuning, self.model.config, self.batch == 1
        if self.rotary is None or len(self.rotary[0]) < cache.slots:
            places = torch.arange(cache.slots, device=self.model.device)
            self.rotary = angles(places, c.rotary_dims, c.rotary_base)
        x_BD = self.model.embedding[ids_B]
        if self.library:
            self.copy_BD = x_BD  # the stream itself
        else:
            x_BD = x_BD.float()
            if not one:
                self.copy_BD.copy_(x_BD)
        for i, (qkv, proj, ffn) in enumerate(self.model.layers):
            after = self.model.layers[i + 1][0].key_ND if i + 1 < c.layers else None
            self._tokens(qkv, x_BD if one else self.copy_BD, self.qkv_MBD, None, proj.key_ND)
            decode.attend(
                self.qkv_MBD, cache.k[i], cache.v[i], *self.rotary, positions_B, self.seen_BD, self.attend_part,
                self.counter, block=t.attend_block, split=t.attend_split if one else t.many_attend_split,
                warps=t.warps, pdl=t.pdl, ahead=proj.value_MEN if t.ahead else None,
            )  # fmt: skip
            self._tokens(proj, self.seen_BD, x_BD, self.copy_BD, ffn.key_ND)
            self._tokens(ffn, x_BD if one else self.copy_BD, x_BD, self.copy_BD, after)
        weight, bias = self.model.norm
        hidden_BD = F.layer_norm(x_BD.float(), (c.dim,), weight, bias, c.norm_eps).to(self.model.dtype)
        if not one:
            return (hidden_BD @ self.model.head.T).float()
        decode.scores_one(hidden_BD, self.model.head, self.logits, None, rows=t.head_rows, warps=t.warps, pdl=t.pdl)
        return self.logits

    def _tokens(self, tokens: FusedTokens, x: Tensor, out: Tensor, copy: Tensor | None, after: Tensor | None) -> None:
        """One group of Pattentions into `out`; with `copy` added to it. `after`: the weights that are read next."""
        from tokenformer.ops.kernels import decode

        t = self.tuning
        ahead = (tokens.value_MEN, after) if t.ahead else (None, None)
        if self.batch == 1:
            decode.scores_one(
                x, tokens.key_ND, self.score, self.stat, rows=t.score_rows, warps=t.warps, pdl=t.pdl, ahead=ahead[0]
            )
            decode.values_one(
                self.score, self.stat, tokens.tau, tokens.bounds, tokens.value_MEN, out,
                par=t.score_rows, rows=t.ffn_value_rows if tokens.wide else t.value_rows,
                block=min(t.value_block, tokens.block), warps=t.warps, add=copy is not None, pdl=t.pdl, ahead=ahead[1],
            )  # fmt: skip
            return
        score_BN = self.score.view(-1)[: self.batch * len(tokens.key_ND)].view(self.batch, -1)
        if self.library:
            torch.mm(x, tokens.key_ND.T, out=score_BN)
            decode.activate(score_BN, score_BN, tokens.tau, tokens.bounds, tokens.members, t.warps, t.pdl)
            if copy is not None:
                out.addmm_(score_BN, tokens.value_MEN[0].T)
            else:
                rows_MBN = score_BN.view(self.batch, tokens.members, -1).transpose(0, 1)
                torch.bmm(rows_MBN, tokens.value_MEN.mT, out=out)
            return
        many: dict[str, Any] = {"bb": self.bb, "warps": t.many_warps, "stages": t.many_stages, "pdl": t.pdl}
        decode.scores_many(
            x, tokens.key_ND, score_BN, self.stat, rows=t.many_score_rows, block=t.many_block, ahead=ahead[0], **many
        )
        decode.values_many(
            score_BN, self.stat, tokens.tau, tokens.bounds, tokens.value_MEN, out, copy, self.part, self.counter,
            par=t.many_score_rows, rows=t.many_value_rows, split=self.split(tokens),
            block=min(t.many_block, tokens.block), ahead=ahead[1], **many,
        )  # fmt: skip
