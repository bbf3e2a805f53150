"""Measures loss, perplexity, bits per token and per byte of texts and prepared sets, with a sliding window.

Unusual: every token of a text is a target exactly once. The token that ends documents is put before the first token; it
is never a target and has no bytes. Where a text itself names it (<|endoftext|>), it is left out.
"""

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.config_data import IGNORED
from tokenformer.data.text.indexed import Indexed, find_prefix
from tokenformer.data.text.inputs import find_inputs
from tokenformer.data.text.parts import PARTS, part_edges
from tokenformer.data.text.reading import Reading, read_units
from tokenformer.data.text.sets import check_set_tokenizer
from tokenformer.data.text.tokenizer import Tokenizer
from tokenformer.errors import UserError
from tokenformer.eval.ranks import spread, world
from tokenformer.models import LanguageModel


class Window(NamedTuple):
    """Inputs tokens[start:stop], whose targets are tokens[start + 1 : stop + 1]; those from `first` on count."""

    start: int
    stop: int
    first: int


class Document(NamedTuple):
    ids: Sequence[int]
    bytes: int


def measures(nats: float, tokens: int, size: int) -> dict[str, float]:
    """Return what follows from the loss of so many tokens, of texts of so many bytes.

    >>> measures(nats=math.log(2) * 8, tokens=4, size=16)["bits_per_byte"]
    0.5
    """
    loss = nats / tokens
    measured = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_token": loss / math.log(2)}
    return measured | {"bits_per_byte": nats / math.log(2) / max(1, size), "tokens": tokens, "bytes": size}


def windows(targets: int, context: int, stride: int) -> Iterator[Window]:
    """Yield windows over a first token and `targets` more: each is a target once, and sees context − stride tokens.

    >>> list(windows(5, 4, 2))
    [Window(start=0, stop=4, first=0), Window(start=1, stop=5, first=4)]
    """
    if not 0 < stride <= context:
        raise UserError(f"stride is {stride}, but must be 1 to {context} (the window)")
    done = 0
    while done < targets:
        stop = min(context if done == 0 else done + stride, targets)
        yield Window(max(0, stop - context), stop, done)
        done = stop


