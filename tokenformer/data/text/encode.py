"""Worker processes that encode: each is sent pieces of text and answers with token ids."""

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tokenformer.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, dtype_for
from tokenformer.data.workers import Workers


class Encoded(NamedTuple):
    """An encoded piece: the number of tokens of each of its units, all ids, and how many of them are special tokens."""

    counts: np.ndarray
    ids: bytes
    special: int


def encode_units(tokenizer: Tokenizer, texts: Sequence[str], lasts: Sequence[bool]) -> Encoded:
    """Encode units one after another, with the end-of-document id behind each that ends a document."""
    end = np.array([tokenizer.end_of_document], dtype_for(tokenizer.vocab_size))
    encoded = tokenizer.encode_batch(texts)
    counts = [len(ids) + last for ids, last in zip(encoded, lasts, strict=True)]
    parts = [part for ids, last in zip(encoded, lasts, strict=True) for part in ((ids, end) if last else (ids,))]
    ids = np.concatenate([end[:0], *parts])
    special = sum(int((ids == i).sum()) for i in tokenizer.special_ids)
    special -= sum(lasts) if tokenizer.end_of_document in tokenizer.special_ids else 0  # those are ours
    return Encoded(np.array(counts, np.int64), ids.tobytes(), special)


def start(_memory: mmap.mmap, text: str, name: str, end: int) -> Callable[..., Encoded]:
    """Run in a worker: return the function that encodes pieces of text, by a tokenizer's JSON (none: by bytes)."""
    tokenizer: Tokenizer = FileTokenizer(text, name, end) if text else ByteTokenizer()
    return lambda texts, lasts: encode_units(tokenizer, [text.decode() for text in texts], lasts)


class Encoders:
    """Several worker processes; `submit` returns a Future of an `Encoded`."""

    def __init__(self, tokenizer: Tokenizer, workers: int) -> None:
        text = "" if isinstance(tokenizer, ByteTokenizer) else tokenizer.to_json()
        setup = (text, tokenizer.name, tokenizer.end_of_document)
        self._workers = Workers("tokenformer.data.text.encode.start", workers, setup)
        self._threads = ThreadPoolExecutor(workers)

    def submit(self, texts: Sequence[bytes], lasts: Sequence[bool]) -> Future[Encoded]:
        return self._threads.submit(self._encode, texts, lasts)

    def _encode(self, texts: Sequence[bytes], lasts: Sequence[bool]) -> Encoded:
        with self._workers.idle() as worker:
            return worker.ask(texts, lasts)

    def close(self) -> None:
        self._workers.close()
        self._threads.shutdown(cancel_futures=True)
