"""Decoding kernels for one row: two products per Pattention, at the speed at which the weights come from memory.

Unusual: a warp reads whole rows of the weights, as words of two 16-bit or four 8-bit numbers. A kernel starts while the
previous one runs (PDL) and loads its first weights before it waits for its input. Each program normalises all scores
itself, so there is no kernel and no wait between the two products.
Legend: D d_in, N parameter tokens of a member (each segment padded to 64), E d_out, M members (q, k, v).
"""

# ruff: noqa: RUF005 (tuples in kernels can be added, not unpacked)

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenformer.ops.kernels.decode import _gelu, _scale, ceil_div, jit, next_power_of_2

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}


@jit
def _load_piece(
    weights, low, high, u: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load piece u of rows low … high: R rows of BK words. Pieces of the same words, row after row, come first."""
    rows = low + (u % TILES) * R + tl.arange(0, R)
    cols = (u // TILES) * BK + tl.arange(0, BK)
    at = weights + rows[:, None] * K + cols[None, :]
    if EVEN:
        out = tl.load(at, eviction_policy="evict_first")
    else:
        ok = (rows < high)[:, None] & (cols < K)[None, :]
        out = tl.load(at, mask=ok, other=0, eviction_policy="evict_first")
    return out


@jit
def _prefetch(
    weights, low, high,
    K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    out = ()
    for u in tl.static_range(min(DEPTH, TILES * ((K + BK - 1) // BK))):
        out = out + (_load_piece(weights, low, high, u, K, R, BK, TILES, EVEN),)
    return out


@jit
def _byte(w, i: tl.constexpr):
    return (w >> (8 * i)).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@jit
def _unpack(w, KIND: tl.constexpr):
    """The numbers in a tile of words, in fp32, with one more dimension: a word holds 1, 2 or 4 of them."""
    if KIND == "fp32":
        out = w[:, :, None]
    elif KIND == "bf16":  # the upper half of an fp32
        out = tl.join((w << 16).to(tl.float32, bitcast=True), (w & -65536).to(tl.float32, bitcast=True))
    elif KIND == "fp8":
        out = tl.join(tl.join(_byte(w, 0), _byte(w, 2)), tl.join(_byte(w, 1), _byte(w, 3)))
        out = tl.reshape(out, [w.shape[0], w.shape[1], 4])
    else:
        low, high = w.to(tl.int16), (w >> 16).to(tl.int16)
        out = tl.join(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)).to(tl.float32)
    return out


@jit
def _store(out, y, rows, high, ADD: tl.constexpr):
    if ADD:
        y += tl.load(out + rows, mask=rows < high, other=0.0)
    tl.store(out + rows, y, mask=rows < high)


@jit
def _product(
    weights, in_flight, vector, scale, out, low, high,
    K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out[low … high] = (+=) weights · vector, with DEPTH pieces of the weights always being loaded. `scale`: of the
    rows of each tile, or nothing.
    """
    T: tl.constexpr = (K + BK - 1) // BK
    acc = ()
    for t in tl.static_range(T):
        fresh = ()
        for i in tl.static_range(TILES):
            part = _unpack(in_flight[t * TILES + i], KIND) * vector[t][None, :, :]
            if KIND == "fp8":  # four sums for each word would take too many registers
                part = tl.sum(part, 2)[:, :, None]
            if t > 0:
                part += acc[i]
            fresh = fresh + (part,)
            if t * TILES + i + DEPTH < T * TILES:
                in_flight = in_flight + (_load_piece(weights, low, high, t * TILES + i + DEPTH, K, R, BK, TILES, EVEN),)
        acc = fresh
    sums = ()
    for i in tl.static_range(TILES):
        sums = sums + (tl.sum(tl.reshape(tl.sum(acc[i], 2), [R, BK // 4, 4]), 2),)
    if len(scale) > 0:
        scaled = ()
        for i in tl.static_range(TILES):
            scaled = scaled + (sums[i] * scale[i][:, None],)
        sums = scaled
    two = tl.arange(0, 2)
    for i in tl.static_range(0, TILES - TILES % 4, 4):  # one reduction over the threads for four tiles
        four = tl.join(tl.join(sums[i], sums[i + 1]), tl.join(sums[i + 2], sums[i + 3]))
        tile = i + two[None, :, None] + 2 * two[None, None, :]
        _store(out, tl.sum(four, 1), low + tile * R + tl.arange(0, R)[:, None, None], high, ADD)
    for i in tl.static_range(TILES - TILES % 4, TILES):
        _store(out, tl.sum(sums[i], 1), low + i * R + tl.arange(0, R), high, ADD)


@jit
def _vector(x, K: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    """K words as tiles (BK, numbers per word) in fp32."""
    EACH: tl.constexpr = 2 - (KIND == "fp32") + 2 * (KIND == "fp8")
    out = ()
    for t in tl.static_range((K + BK - 1) // BK):
        word = t * BK + tl.arange(0, BK)[:, None] + tl.zeros((1, EACH), tl.int32)
        at = word * EACH + tl.arange(0, EACH)[None, :]
        out = out + (tl.load(x + at, mask=word < K, other=0.0).to(tl.float32),)
    return out


@jit
def _centred(vector, count: tl.constexpr):
    """The vector without its mean over `count` numbers."""
    total = tl.sum(tl.sum(vector[0], 1), 0)
    for t in tl.static_range(1, len(vector)):
        total += tl.sum(tl.sum(vector[t], 1), 0)
    out = ()
    for t in tl.static_range(len(vector)):
        out = out + (vector[t] - total / count,)  # weights behind the last word are 0
    return out


@jit
def _scores_one(
    x, keys, key_scale, out, count, PER: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr,
    CENTRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PER scores per program. `key_scale` (count,): of keys in fp8. CENTRED: x counts without its mean."""
    TILES: tl.constexpr = (PER + R - 1) // R
    low = tl.program_id(0) * PER
    high = tl.minimum(low + PER, count)
    if PDL:
        gdc_launch_dependents()
    in_flight = _prefetch(keys, low, high, K, R, BK, TILES, EVEN, DEPTH)
    scale = ()
    if key_scale is not None:
        for i in tl.static_range(TILES):
            rows = low + i * R + tl.arange(0, R)
            scale = scale + (tl.load(key_scale + rows, mask=rows < high, other=0.0),)
    if PDL:
        gdc_wait()
    vector = _vector(x, K, BK, KIND)
    if CENTRED:
        vector = _centred(vector, 4 * K)
    _product(keys, in_flight, vector, scale, out, low, high, K, R, BK, TILES, EVEN, DEPTH, KIND, False)


@jit
def _values_one(
    score, tau, bounds, values, value_scale, out, E, PER: tl.constexpr,
    N: tl.constexpr, SEGMENTS: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    DEPTH: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PER outputs of a member per program: values · gelu(score · τ / ‖score‖), each segment by itself. `value_scale`
    (M·N,): of values in fp8, one per token, which multiply Θ's result.
    """
    TILES: tl.constexpr = (PER + R - 1) // R
    EACH: tl.constexpr = N // K
    member = tl.program_id(1)
    low = tl.program_id(0) * PER
    high = tl.minimum(low + PER, E)
    values += member * E * K
    if PDL:
        gdc_launch_dependents()
    in_flight = _prefetch(values, low, high, K, R, BK, TILES, EVEN, DEPTH)
    of_token = ()
    if value_scale is not None:
        of_token = _vector(value_scale + member * N, K, BK, KIND)
    if PDL:
        gdc_wait()
    a = _vector(score + member * N, K, BK, KIND)
    scales = ()
    for s in tl.static_range(SEGMENTS):
        squares = tl.zeros((BK, EACH), tl.float32)
        for t in tl.static_range(len(a)):
            mine = a[t]
            if SEGMENTS > 1:
                at = (t * BK + tl.arange(0, BK)[:, None]) * EACH + tl.arange(0, EACH)[None, :]
                mine = tl.where((at >= tl.load(bounds + s)) & (at < tl.load(bounds + s + 1)), mine, 0.0)
            squares += mine * mine
        scales = scales + (_scale(tl.sum(tl.sum(squares, 1), 0), tl.load(tau + s)),)
    g = ()
    for t in tl.static_range(len(a)):
        scale = scales[0]  # pyrefly: ignore[bad-index]
        if SEGMENTS > 1:
            at = (t * BK + tl.arange(0, BK)[:, None]) * EACH + tl.arange(0, EACH)[None, :]
            for s in tl.static_range(1, SEGMENTS):
                scale = tl.where(at >= tl.load(bounds + s), scales[s], scale)
        active = _gelu(a[t] * scale)
        if value_scale is not None:
            active *= of_token[t]  # pyrefly: ignore[bad-index]
        g = g + (active,)
    _product(values, in_flight, g, (), out + member * E, low, high, K, R, BK, TILES, EVEN, DEPTH, KIND, ADD)


@jit
def _values_kept(
    score, tau, bounds, values, value_scale, rule, base, out, part, counter,
    N: tl.constexpr, E: tl.constexpr, MANY: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs as `_values_one` gives them, but values (M, N, E) of tokens whose weight lies within rule[0] … rule[1] of
    their member are not loaded: such a token counts as rule[2], and `base` (M, E) is what all tokens would add if they
    counted so. ROWS tokens and BE outputs per program, which reads all scores, MANY at once, for the norm; the last of
    SPLIT programs adds the parts.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    member = tl.program_id(2)
    n = split * ROWS + tl.arange(0, ROWS)
    many = tl.arange(0, MANY)
    cols = tile * BE + tl.arange(0, BE)
    low, high = tl.load(rule + member * 4), tl.load(rule + member * 4 + 1)
    centre = tl.load(rule + member * 4 + 2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    score += member * N
    a = tl.load(score + n, mask=n < N, other=0.0)
    scale = tl.zeros((ROWS,), tl.float32)
    for s in tl.static_range(SEGMENTS):
        start, stop = tl.load(bounds + s), tl.load(bounds + s + 1)
        squares = tl.zeros((MANY,), tl.float32)
        for k in range(start, stop, MANY):
            some = tl.load(score + k + many, mask=k + many < stop, other=0.0)
            squares += some * some
        scale = tl.where((n >= start) & (n < stop), _scale(tl.sum(squares, 0), tl.load(tau + s)), scale)
    g = _gelu(a * scale)
    kept = ((g < low) | (g > high)) & (n < N)
    v = tl.load(
        values + (member * N + n[:, None]) * E + cols[None, :], mask=kept[:, None] & (cols < E)[None, :], other=0.0,
        eviction_policy="evict_first",
    ).to(tl.float32)  # fmt: skip
    g -= centre
    if value_scale is not None:
        g *= tl.load(value_scale + member * N + n, mask=n < N, other=0.0)
    y = tl.sum(v * g[:, None], 0)
    part += (member * SPLIT + split) * E
    tl.store(part + cols, y, mask=cols < E)
    tl.debug_barrier()
    mark = counter + member * tl.num_programs(0) + tile
    if tl.atomic_add(mark, 1, sem="acq_rel") == SPLIT - 1:
        part -= split * E
        each = tl.arange(0, PARTS)[:, None]
        ok = (each < SPLIT) & (cols < E)[None, :]
        y = tl.sum(tl.load(part + each * E + cols[None, :], mask=ok, other=0.0, cache_modifier=".cg"), 0)
        y += tl.load(base + member * E + cols, mask=cols < E, other=0.0)
        _store(out + member * E, y, cols, E, ADD)
        tl.store(mark, 0)


def scores_one(
    x: Tensor, keys: Tensor, out: Tensor, *, programs: int, rows: int, words: int, depth: int, warps: int,
    registers: int, pdl: bool, scales: Tensor | None = None, centred: bool = False,
) -> None:  # fmt: skip
    """`out` (N) = keys · x. Keys in fp8 have `scales` (N,); `centred`: they multiply x without its mean."""
    count, k = _words(keys).shape
    per = rows * ceil_div(count, programs * rows)
    _scores_one[(ceil_div(count, per),)](
        x, _words(keys), scales, out, count, PER=per, K=k, R=rows, BK=words, EVEN=count % per == 0 and k % words == 0,
        DEPTH=depth, KIND=KINDS[keys.dtype], CENTRED=centred, PDL=pdl, num_warps=warps, **_launch(pdl, registers),
    )  # fmt: skip


def values_one(
    score: Tensor, tau: Tensor, bounds: Tensor, values_MEN: Tensor, out: Tensor, *, add: bool, programs: int,
    rows: int, words: int, depth: int, warps: int, registers: int, pdl: bool, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """`out` (M, E) = (+=) values · gelu(score · τ / ‖score‖), each segment of each member by itself. Values in fp8 have
    `scales` (M·N,).
    """
    weights, (members, e, n) = _words(values_MEN), values_MEN.shape
    per, k = rows * ceil_div(members * e, programs * rows), weights.shape[-1]
    words = max(words, next_power_of_2(ceil_div(k, 48)))  # the loop over pieces is unrolled: not too many
    _values_one[(ceil_div(e, per), members)](
        score, tau, bounds, weights, scales, out, e, PER=per, N=n, SEGMENTS=len(bounds) - 1, K=k, R=rows, BK=words,
        EVEN=e % per == 0 and k % words == 0, DEPTH=depth, KIND=KINDS[values_MEN.dtype], ADD=add, PDL=pdl,
        num_warps=warps, **_launch(pdl, registers),
    )  # fmt: skip


def values_kept(
    score: Tensor, tau: Tensor, bounds: Tensor, values_MNE: Tensor, rule_M4: Tensor, base_ME: Tensor, out: Tensor,
    part: Tensor, counter: Tensor, *, add: bool, rows: int, cols: int, warps: int, pdl: bool,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """`out` (M, E) = (+=) values of those tokens that the rule keeps (see `_values_kept`). `part` has room for the sums
    of every `rows` tokens, `counter` is 0.
    """
    members, n, e = values_MNE.shape
    split = ceil_div(n, rows)
    _values_kept[(ceil_div(e, cols), split, members)](
        score, tau, bounds, values_MNE, scales, rule_M4, base_ME, out, part, counter, N=n, E=e,
        MANY=min(8192, next_power_of_2(n)), SEGMENTS=len(bounds) - 1, ROWS=rows, BE=cols, SPLIT=split,
        PARTS=next_power_of_2(split), ADD=add, PDL=pdl, num_warps=warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _words(weights: Tensor) -> Tensor:
    return weights if weights.element_size() == 4 else weights.view(torch.int32)


def _launch(pdl: bool, registers: int) -> dict[str, Any]:
    """Limit the registers, so that the next kernel can load its weights beside this one."""
    return {"launch_pdl": True, "maxnreg": registers} if pdl else {}
