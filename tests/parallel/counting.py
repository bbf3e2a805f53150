"""Counts what a layout sends in one forward and backward pass of one micro-batch. No test in here."""

import json
from pathlib import Path

import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenformer.config import load
from tokenformer.parallel.mesh import Place
from tokenformer.parallel.plan import micro_batch_bytes
from tokenformer.train.task import LanguageTask


class Bytes(TorchDispatchMode):
    """Bytes of every collective: the larger of what goes in and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "c10d" in name and "wait" not in name:
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
            self.total += max(t.nbytes for t in tensors)
        return result


def count(out: str, file: str, settings: list[str]) -> None:
    """Writes {"forward": {collective: how many}, "backward": …} of rank 0."""
    config = load(file, overrides=settings)
    place = Place(config.parallel)
    task = LanguageTask(config, place, torch.device("cpu"))
    place.start(torch.device("cpu"))
    layout = task.build(config.model, task.first_values())
    batch = next(iter(task.batches()))
    found = {}
    with CommDebugMode() as comm:
        loss, _ = task.loss(layout.model, batch)
        found["forward"] = {str(k).split(".")[-1]: n for k, n in comm.get_comm_counts().items()}
    with CommDebugMode() as comm:
        loss.backward()
        found["backward"] = {str(k).split(".")[-1]: n for k, n in comm.get_comm_counts().items()}
    with Bytes() as sent:
        task.loss(layout.model, batch)[0].backward()
    found["bytes"] = sent.total
    found["formula"] = sum(micro_batch_bytes(config, place.degrees, config.micro_batch or 1).values())
    if place.first:
        Path(out).write_text(json.dumps(found))
