"""Kernels of the single-token step: Pattention (l2_norm_gelu) for few rows, attention with rotary and cache in one.

Unusual: LayerNorm is not computed. l2_norm_gelu ignores the scale of its input, and keys whose mean over the channels
was taken out (once, by the caller) ignore its mean: what is left of LayerNorm is nothing. Reductions over several
programs are done by the last of them, in a fixed order, so that equal inputs give equal bits.
Programs may begin before the kernel before theirs has ended (PDL): they load weights, which depend on nothing, ask for
those of the next kernel to come into the cache (`ahead`), and then wait.
Legend: B rows of data, D d_in, N parameter tokens (each segment padded to 64 with zero tokens), E d_out, M members
(q, k, v), H heads, C head_dim, S slots of the cache.
"""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

jit: Any = triton.jit  # what it makes is beyond a type checker
FAR = tl.constexpr(-1.0e30)


@jit
def _gelu(a):
    return 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))


@jit
def _scale(total, tau):
    """τ / ‖a‖, and 0 where there is nothing to normalise."""
    return tl.where(total > 0, tau / tl.sqrt(tl.where(total > 0, total, 1.0)), 0.0)


@jit
def _fetch(weights, program, lines, PER: tl.constexpr):
    """Asks for PER · 128 lines of 128 bytes of the next kernel's weights to come into the L2 cache meanwhile."""
    width: tl.constexpr = 1024 // weights.dtype.element_ty.primitive_bitwidth
    for i in tl.static_range(PER):
        line = tl.minimum((program * PER + i) * 128 + tl.arange(0, 128), lines - 1)
        place = (weights + line.to(tl.int64) * width).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def _scores_one(
    x, keys, out, stat, count, ahead, lines,
    D: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, STAT: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of data: ROWS scores, and Σ of their squares."""
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BK)
    here = rows[:, None] < count
    at = keys + rows[:, None] * D + cols[None, :]
    if PDL:
        gdc_launch_dependents()
    w = tl.load(at, mask=here, other=0.0, eviction_policy="evict_first")
    w1, w2 = w, w
    if D > BK:  # two more tiles are under way before the wait
        w1 = tl.load(at + BK, mask=here, other=0.0, eviction_policy="evict_first")
    if D > 2 * BK:
        w2 = tl.load(at + 2 * BK, mask=here, other=0.0, eviction_policy="evict_first")
    _fetch(ahead, pid, lines, AHEAD)
    if PDL:
        gdc_wait()
    acc = w.to(tl.float32) * tl.load(x + cols)[None, :].to(tl.float32)
    if D > BK:
        acc += w1.to(tl.float32) * tl.load(x + BK + cols)[None, :].to(tl.float32)
    if D > 2 * BK:
        acc += w2.to(tl.float32) * tl.load(x + 2 * BK + cols)[None, :].to(tl.float32)
    for k in tl.static_range(3 * BK, D, BK):
        w = tl.load(at + k, mask=here, other=0.0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * tl.load(x + k + cols)[None, :].to(tl.float32)
    score = tl.sum(acc, 1)
    tl.store(out + rows, score, mask=rows < count)
    if STAT:
        tl.store(stat + pid, tl.sum(score * score, 0))


@jit
def _values_one(
    score, stat, tau, bounds, values, out, ahead, lines,
    N: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PAR: tl.constexpr,
    SEGMENTS: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of data: ROWS outputs of a member; with ADD they are added to what stands in `out`."""
    member = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BK)
    parts = tl.arange(0, PARTS)
    at = values + (member * E + rows[:, None]) * N + cols[None, :]
    score += member * N
    stat += member * (N // PAR)
    if PDL:
        gdc_launch_dependents()
    acc = tl.zeros((ROWS, BK), tl.float32)
    if SEGMENTS == 1:
        w = tl.load(at, eviction_policy="evict_first")
        w1, w2 = w, w
        if N > BK:
            w1 = tl.load(at + BK, eviction_policy="evict_first")
        if N > 2 * BK:
            w2 = tl.load(at + 2 * BK, eviction_policy="evict_first")
        _fetch(ahead, member * tl.num_programs(0) + tl.program_id(0), lines, AHEAD)
        if PDL:
            gdc_wait()
        total = tl.sum(tl.load(stat + parts, mask=parts < N // PAR, other=0.0), 0)
        scale = _scale(total, tl.load(tau))
        acc = w.to(tl.float32) * _gelu(tl.load(score + cols) * scale)[None, :]
        if N > BK:
            acc += w1.to(tl.float32) * _gelu(tl.load(score + BK + cols) * scale)[None, :]
        if N > 2 * BK:
            acc += w2.to(tl.float32) * _gelu(tl.load(score + 2 * BK + cols) * scale)[None, :]
        for k in tl.static_range(3 * BK, N, BK):
            w = tl.load(at + k, eviction_policy="evict_first")
            acc += w.to(tl.float32) * _gelu(tl.load(score + k + cols) * scale)[None, :]
    else:
        _fetch(ahead, member * tl.num_programs(0) + tl.program_id(0), lines, AHEAD)
        if PDL:
            gdc_wait()
        for s in tl.static_range(SEGMENTS):
            first = tl.load(bounds + s)
            last = tl.load(bounds + s + 1)
            mine = (parts * PAR >= first) & (parts * PAR < last)
            scale = _scale(tl.sum(tl.load(stat + parts, mask=mine, other=0.0), 0), tl.load(tau + s))
            for i in range(first // BK, last // BK):
                k = i * BK  # seen to be a multiple: else every load is two bytes wide
                w = tl.load(at + k, eviction_policy="evict_first")
                acc += w.to(tl.float32) * _gelu(tl.load(score + k + cols) * scale)[None, :]
    y = tl.sum(acc, 1)
    out += member * E
    if ADD:
        y += tl.load(out + rows)
    tl.store(out + rows, y)


@jit
def _scores_many(
    x, keys, out, stat, batch, count, ahead, lines,
    D: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few rows of data on the matrix units: scores (B, count), and Σ of squares a row and program."""
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BK)
    b = tl.arange(0, BB)
    if PDL:
        gdc_launch_dependents()
    _fetch(ahead, pid, lines, AHEAD)
    if PDL:
        gdc_wait()
    acc = tl.zeros((ROWS, BB), tl.float32)
    for k in range(0, D, BK):
        w = tl.load(keys + rows[:, None] * D + (k + cols)[None, :], eviction_policy="evict_first")
        xt = tl.load(x + b[None, :] * D + (k + cols)[:, None], mask=b[None, :] < batch, other=0.0)
        acc = tl.dot(w, xt, acc, input_precision=PRECISION)
    tl.store(out + b[None, :] * count + rows[:, None], acc, mask=b[None, :] < batch)
    tl.store(stat + pid * BB + b, tl.sum(acc * acc, 0))


@jit
def _values_many(
    score, stat, tau, bounds, values, out, copy, part, counter, batch, count, ahead, lines,
    N: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr, PARTS: tl.constexpr,
    PAR: tl.constexpr, SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few rows of data: outputs of a member, the tokens split over programs, the last of which adds up."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    member = tl.program_id(2)
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BK)
    parts = tl.arange(0, PARTS)
    b = tl.arange(0, BB)
    per: tl.constexpr = ((N // BK + SPLIT - 1) // SPLIT) * BK
    low = split * per
    high = tl.minimum(low + per, N)
    if PDL:
        gdc_launch_dependents()
    _fetch(ahead, (member * SPLIT + split) * tl.num_programs(0) + tile, lines, AHEAD)
    if PDL:
        gdc_wait()
    values += (member * E + rows[:, None]) * N + cols[None, :]
    score += member * N
    stat += member * (N // PAR) * BB
    acc = tl.zeros((ROWS, BB), tl.float32)
    for s in tl.static_range(SEGMENTS):
        first = tl.load(bounds + s)
        last = tl.load(bounds + s + 1)
        mine = (parts * PAR >= first) & (parts * PAR < last)
        total = tl.sum(tl.load(stat + parts[:, None] * BB + b[None, :], mask=mine[:, None], other=0.0), 0)
        scale = _scale(total, tl.load(tau + s))
        for i in range(tl.maximum(first, low) // BK, tl.minimum(last, high) // BK):
            k = i * BK
            w = tl.load(values + k, eviction_policy="evict_first")
            a = tl.load(score + b[None, :] * count + (k + cols)[:, None], mask=b[None, :] < batch, other=0.0)
            g = _gelu(a.to(tl.float32) * scale[None, :])
            acc = tl.dot(w, g.to(w.dtype), acc, input_precision=PRECISION)
    offset = rows[:, None] * BB + b[None, :]
    done = SPLIT == 1
    if SPLIT > 1:
        part += (member * SPLIT * E) * BB
        tl.store(part + split * E * BB + offset, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter + member * tl.num_programs(0) + tile, 1)
        done = arrived == SPLIT - 1
    if done:
        if SPLIT > 1:
            tl.debug_barrier()
            acc = tl.load(part + offset, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                acc += tl.load(part + other * E * BB + offset, cache_modifier=".cg")
            tl.store(counter + member * tl.num_programs(0) + tile, 0)
        place = (member * batch + b[None, :]) * E + rows[:, None]
        if ADD:
            acc += tl.load(out + place, mask=b[None, :] < batch, other=0.0)
        tl.store(out + place, acc, mask=b[None, :] < batch)
        if ADD:
            tl.store(copy + place, acc, mask=b[None, :] < batch)


@jit
def _activate(
    score, out, tau, bounds, count,
    N: tl.constexpr, BK: tl.constexpr, SEGMENTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """gelu(score · τ / ‖score‖) of one row and member, each segment by itself; read twice, the second time from L2."""
    start = tl.program_id(0) * count + tl.program_id(1) * N
    cols = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for s in tl.static_range(SEGMENTS):
        first = tl.multiple_of(tl.load(bounds + s), 64)
        last = tl.multiple_of(tl.load(bounds + s + 1), 64)
        squares = tl.zeros((BK,), tl.float32)
        for k in range(first, last, BK):
            a = tl.load(score + start + k + cols, mask=k + cols < last, other=0.0).to(tl.float32)
            squares += a * a
        scale = _scale(tl.sum(squares, 0), tl.load(tau + s))
        for k in range(first, last, BK):
            a = tl.load(score + start + k + cols, mask=k + cols < last, other=0.0).to(tl.float32)
            tl.store(out + start + k + cols, _gelu(a * scale), mask=k + cols < last)


@jit
def _attend(
    qkv, keys, values, cos, sin, positions, out, part, counter, batch, slots, scale, ahead, lines,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, HALF: tl.constexpr, BS: tl.constexpr, SPLIT: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A new query a row: q and k turned, k and v put into the cache, attention over it and the new position."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    c = tl.arange(0, CP)
    inside = c < C
    if PDL:
        gdc_launch_dependents()
    _fetch(ahead, (split * tl.num_programs(1) + row) * H + head, lines, AHEAD)
    if PDL:
        gdc_wait()
    place = tl.load(positions + row)
    turned = c < 2 * HALF
    other = tl.where(c < HALF, c + HALF, c - HALF)
    angle = tl.where(c < HALF, c, c - HALF)
    cosine = tl.load(cos + place * HALF + angle, mask=turned, other=1.0)
    sine = tl.load(sin + place * HALF + angle, mask=turned, other=0.0)
    sine = tl.where(c < HALF, -sine, sine)
    base = row * H * C + head * C
    member = batch * H * C
    q = tl.load(qkv + base + c, mask=inside, other=0.0).to(tl.float32) * cosine
    q += tl.load(qkv + base + other, mask=turned, other=0.0).to(tl.float32) * sine
    q = q.to(keys.dtype.element_ty).to(tl.float32) * scale
    k = tl.load(qkv + member + base + c, mask=inside, other=0.0).to(tl.float32) * cosine
    k += tl.load(qkv + member + base + other, mask=turned, other=0.0).to(tl.float32) * sine
    k = k.to(keys.dtype.element_ty)
    v = tl.load(qkv + 2 * member + base + c, mask=inside, other=0.0).to(values.dtype.element_ty)
    cache = (row * H + head) * slots.to(tl.int64) * C
    tl.store(keys + cache + place * C + c, k, mask=inside & (split == 0))
    tl.store(values + cache + place * C + c, v, mask=inside & (split == 0))
    new = tl.sum(q * k.to(tl.float32), 0)
    top = tl.where(split == 0, new, FAR)  # the new position belongs to the first program
    norm = tl.where(split == 0, 1.0, 0.0)
    acc = v.to(tl.float32) * norm
    per = (place + SPLIT - 1) // SPLIT
    low = split * per
    high = tl.minimum(low + per, place)
    for start in range(low, high, BS):
        s = start + tl.arange(0, BS)
        seen = s < high
        at = cache + s[:, None] * C + c[None, :]
        ok = seen[:, None] & inside[None, :]
        old_k = tl.load(keys + at, mask=ok, other=0.0)
        old_v = tl.load(values + at, mask=ok, other=0.0)  # on its way while scores are made
        score = tl.where(seen, tl.sum(old_k.to(tl.float32) * q[None, :], 1), FAR)
        higher = tl.maximum(top, tl.max(score, 0))
        weight = tl.exp(score - higher)
        shrink = tl.exp(top - higher)
        norm = norm * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(old_v.to(tl.float32) * weight[:, None], 0)
        top = higher
    done = SPLIT == 1
    mine = part + ((row * H + head) * SPLIT) * (CP + 2)
    if SPLIT > 1:
        tl.store(mine + split * (CP + 2) + c, acc)
        tl.store(mine + split * (CP + 2) + CP, top)
        tl.store(mine + split * (CP + 2) + CP + 1, norm)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter + row * H + head, 1)
        done = arrived == SPLIT - 1
    if done:
        if SPLIT > 1:
            tl.debug_barrier()
            each = tl.arange(0, SPLIT)
            tops = tl.load(mine + each * (CP + 2) + CP, cache_modifier=".cg")
            norms = tl.load(mine + each * (CP + 2) + CP + 1, cache_modifier=".cg")
            accs = tl.load(mine + each[:, None] * (CP + 2) + c[None, :], cache_modifier=".cg")
            share = tl.exp(tops - tl.max(tops, 0))
            norm = tl.sum(norms * share, 0)
            acc = tl.sum(accs * share[:, None], 0)
            tl.store(counter + row * H + head, 0)
        tl.store(out + base + c, acc / norm, mask=inside)


def _up(n: int, by: int) -> int:
    return -(-n // by)


def _power_above(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _power(n: int, most: int) -> int:
    """The largest power of two that divides n, at most `most`."""
    return min(n & -n, most)


def scores_one(
    x: Tensor, keys: Tensor, out: Tensor, stat: Tensor | None, *, rows: int, warps: int, pdl: bool,
    ahead: Tensor | None = None,
) -> None:  # fmt: skip
    """`out` (N) = keys · x; with `stat` (N / rows) the sums of squares of its blocks. `ahead`: what is read next."""
    count, dim = keys.shape
    grid = (_up(count, rows),)
    _scores_one[grid](
        x, keys, out, stat if stat is not None else out, count, *_lines(ahead, keys),
        D=dim, ROWS=rows, BK=_power(dim, 512), STAT=stat is not None, AHEAD=_per(ahead, grid), PDL=pdl,
        num_warps=warps, **_launch(pdl),
    )  # fmt: skip


def values_one(
    score: Tensor, stat: Tensor, tau: Tensor, bounds: Tensor, values_MEN: Tensor, out: Tensor, *,
    par: int, rows: int, block: int, warps: int, add: bool, pdl: bool, ahead: Tensor | None = None,
) -> None:  # fmt: skip
    """`out` (M, E) = (+=) values · gelu(score · τ / ‖score‖), each segment by itself; `block` divides their sizes."""
    members, e, n = values_MEN.shape
    grid = (e // rows, members)
    _values_one[grid](
        score, stat, tau, bounds, values_MEN, out, *_lines(ahead, values_MEN), N=n, E=e, ROWS=rows,
        BK=block, PARTS=_power_above(n // par), PAR=par,
        SEGMENTS=len(tau), ADD=add, AHEAD=_per(ahead, grid), PDL=pdl, num_warps=warps, **_launch(pdl),
    )  # fmt: skip


def scores_many(
    x_BD: Tensor, keys: Tensor, out_BN: Tensor, stat: Tensor, *, rows: int, block: int, bb: int, warps: int,
    stages: int, pdl: bool, ahead: Tensor | None = None,
) -> None:  # fmt: skip
    """`out` (B, N) = x · keysᵀ, and the sums of squares of its blocks (N / rows, bb)."""
    count, dim = keys.shape
    grid = (count // rows,)
    _scores_many[grid](
        x_BD, keys, out_BN, stat, x_BD.shape[0], count, *_lines(ahead, keys),
        D=dim, ROWS=rows, BK=_power(dim, block), BB=bb, PRECISION=_precision(keys), AHEAD=_per(ahead, grid), PDL=pdl,
        num_warps=warps, num_stages=stages, **_launch(pdl),
    )  # fmt: skip


def values_many(
    score_BN: Tensor, stat: Tensor, tau: Tensor, bounds: Tensor, values_MEN: Tensor, out_MBE: Tensor,
    copy: Tensor | None, part: Tensor, counter: Tensor, *, par: int, rows: int, block: int, bb: int, split: int,
    warps: int, stages: int, pdl: bool, ahead: Tensor | None = None,
) -> None:  # fmt: skip
    """`out` (M, B, E) = values · gelu(…); with `copy` added to what stands there, and written to it in its type too."""
    members, e, n = values_MEN.shape
    grid = (e // rows, split, members)
    _values_many[grid](
        score_BN, stat, tau, bounds, values_MEN, out_MBE, copy if copy is not None else out_MBE, part, counter,
        score_BN.shape[0], score_BN.shape[1], *_lines(ahead, values_MEN), N=n, E=e, ROWS=rows, BK=block, BB=bb,
        PARTS=_power_above(n // par), PAR=par, SEGMENTS=len(tau), SPLIT=split, ADD=copy is not None,
        PRECISION=_precision(values_MEN), AHEAD=_per(ahead, grid), PDL=pdl,
        num_warps=warps, num_stages=stages, **_launch(pdl),
    )  # fmt: skip


def activate(
    score_BN: Tensor, out_BN: Tensor, tau: Tensor, bounds: Tensor, members: int, warps: int, pdl: bool
) -> None:
    """`out` (B, M·N) = gelu(score · τ / ‖score‖), each segment of each member by itself."""
    batch, count = score_BN.shape
    n = count // members
    _activate[(batch, members)](
        score_BN, out_BN, tau, bounds, count, N=n, BK=min(2048, _power_above(n)), SEGMENTS=len(tau), PDL=pdl,
        num_warps=warps, **_launch(pdl),
    )  # fmt: skip


def attend(
    qkv_MBD: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, cos: Tensor, sin: Tensor, positions_B: Tensor, out_BD: Tensor,
    part: Tensor, counter: Tensor, *, block: int, split: int, warps: int, pdl: bool, ahead: Tensor | None = None,
) -> None:  # fmt: skip
    """`out` (B, D): attention of the new position of each row, which is put into the cache on the way."""
    batch, heads, slots, dim = k_BHSC.shape
    grid = (heads, batch, split)
    _attend[grid](
        qkv_MBD, k_BHSC, v_BHSC, cos, sin, positions_B, out_BD, part, counter, batch, slots, dim**-0.5,
        *_lines(ahead, k_BHSC), H=heads, C=dim, CP=_power_above(dim), HALF=cos.shape[-1], BS=block,
        SPLIT=split, AHEAD=_per(ahead, grid), PDL=pdl, num_warps=warps, **_launch(pdl),
    )  # fmt: skip


def _lines(ahead: Tensor | None, instead: Tensor) -> tuple[Tensor, int]:
    """What is read next, and how many lines of 128 bytes it has."""
    return (instead, 1) if ahead is None else (ahead, ahead.nbytes // 128)


def _per(ahead: Tensor | None, grid: tuple[int, ...]) -> int:
    """How many times 128 lines each program of a grid asks for."""
    return 0 if ahead is None else _up(ahead.nbytes // 128, 128 * math.prod(grid))


def _precision(weights: Tensor) -> str:
    return "ieee" if weights.element_size() == 4 else "tf32"


def _launch(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}
