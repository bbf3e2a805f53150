"""Counts what a layout sends in a step. No test in here."""

import json
from pathlib import Path

import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenformer.config import load
from tokenformer.parallel.traffic import Cut, Rank, sent
from tokenformer.train.trainer import Trainer


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
    """Writes what every rank sends in a step, counted and predicted; of rank 0 also how many collectives a micro-batch

    has: {"forward": {collective: how many}, "backward": …}.
    """
    trainer = Trainer(load(file, overrides=settings), Path(out).with_suffix(""))
    trainer.build()
    place, task, found = trainer.place, trainer.task, {}
    trainer.batches = iter(task.loader)
    if trainer.layout.pipeline is not None:
        trainer.train_step()  # in the first one the stages tell each other their shapes
    elif trainer.config.train.activation_checkpointing == "none":  # what is made again confuses CommDebugMode
        with CommDebugMode() as comm:
            loss, _ = task.loss(trainer.model, task.on_device(next(trainer.batches)))
            found["forward"] = {str(k).split(".")[-1]: n for k, n in comm.get_comm_counts().items()}
        with CommDebugMode() as comm:
            loss.backward()
            found["backward"] = {str(k).split(".")[-1]: n for k, n in comm.get_comm_counts().items()}
    trainer.layout.zero_grad()
    with Bytes() as moved:
        trainer.stopping()
        trainer.train_step()
    here = Rank(place.pipeline, place.data_rank, place.token)
    found["counted"], found["formula"] = moved.total, sent(Cut(trainer.config), place.degrees, here)
    Path(f"{out}-{place.rank}.json").write_text(json.dumps(found))
