"""Worker processes that read sources: each fills a micro-batch in memory that it shares with the loader."""

import mmap
from collections.abc import Callable, Sequence

import numpy as np

from tokenformer.data.source import Field, Source
from tokenformer.data.workers import Workers

Fields = dict[str, Field]


def _arrays(fields: Fields, rows: int, memory: mmap.mmap | None = None) -> tuple[dict[str, np.ndarray], int]:
    """Return the arrays of a micro-batch in a memory, and how many bytes they need."""
    arrays, end = {}, 0
    for name, field in fields.items():
        size = rows * int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize
        if memory is not None:
            arrays[name] = np.ndarray((rows, *field.shape), field.dtype, memory, end)
        end += -(-size // 64) * 64
    return arrays, end


def start(memory: mmap.mmap, sources: Sequence[Source], fields: Fields, rows: int) -> Callable[..., None]:
    """Run in a worker: return the function that reads samples of a source into the shared memory."""
    arrays, _ = _arrays(fields, rows, memory)

    def read(number: int, indices: np.ndarray, epochs: np.ndarray) -> None:
        sources[number].read(indices, epochs, {name: array[: len(indices)] for name, array in arrays.items()})

    return read


class Readers:
    """Worker processes that read sources; `read` may be called by as many threads as there are workers."""

    def __init__(self, sources: Sequence[Source], fields: Fields, rows: int, workers: int) -> None:
        self._fields, self._rows = fields, rows
        size = _arrays(fields, rows)[1]
        self.workers = Workers("tokenformer.data.readers.start", workers, (sources, fields, rows), size)
        self.close = self.workers.close

    def read(self, number: int, indices: np.ndarray, epochs: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Fill `out` with samples of source `number`."""
        with self.workers.idle() as worker:
            worker.ask(number, indices, epochs)
            for name, array in _arrays(self._fields, self._rows, worker.memory)[0].items():
                out[name][:] = array[: len(indices)]
