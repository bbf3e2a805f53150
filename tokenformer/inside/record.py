"""Keeps what was explored: a state to go on from while it runs, then a folder of tables, JSON lines and a page.

A folder holds `tables.safetensors` (`LAYER.PROJECTION.SEGMENT.NAME`, see `Tally`), `explored.json` (the model's digest,
the text, rows), `tokens.jsonl` (a line for each parameter token), `index.html`; the manifest is written last.
"""

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.files import atomic_file, check_manifest
from tokenformer.growth.measure import Where, segments
from tokenformer.inside.effects import twins, vocabulary_effects
from tokenformer.inside.tally import Tally, unpack
from tokenformer.parsing import read_json

TABLES, ABOUT = "tables.safetensors", "explored.json"
WRITES = 8  # vocabulary entries that are kept of a token, raised and lowered


def save_state(path: Path, tally: Tally, identity: dict[str, str]) -> None:
    """Write a tally with what it belongs to, beside its name first."""
    tensors = {
        f"{layer}.{name}.{i}.{n}": t.cpu() for (layer, name, i), ts in tally.tables.items() for n, t in ts.items()
    }
    with atomic_file(path) as beside:
        beside.write_bytes(save(tensors, metadata={**identity, "rows": str(tally.rows)}))


def load_state(path: Path, identity: dict[str, str] | None = None) -> Tally:
    """Read a tally; refuse one of another model or text."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        found = Tally(int(about.get("rows", "")))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is no whole record of an exploration ({error}): remove it and start again") from None
    for key, value in (identity or {}).items():
        if about.get(key) != value:
            raise UserError(f"{path} was begun with another {key}: give the same, or remove it to start again")
    for text, tensor in tensors.items():
        layer, name, segment, table = text.split(".")
        found.tables.setdefault((int(layer), name, int(segment)), {})[table] = tensor
    return found


def load_explored(folder: Path) -> tuple[Tally, dict[str, Any]]:
    """Read what `explore` wrote, and what it says of itself."""
    check_manifest(folder)
    return load_state(folder / TABLES), read_json(folder / ABOUT)


def cards(model: Any, tally: Tally, vocab: int) -> Iterator[dict[str, Any]]:
    """Yield per segment what is known of its tokens, as columns: tensors of N rows. `vocab`: ids of the tokenizer.

    `energy` is a token's share of what its projection adds. `raises` and `lowers` are vocabulary ids, of proj and ffn
    alone. `twin` is the row of a near-equal token of the same segment, or -1.
    """
    writes = {where: (up, down) for where, up, down in vocabulary_effects(model, min(WRITES, vocab), vocab)}
    energy: dict[Where, Tensor] = {}
    for where, segment in segments(model):
        length = segment.value_tokens.detach().double().square().sum(1).cpu()
        energy[where] = tally.tables[where]["square"] * length
    whole: dict[tuple[int, str], float] = {}
    for (layer, name, _), part in energy.items():
        whole[layer, name] = whole.get((layer, name), 0.0) + part.sum().item()
    for where, segment in segments(model):
        layer, name, _ = where
        high, low = (unpack(tally.tables[where][which]) for which in ("high", "low"))
        up, down = writes.get(where, (None, None))
        yield {
            "where": where,
            "mean": tally.mean(where).float(),
            "spread": tally.spread(where).float(),
            "fires": (tally.tables[where]["fires"] / tally.rows).float(),
            "energy": (energy[where] / max(whole[layer, name], 1e-300)).float(),
            "dead": tally.dead(where),
            "twin": twins(segment),
            "high": high,
            "low": (-low[0], low[1]),
            "raises": up,
            "lowers": down,
        }


def context(ids: Sequence[int], row: int, name: Callable[[int], tuple[str, bytes]], place: int) -> str:
    """Return the text around a place, ⟩ behind its token: nothing of what stands before the model's row, and of a
    character that is cut the part that is there counts as none.

    >>> from tokenformer.data.text.token_names import token_names
    >>> from tokenformer.data.text.tokenizer import ByteTokenizer
    >>> ids, name = ByteTokenizer().encode("ein Café, bitte"), token_names(ByteTokenizer())
    >>> context(ids, 16, name, 6), context(ids, 16, name, 7), context(ids, 4, name, 6)
    ('ein Caf⟩é, b', 'ein Caf⟩é, bi', 'Caf⟩é, b')
    """
    begin, end = max(place - place % row, place - 12), min(len(ids), place + 6)
    parts = [b"".join(name(id)[1] for id in ids[a:b]) for a, b in ((begin, place + 1), (place + 1, end))]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    before = decoder.decode(parts[0].lstrip(bytes(range(0x80, 0xC0))))
    return f"{before}⟩{decoder.decode(parts[1])}"


def lines(
    columns: dict[str, Any], first: int, name: Callable[[int], tuple[str, bytes]], around: Callable[[int], str]
) -> Iterator[str]:
    """Yield the JSON line of each token of a segment; `first` is the row of its first token in its projection."""
    layer, projection, i = columns["where"]
    plain = {key: columns[key].tolist() for key in ("mean", "spread", "fires", "energy", "dead", "twin")}
    for row in range(len(columns["mean"])):
        line: dict[str, Any] = {"token": f"{layer}:{projection}:{first + row}", "segment": i}
        line |= {key: values[row] for key, values in plain.items() if key != "twin"}
        if plain["twin"][row] >= 0:
            line["twin"] = f"{layer}:{projection}:{first + plain['twin'][row]}"
        for which in ("high", "low"):
            values, places = (part[row].tolist() for part in columns[which])
            line[which] = [[round(v, 4), p, around(p)] for v, p in zip(values, places, strict=True)]
        if columns["raises"] is not None:
            for which in ("raises", "lowers"):
                line[which] = [name(id)[0] for id in columns[which][row].tolist() if id >= 0]
        yield json.dumps(line, ensure_ascii=False)
