"""Pattention for training: cuBLAS for the products, one kernel for Θ, one for its gradient.

Unusual: backward keeps the scores and one number per row and segment, and recomputes Θ. All segments of all members
(q, k, v) lie side by side in one buffer of scores, each padded to 64 columns by zero keys and values: one product makes
all scores, and one product per member adds up its segments, and adds them to the residual stream where there is one.
No atomics: equal inputs give equal bits. Legend: T rows of data, D d_in, E d_out, W columns of scores, S segments.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import tokenformer.ops.kernels.rotary  # noqa: F401  (registers the operator rotate_)

TILE = 64  # columns that a segment is padded to
jit: Any = triton.jit  # Any: type checkers do not understand kernels


@jit
def _instruction(x, assembly):
    return tl.inline_asm_elementwise(assembly, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def exp2(x, FAST: tl.constexpr):
    return _instruction(x, "ex2.approx.ftz.f32 $0, $1;") if FAST else tl.exp2(x)


@jit
def _inverse(x, FAST: tl.constexpr):
    return _instruction(x, "rcp.approx.ftz.f32 $0, $1;") if FAST else 1.0 / x


@jit
def _gelu(s, EXACT: tl.constexpr, FAST: tl.constexpr):
    """gelu(s) and its slope; in half precision by formula 7.1.26 of Abramowitz and Stegun (Φ within 1e-7).

    FAST: with instructions of the GPU, which the interpreter does not have.
    """
    bell = exp2(s * (-0.7213475204444817 * s), FAST)  # exp(-s²/2)
    if EXACT:
        upper = 0.5 * (1.0 + tl.erf(s * 0.7071067811865476))
        return s * upper, upper + s * bell * 0.3989422804014327
    else:
        size = tl.abs(s)
        t = _inverse(1.0 + 0.23164189 * size, FAST)
        tail = ((((0.5307027 * t - 0.7265760) * t + 0.7107069) * t - 0.1422484) * t + 0.1274148) * (t * bell)
        upper = tl.where(s < 0, tail, 1.0 - tail)
        return tl.maximum(s, 0.0) - size * tail, upper + s * (bell * 0.3989422804014327)


@jit
def _rate(total, tau, THETA: tl.constexpr):
    """The factor of the scores: τ² / total or τ / √total; 0 where the total is 0."""
    safe = tl.where(total > 0, total, 1.0)
    rate = tau * tau / safe if THETA == "l1_norm_gelu" else tau * tl.rsqrt(safe)
    return tl.where(total > 0, rate, 0.0)


@jit
def _forward(
    scores, out, totals, count, W, S, start, apart, size, which, between, many, tau,
    WIDTH: tl.constexpr, THETA: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, PART: tl.constexpr,
    SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Θ, times SCALE, of ROWS rows of one segment, and their statistic (the sum; of softmax its logarithm).

    PART: "whole", or one half of it, where other ranks hold more of the segment: "sums" writes the statistic alone,
    "rest" reads that of all ranks and writes Θ.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # last rows first: they are still in the L2 cache
    start += (program % many) * apart
    which += (program % many) * between
    rows = (program // many).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    at = scores + rows[:, None] * W + start + cols[None, :]
    to = out + rows[:, None] * W + start + cols[None, :]
    here = rows[:, None] < count
    a = tl.load(at, mask=here & (cols[None, :] < WIDTH), other=0.0).to(tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if PART == "rest":
        total = tl.load(totals + rows * S + which, mask=rows < count, other=0.0)
    elif THETA == "softmax":
        peak = tl.full((ROWS,), -1e30, tl.float32)
        for first in range(0, WIDTH, BLOCK):
            if BLOCK < WIDTH:
                a = tl.load(at + first, mask=here & (first + cols[None, :] < WIDTH), other=0.0).to(tl.float32)
            counts = first + cols[None, :] < size
            higher = tl.maximum(peak, tl.max(tl.where(counts, a, -1e30), 1))
            total = total * tl.exp(peak - higher) + tl.sum(tl.where(counts, tl.exp(a - higher[:, None]), 0.0), 1)
            peak = higher
        total = peak + tl.log(total)
    else:
        for first in range(0, WIDTH, BLOCK):
            if BLOCK < WIDTH:
                a = tl.load(at + first, mask=here & (first + cols[None, :] < WIDTH), other=0.0).to(tl.float32)
            if THETA == "l1_norm_gelu":
                total += tl.sum(tl.abs(a), 1)
            elif THETA == "gelu_l2_norm":
                b, _ = _gelu(a, EXACT, FAST)
                total += tl.sum(b * b, 1)
            else:
                total += tl.sum(a * a, 1)
    if PART != "rest":
        tl.store(totals + rows * S + which, total, mask=rows < count)
    if PART != "sums":
        rate = _rate(total, tau, THETA)[:, None]
        for first in range(0, WIDTH, BLOCK):
            inside = here & (first + cols[None, :] < WIDTH)
            if BLOCK < WIDTH:
                a = tl.load(at + first, mask=inside, other=0.0).to(tl.float32)
            if THETA == "softmax":
                p = tl.where(first + cols[None, :] < size, tl.exp(a - total[:, None]) * (tau * tau), 0.0)
            elif THETA == "gelu_l2_norm":
                p, _ = _gelu(a, EXACT, FAST)
                p *= rate
            else:
                p, _ = _gelu(a * rate, EXACT, FAST)
            tl.store(to + first, (p * SCALE).to(out.dtype.element_ty), mask=inside)


@jit
def _theta(a, g, total, rate, tau, counts, THETA: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr):
    """From the scores a and the gradient g of Θ: Θ, the terms of a sum over the row, and `own`, `share`, `factor`.

    The gradient of the scores is (own − share · sum / τ²) · factor.
    """
    if THETA == "softmax":
        p = tl.where(counts, tl.exp(a - total) * (tau * tau), 0.0)
        return p, g * p, g, 1.0, p
    elif THETA == "gelu_l2_norm":
        b, slope = _gelu(a, EXACT, FAST)
        p = b * rate
        return p, g * p, g, p, slope * rate
    else:
        s = a * rate
        p, slope = _gelu(s, EXACT, FAST)
        g = g * slope
        if THETA == "l1_norm_gelu":
            return p, g * s, g, tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, 0.0)), rate
        else:
            return p, g * s, g, s, rate


@jit
def _scale(peak):
    """`scale_of` of ops/fp8.py, from the largest number of each row."""
    exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 127 - 53), 127 + 67)
    scale = ((127 + 7 + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(peak < float("inf"), scale, float("nan"))


@jit
def _backward(
    scores, grads, totals, partial, factors, out, slopes, rounded, scales, count, W, G, S, start, at, size, which, tau,
    member, M, WIDTH: tl.constexpr, THETA: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, PART: tl.constexpr,
    SCALED: tl.constexpr, ROUNDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the gradient of Θ compute that of the scores, and recompute Θ itself.

    PART: as in `_forward`; "sums" writes each row's sum to `partial`, "rest" reads it there. SCALED: the gradient given
    is to be multiplied by a factor per row and member. ROUNDED: that of the scores, a row of one block, is written in
    fp8 too, with the scale of each row.
    """
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    place = rows[:, None] * W + start + cols[None, :]
    given = grads + rows[:, None] * G + at + cols[None, :]
    here = rows[:, None] < count
    total = tl.load(totals + rows * S + which, mask=rows < count, other=0.0)[:, None]
    rate = _rate(total, tau, THETA)
    mine = here & (cols[None, :] < WIDTH)
    unit = 1.0
    if SCALED:
        unit = tl.load(factors + rows * M + member, mask=rows < count, other=0.0)[:, None]
    a = tl.load(scores + place, mask=mine, other=0.0).to(tl.float32)
    g = tl.load(given, mask=mine, other=0.0).to(tl.float32) * unit
    sums = tl.zeros((ROWS,), tl.float32)
    p, summed, own, share, factor = _theta(a, g, total, rate, tau, cols[None, :] < size, THETA, EXACT, FAST)
    if PART == "rest":
        sums = tl.load(partial + rows * S + which, mask=rows < count, other=0.0)
    elif BLOCK >= WIDTH:
        sums += tl.sum(summed, 1)
    else:
        for first in range(0, WIDTH, BLOCK):
            inside = here & (first + cols[None, :] < WIDTH)
            a = tl.load(scores + place + first, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(given + first, mask=inside, other=0.0).to(tl.float32) * unit
            p, summed, own, share, factor = _theta(
                a, g, total, rate, tau, first + cols[None, :] < size, THETA, EXACT, FAST
            )
            sums += tl.sum(summed, 1)
    if PART == "sums":
        tl.store(partial + rows * S + which, sums, mask=rows < count)
    else:
        sums = (sums / (tau * tau))[:, None]
        for first in range(0, WIDTH, BLOCK):
            inside = here & (first + cols[None, :] < WIDTH)
            if BLOCK < WIDTH:
                a = tl.load(scores + place + first, mask=inside, other=0.0).to(tl.float32)
                g = tl.load(given + first, mask=inside, other=0.0).to(tl.float32) * unit
                p, summed, own, share, factor = _theta(
                    a, g, total, rate, tau, first + cols[None, :] < size, THETA, EXACT, FAST
                )
            tl.store(out + place + first, p.to(out.dtype.element_ty), mask=inside)
            slope = ((own - share * sums) * factor).to(slopes.dtype.element_ty)
            tl.store(slopes + place + first, slope, mask=inside)
            if ROUNDED:
                wide = slope.to(tl.float32)
                scale = _scale(tl.max(tl.abs(wide), 1))
                tl.store(rounded + place, (wide * scale[:, None]).to(rounded.dtype.element_ty), mask=inside)
                tl.store(scales + rows, scale, mask=rows < count)


def padded(size: int) -> int:
    """Columns of a segment of this size."""
    return -(-size // TILE) * TILE


def columns(sizes: Sequence[int], members: Sequence[int]) -> list[slice]:
    """Where each member's scores lie."""
    places, segments = [0], iter(sizes)
    for count in members:
        places.append(places[-1] + sum(padded(next(segments)) for _ in range(count)))
    return [slice(first, last) for first, last in itertools.pairwise(places)]


def _tile(width: int, backward: bool) -> dict[str, int]:
    """Rows, columns and warps of a program, the fastest on an H200. A row longer than BLOCK is read twice."""
    block = 1 << (width - 1).bit_length()
    if width <= 4096:
        warps = max(1, block // (512 if backward and block > 2048 else 1024))
        return {"ROWS": max(1, 2048 // block), "BLOCK": block, "num_warps": warps}
    whole = 8192 if backward else 16384
    return {"ROWS": 1, "BLOCK": block if width <= whole else 2048 if backward else 8192, "num_warps": 8}


def in_one_block(sizes: Sequence[int]) -> bool:
    """Whether a program of `_backward` has a whole row of scores at once."""
    return len(sizes) == 1 and _tile(padded(sizes[0]), backward=True)["BLOCK"] >= padded(sizes[0])


def launch_forward(
    scores: Tensor, out: Tensor, totals: Tensor, layout: tuple, part: str = "whole", scale: float = 1.0
) -> None:
    sizes, members, taus, kind = layout
    (rows, width), count = scores.shape, len(sizes)
    each = count // len(members)
    alike = all(list(x) == list(x[:each]) * len(members) for x in (sizes, taus)) and set(members) == {each}
    many, start = len(members) if alike else 1, 0  # members of equal segments: one launch per segment
    for i, size in enumerate(sizes[: count // many]):
        tile = _tile(padded(size), backward=False)
        if rows and size:  # of segments that stay whole, other ranks hold some
            _forward[(triton.cdiv(rows, tile["ROWS"]) * many,)](
                scores, out, totals, rows, width, count, start, width // many, size, i, each, many, taus[i],
                padded(size), kind, scores.dtype == torch.float32, scores.is_cuda, part, scale, **tile,
            )  # fmt: skip
        start += padded(size)


def launch_backward(
    grads: Sequence[Tensor],
    scores: Tensor,
    totals: Tensor,
    sums: Tensor,
    new: Sequence[Tensor],
    layout: tuple,
    part: str = "whole",
    factors: Tensor | None = None,
    rounded: Sequence[Tensor] = (),
) -> None:
    """`new`: where Θ and the gradient of the scores are written. `factors` and `rounded` (the gradient in fp8, scales):
    see SCALED and ROUNDED of `_backward`.
    """
    sizes, members, taus, kind = layout
    (rows, width), start, which = scores.shape, 0, 0
    scaled, factors = factors is not None, totals if factors is None else factors
    more = (factors, *new, *(rounded or (totals, totals)))
    for member, (grad, segments) in enumerate(zip(grads, members, strict=True)):
        at = 0
        for _ in range(segments):
            size = sizes[which]
            tile = _tile(padded(size), backward=True)
            if rows and size:
                _backward[(triton.cdiv(rows, tile["ROWS"]),)](
                    scores, grad, totals, sums, *more, rows, width, grad.shape[1], len(sizes), start, at, size, which,
                    taus[which], member, len(members), padded(size), kind, scores.dtype == torch.float32,
                    scores.is_cuda, part, scaled, bool(rounded), **tile,
                )  # fmt: skip
            start, at, which = start + padded(size), at + padded(size), which + 1


def per_segment(scores: Tensor, sizes: Sequence[int]) -> Tensor:
    return scores.new_empty(scores.shape[0], len(sizes), dtype=torch.float32)


LAYOUT = "int[] sizes, int[] members, float[] taus, str kind"
GIVEN = "Tensor[] grads, Tensor scores, Tensor totals"
torch.library.define("tokenformer::theta", f"(Tensor scores, {LAYOUT}) -> (Tensor, Tensor)")
torch.library.define("tokenformer::theta_backward", f"({GIVEN}, {LAYOUT}) -> (Tensor, Tensor)")
# the same in two halves, between which ranks that share a segment sum one number per row
torch.library.define("tokenformer::theta_sums", f"(Tensor scores, {LAYOUT}) -> Tensor")
torch.library.define("tokenformer::theta_rest", f"(Tensor scores, Tensor totals, {LAYOUT}) -> Tensor")
torch.library.define("tokenformer::theta_backward_sums", f"({GIVEN}, {LAYOUT}) -> Tensor")
torch.library.define("tokenformer::theta_backward_rest", f"({GIVEN}, Tensor sums, {LAYOUT}) -> (Tensor, Tensor)")


@torch.library.impl("tokenformer::theta", ("cuda", "cpu"))
def theta(scores: Tensor, *layout: Any) -> tuple[Tensor, Tensor]:
    """Θ of scores (T, W), and the statistics (T, S) of their rows. `layout`: sizes, members, taus, kind."""
    out, totals = torch.empty_like(scores), per_segment(scores, layout[0])
    launch_forward(scores, out, totals, layout)
    return out, totals


@torch.library.impl("tokenformer::theta_sums", ("cuda", "cpu"))
def theta_sums(scores: Tensor, *layout: Any) -> Tensor:
    totals = per_segment(scores, layout[0]).fill_(-torch.inf if layout[3] == "softmax" else 0)  # of no tokens
    launch_forward(scores, scores, totals, layout, "sums")
    return totals


@torch.library.impl("tokenformer::theta_rest", ("cuda", "cpu"))
def theta_rest(scores: Tensor, totals: Tensor, *layout: Any) -> Tensor:
    out = torch.empty_like(scores)
    launch_forward(scores, out, totals, layout, "rest")
    return out


@torch.library.impl("tokenformer::theta_backward", ("cuda", "cpu"))
def theta_backward(grads: Sequence[Tensor], scores: Tensor, totals: Tensor, *layout: Any) -> tuple[Tensor, Tensor]:
    """From each member's gradient of Θ compute that of the scores, and recompute Θ (T, W)."""
    out, slopes = torch.empty_like(scores), torch.empty_like(scores)
    launch_backward(grads, scores, totals, totals, (out, slopes), layout)
    return out, slopes


@torch.library.impl("tokenformer::theta_backward_sums", ("cuda", "cpu"))
def theta_backward_sums(grads: Sequence[Tensor], scores: Tensor, totals: Tensor, *layout: Any) -> Tensor:
    sums = torch.zeros_like(totals)
    launch_backward(grads, scores, totals, sums, (scores, scores), layout, "sums")
    return sums


@torch.library.impl("tokenformer::theta_backward_rest", ("cuda", "cpu"))
def theta_backward_rest(
    grads: Sequence[Tensor], scores: Tensor, totals: Tensor, sums: Tensor, *layout: Any
) -> tuple[Tensor, Tensor]:
    out, slopes = torch.empty_like(scores), torch.empty_like(scores)
    launch_backward(grads, scores, totals, sums, (out, slopes), layout, "rest")
    return out, slopes


def _like_scores(grads: Any, scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scores), torch.empty_like(scores)


fake = torch.library.register_fake
fake("tokenformer::theta", lambda scores, sizes, *_: (torch.empty_like(scores), per_segment(scores, sizes)))
fake("tokenformer::theta_sums", lambda scores, sizes, *_: per_segment(scores, sizes))
fake("tokenformer::theta_rest", lambda scores, *_: torch.empty_like(scores))
fake("tokenformer::theta_backward", _like_scores)
fake("tokenformer::theta_backward_sums", lambda grads, scores, totals, *_: torch.empty_like(totals))
fake("tokenformer::theta_backward_rest", _like_scores)
torch.library.define("tokenformer::add_product_", "(Tensor(a!) base, Tensor a, Tensor b) -> ()")
torch.library.register_fake("tokenformer::add_product_", lambda base, a, b: None)


@torch.library.impl("tokenformer::add_product_", ("cuda", "cpu"))
def add_product_(base: Tensor, a: Tensor, b: Tensor) -> None:
    """base += a @ b, in place. torch.compile would copy the first argument of `addmm`, even where nothing reads it."""
    base.addmm_(a, b)


def rotate_first_two(parts: list[Tensor], cos: Tensor | None, sin: Tensor | None, head_dim: int, back: bool) -> None:
    """Rotate q and k, or their gradients back, in copies; nothing where `head_dim` is 0."""
    for i in range(2) if head_dim else ():
        parts[i] = parts[i].clone()  # torch.compile removes the copy; eager, a checkpoint may keep the product
        torch.ops.tokenformer.rotate_(parts[i], cos, sin, head_dim, back)


def output_gradients(ctx: Any, grads: Sequence[Tensor | None], widths: Sequence[int], saved: Sequence[Any]) -> list:
    """Return the gradient of each member's output as it was before the rotation; `saved`: x, cos, sin."""
    x, cos, sin = saved
    own = [x.new_zeros(len(x), w) if g is None else g.contiguous() for g, w in zip(grads, widths, strict=False)]
    rotate_first_two(own, cos, sin, ctx.head_dim, True)
    return own


def value_gradients(ctx: Any, weights: Tensor, own: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the values; no product is computed for what is frozen."""
    return [
        weights[:, place].T @ g if learns else None
        for place, g, learns in zip(columns(*ctx.layout[:2]), own, ctx.needs_input_grad[8 : 8 + len(own)], strict=True)
    ]


class Fused(torch.autograd.Function):
    """x (T, D), keys (W, D), values (columns of a member, E) → one output per member.

    `onto`: what the outputs are added to, inside their products: "nothing", "input" (x itself) or "residual"; "fork":
    x is also returned, as the last output, so that backward adds its gradient inside a product. With `cos` and `sin`
    the first two outputs (q and k) are rotated by the positions of their rows, per head of `head_dim` channels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        head_dim: int,
        layout: tuple,
        onto: str,
        keys: Tensor,
        *values: Tensor,
    ):
        scores = x @ keys.T
        weights, totals = torch.ops.tokenformer.theta(scores, *layout)
        ctx.save_for_backward(x, cos, sin, keys, scores, totals, *values)
        ctx.layout, ctx.onto, ctx.head_dim = layout, onto, head_dim
        ctx.set_materialize_grads(False)
        base = x if onto == "input" else residual
        parts = zip(columns(*layout[:2]), values, strict=True)
        outputs = [
            weights[:, place] @ v if base is None else torch.addmm(base, weights[:, place], v) for place, v in parts
        ]
        rotate_first_two(outputs, cos, sin, head_dim, False)
        return *outputs, *([x.view_as(x)] if onto == "fork" else [])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("the kernels have no second derivative: set TOKENFORMER_PATTENTION=reference")
        x, cos, sin, keys, scores, totals, *values = ctx.saved_tensors
        own = output_gradients(ctx, grads, [v.shape[1] for v in values], (x, cos, sin))
        thetas = [g @ v.T for g, v in zip(own, values, strict=True)]  # gradients of Θ
        weights, slopes = torch.ops.tokenformer.theta_backward(thetas, scores, totals, *ctx.layout)
        base = grads[-1] if ctx.onto in ("input", "fork") else None
        wanted = ctx.needs_input_grad  # no product is computed for what is frozen
        if not wanted[0]:
            dx = None
        elif base is None:
            dx = slopes @ keys
        else:
            dx = base.clone()
            torch.ops.tokenformer.add_product_(dx, slopes, keys)
        dkeys = slopes.T @ x if wanted[7] else None
        dresidual = own[0] if ctx.onto == "residual" else None
        return dx, dresidual, None, None, None, None, None, dkeys, *value_gradients(ctx, weights, own)


def fused(
    x: Tensor,
    members: Sequence[Sequence[tuple[Tensor, Tensor, float]]],
    theta: str,
    *,
    centred: bool = False,
    onto: str = "nothing",
    residual: Tensor | None = None,
    rotary: tuple[Tensor | None, Tensor | None, int] = (None, None, 0),
) -> list[Tensor]:
    """`pattention_group`. `centred` subtracts the mean of each key; `rotary`: cos, sin, head_dim; `onto`: see Fused."""
    flat, layout, keys, values = pack(x, members, theta, centred)
    base = None if residual is None else residual.flatten(0, -2)
    outputs = Fused.apply(flat, base, *rotary, layout, onto, keys, *values)
    return [out.view(*x.shape[:-1], out.shape[-1]) for out in outputs]


def pack(
    x: Tensor, members: Sequence[Sequence[tuple[Tensor, Tensor, float]]], theta: str, centred: bool = False
) -> tuple[Tensor, tuple, Tensor, list[Tensor]]:
    """Return x (T, D), the layout of the scores, all keys (W, D) and each member's values (its columns, E)."""
    flat = x.reshape(-1, x.shape[-1])
    keys = [_without_mean(key) if centred else key for segments in members for key, _, _ in segments]
    sizes = tuple(len(key) for key in keys)
    layout = (sizes, tuple(map(len, members)), tuple(tau for m in members for *_, tau in m), theta)
    values = [_stack([value for _, value, _ in segments], x.dtype) for segments in members]
    return flat, layout, _stack(keys, x.dtype), values


def _without_mean(key: Tensor) -> Tensor:
    wide = key.to(torch.promote_types(key.dtype, torch.float32))
    return wide - wide.mean(-1, keepdim=True)


def _stack(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate, each part padded with zero rows to whole tiles."""
    parts = [
        F.pad(part.to(dtype), (0, 0, 0, -len(part) % TILE)) if len(part) % TILE else part.to(dtype) for part in parts
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
