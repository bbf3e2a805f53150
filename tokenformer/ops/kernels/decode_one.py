"""The single-token step of one row of data as one kernel: all layers and the output head, no launch in between.

Unusual: a fixed grid, all of it on the device at once, goes through phases; between two of them every program waits for
all others (a counter in memory). Weights depend on nothing: each program asks for its own rows of the next phase before
it waits, so that memory never idles. LayerNorm is not computed: l2_norm_gelu ignores the scale of its input, and keys
whose mean over the channels was taken out (once, by the caller) ignore its mean. The residual stream stays in fp32.
Phases of a layer: scores of q, k, v; their outputs; attention; scores of proj; its output; scores of the FFN; its output.
Legend: L layers, D dim, N parameter tokens of a member (padded), M members (q, k, v), W vocabulary, H heads, C head_dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenformer.ops.kernels.decode import _arrive, _attend, _gelu, _scale, _wait

jit: Any = triton.jit
PHASES = 7  # of a layer; the head is one more


@jit
def _ask_rows(weights, low, high, WIDTH: tl.constexpr, AHEAD: tl.constexpr):
    """Rows low … high come into the L2 cache meanwhile: one instruction of one thread."""
    if AHEAD:
        size: tl.constexpr = WIDTH * 4
        count = tl.minimum(tl.maximum(high - low, 0) * size, 131072)
        tl.inline_asm_elementwise(
            """{
            .reg .pred first, some; .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            setp.gt.and.s32 some, $2, 0, first;
            @some cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [(weights + low.to(tl.int64) * WIDTH).to(tl.int64), count],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def _tiles(weights, row, high, FROM: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """TILES tiles of R rows and BK words, from the word FROM on."""
    cols = FROM + tl.arange(0, BK)
    out = ()
    for i in tl.static_range(TILES):
        rows = row + i * R + tl.arange(0, R)
        ok = (rows < high)[:, None] & (cols < K)[None, :]
        at = weights + rows[:, None] * K + cols[None, :]
        out = out + (tl.load(at, mask=ok, other=0, eviction_policy="evict_first"),)
    return out


@jit
def _begin(weights, low, high, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr):
    """The first two pieces of rows low … high, under way before anything else is known."""
    first = _tiles(weights, low, high, 0, K, R, BK, TILES)
    if K > BK:
        second = _tiles(weights, low, high, BK, K, R, BK, TILES)
    else:
        second = _tiles(weights, low + TILES * R, high, 0, K, R, BK, TILES)
    return first, second


@jit
def _times(w, v, KIND: tl.constexpr):
    """Products of a tile of words with a tile of the vector; a word is one fp32 or two of a 16-bit type."""
    if KIND == "fp32":
        return w * v[0][None, :]
    if KIND == "bf16":  # the upper half of an fp32
        even = (w << 16).to(tl.float32, bitcast=True)
        odd = (w & -65536).to(tl.float32, bitcast=True)
    else:
        even = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return even * v[0][None, :] + odd * v[1][None, :]


@jit
def _product(
    weights, begun, v, out, low, high,
    K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out[low … high] = (+=) weights · v, two pieces of the weights always under way; v is a tuple of tiles."""
    T: tl.constexpr = (K + BK - 1) // BK
    now, after = begun
    for g in range(0, tl.cdiv(high - low, TILES * R)):
        row = low + g * TILES * R
        acc = ()
        for t in tl.static_range(T):
            fresh = ()
            for i in tl.static_range(TILES):
                part = tl.sum(tl.reshape(_times(now[i], v[t], KIND), [R, BK // 4, 4]), 2)
                if t > 0:
                    part += acc[i]
                fresh = fresh + (part,)
            acc = fresh
            now = after
            after = _tiles(
                weights, row + ((t + 2) // T) * TILES * R, high, ((t + 2) % T) * BK, K, R, BK, TILES,
            )  # fmt: skip
        for i in tl.static_range(TILES):
            rows = row + i * R + tl.arange(0, R)
            y = tl.sum(acc[i], 1)
            if ADD:
                y += tl.load(out + rows, mask=rows < high, other=0.0, cache_modifier=".cg")
            tl.store(out + rows, y, mask=rows < high)


@jit
def _vector(x, K: tl.constexpr, BK: tl.constexpr, PER: tl.constexpr):
    """K words of PER numbers each, as tiles (BK, PER) in fp32."""
    out = ()
    for t in tl.static_range((K + BK - 1) // BK):
        word = t * BK + tl.arange(0, BK)[:, None] + tl.zeros((1, PER), tl.int32)
        at = word * PER + tl.arange(0, PER)[None, :]
        out = out + (tl.load(x + at, mask=word < K, other=0.0, cache_modifier=".cg").to(tl.float32),)
    return out


@jit
def _stream(x, start, begins, K: tl.constexpr, BK: tl.constexpr, PER: tl.constexpr):
    """The residual stream, which is the embedding before the first layer."""
    out = ()
    for t in tl.static_range((K + BK - 1) // BK):
        word = t * BK + tl.arange(0, BK)[:, None] + tl.zeros((1, PER), tl.int32)
        at = word * PER + tl.arange(0, PER)[None, :]
        old = tl.load(x + at, mask=(word < K) & (not begins), other=0.0, cache_modifier=".cg")
        out = out + (old + tl.load(start + at, mask=(word < K) & begins, other=0.0).to(tl.float32),)
    return out


@jit
def _sides(tiles, PER: tl.constexpr):
    """What meets the first, and what the second number of each word."""
    out = ()
    for t in tl.static_range(len(tiles)):
        if PER == 1:
            out = out + ((tl.sum(tiles[t], 1),),)
        else:
            out = out + (tl.split(tiles[t]),)
    return out


@jit
def _activated(score, tau, bounds, N: tl.constexpr, BK: tl.constexpr, PER: tl.constexpr, SEGMENTS: tl.constexpr):
    """gelu(score · τ / ‖score‖), each segment by itself, as tiles."""
    a = _vector(score, N // PER, BK, PER)
    scales = ()
    for s in tl.static_range(SEGMENTS):
        first = tl.load(bounds + s)
        last = tl.load(bounds + s + 1)
        total = 0.0
        for t in tl.static_range(len(a)):
            at = (t * BK + tl.arange(0, BK)[:, None]) * PER + tl.arange(0, PER)[None, :]
            mine = a[t]
            if SEGMENTS > 1:
                mine = tl.where((at >= first) & (at < last), mine, 0.0)
            total += tl.sum(tl.sum(mine * mine, 1), 0)
        scales = scales + (_scale(total, tl.load(tau + s)),)
    out = ()
    for t in tl.static_range(len(a)):
        at = (t * BK + tl.arange(0, BK)[:, None]) * PER + tl.arange(0, PER)[None, :]
        scale = tl.zeros((BK, PER), tl.float32) + scales[0]
        for s in tl.static_range(1, SEGMENTS):
            scale = tl.where(at >= tl.load(bounds + s), scales[s], scale)
        out = out + (_gelu(a[t] * scale),)
    return _sides(out, PER)


@jit
def _rows(pid, programs, count):
    """The rows of one program."""
    per = tl.cdiv(count, programs)
    low = tl.minimum(pid * per, count)
    return low, tl.minimum(low + per, count)


@jit
def _member_rows(pid, programs, M: tl.constexpr, E: tl.constexpr):
    """The rows of one program where the rows of M members of E rows each are dealt out, and its member."""
    each = programs // M
    member = tl.minimum(pid // each, M - 1)
    low, high = _rows(pid - member * each, each, E)
    return member, member * E + low, member * E + high


@jit
def _step(
    ids, positions, embedding, x,
    qkv_keys, qkv_values, qkv_tau, qkv_bounds, proj_keys, proj_values, proj_tau, proj_bounds,
    ffn_keys, ffn_values, ffn_tau, ffn_bounds, cache_k, cache_v, cos, sin, norm_weight, norm_bias, head, logits,
    score, qkv, seen, part, counter, begin, end, slots, vocab, scale, eps,
    D: tl.constexpr, H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, HALF: tl.constexpr,
    QKV: tl.constexpr, PROJ: tl.constexpr, FFN: tl.constexpr,
    QKV_SEGMENTS: tl.constexpr, PROJ_SEGMENTS: tl.constexpr, FFN_SEGMENTS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, SPLIT: tl.constexpr, BS: tl.constexpr,
    R: tl.constexpr, TILES: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, AHEAD: tl.constexpr,
    ONLY: tl.constexpr,
):  # fmt: skip
    """Layers begin … end of one shape. FIRST: the first of them reads the embedding; LAST: logits come after them.
    ONLY: one phase (7: the head) and no waiting, for the interpreter, which runs one program after another.
    """
    PER: tl.constexpr = 1 if KIND == "fp32" else 2  # numbers a word of the weights
    DW: tl.constexpr = D // PER
    QW: tl.constexpr = QKV // PER
    PW: tl.constexpr = PROJ // PER
    FW: tl.constexpr = FFN // PER
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    place = tl.load(positions)
    done = 0  # arrivals
    for layer in range(begin, end):
        far = tl.program_id(1).to(tl.int64) + layer  # in 64 bits
        keys_q, values_q = qkv_keys + far * (3 * QKV * DW), qkv_values + far * (3 * QKV * DW)
        keys_p, values_p = proj_keys + far * (PROJ * DW), proj_values + far * (PROJ * DW)
        keys_f, values_f = ffn_keys + far * (FFN * DW), ffn_values + far * (FFN * DW)
        low_q, high_q = _rows(pid, programs, 3 * QKV)
        member, low_v, high_v = _member_rows(pid, programs, 3, D)
        low_p, high_p = _rows(pid, programs, PROJ)
        low_f, high_f = _rows(pid, programs, FFN)
        low, high = _rows(pid, programs, D)
        if ONLY < 0 or ONLY == 0:
            begun = _begin(keys_q, low_q, high_q, DW, R, BK, TILES)
            if ONLY < 0:
                _wait(counter, done)
            _ask_rows(values_q, low_v, high_v, QW, AHEAD)
            begins = FIRST and layer == 0
            stream = _stream(x, embedding + tl.load(ids) * D, begins, DW, BK, PER)
            if begins and pid == 0:
                for t in tl.static_range(len(stream)):  # nobody adds to it before all are past this phase
                    word = t * BK + tl.arange(0, BK)[:, None] + tl.zeros((1, PER), tl.int32)
                    tl.store(x + word * PER + tl.arange(0, PER)[None, :], stream[t], mask=word < DW)
            _product(keys_q, begun, _sides(stream, PER), score, low_q, high_q, DW, R, BK, TILES, KIND, False)
            if ONLY < 0:
                _arrive(counter)
        if ONLY < 0 or ONLY == 1:
            begun = _begin(values_q, low_v, high_v, QW, R, BK, TILES)
            if ONLY < 0:
                _wait(counter, done + programs)
            _ask_rows(keys_p, low_p, high_p, DW, AHEAD)
            _ask_rows(values_p, low, high, PW, AHEAD)
            tau = qkv_tau + layer * QKV_SEGMENTS
            g = _activated(score + member * QKV, tau, qkv_bounds, QKV, BK, PER, QKV_SEGMENTS)
            _product(values_q, begun, g, qkv, low_v, high_v, QW, R, BK, TILES, KIND, False)
            if ONLY < 0:
                _arrive(counter)
        if ONLY < 0 or ONLY == 2:
            if ONLY < 0:
                _wait(counter, done + 2 * programs)
            _ask_rows(keys_f, low_f, high_f, DW, AHEAD)
            for unit in range(pid, H * SPLIT, programs):
                unit_head = unit // SPLIT
                room = (far * H + unit_head) * slots * C
                mine = qkv + unit_head * C
                _attend(
                    mine, mine + D, mine + 2 * D, cache_k + room, cache_v + room, cos, sin, place, seen + unit_head * C,
                    part + unit_head * SPLIT * (CP + 2), counter + 1 + unit_head, unit % SPLIT, scale,
                    C, CP, HALF, BS, SPLIT, 1,
                )  # fmt: skip
            if ONLY < 0:
                _arrive(counter)
        if ONLY < 0 or ONLY == 3:
            begun = _begin(keys_p, low_p, high_p, DW, R, BK, TILES)
            if ONLY < 0:
                _wait(counter, done + 3 * programs)
            _product(keys_p, begun, _sides(_vector(seen, DW, BK, PER), PER), score, low_p, high_p, DW, R, BK, TILES, KIND, False)
            if ONLY < 0:
                _arrive(counter)
        if ONLY < 0 or ONLY == 4:
            begun = _begin(values_p, low, high, PW, R, BK, TILES)
            if ONLY < 0:
                _wait(counter, done + 4 * programs)
            _ask_rows(values_f, low, high, FW, AHEAD)
            g = _activated(score, proj_tau + layer * PROJ_SEGMENTS, proj_bounds, PROJ, BK, PER, PROJ_SEGMENTS)
            _product(values_p, begun, g, x, low, high, PW, R, BK, TILES, KIND, True)
            if ONLY < 0:
                _arrive(counter)
        if ONLY < 0 or ONLY == 5:
            begun = _begin(keys_f, low_f, high_f, DW, R, BK, TILES)
            if ONLY < 0:
                _wait(counter, done + 5 * programs)
            _product(keys_f, begun, _sides(_vector(x, DW, BK, PER), PER), score, low_f, high_f, DW, R, BK, TILES, KIND, False)
            if ONLY < 0:
                _arrive(counter)
        if ONLY < 0 or ONLY == 6:
            begun = _begin(values_f, low, high, FW, R, BK, TILES)
            if ONLY < 0:
                _wait(counter, done + 6 * programs)
            if layer + 1 < end:
                _ask_rows(keys_q + 3 * QKV * DW, low_q, high_q, DW, AHEAD)
            g = _activated(score, ffn_tau + layer * FFN_SEGMENTS, ffn_bounds, FFN, BK, PER, FFN_SEGMENTS)
            _product(values_f, begun, g, x, low, high, FW, R, BK, TILES, KIND, True)
            if ONLY < 0:
                _arrive(counter)
        done += 7 * programs
    if LAST and (ONLY < 0 or ONLY == 7):
        low, high = _rows(pid, programs, vocab)
        begun = _begin(head, low, high, DW, R, BK, TILES)
        if ONLY < 0:
            _wait(counter, done)
        stream = _vector(x, DW, BK, PER)
        total = 0.0
        for t in tl.static_range(len(stream)):
            total += tl.sum(tl.sum(stream[t], 1), 0)
        mean = total / D
        total = 0.0
        for t in tl.static_range(len(stream)):
            cols = (t * BK + tl.arange(0, BK)[:, None]) * PER + tl.arange(0, PER)[None, :]
            away = tl.where(cols < D, stream[t] - mean, 0.0)
            total += tl.sum(tl.sum(away * away, 1), 0)
        by = 1.0 / tl.sqrt(total / D + eps)
        hidden = ()
        for t in tl.static_range(len(stream)):
            cols = (t * BK + tl.arange(0, BK)[:, None]) * PER + tl.arange(0, PER)[None, :]
            gain = tl.load(norm_weight + cols, mask=cols < D, other=0.0)
            shift = tl.load(norm_bias + cols, mask=cols < D, other=0.0)
            h = (stream[t] - mean) * by * gain + shift
            hidden = hidden + (h.to(embedding.dtype.element_ty).to(tl.float32),)
        _product(head, begun, _sides(hidden, PER), logits, low, high, DW, R, BK, TILES, KIND, False)
    if ONLY < 0:
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == done + programs - 1:
            tl.store(counter, 0)


KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _words(weights: Tensor) -> Tensor:
    return weights if weights.element_size() == 4 else weights.view(torch.int32)


def step(
    ids: Tensor, positions: Tensor, embedding: Tensor, x: Tensor, groups: Sequence[Any], cache_k: Tensor,
    cache_v: Tensor, cos: Tensor, sin: Tensor, norm: tuple[Tensor, Tensor, float], head: Tensor, logits: Tensor,
    score: Tensor, qkv: Tensor, seen: Tensor, part: Tensor, counter: Tensor, *,
    first: bool, last: bool, programs: int, split: int, block: int, rows: int, warps: int, ahead: bool, apart: bool,
) -> None:  # fmt: skip
    """Layers of one shape: `groups` are their q/k/v, proj and FFN; the caches are those of these layers alone.

    `counter` (1 + heads) is 0 before and after. `apart`: every phase in its own launch.
    """
    layers, _, heads, slots, dim_head = cache_k.shape
    dim, kind = x.shape[-1], KINDS[embedding.dtype]
    words = dim // (1 if kind == "fp32" else 2)
    weights = [a for t in groups for a in (_words(t.key_LND), _words(t.value_LMEN), t.tau_LS, t.bounds)]
    launches = [(0, layers, -1)]
    if apart:
        launches = [(i, i + 1, phase) for i in range(layers) for phase in range(PHASES)] + [(0, 0, PHASES)] * last
    for begin, end, only in launches:
        _step[(programs,)](
            ids, positions, embedding, x, *weights, cache_k, cache_v, cos, sin, norm[0], norm[1], _words(head), logits,
            score, qkv, seen, part, counter, begin, end, slots, len(head), dim_head**-0.5, norm[2],
            D=dim, H=heads, C=dim_head, CP=triton.next_power_of_2(dim_head), HALF=cos.shape[-1],
            QKV=groups[0].n, PROJ=groups[1].n, FFN=groups[2].n, QKV_SEGMENTS=groups[0].tau_LS.shape[1],
            PROJ_SEGMENTS=groups[1].tau_LS.shape[1], FFN_SEGMENTS=groups[2].tau_LS.shape[1], FIRST=first, LAST=last,
            SPLIT=split, BS=block, R=rows, TILES=triton.cdiv(triton.cdiv(dim, programs), rows),
            BK=min(triton.next_power_of_2(words), 1024), KIND=kind, AHEAD=ahead, ONLY=only,
            num_warps=warps, launch_cooperative_grid=not apart,
        )  # fmt: skip
