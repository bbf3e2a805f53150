"""Scores continuations in batches sorted by length; a context that several continuations share is computed once.

Unusual: what does not fit is cut off on the left, exactly as the harness does it: a continuation of c tokens sees the
last context + 1 − c tokens before it. Legend: R rows, G groups, T positions, D dim, W vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.infer.cache import StaticCache
from tokenformer.infer.packed import Packed

LOGITS = 1 << 24  # numbers of logits held at once


class Scored(NamedTuple):
    """Σ log p of a continuation's tokens, and whether each of them was the most likely one."""

    logprob: float
    greedy: bool


class _Row(NamedTuple):
    index: int
    prefix: tuple[int, ...]
    target: list[int]


@torch.no_grad()
def score(
    packed: Packed,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    context: int | None = None,
    tokens: int = 16384,
    advance: Callable[[float], object] = lambda count: None,
) -> list[Scored]:
    """Return log-likelihoods of (context ids, continuation ids); `tokens` positions are computed at once."""
    context = context or packed.config.context
    groups: dict[tuple[int, ...], list[_Row]] = {}
    for i, (before, after) in enumerate(pairs):
        if not before or not after:
            raise UserError(f"request {i} has no {'continuation' if before else 'context'}: both need a token")
        if len(after) > context:
            raise UserError(f"request {i} continues by {len(after):,} tokens, more than the context of {context:,}")
        full = [*before, *after][-(context + 1) :]
        row = _Row(i, tuple(full[: -len(after)]), full[-len(after) :])
        groups.setdefault(row.prefix, []).append(row)
    out: list[Scored | None] = [None] * len(pairs)
    alone = sorted((g for g in groups.values() if len(g) == 1), key=_length, reverse=True)
    shared = sorted((g for g in groups.values() if len(g) > 1), key=_length, reverse=True)
    for work, many in ((_alone, alone), (_shared, shared)):
        for some in _batches(many, tokens):
            rows = [row for group in some for row in group]
            for row, result in zip(rows, work(packed, some), strict=True):
                out[row.index] = result
            advance(len(rows))
    return [result for result in out if result is not None]


def _length(group: list[_Row]) -> int:
    return len(group[0].prefix) + max(len(row.target) for row in group)


def _batches(groups: list[list[_Row]], tokens: int) -> list[list[list[_Row]]]:
    """Batch consecutive groups: at most `tokens` positions, each row padded to the longest (the first)."""
    batches: list[list[list[_Row]]] = []
    rows = longest = 0
    for group in groups:
        if not batches or (rows + len(group)) * longest > tokens:
            batches.append([])
            rows, longest = 0, _length(group)
        batches[-1].append(group)
        rows += len(group)
    return batches


def _alone(packed: Packed, groups: list[list[_Row]]) -> list[Scored]:
    """Score contexts that have one continuation each, in one pass."""
    rows = [group[0] for group in groups]
    ids_RT = _pad([[*row.prefix, *row.target[:-1]] for row in rows], packed.device)
    cache = StaticCache(packed.config, len(rows), ids_RT.shape[1], packed.device, packed.dtype)
    hidden_RTD = packed.hidden(ids_RT, torch.arange(ids_RT.shape[1], device=packed.device), cache, 0)
    places = [range(len(row.prefix) - 1, len(row.prefix) - 1 + len(row.target)) for row in rows]
    picked = torch.cat([hidden_RTD[i, p.start : p.stop] for i, p in enumerate(places)])
    return _judge(packed, picked, [row.target for row in rows])


def _shared(packed: Packed, groups: list[list[_Row]]) -> list[Scored]:
    """Compute each context once, then copy its cache row for every continuation."""
    device = packed.device
    ids_GT = _pad([group[0].prefix for group in groups], device)
    cache = StaticCache(packed.config, len(groups), ids_GT.shape[1], device, packed.dtype)
    first_GTD = packed.hidden(ids_GT, torch.arange(ids_GT.shape[1], device=device), cache, 0)
    rows = [row for group in groups for row in group]
    of = torch.tensor([g for g, group in enumerate(groups) for _ in group], device=device)
    lengths = torch.tensor([len(row.prefix) for row in rows], device=device)
    first_RD = first_GTD[of, lengths - 1]
    rest = [row.target[:-1] for row in rows]
    if not any(rest):
        return _judge(packed, first_RD, [row.target for row in rows])
    ids_RT = _pad(rest, device)
    slots = max(len(row.prefix) + ids_RT.shape[1] for row in rows)
    positions_RT = lengths[:, None] + torch.arange(ids_RT.shape[1], device=device)
    hidden_RTD = packed.hidden(ids_RT, positions_RT, cache.spread(of, slots))
    whole_RTD = torch.cat([first_RD[:, None], hidden_RTD], 1)
    picked = torch.cat([whole_RTD[i, : len(row.target)] for i, row in enumerate(rows)])
    return _judge(packed, picked, [row.target for row in rows])


def _pad(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return ids.to(device)


def _judge(packed: Packed, hidden_TD: Tensor, targets: list[list[int]]) -> list[Scored]:
    wanted_T = torch.tensor([t for target in targets for t in target], device=packed.device)
    chances, best = [], []
    step = max(1, LOGITS // len(packed.head))
    for h, y in zip(hidden_TD.split(step), wanted_T.split(step), strict=True):
        logits_TW = packed.logits(h)
        chances.append(logits_TW.log_softmax(-1).gather(1, y[:, None])[:, 0].double())
        best.append(logits_TW.argmax(-1) == y)
    chance_T, best_T = torch.cat(chances).tolist(), torch.cat(best).tolist()
    out, at = [], 0
    for target in targets:
        stop = at + len(target)
        out.append(Scored(sum(chance_T[at:stop]), all(best_T[at:stop])))
        at = stop
    return out
