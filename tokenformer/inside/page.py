"""Makes the page of an explored model: one file that opens from disk, with its data inside, in compact arrays."""

import base64
import html
import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenformer.inside.ablation import Token
from tokenformer.inside.effects import Effects, direct_effects, real_effects
from tokenformer.inside.learned import Learned, words
from tokenformer.inside.tally import FIRES
from tokenformer.terminal import progress

HIGH, LOW = 8, 4  # places of a token that the page shows
STRONGEST = 50  # tokens per position of the text view
CARRIED = 2_000_000  # tokens of the text, at most; places behind them are in tokens.jsonl alone


def packed(values: Any, kind: str) -> dict[str, str]:
    """Return an array as the page reads it: its type of numbers, and base64 of its bytes."""
    array = np.ascontiguousarray(torch.as_tensor(values).cpu().numpy().astype(kind))
    return {"type": kind, "data": base64.b64encode(array.tobytes()).decode()}


def columns_of(cards: Sequence[dict[str, Any]], carried: int) -> dict[str, Any]:
    """Join what is known of all tokens into long columns, segment after segment."""
    out: dict[str, Any] = {}
    for name, kind in (("mean", "f4"), ("spread", "f4"), ("fires", "f4"), ("energy", "f4"), ("dead", "u1")):
        out[name] = packed(torch.cat([card[name] for card in cards]), kind)
    out["twin"] = packed(torch.cat([card["twin"] for card in cards]), "i4")
    for name, count in (("high", HIGH), ("low", LOW)):
        rows = []
        for card in cards:
            values, places = (part[:, :count] for part in card[name])
            short = count - values.shape[1]
            places = places.masked_fill(places >= carried, -1)
            rows.append([torch.nn.functional.pad(part, (0, short), value=-1) for part in (values, places)])
        out[name] = packed(torch.cat([values for values, _ in rows]), "f4")
        out[f"{name}_places"] = packed(torch.cat([places for _, places in rows]), "i4")
    for name in ("raises", "lowers"):
        out[name] = packed(torch.cat([card[name] for card in cards if card[name] is not None]), "u4")
    return out


def segments_of(cards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say where each segment begins in the columns, in its projection, and among those that write."""
    out, start, writer, rows = [], 0, 0, dict[tuple[int, str], int]()
    for card in cards:
        layer, name, segment = card["where"]
        count, writes = len(card["mean"]), card["raises"] is not None
        first = rows.get((layer, name), 0)
        out.append({"layer": layer, "projection": name, "segment": segment, "count": count, "start": start})
        out[-1] |= {"first": first, "writer": writer if writes else -1}
        rows[layer, name], start, writer = first + count, start + count, writer + count * writes
    return out


def text_view(model: Any, ids_T: Tensor, segments: Sequence[dict[str, Any]], switched_off: int) -> dict[str, Any]:
    """Return, for each position of a sample, what wrote the logit of its next token: the strongest tokens, their real
    effect for the first `switched_off` of them, the sums per segment and the rest.
    """
    seen_T, wanted_T = ids_T[:-1], ids_T[1:]
    found: Effects = direct_effects(model, seen_T, wanted_T)
    writers = [s for s in segments if s["writer"] >= 0]
    effect_TN = torch.cat([found.tokens[s["layer"], s["projection"], s["segment"]] for s in writers], 1)
    numbers = torch.cat([torch.arange(s["start"], s["start"] + s["count"]) for s in writers])
    best = effect_TN.abs().topk(min(STRONGEST, effect_TN.shape[1])).indices
    top_TK, top_id_TK = effect_TN.gather(1, best), numbers[best.cpu()]
    sums = [found.tokens[s["layer"], s["projection"], s["segment"]].sum(-1) for s in writers]
    names = {}
    for s in writers:
        names |= {s["start"] + i: Token(s["layer"], s["projection"], s["first"] + i) for i in range(s["count"])}
    switched_off = min(switched_off, best.shape[1])
    asked = [(names[n], t) for t, row in enumerate(top_id_TK[:, :switched_off].tolist()) for n in row]
    off = {}
    with progress("switching tokens off", 2 * len({token for token, _ in asked}), " passes") as advance:
        for how in ("value", "mask") if asked else ():
            off[how] = real_effects(model, seen_T, wanted_T, asked, how, advance)
    return {
        "ids": ids_T.tolist(),
        "logit": packed(found.logit_T, "f4"),
        "loss": packed(found.loss_T, "f4"),
        "embedding": packed(found.embedding_T, "f4"),
        "bias": packed(found.bias_T, "f4"),
        "sums": packed(torch.stack(sums, 1), "f4"),
        "writers": [segments.index(s) for s in writers],
        "count": top_TK.shape[1],
        "effect": packed(top_TK, "f4"),
        "token": packed(top_id_TK, "u4"),
        "off": switched_off,
        **{f"off_{how}": packed(values, "f4") for how, values in off.items()},
    }


def growth_view(learned: Learned, ids_BT: Tensor, vocab: int, most: int = 30) -> dict[str, Any]:
    """Return the vocabulary entries and the places whose loss fell most through the newest segments."""
    gain_W = words(learned, ids_BT.flatten(), vocab)
    best, worst = gain_W.topk(min(most, vocab)), (-gain_W).topk(min(most, vocab))
    gains, places = learned.gain_T.topk(min(most, ids_BT.numel()))
    counts = torch.bincount(ids_BT[:, 1:].flatten().cpu(), minlength=vocab)  # nothing comes before the first of a row

    def rows(ids: Tensor) -> list[list[float]]:
        return [[i, gain_W[i].item(), counts[i].item()] for i in ids.tolist() if counts[i]]

    return {
        "without": learned.segments,
        "places": [[p, learned.without_T[p].item(), learned.with_T[p].item()] for p in places[gains > 0].tolist()],
        "best": rows(best.indices),
        "worst": rows(worst.indices),
        "mean": [(part.sum() / learned.count).item() for part in (learned.without_T, learned.with_T)],
    }


def make_page(
    title: str,
    notes: Sequence[str],
    cards: Sequence[dict[str, Any]],
    ids_BT: Tensor,
    name: Callable[[int], tuple[str, bytes]],
    vocab: int,
    view: dict[str, Any],
    growth: dict[str, Any] | None,
) -> str:
    """Return the page's text. `name` gives the text of a token and its bytes (`token_names`)."""
    carried, named = ids_BT.flatten()[:CARRIED], [name(i) for i in range(vocab)]
    data = {
        "segments": segments_of(cards),
        "columns": columns_of(cards, len(carried)),
        "text": packed(carried, "u4"),
        "row": ids_BT.shape[1],  # the model reads nothing of the row before
        "words": [text for text, _ in named],
        "bytes": {i: raw.hex() for i, (text, raw) in enumerate(named) if text.encode() != raw},
        "fires": FIRES,
        "view": view,
        "growth": growth,
        "shown": [HIGH, LOW],
    }
    template = string.Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    # of a script even "<!--" and "<script" mean something
    body = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return template.substitute(title=html.escape(title), notes=said, data=body)
