"""Single-token steps and prefill on the decoding kernels. Weights are laid out, and buffers made, once.

Unusual: keys that read a LayerNorm have their mean subtracted, values are transposed, segments are padded with zero
tokens; the residual stream stays in fp32. Keys in fp8 keep their mean: the kernels take out that of the input instead.
Legend: B batch, D dim, N tokens, E output dim, M members, W vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.infer.cache import StaticCache
from tokenformer.infer.quantised import quantise
from tokenformer.infer.skipping import Skip
from tokenformer.models import LanguageModel, Pattention
from tokenformer.ops.attention import attention
from tokenformer.ops.fp8 import E4M3
from tokenformer.ops.rotary import angles

PAD = 64
MOST = 64  # rows of data that the kernels take


@dataclass(frozen=True)
class Tuning:
    """Shapes of the kernels; what was fastest where it was measured (benchmarks/decode.py)."""

    pdl: bool = True  # a kernel begins while the one before it ends
    apart: bool = False  # no kernel waits for its own programs: for Triton's interpreter
    # one row of data
    one_programs: int = 264  # about how many share the scores,
    one_values: int = 264  # the outputs of q, k and v or proj,
    one_wide: int = 264  # and those of many more tokens than outputs
    one_rows: int = 8  # of weights in a piece
    one_words: int = 128
    one_depth: int = 18  # pieces under way
    one_warps: int = 8
    one_registers: int = 128  # a thread has: with fewer, the next kernel has room beside this one
    kept_rows: int = 256  # tokens of a program, where values are skipped
    kept_cols: int = 128  # and its outputs
    kept_warps: int = 8
    one_slots: int = 32  # of the cache at once
    one_slot_warps: int = 2
    # several rows of data
    score_rows: int = 64  # of weights per program
    value_rows: int = 64
    value_programs: int = 132  # about how many share one product of values
    block: int = 128
    warps: int = 4
    stages: int = 5
    slots: int = 32
    slot_warps: int = 4
    slot_stages: int = 3
    slot_programs: int = 128  # at least so many, if the heads of all rows are fewer


def why_not(config: ModelConfig, device: torch.device) -> str | None:
    """Return why the kernels cannot compute a model here, or None if they can."""
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
    """Pattentions of one input (q, k and v, or one alone) of layers of one shape, laid out for the kernels. `centred`:
    their input comes through a LayerNorm, which is not computed. In fp8 each token has three numbers beside it: its
    key's scale, that times the key's mean (0 if not centred), and its value's scale. With `skips`, of each layer, the
    values of a token lie together.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Pattention]],
        dtype: torch.dtype,
        centred: bool,
        fp8: bool = False,
        skips: Sequence[Skip] | None = None,
    ) -> None:
        one, self.members, self.switch = layers[0][0].segments, len(layers[0]), layers[0][0].switch
        self.sizes = sizes = [len(s.key_tokens) for s in one]
        padded = [-(-n // PAD) * PAD for n in sizes]
        device, self.n = one[0].key_tokens.device, sum(padded)
        d_in, d_out = one[0].key_tokens.shape[1], one[0].value_tokens.shape[1]
        self.dtype, self.centred, held = dtype, centred, E4M3 if fp8 else dtype
        self.key_LND = torch.zeros(len(layers), self.members * self.n, d_in, dtype=held, device=device)
        shape = (self.n, d_out) if skips else (d_out, self.n)
        value = torch.zeros(len(layers), self.members, *shape, dtype=held, device=device)
        self.value_LMEN = value.mT if skips else value
        self.scale_L3N = torch.zeros(len(layers), 3, self.members * self.n, device=device) if fp8 else None
        for i, members in enumerate(layers):
            for m, member in enumerate(members):
                at = 0
                for segment, size, room in zip(member.segments, sizes, padded, strict=True):
                    keys, values = (t.detach().float() for t in (segment.key_tokens, segment.value_tokens))
                    rows = slice(m * self.n + at, m * self.n + at + size)
                    if self.scale_L3N is not None:
                        (keys, key_N), (values, value_N) = quantise(keys), quantise(values)
                        mean_N = key_N * keys.float().mean(-1) if centred else torch.zeros_like(key_N)
                        self.scale_L3N[i, :, rows] = torch.stack([key_N, mean_N, value_N])
                    elif centred:  # Σ (x − mean)·k is Σ x·(k − mean): LayerNorm's mean goes into the keys
                        keys = keys - keys.mean(-1, keepdim=True)
                    self.key_LND[i, rows] = keys.to(held)
                    self.value_LMEN[i, m, :, at : at + size] = values.T.to(held)
                    at += room
        if skips:
            self.rule_LM4 = torch.stack([F.pad(torch.stack(skip, 1), (0, 1)) for skip in skips])
            scale_LM1N = 1.0 if self.scale_L3N is None else self.scale_L3N[:, 2].unflatten(1, (self.members, 1, -1))
            self.base_LME = self.rule_LM4[..., 2:3] * (self.value_LMEN.float() * scale_LM1N).sum(-1)
        self.bounds = torch.tensor([0, *padded]).cumsum(0).to(device=device, dtype=torch.int32)
        self.taus = [[s.tau for s in members[0].segments] for members in layers]
        # each layer's at a multiple of 16 bytes: else the kernels would be compiled twice
        self.tau_LS = F.pad(torch.tensor(self.taus, dtype=torch.float32, device=device), (0, -len(sizes) % 4))
        self.block = min(n & -n for n in padded)  # a power of two that divides all of them
        self.padded = padded

    def factors(self, batch: int, switches: Mapping[str, Tensor] | None) -> Tensor | None:
        """Return (B, M·N): how much each token counts in each row; None where no segment has a switch."""
        if not any(self.switch):
            return None
        given = {"": torch.ones(batch, device=self.key_LND.device), **(switches or {})}
        off = torch.zeros_like(given[""])
        columns = [given.get(s, off)[:, None].expand(-1, n) for s, n in zip(self.switch, self.padded, strict=True)]
        return torch.cat(columns, 1).repeat(1, self.members).to(self.dtype)

    def scales(self, at: int) -> Sequence[Tensor | None]:
        """Return the scales of the keys and of the values of layer `at`; None where there are none."""
        return (None, None) if self.scale_L3N is None else (self.scale_L3N[at, 0], self.scale_L3N[at, 2])


class FusedModel:
    """A model's weights for the kernels, shared by steps of all batch sizes. Layers of one shape lie together. In `fp8`
    they, and the head, have 8 bits each: the model was `rounded` to them, and makes steps, but no prefill. With `skips`
    (`infer/skipping.py`) it makes steps for one row alone.
    """

    def __init__(
        self, model: LanguageModel, dtype: torch.dtype, fp8: bool = False, skips: Sequence[Skip] | None = None
    ) -> None:
        self.config, self.dtype, self.skips = model.config, dtype, skips
        layers: list[tuple[list[Pattention], ...]] = []
        for block in model.blocks:
            part: Any = block
            a = part.attention
            layers.append(([a.query, a.key, a.value], [a.proj], [part.ffn]))
        self.runs = []
        for _, run in groupby(
            layers, lambda layer: [([len(s.key_tokens) for s in g[0].segments], g[0].switch) for g in layer]
        ):
            some, at = list(run), 3 * sum(len(groups[0].tau_LS) for groups in self.runs)
            of = [skips[at + i : at + 3 * len(some) : 3] if skips else None for i in range(3)]
            self.runs.append([FusedTokens([layer[i] for layer in some], dtype, i != 1, fp8, of[i]) for i in range(3)])
        self.places = [(run, at) for run in self.runs for at in range(len(run[0].tau_LS))]
        self.embedding = _table([model.embedding, model.added_embedding], dtype)
        self.head = self.embedding if model.head is None else _table([model.head, model.added_head], dtype)
        self.head_scale: Tensor | None = None
        if fp8:
            self.head, self.head_scale = quantise(self.head)
        norm: Any = model.norm
        self.norm = (norm.weight.detach().float(), norm.bias.detach().float(), model.config.norm_eps)
        self.device = self.embedding.device

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        parts = [
            t for run in self.runs for tokens in run for t in (tokens.key_LND, tokens.value_LMEN, tokens.scale_L3N)
        ]
        return sum(t.nbytes for t in [*parts, self.head, self.head_scale] if t is not None)

    @property
    def value_bytes(self) -> int:
        return sum(tokens.value_LMEN.nbytes for run in self.runs for tokens in run)

    def step(self, batch: int, tuning: Tuning) -> "OneStep | FewStep | None":
        if batch == 1 and not self.config.switch_names():
            return OneStep(self, tuning)
        assert not self.skips
        return FewStep(self, batch, tuning) if batch <= MOST else None

    def factors(self, batch: int, switches: Mapping[str, Tensor] | None) -> list[list[Tensor | None]]:
        """Return the factors of the groups of each layer (`FusedTokens.factors`)."""
        made = {id(tokens): tokens.factors(batch, switches) for run in self.runs for tokens in run}
        return [[made[id(tokens)] for tokens in run] for run, _ in self.places]

    def hidden(
        self, ids_BT: Tensor, cache: StaticCache, start: int, switches: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return (B, T, D) after the final norm and fill the cache; all rows are at start, start + 1, …"""
        from tokenformer.ops.kernels import decode

        c, (batch, length) = self.config, ids_BT.shape
        turn = self.rotary(start + length)
        x_TD = self.embedding[ids_BT].flatten(0, 1)
        q_BHTC = torch.empty(batch, c.heads, length, c.head_dim, dtype=self.dtype, device=self.device)
        for i, (((qkv, proj, ffn), at), (f, g, h)) in enumerate(
            zip(self.places, self.factors(batch, switches), strict=True)
        ):
            qkv_MTD = torch.bmm(_weights(qkv, at, x_TD, f), qkv.value_LMEN[at].mT)
            decode.fill_cache(qkv_MTD, cache.k[i], cache.v[i], *turn, start, q_BHTC)
            seen_BHTC = attention(q_BHTC, *(t[i, :, :, : start + length] for t in (cache.k, cache.v)))
            seen_TD = seen_BHTC.transpose(1, 2).reshape(x_TD.shape)
            x_TD.addmm_(_weights(proj, at, seen_TD, g)[0], proj.value_LMEN[at, 0].T)
            x_TD.addmm_(_weights(ffn, at, x_TD, h)[0], ffn.value_LMEN[at, 0].T)
        weight, bias, eps = self.norm
        return F.layer_norm(x_TD.float(), (c.dim,), weight, bias, eps).to(self.dtype).unflatten(0, (batch, length))

    def rotary(self, slots: int) -> tuple[Tensor, Tensor]:
        return angles(torch.arange(slots, device=self.device), self.config.rotary_dims, self.config.rotary_base)


def _table(parts: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Return the rows of all ids, those that growth added too; who chooses from the logits leaves them out."""
    rows = [part.weight.detach().to(dtype) for part in parts if part is not None]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _weights(tokens: FusedTokens, at: int, x_TD: Tensor, factor_BN: Tensor | None) -> Tensor:
    """Return (M, T, N): the weight of each value token of layer `at` in each row of data."""
    import tokenformer.ops.kernels.pattention  # noqa: F401  (makes the operator)

    layout = tokens.sizes * tokens.members, [len(tokens.sizes)] * tokens.members, tokens.taus[at] * tokens.members
    weight_TN, _ = torch.ops.tokenformer.theta(x_TD @ tokens.key_LND[at].T, *layout, "l2_norm_gelu")
    if factor_BN is not None:
        weight_TN = weight_TN * factor_BN.repeat_interleave(len(x_TD) // len(factor_BN), 0)
    return weight_TN.unflatten(1, (tokens.members, -1)).transpose(0, 1)


class OneStep:
    """The step for one row: ids (1,), positions (1,), cache → logits (1, W)."""

    def __init__(self, model: FusedModel, tuning: Tuning) -> None:
        self.model, self.tuning = model, tuning
        c, device = model.config, model.device
        most = max(t.members * t.n for run in model.runs for t in run)
        self.score, self.logits = torch.empty(most, device=device), torch.empty(1, len(model.head), device=device)
        self.qkv_MBD, self.seen_BD = torch.empty(3, 1, c.dim, device=device), torch.empty(1, c.dim, device=device)
        if model.skips:
            parts = max(t.members * -(-t.n // tuning.kept_rows) for run in model.runs for t in run)
            self.part = torch.empty(parts * c.dim, device=device)
            self.counter = torch.zeros(3 * c.dim, dtype=torch.int32, device=device)
        self.attend = Attend(model, 1, tuning)

    def __call__(self, ids_B: Tensor, positions_B: Tensor, cache: StaticCache, switches: Any = None) -> Tensor:
        from tokenformer.ops.kernels import decode_one

        m, t = self.model, self.tuning
        how: dict[str, Any] = {
            "rows": t.one_rows, "words": t.one_words, "depth": t.one_depth, "warps": t.one_warps,
            "registers": t.one_registers, "pdl": t.pdl,
        }  # fmt: skip
        x_BD = m.embedding[ids_B].float()

        def tokens(group: FusedTokens, at: int, x: Tensor, out: Tensor, add: bool) -> None:
            key_scale, value_scale = group.scales(at)
            decode_one.scores_one(
                x, group.key_LND[at], self.score, scales=key_scale, centred=key_scale is not None and group.centred,
                programs=t.one_programs, **how,
            )  # fmt: skip
            if m.skips:
                decode_one.values_kept(
                    self.score, group.tau_LS[at], group.bounds, group.value_LMEN[at].mT, group.rule_LM4[at],
                    group.base_LME[at], out, self.part, self.counter, scales=value_scale, add=add,
                    rows=t.kept_rows, cols=t.kept_cols, warps=t.kept_warps, pdl=t.pdl,
                )  # fmt: skip
                return
            decode_one.values_one(
                self.score, group.tau_LS[at], group.bounds, group.value_LMEN[at], out, scales=value_scale, add=add,
                programs=t.one_wide if group.n > 2 * out.shape[-1] else t.one_values, **how,
            )  # fmt: skip

        for i, ((qkv, proj, ffn), at) in enumerate(m.places):
            tokens(qkv, at, x_BD, self.qkv_MBD, False)
            self.attend(self.qkv_MBD, cache, i, positions_B, self.seen_BD)
            tokens(proj, at, self.seen_BD, x_BD, True)
            tokens(ffn, at, x_BD, x_BD, True)
        weight, bias, eps = m.norm
        hidden_BD = F.layer_norm(x_BD, x_BD.shape[1:], weight, bias, eps).to(m.dtype)
        decode_one.scores_one(hidden_BD, m.head, self.logits, scales=m.head_scale, programs=8 * t.one_programs, **how)
        return self.logits


class Attend:
    """Attention of the new positions, whose keys and values are written to the cache."""

    def __init__(self, model: FusedModel, batch: int, tuning: Tuning) -> None:
        from tokenformer.ops.kernels import decode

        self.model, self.tuning, units = model, tuning, batch * model.config.heads
        self.split = 1 << (-(-tuning.slot_programs // units) - 1).bit_length()
        self.part = torch.empty(units * self.split * (decode.channels(model.config.head_dim) + 2), device=model.device)
        self.counter = torch.zeros(units, dtype=torch.int32, device=model.device)
        if batch == 1:
            self.how = {"block": tuning.one_slots, "warps": tuning.one_slot_warps, "stages": 1}
        else:
            self.how = {"block": tuning.slots, "warps": tuning.slot_warps, "stages": tuning.slot_stages}
        self.angles: tuple[Tensor, Tensor] | None = None

    def __call__(self, qkv_MBD: Tensor, cache: StaticCache, layer: int, positions_B: Tensor, out_BD: Tensor) -> None:
        from tokenformer.ops.kernels import decode

        if self.angles is None or len(self.angles[0]) < cache.slots:
            self.angles = self.model.rotary(cache.slots)
        decode.attend(
            qkv_MBD, cache.k[layer], cache.v[layer], *self.angles, positions_B, out_BD, self.part, self.counter,
            split=self.split, pdl=self.tuning.pdl, **self.how,
        )  # fmt: skip


class FewStep:
    """The step for one batch size: ids (B,), positions (B,), cache → logits (B, W) in the type of the weights."""

    def __init__(self, model: FusedModel, batch: int, tuning: Tuning) -> None:
        self.model, self.batch, self.tuning = model, batch, tuning
        self.block = tuning.block * 2 // model.embedding.element_size()  # the same bytes in every type
        c, device = model.config, model.device
        groups = [t for run in model.runs for t in run]
        most = max(t.members * t.n for t in groups)
        self.bb = max(16, 1 << (batch - 1).bit_length())
        self.how: dict[str, Any] = {
            "bb": self.bb, "warps": tuning.warps, "stages": tuning.stages, "pdl": tuning.pdl,
        }  # fmt: skip
        self.g = torch.empty(batch * most, dtype=model.dtype, device=device)
        self.raw = torch.empty(most * self.bb, device=device)
        tiles = max(t.members * t.n // tuning.score_rows for t in groups)
        self.stat = torch.empty(tiles * self.bb, device=device)
        # apart by 16 bytes: else the kernels would be compiled twice
        self.arrived = torch.zeros(c.layers, 3, 4, dtype=torch.int32, device=device)
        self.qkv_MBD = torch.empty(3, batch, c.dim, device=device)
        self.seen_BD = torch.empty(batch, c.dim, dtype=model.dtype, device=device)
        self.part = torch.empty(3 * max(map(self.split, groups)) * c.dim * self.bb, device=device)
        self.counter = torch.zeros(3 * c.dim, dtype=torch.int32, device=device)
        self.attend = Attend(model, batch, tuning)
        # programs that wait for each other must all be on the device: one per multiprocessor always is
        self.together = 0 if tuning.apart else torch.cuda.get_device_properties(device).multi_processor_count

    def split(self, tokens: FusedTokens) -> int:
        """Return how many programs share the tokens of one tile of outputs: enough to fill the device."""
        tiles = tokens.members * (tokens.value_LMEN.shape[2] // self.tuning.value_rows)
        blocks = tokens.n // min(self.block, tokens.block)
        each = -(-blocks // max(1, min(self.tuning.value_programs // tiles, blocks)))
        return -(-blocks // each)

    def __call__(
        self, ids_B: Tensor, positions_B: Tensor, cache: StaticCache, switches: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        from tokenformer.ops.kernels import decode

        m, c = self.model, self.model.config
        self.arrived.zero_()
        copy_BD = m.embedding[ids_B]
        x_BD = copy_BD.float()
        factors = m.factors(self.batch, switches)
        for i, (run, at) in enumerate(m.places):
            (qkv, proj, ffn), (f, g, h) = run, factors[i]
            self._tokens(qkv, at, self.arrived[i, 0], copy_BD, self.qkv_MBD, None, f)
            self.attend(self.qkv_MBD, cache, i, positions_B, self.seen_BD)
            self._tokens(proj, at, self.arrived[i, 1], self.seen_BD, x_BD, copy_BD, g)
            self._tokens(ffn, at, self.arrived[i, 2], copy_BD, x_BD, copy_BD, h)
        weight, bias, eps = m.norm
        hidden_BD = F.layer_norm(x_BD, (c.dim,), weight, bias, eps).to(m.dtype)
        if m.head_scale is None:
            return hidden_BD @ m.head.T
        logits_BW = torch.empty(self.batch, len(m.head), device=m.device)
        decode.values(
            hidden_BD, m.head[None], logits_BW[None], None, self.part, self.counter, rows=self.tuning.value_rows,
            block=min(self.block, c.dim & -c.dim), split=1, scale=m.head_scale, **self.how,
        )  # fmt: skip
        return logits_BW

    def _tokens(
        self,
        tokens: FusedTokens,
        at: int,
        arrived: Tensor,
        x: Tensor,
        out: Tensor,
        copy: Tensor | None,
        factor_BN: Tensor | None,
    ) -> None:
        """Write a group of Pattentions of layer `at` of its run to `out`, or add it to `out` and `copy`."""
        from tokenformer.ops.kernels import decode

        t = self.tuning
        g_BN = self.g[: self.batch * tokens.members * tokens.n].view(self.batch, -1)
        decode.scores(
            x, tokens.key_LND[at], None if tokens.scale_L3N is None else tokens.scale_L3N[at], g_BN, self.raw,
            self.stat, arrived, tokens.tau_LS[at], tokens.bounds, tokens.members, rows=t.score_rows, block=self.block,
            apart=len(tokens.key_LND[at]) // t.score_rows > self.together, **self.how,
        )  # fmt: skip
        if factor_BN is not None:
            g_BN *= factor_BN
        decode.values(
            g_BN, tokens.value_LMEN[at], out, copy, self.part, self.counter, rows=t.value_rows,
            block=min(self.block, tokens.block), split=self.split(tokens), **self.how,
        )  # fmt: skip
