"""A source that computes its samples from their numbers, for threads or processes."""

import os

import numpy as np

from tokenformer.data.source import Field
from tokenformer.errors import UserError


class Squares:
    """Sample i of epoch e: i, the process that read it, and a small picture made of i and e."""

    def __init__(self, count: int, processes: bool, name: str = "squares", shuffled: bool = True) -> None:
        self.count, self.processes, self.shuffled = count, processes, shuffled
        self.identity = {"data": name, "size": "3x4"}
        self.fields = {
            "index": Field((), np.int64, -1),
            "process": Field((), np.int32),
            "picture": Field((3, 4), np.float32, 0.5),
        }

    def __len__(self) -> int:
        return self.count

    def read(self, indices: np.ndarray, epochs: np.ndarray, out: dict[str, np.ndarray]) -> None:
        if self.identity["data"] == "bad" and 7 in indices:
            raise UserError("picture 7 is damaged: get it anew")
        if self.identity["data"] == "broken" and 7 in indices:
            raise IndexError("seven")
        if self.identity["data"] == "dying" and 7 in indices:
            os.kill(os.getpid(), 9)
        print(end=" ", flush=True)  # what a library prints must not get among the answers
        out["index"][:] = indices
        out["process"][:] = os.getpid()
        out["picture"][:] = (indices + 1000 * epochs)[:, None, None] ** 2 + np.arange(12).reshape(3, 4)
