"""Loss, perplexity, bits per token and per byte of texts and prepared sets, with a sliding window.

Unusual: every token of a text is a target exactly once; the token that ends a document comes before its first token,
is never a target itself, and its byte is never counted.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.data.indexed import Indexed, find_prefix
from tokenformer.data.sources import find_sources
from tokenformer.data.texts import Reading, read_units
from tokenformer.data.tokenizer import Tokenizer
from tokenformer.errors import UserError
from tokenformer.eval.ranks import spread
from tokenformer.models import LanguageModel


class Window(NamedTuple):
    """Inputs tokens[start:stop], whose targets are tokens[start + 1 : stop + 1]; those from `first` on count."""

    start: int
    stop: int
    first: int


class Document(NamedTuple):
    ids: Sequence[int]
    bytes: int


@dataclass(frozen=True)
class Perplexity:
    """What was counted, and what follows from it."""

    nats: float
    tokens: int
    bytes: int
    documents: int
    seconds: float

    @property
    def loss(self) -> float:
        return self.nats / max(1, self.tokens)

    def to_dict(self) -> dict:
        """
        >>> Perplexity(nats=math.log(2) * 8, tokens=4, bytes=16, documents=1, seconds=0.0).to_dict()["bits_per_byte"]
        0.5
        """
        return {
            "loss": self.loss,
            "perplexity": math.exp(min(self.loss, 700.0)),
            "bits_per_token": self.loss / math.log(2),
            "bits_per_byte": self.nats / math.log(2) / max(1, self.bytes),
            "tokens": self.tokens,
            "bytes": self.bytes,
            "documents": self.documents,
            "seconds": round(self.seconds, 3),
        }


def windows(targets: int, context: int, stride: int) -> Iterator[Window]:
    """Windows over a first token and `targets` more: each a target once, with at least context − stride before it.

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


@torch.no_grad()
def window_nats(model: LanguageModel, parts: Sequence[tuple[Tensor, int]], batch: int) -> list[float]:
    """Σ −log p over the counted targets of each part (ids of a window and one more, how many at its end count)."""
    device, out = model.embedding.weight.device, []
    for at in range(0, len(parts), batch):
        some = parts[at : at + batch]
        longest = max(len(ids) for ids, _ in some) - 1
        inputs = torch.zeros(len(some), longest, dtype=torch.long)
        labels = torch.full((len(some), longest), -100)
        for i, (ids, count) in enumerate(some):
            inputs[i, : len(ids) - 1] = ids[:-1]
            labels[i, len(ids) - 1 - count : len(ids) - 1] = ids[len(ids) - count :]
        hidden = model.hidden(inputs.to(device))
        weight = model.head_weight.to(hidden.dtype)
        for row, label in zip(hidden, labels.to(device), strict=True):  # a sum a row: windows are told apart
            out.append(_nats(row[label >= 0], weight, label[label >= 0]))
    return out


def _nats(hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    total = 0.0
    for h, y in zip(hidden.split(512), labels.split(512), strict=True):
        logits = h @ weight.T
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total += torch.nn.functional.cross_entropy(logits, y, reduction="sum").item()
    return total


def perplexity(
    model: LanguageModel,
    documents: Iterable[Document],
    first: int,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch: int = 8,
    advance: Callable[[float], object] = lambda count: None,
) -> Perplexity:
    """Over documents, each by itself after the token `first`; `stride` defaults to half the window."""
    context = context or model.config.context
    if context > model.config.context:
        raise UserError(f"the window is {context}, but the model's context is {model.config.context}")
    stride = stride or max(1, context // 2)
    begun, count, size, read, nats = time.perf_counter(), 0, 0, 0, 0.0

    def run(parts: list[tuple[Tensor, int]]) -> float:
        parts.sort(key=lambda part: len(part[0]))
        return sum(spread(parts, lambda some: window_nats(model, some, batch)))

    held: list[tuple[Tensor, int]] = []
    for document in documents:
        ids = torch.cat([torch.tensor([first]), torch.as_tensor(document.ids, dtype=torch.long)])
        for w in windows(len(ids) - 1, context, stride):
            held.append((ids[w.start : w.stop + 1], w.stop - w.first))
        count, size, read = count + len(ids) - 1, size + document.bytes, read + 1
        if len(held) >= 64 * batch:
            nats, held = nats + run(held), []
        advance(document.bytes)
    nats += run(held) if held else 0.0
    if count == 0:
        raise UserError("there is no text to measure: give a file or a prepared set that holds some")
    return Perplexity(nats, count, size, read, time.perf_counter() - begun)


def open_documents(path: str | Path, tokenizer: Tokenizer, limit: int | None = None) -> Iterator[Document]:
    """Documents of a prepared set (its end tokens left out), or of text files (one each; rows of .jsonl, .parquet)."""
    documents = _prepared(path, tokenizer) if is_prepared(path) else _texts(path, tokenizer)
    for i, document in enumerate(documents):
        if limit is not None and i >= limit:
            return
        yield document


def is_prepared(path: str | Path) -> bool:
    try:
        find_prefix(path)
    except UserError:
        return False
    return Path(path).suffix in ("", ".bin", ".idx") or not Path(path).is_file()


def _prepared(path: str | Path, tokenizer: Tokenizer) -> Iterator[Document]:
    held = Indexed(path, vocab=tokenizer.vocab_size)
    for i in range(held.documents):
        ids = held.document(i)
        ids = ids[ids != tokenizer.end_of_document].astype("int64")
        yield Document(ids, len(tokenizer.decode(ids.tolist()).encode()))


def _texts(path: str | Path, tokenizer: Tokenizer) -> Iterator[Document]:
    for source in find_sources([path]):
        ids, size = [], 0
        for unit in read_units(source, Reading(), tokenizer.cuts):
            if unit.left_out:
                continue
            ids += tokenizer.encode(unit.text)
            size += len(unit.text.encode())
            if unit.last:
                yield Document(ids, size)
                ids, size = [], 0