def window(longest: int, context: int | None, stride: int | None) -> tuple[int, int]:
    """Return the window and its stride, given or by default; `longest` is the model's context.

    >>> window(2048, None, None)
    (2048, 1024)
    """
    context = longest if context is None else context
    if not 0 < context <= longest:
        raise UserError(f"the window is {context}, but must be 1 to {longest} (the model's context)")
    return context, max(1, context // 2) if stride is None else stride


@torch.no_grad()
def window_nats(
    model: LanguageModel, parts: Sequence[tuple[Tensor, int]], batch: int, advance: Callable[[int], object]
) -> list[float]:
    """Return Σ −log p over the targets of each part (ids of a window and one more, how many at its end count)."""
    device, out = model.embedding.weight.device, []
    for at in range(0, len(parts), batch):
        some = parts[at : at + batch]
        longest = max(len(ids) for ids, _ in some) - 1
        inputs = torch.zeros(len(some), longest, dtype=torch.long)
        labels = torch.full((len(some), longest), IGNORED)
        for i, (ids, count) in enumerate(some):
            inputs[i, : len(ids) - 1] = ids[:-1]
            labels[i, len(ids) - 1 - count : len(ids) - 1] = ids[len(ids) - count :]
        hidden = model.hidden(inputs.to(device))
        pairs = zip(hidden, labels.to(device), strict=True)
        out += [model.loss(row, label)[0].item() for row, label in pairs]  # a sum per window
        advance(sum(count for _, count in some))
    return out


def perplexity(
    model: LanguageModel,
    documents: Iterable[Document],
    first: int,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch: int = 8,
    advance: Callable[[float], object] = lambda count: None,
) -> dict[str, float]:
    """Measure documents, each by itself after the token `first`; `stride` defaults to half the window. `advance` is
    called with every number of tokens that were measured.
    """
    context, stride = window(model.config.context, context, stride)
    begun, count, size, read, nats = time.perf_counter(), 0, 0, 0, 0.0

    def run(parts: list[tuple[Tensor, int]]) -> float:
        parts.sort(key=lambda part: len(part[0]))
        return sum(spread(parts, lambda some: window_nats(model, some, batch, lambda n: advance(n * world()))))

    held: list[tuple[Tensor, int]] = []
    for document in documents:
        ids = torch.cat([torch.tensor([first]), torch.as_tensor(document.ids, dtype=torch.long)])
        for w in windows(len(ids) - 1, context, stride):
            held.append((ids[w.start : w.stop + 1], w.stop - w.first))
        count, size, read = count + len(ids) - 1, size + document.bytes, read + 1
        if len(held) >= 64 * batch:
            nats, held = nats + run(held), []
    nats += run(held) if held else 0.0
    if count == 0:
        raise UserError("there is no text to measure: give a file or a prepared set that holds some")
    return measures(nats, count, size) | {"documents": read, "seconds": round(time.perf_counter() - begun, 3)}


def open_documents(
    path: str | Path,
    tokenizer: Tokenizer,
    limit: int | None = None,
    *,
    field: str = "text",
    part: str | None = None,
    shares: Sequence[float] = (1.0,),
) -> Iterator[Document]:
    """Yield the documents of a prepared set (`part` of it, cut by `shares`), or of text files (one each; rows of .jsonl
    and .parquet by their `field`). End tokens are left out.
    """
    found = _prepared(path, tokenizer, part, shares) if is_prepared(path) else _texts(path, tokenizer, field)
    return itertools.islice(found, limit)


def is_prepared(path: str | Path) -> bool:
    try:
        find_prefix(path)
    except UserError:
        return False
    return Path(path).suffix in ("", ".bin", ".idx") or not Path(path).is_file()


def _prepared(path: str | Path, tokenizer: Tokenizer, part: str | None, shares: Sequence[float]) -> Iterator[Document]:
    held = Indexed(path, vocab=tokenizer.vocab_size)
    check_set_tokenizer(held, tokenizer)
    start, stop = 0, len(held.tokens)
    if part is not None:
        edges, _ = part_edges(held, shares)
        start, stop = edges[PARTS.index(part) :][:2]
        if start == stop:
            raise UserError(f"{path} has nothing in its part {part}, cut by {list(shares)}: measure another part")
    first = bisect.bisect_right(range(held.documents), start, key=lambda i: held.document_start(i + 1))
    for i in range(first, held.documents):
        begin, end = max(start, held.document_start(i)), min(stop, held.document_start(i + 1))
        if begin >= stop:
            return
        ids = held.span(begin, end)
        ids = ids[ids != tokenizer.end_of_document].astype("int64")
        yield Document(ids, len(tokenizer.decode(ids.tolist()).encode()))


def _texts(path: str | Path, tokenizer: Tokenizer, field: str) -> Iterator[Document]:
    ids, size = [], 0
    for part, last in read_fragments(path, tokenizer, field):
        ids += part.ids
        size += part.bytes
        if last:
            yield Document(ids, size)
            ids, size = [], 0


def read_fragments(path: str | Path, tokenizer: Tokenizer, field: str) -> Iterator[tuple[Document, bool]]:
    """Yield the fragments of texts' documents, and whether each is its document's last. End tokens are left out."""
    end = tokenizer.end_of_document
    end_bytes = len(tokenizer.decode([end]).encode())
    for source in find_inputs([path]):
        for unit in read_units(source, Reading(field=field, can_skip=False), tokenizer.cuts):
            if not unit.left_out:
                encoded = tokenizer.encode(unit.text)
                kept = [i for i in encoded if i != end]
                yield Document(kept, len(unit.text.encode()) - end_bytes * (len(encoded) - len(kept))), unit.last
