"""Decoding kernels for a few rows: Pattention (l2_norm_gelu), attention of one new position, filling the cache.

Unusual: LayerNorm is not computed. l2_norm_gelu ignores the scale of its input, and keys without their mean over the
channels (the caller subtracts it once) ignore the mean of the input, so LayerNorm changes nothing. Scores stay in
registers until all programs know the norm: all programs run at once and wait for each other at a counter in memory.
Sums over several programs are computed by the last of them, in a fixed order, so that equal inputs give equal bits.
A kernel may start before the previous one has ended (PDL, programmatic dependent launch). Weights in fp8 are widened in
registers; their scales, one per row, are applied after the product.
Legend: B rows of data, D d_in, N parameter tokens (each segment padded to 64 with zero tokens), E d_out, M members
(q, k, v), H heads, C head_dim, S slots of the cache.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

jit: Any = triton.jit  # Any: type checkers do not understand kernels
LOWEST = tl.constexpr(-1.0e30)


@jit
def _gelu(a):
    return 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))


@jit
def _scale(total, tau):
    """τ / ‖a‖, where `total` is ‖a‖²; 0 where that is 0."""
    return tl.where(total > 0, tau / tl.sqrt(tl.where(total > 0, total, 1.0)), 0.0)


@jit
def _signal(counter):
    tl.debug_barrier()  # first all threads of this program have written
    tl.atomic_add(counter, 1, sem="release")


@jit
def _wait(counter, target):
    while tl.atomic_add(counter, 0, sem="acquire") < target:
        pass


@jit
def _scores(
    x, keys, scales, out, raw, stat, counter, tau, bounds, batch, count,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr, PARTS: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """out (B, count) = gelu(score · τ / ‖score‖) of score = x · keysᵀ, each segment of each member by itself.

    `scales` (3, count), with keys and values in fp8: the score is score · scales[0] − Σx · scales[1], and the result is
    multiplied by scales[2]. Keys in fp8 have a mean, so that of x has to be taken out here.
    HALF: 0 all of it; 1 and 2 the parts before and after the wait, for the interpreter, which cannot wait.
    """
    pid = tl.program_id(0)
    row = pid * ROWS
    rows = row + tl.arange(0, ROWS)
    cols = tl.arange(0, BK)
    b = tl.arange(0, BB)
    keep = raw + rows[:, None] * BB + b[None, :]
    acc = tl.zeros((ROWS, BB), tl.float32)
    total = tl.zeros((BB,), tl.float32)
    if PDL:
        gdc_wait()
    if HALF != 2:
        for k in range(0, D, BK):
            w = tl.load(keys + rows[:, None] * D + (k + cols)[None, :], eviction_policy="evict_first")
            xt = tl.load(x + b[None, :] * D + (k + cols)[:, None], mask=b[None, :] < batch, other=0.0)
            acc = tl.dot(w.to(xt.dtype), xt, acc, input_precision=PRECISION)
            if scales is not None:
                total += tl.sum(xt.to(tl.float32), 0)
        if scales is not None:
            shift = tl.load(scales + count + rows)[:, None] * total[None, :]
            acc = acc * tl.load(scales + rows)[:, None] - shift
        tl.store(stat + pid * BB + b, tl.sum(acc * acc, 0))
    if HALF == 0:
        _signal(counter)
        if PDL:
            gdc_launch_dependents()
        _wait(counter, tl.num_programs(0))
    elif HALF == 1:
        tl.store(keep, acc)
    else:
        acc = tl.load(keep)
    if HALF != 1:
        member = row // N
        first, last, mine = 0, N, tl.load(tau)
        for s in tl.static_range(1, SEGMENTS):
            here = row - member * N >= tl.load(bounds + s)
            first = tl.where(here, tl.load(bounds + s), first)
            mine = tl.where(here, tl.load(tau + s), mine)
        for s in tl.static_range(1, SEGMENTS):
            end = tl.load(bounds + s)
            last = tl.where((end > first) & (end < last), end, last)
        part = (member * N + first) // ROWS + tl.arange(0, PARTS)
        ok = part < (member * N + last) // ROWS
        squares = tl.load(stat + part[:, None] * BB + b[None, :], mask=ok[:, None], other=0.0, cache_modifier=".cg")
        g = _gelu(acc * _scale(tl.sum(squares, 0), mine)[None, :])
        if scales is not None:
            g *= tl.load(scales + 2 * count + rows)[:, None]
        tl.store(out + b[None, :] * count + rows[:, None], g, mask=b[None, :] < batch)


@jit
def _values(
    g, values, row_scale, out, copy, part, counter, batch, count,
    N: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr, SPLIT: tl.constexpr,
    ADD: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (M, B, E) = values · g of each member. The tokens are split over programs; the last to end adds the parts.

    ADD: the result is added to `out`, and also written to `copy`, in the type of `copy`. `row_scale` (E,): of
    values, or None. EVEN: E is a multiple of ROWS.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    member = tl.program_id(2)
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BK)
    b = tl.arange(0, BB)
    per: tl.constexpr = ((N // BK + SPLIT - 1) // SPLIT) * BK
    low = split * per
    high = tl.minimum(low + per, N)
    w_rows = values + (member * E + rows) * N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((ROWS, BB), tl.float32)
    for k in range(low, high, BK):
        at = tl.multiple_of(k, BK) + cols
        if EVEN:
            w = tl.load(w_rows[:, None] + at[None, :], eviction_policy="evict_first")
        else:
            w = tl.load(w_rows[:, None] + at[None, :], mask=(rows < E)[:, None], eviction_policy="evict_first")
        gt = tl.load(g + b[None, :] * count + member * N + at[:, None], mask=b[None, :] < batch, other=0.0)
        acc = tl.dot(w.to(gt.dtype), gt, acc, input_precision=PRECISION)
    if row_scale is not None:
        acc *= tl.load(row_scale + rows, mask=rows < E, other=0.0)[:, None]
    offset = rows[:, None] * BB + b[None, :]
    done = SPLIT == 1
    if SPLIT > 1:
        part += member * SPLIT * E * BB
        tl.store(part + split * E * BB + offset, acc)
        tl.debug_barrier()
        done = tl.atomic_add(counter + member * tl.num_programs(0) + tile, 1) == SPLIT - 1
    if done:
        if SPLIT > 1:
            tl.debug_barrier()
            acc = tl.load(part + offset, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                acc += tl.load(part + other * E * BB + offset, cache_modifier=".cg")
            tl.store(counter + member * tl.num_programs(0) + tile, 0)
        place = (member * batch + b[None, :]) * E + rows[:, None]
        inside = b[None, :] < batch
        if not EVEN:
            inside &= (rows < E)[:, None]
        if ADD:
            acc += tl.load(out + place, mask=inside, other=0.0)
        tl.store(out + place, acc, mask=inside)
        if ADD:
            tl.store(copy + place, acc, mask=inside)


@jit
def _rotated(x, c, inside, cosine, sine, HALF: tl.constexpr):
    """Channels c of a head, rotated, where they are `inside`; `sine` has its sign already."""
    other = tl.where(c < HALF, c + HALF, c - HALF)
    y = tl.load(x + c, mask=inside, other=0.0).to(tl.float32) * cosine
    return y + tl.load(x + other, mask=inside & (c < 2 * HALF), other=0.0).to(tl.float32) * sine


@jit
def _angles(cos, sin, place, c, HALF: tl.constexpr):
    angle = tl.where(c < HALF, c, c - HALF)
    cosine = tl.load(cos + place * HALF + angle, mask=c < 2 * HALF, other=1.0)
    sine = tl.load(sin + place * HALF + angle, mask=c < 2 * HALF, other=0.0)
    return cosine, tl.where(c < HALF, -sine, sine)


@jit
def _attend_block(q, k, v, seen, scale, top, norm, acc, PRECISION: tl.constexpr):
    """Add a block of cache slots to an online softmax: its maximum, its sum and its weighted values."""
    score = tl.where(seen[None, :], tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, LOWEST)
    higher = tl.maximum(top, tl.max(score, 1))
    shrink = tl.exp(top - higher)
    weight = tl.where(seen[None, :], tl.exp(score - higher[:, None]), 0.0)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return higher, norm * shrink + tl.sum(weight, 1), acc


@jit
def _attention(
    qkv, keys, values, cos, sin, positions, out, part, counter, batch, slots, scale,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, HALF: tl.constexpr, BS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of the new position of one row: rotate q and k, store k and v in the cache, attend to a part of it. The
    last of SPLIT programs combines the parts. What the cache held before is loaded before the wait. The matrix units
    need 16 queries: they get the same one 16 times.
    """
    unit = tl.program_id(1) * H + tl.program_id(0)
    split = tl.program_id(2)
    c = tl.arange(0, CP)
    lane = tl.arange(0, BS)
    inside = c < C
    if PDL:
        gdc_launch_dependents()
    place = tl.load(positions + tl.program_id(1))
    per = tl.cdiv(place, SPLIT).to(tl.int32)
    low = split * per
    high = tl.minimum(low + per, place.to(tl.int32))
    keys += unit.to(tl.int64) * slots * C
    values += unit.to(tl.int64) * slots * C
    at = lane[:, None] * C + c[None, :]
    ok = (low + lane < high)[:, None] & inside[None, :]
    first_k = tl.load(keys + low * C + at, mask=ok, other=0.0)
    first_v = tl.load(values + low * C + at, mask=ok, other=0.0)
    cosine, sine = _angles(cos, sin, place, c, HALF)
    if PDL:
        gdc_wait()
    qkv += unit * C
    q = _rotated(qkv, c, inside, cosine, sine, HALF).to(keys.dtype.element_ty)
    k = _rotated(qkv + batch * H * C, c, inside, cosine, sine, HALF).to(keys.dtype.element_ty)
    v = tl.load(qkv + 2 * batch * H * C + c, mask=inside, other=0.0).to(values.dtype.element_ty)
    own = tl.sum(q.to(tl.float32) * k.to(tl.float32), 0) * scale
    q = tl.broadcast_to(q[None, :], (16, CP))
    top = tl.full((16,), LOWEST, tl.float32)
    norm = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, CP), tl.float32)
    top, norm, acc = _attend_block(q, first_k, first_v, low + lane < high, scale, top, norm, acc, PRECISION)
    for start in tl.range(low + BS, high, BS, num_stages=STAGES):
        seen = start + lane < high
        ok = seen[:, None] & inside[None, :]
        old_k = tl.load(keys + start * C + at, mask=ok, other=0.0)
        old_v = tl.load(values + start * C + at, mask=ok, other=0.0)
        top, norm, acc = _attend_block(q, old_k, old_v, seen, scale, top, norm, acc, PRECISION)
    own = tl.where(split == 0, own, LOWEST)  # the new position: the first program's
    most = tl.maximum(tl.max(top, 0), own)
    share = tl.exp(tl.max(top, 0) - most)
    weight = tl.where(split == 0, tl.exp(own - most), 0.0)
    total = tl.max(norm, 0) * share + weight
    sums = tl.max(acc, 0) * share + v.to(tl.float32) * weight
    tl.store(keys + place * C + c, k, mask=inside & (split == 0))
    tl.store(values + place * C + c, v, mask=inside & (split == 0))
    if SPLIT == 1:
        tl.store(out + unit * C + c, sums / total, mask=inside)
    else:
        part += unit * SPLIT * (CP + 2)
        tl.store(part + split * (CP + 2) + c, sums)
        tl.store(part + split * (CP + 2) + CP, most)
        tl.store(part + split * (CP + 2) + CP + 1, total)
        tl.debug_barrier()
        if tl.atomic_add(counter + unit, 1, sem="acq_rel") == SPLIT - 1:
            each = tl.arange(0, SPLIT)
            tops = tl.load(part + each * (CP + 2) + CP, cache_modifier=".cg")
            totals = tl.load(part + each * (CP + 2) + CP + 1, cache_modifier=".cg")
            accs = tl.load(part + each[:, None] * (CP + 2) + c[None, :], cache_modifier=".cg")
            shares = tl.exp(tops - tl.max(tops, 0))
            y = tl.sum(accs * shares[:, None], 0) / tl.sum(totals * shares, 0)
            tl.store(out + unit * C + c, y, mask=inside)
            tl.store(counter + unit, 0)


