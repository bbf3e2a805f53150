"""Small sets that are written by hand, without a tokenizer and a description."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tokenformer.data.text.indexed import set_files, write_index


def write_set(prefix: str | Path, documents: Iterable[Sequence[Sequence[int]]], dtype: type = np.uint16) -> None:
    """Write a set from documents, each a list of items (lists of ids)."""
    documents, paths = list(documents), set_files(prefix)
    items = [np.asarray(item, dtype) for document in documents for item in document]
    paths["tokens"].write_bytes(b"".join(item.tobytes() for item in items))
    sizes, marks = np.array([len(item) for item in items], np.int32), np.cumsum([0, *map(len, documents)])
    write_index(paths["index"], np.dtype(dtype), sizes, marks.astype(np.int64))
