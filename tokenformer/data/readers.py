"""Sources that are read by processes: each fills a micro-batch in memory that it shares with the loader."""

import json
import mmap
import pickle
import sys
import traceback
from collections.abc import Sequence

import numpy as np

from tokenformer.data.source import Field, Source
from tokenformer.data.workers import Answer, Worker, Workers
from tokenformer.errors import UserError


def _arrays(fields: dict[str, Field], rows: int, memory: mmap.mmap | None = None) -> tuple[dict[str, np.ndarray], int]:
    """The arrays of a micro-batch in a memory, and how many bytes they need."""
    arrays, end = {}, 0
    for name, field in fields.items():
        size = rows * int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize
        if memory is not None:
            arrays[name] = np.ndarray((rows, *field.shape), field.dtype, memory, end)
        end += -(-size // 64) * 64
    return arrays, end


def start(setup: bytes, memory: mmap.mmap) -> Answer:
    """Run in a worker: what reads samples of the sources that `setup` holds. An empty answer says that it went well."""
    sys.path[:], pickled = pickle.loads(setup)  # first the paths: they say where the sources' classes are
    sources, fields, rows = pickle.loads(pickled)
    arrays, _ = _arrays(fields, rows, memory)

    def read(question: bytes) -> Sequence[bytes]:
        number, *both = np.frombuffer(question, np.int64)
        indices, epochs = np.array(both, np.int64).reshape(2, -1)
        try:
            sources[number].read(indices, epochs, {name: array[: len(indices)] for name, array in arrays.items()})
        except UserError as error:
            return [json.dumps(["user", str(error)]).encode()]
        except Exception:
            return [json.dumps(["bug", traceback.format_exc()]).encode()]
        return []

    return read


class Readers:
    """Worker processes that read sources; `read` may be called by as many threads as there are workers."""

    def __init__(self, sources: Sequence[Source], fields: dict[str, Field], rows: int, workers: int) -> None:
        self._fields, self._rows = fields, rows
        setup = pickle.dumps((sys.path, pickle.dumps((list(sources), fields, rows))))
        self.workers = Workers("tokenformer.data.readers.start", workers, setup, _arrays(fields, rows)[1])
        self.close = self.workers.close

    def read(self, number: int, indices: np.ndarray, epochs: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Fill `out` with samples of source `number`."""

        def fill(worker: Worker) -> None:
            failed = worker.ask(np.array([number, *indices, *epochs], np.int64).tobytes())
            if failed:
                kind, text = json.loads(failed)
                raise UserError(text) if kind == "user" else RuntimeError(f"a worker could not read the data:\n{text}")
            for name, array in _arrays(self._fields, self._rows, worker.memory)[0].items():
                out[name][:] = array[: len(indices)]

        self.workers.run(fill)