@jit
def _greedy(
    logits, token, out, position, last, limit, done, stop_ids, vocab, width, room,
    STOPS: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    cols = tl.arange(0, BW)
    best = tl.full((BW,), float("-inf"), tl.float32)
    index = cols
    for start in range(0, vocab, BW):
        x = tl.load(logits + row * width + start + cols, mask=start + cols < vocab, other=float("-inf")).to(tl.float32)
        index = tl.where(x > best, start + cols, index)
        best = tl.maximum(x, best)
    most = tl.max(best, 0)
    choice = tl.min(tl.where(best == most, index, vocab - 1), 0).to(tl.int64)
    over = tl.load(done + row) != 0
    here = tl.load(position + row)
    made = here - tl.load(last + row)
    tl.store(position + row, here + 1, mask=~over)
    tl.store(token + row, choice)
    tl.store(out + row * room + made, choice, mask=~over)
    over = over | (made + 1 >= tl.load(limit + row))
    for i in tl.static_range(STOPS):
        over = over | (choice == tl.load(stop_ids + i))
    tl.store(done + row, over.to(tl.int8))


@jit
def _fill_cache(
    qkv, q, keys, values, cos, sin, start, length, rows, slots,
    H: tl.constexpr, HP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Position t of row b: rotate q and k; write q to (B, H, T, C), k and v to slot `start` + t of the cache."""
    t = tl.program_id(0)
    b = tl.program_id(1)
    h = tl.arange(0, HP)[:, None]
    c = tl.arange(0, CP)[None, :]
    inside = (h < H) & (c < C)
    cosine, sine = _angles(cos, sin, start + t, c, HALF)
    at = qkv + (b * length + t).to(tl.int64) * H * C + h * C
    far = rows.to(tl.int64) * H * C
    slot = ((b * H + h).to(tl.int64) * slots + start + t) * C + c
    to = q + ((b * H + h).to(tl.int64) * length + t) * C + c
    tl.store(to, _rotated(at, c, inside, cosine, sine, HALF), mask=inside)
    tl.store(keys + slot, _rotated(at + far, c, inside, cosine, sine, HALF), mask=inside)
    tl.store(values + slot, tl.load(at + 2 * far + c, mask=inside), mask=inside)


def scores(
    x_BD: Tensor, keys: Tensor, scales: Tensor | None, out_BN: Tensor, raw: Tensor, stat: Tensor, counter: Tensor,
    tau: Tensor, bounds: Tensor, members: int, *, rows: int, block: int, bb: int, warps: int, stages: int, pdl: bool,
    apart: bool,
) -> None:  # fmt: skip
    """`out` (B, M·N) = gelu(x · keysᵀ · τ / ‖…‖). `counter` must be 0. `apart`: two launches instead of a wait.
    `scales` (3, M·N) belong to keys in fp8 (see `_scores`).
    """
    count, dim = keys.shape
    for half in (1, 2) if apart else (0,):
        _scores[(count // rows,)](
            x_BD, keys, scales, out_BN, raw, stat, counter, tau, bounds, x_BD.shape[0], count,
            D=dim, N=count // members, ROWS=rows, BK=_largest_power_of_2(dim, block), BB=bb,
            PARTS=next_power_of_2(count // members // rows), SEGMENTS=len(bounds) - 1,
            PRECISION=_precision(x_BD), PDL=pdl, HALF=half, num_warps=warps, num_stages=stages,
            **_launch(pdl, not apart),
        )  # fmt: skip


def values(
    g_BN: Tensor, values_MEN: Tensor, out_MBE: Tensor, copy: Tensor | None, part: Tensor, counter: Tensor, *,
    rows: int, block: int, bb: int, split: int, warps: int, stages: int, pdl: bool, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """`out` (M, B, E) = values · g. With `copy`, the result is added to `out` and also written to `copy`. `scale` (E,)
    multiplies the rows of values; without it E is a multiple of `rows`.
    """
    members, e, n = values_MEN.shape
    _values[(ceil_div(e, rows), split, members)](
        g_BN, values_MEN, scale, out_MBE, copy if copy is not None else out_MBE, part, counter, *g_BN.shape,
        N=n, E=e, ROWS=rows, BK=block, BB=bb, SPLIT=split, ADD=copy is not None, EVEN=e % rows == 0,
        PRECISION=_precision(g_BN), PDL=pdl, num_warps=warps, num_stages=stages, **_launch(pdl),
    )  # fmt: skip


def attend(
    qkv_MBD: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, cos: Tensor, sin: Tensor, positions_B: Tensor, out_BD: Tensor,
    part: Tensor, counter: Tensor, *, block: int, split: int, warps: int, stages: int, pdl: bool,
) -> None:  # fmt: skip
    """`out` (B, D): attention of the new position of each row, which is also stored in the cache."""
    batch, heads, slots, dim = k_BHSC.shape
    _attention[(heads, batch, split)](
        qkv_MBD, k_BHSC, v_BHSC, cos, sin, positions_B, out_BD, part, counter, batch, slots, dim**-0.5,
        H=heads, C=dim, CP=channels(dim), HALF=cos.shape[-1], BS=max(16, block), SPLIT=split,
        STAGES=stages, PRECISION=_precision(k_BHSC), PDL=pdl, num_warps=warps, **_launch(pdl),
    )  # fmt: skip


def greedy(
    logits_BW: Tensor, vocab: int, token_B: Tensor, out_BK: Tensor, position_B: Tensor, last_B: Tensor,
    limit_B: Tensor, done_B: Tensor, stop_ids: Tensor,
) -> None:  # fmt: skip
    """Choose the most likely next token of each row. A row that is not done stores it in `out`, in the column of its
    distance from the prompt's end (`last`), and moves on; it is done after `limit` tokens or a stop token.
    """
    _greedy[(len(logits_BW),)](
        logits_BW, token_B, out_BK, position_B, last_B, limit_B, done_B, stop_ids, vocab, logits_BW.shape[1],
        out_BK.shape[1], STOPS=len(stop_ids), BW=min(16384, next_power_of_2(vocab)), num_warps=32,
    )  # fmt: skip


def fill_cache(
    qkv_MTD: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, cos: Tensor, sin: Tensor, start: int, q_BHTC: Tensor
) -> None:
    """Rotate q and k, and store k and v in the cache; every row has the positions start, start + 1, …"""
    batch, heads, length, dim = q_BHTC.shape
    _fill_cache[(length, batch)](
        qkv_MTD, q_BHTC, k_BHSC, v_BHSC, cos, sin, start, length, batch * length, k_BHSC.shape[2],
        H=heads, HP=next_power_of_2(heads), C=dim, CP=next_power_of_2(dim), HALF=cos.shape[-1],
    )  # fmt: skip


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def channels(head_dim: int) -> int:
    """Channels of a head as attention holds them: padded to what the matrix units take."""
    return max(16, next_power_of_2(head_dim))


def _largest_power_of_2(n: int, most: int) -> int:
    """The largest power of two that divides n, at most `most`."""
    return min(n & -n, most)


def _precision(weights: Tensor) -> str:
    return "ieee" if weights.element_size() == 4 else "tf32"


def _launch(pdl: bool, together: bool = False) -> dict[str, bool]:
    return ({"launch_pdl": True} if pdl else {}) | ({"launch_cooperative_grid": True} if together else {})
