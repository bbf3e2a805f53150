"""Processes that encode: each is sent pieces of text and answers with ids."""

import json
import mmap
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tokenformer.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, dtype_for
from tokenformer.data.workers import Answer, Worker, Workers

_LENGTH = struct.Struct("<Q")


class Encoded(NamedTuple):
    """What became of a piece: tokens of each of its units, all ids, and how many of them are special tokens."""

    counts: np.ndarray
    ids: bytes
    special: int


def encode_units(tokenizer: Tokenizer, texts: Sequence[str], lasts: Sequence[bool]) -> Encoded:
    """Ids of units one after another, with the end-of-document id behind each that ends a document."""
    end = np.array([tokenizer.end_of_document], dtype_for(tokenizer.vocab_size))
    encoded = tokenizer.encode_batch(texts)
    counts = [len(ids) + last for ids, last in zip(encoded, lasts, strict=True)]
    parts = [part for ids, last in zip(encoded, lasts, strict=True) for part in ((ids, end) if last else (ids,))]
    ids = np.concatenate([end[:0], *parts])
    special = sum(int((ids == i).sum()) for i in tokenizer.special_ids)
    special -= sum(lasts) if tokenizer.end_of_document in tokenizer.special_ids else 0  # those are ours
    return Encoded(np.array(counts, np.int64), ids.tobytes(), special)


def start(setup: bytes, memory: mmap.mmap) -> Answer:
    """Run in a worker: what turns pieces of text into ids, by the tokenizer that `setup` holds."""
    about = json.loads(setup)
    tokenizer: Tokenizer = ByteTokenizer()
    if about["json"]:
        tokenizer = FileTokenizer(about["json"], about["name"], about["end"])

    def encode(payload: bytes) -> Sequence[bytes]:
        (units,) = _LENGTH.unpack_from(payload)
        lengths = np.frombuffer(payload, np.int64, units, 8)
        lasts = np.frombuffer(payload, np.bool_, units, 8 + 8 * units)
        ends = 8 + 9 * units + np.cumsum(lengths)
        texts = [payload[e - n : e].decode() for e, n in zip(ends.tolist(), lengths.tolist(), strict=True)]
        result = encode_units(tokenizer, texts, lasts.tolist())
        return _LENGTH.pack(result.special), result.counts.tobytes(), result.ids

    return encode


class Encoders:
    """A number of worker processes; `submit` gives a Future of an `Encoded`."""

    def __init__(self, tokenizer: Tokenizer, workers: int, end: str | None = None) -> None:
        text = "" if isinstance(tokenizer, ByteTokenizer) else tokenizer.to_json()
        setup = json.dumps({"json": text, "name": tokenizer.name, "end": end}).encode()
        self._workers = Workers("tokenformer.data.text.encode.start", workers, setup)
        self._threads = ThreadPoolExecutor(workers)

    def submit(self, texts: Sequence[bytes], lasts: Sequence[bool]) -> Future[Encoded]:
        lengths = np.array([len(t) for t in texts], np.int64).tobytes()
        head = _LENGTH.pack(len(texts)) + lengths + np.array(lasts, np.bool_).tobytes()
        body = b"".join(texts)

        def encode(worker: Worker) -> Encoded:
            answer = worker.ask(head, body)
            (special,) = _LENGTH.unpack_from(answer)
            return Encoded(np.frombuffer(answer, np.int64, len(texts), 8), answer[8 + 8 * len(texts) :], special)

        return self._threads.submit(self._workers.run, encode)

    def close(self) -> None:
        self._workers.close()
        self._threads.shutdown(cancel_futures=True)
