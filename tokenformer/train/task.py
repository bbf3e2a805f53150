"""What turns a batch into a loss: the contract between the trainer and a task, and what all tasks share.

A task knows no layout, precision or compiler: it is given a model and calls it. The simplest one opens its data in
`__init__` and implements `loss`; language.py is the task of language models. Our own tasks are named in `TASKS`
of trainer.py; any other one is given to the trainer: `Trainer(…, task=MyTask)`.
"""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from tokenformer.config import Config
from tokenformer.data.loader import Batch, Loader
from tokenformer.errors import UserError
from tokenformer.parallel.mesh import Place
from tokenformer.parallel.parallelize import before_backward


class Task:
    """What is learned, from which data, and how it is measured."""

    unit = "samples"  # what is counted in log lines, totals, throughput and growth conditions
    loader: Loader  # what is trained on
    held_out: Loader | None = None  # what is measured on
    inherited: Mapping[str, bytes] = {}  # see `inherit`

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        """Open and check the data, and write nothing. `config` has its batch sizes as numbers."""
        self.config, self.place, self.device = config, place, device
        assert config.batch is not None
        self.batch, v = config.batch, config.validation  # samples of a step, over all ranks
        self.held_out_samples = v.samples if v.batches is None else v.batches * self.batch  # of a validation
        self.cut: dict[str, Any] = {  # how a loader is cut for this rank, and where its arrays lie
            "micro_batch": config.micro_batch,
            "rank": place.data_rank,
            "world": place.data_world,
            "allocate": pinned if device.type == "cuda" else np.empty,
        }

    @property
    def units_per_step(self) -> int:
        return self.batch

    def flops(self, cost: Any) -> float:
        """Return the training FLOPs per unit of a model of this cost; 0 where they are not known."""
        return 0.0

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses in a micro-batch on the device, and over how many it is."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def gradients(
        self, model: Any, batches: Iterator[Batch], scale: Tensor, pipeline: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Accumulate the gradients of loss × scale over the micro-batches of a step; return their total and count.

        A task whose loss is over the whole batch at once (pairs) overrides this. Only language models use `pipeline`.
        """
        total = count = torch.zeros((), device=self.device)
        for left in reversed(range(self.loader.micro_batches)):
            loss_sum, losses = self.loss(model, self.on_device(next(batches)))
            before_backward(model, self.place, last=not left)
            (loss_sum * scale).backward()
            total, count = total + loss_sum.detach(), count + losses
        return total, count

    def measures(self, model: Any) -> dict[str, float]:
        """Return `loss`, the mean over the same held-out samples each time; nothing if there are none.

        The trainer calls this, and `sample`, without gradients.
        """
        if self.held_out is None or not self.held_out.samples:
            return {}
        total, count = torch.zeros(2, device=self.device)
        self.held_out.samples_seen = 0
        for batch in self.held_out:
            loss_sum, losses = self.loss(model, self.on_device(batch))
            total, count = total + loss_sum, count + losses
            if batch.last:
                break
        total, count = self.place.sum(torch.stack([total, count]))
        return {"loss": (total / count).item()}

    def sample(self, model: Any) -> dict[str, str | bytes]:
        """Return samples to look at, by name: text goes into the metrics, bytes become files of samples/STEP/."""
        return {}

    def logged(self) -> dict[str, int]:
        """Return what else a log line counts, since the last one and over all ranks; every rank calls this."""
        return {}

    def files(self) -> dict[str, Any]:
        """Return the files that belong beside the weights, by name: text, or bytes."""
        return {}

    def inherit(self, folder: Path) -> None:
        """Keep what lies beside the weights that a run begins or goes on with, and is not among `files`."""
        from tokenformer.hub.folder import kept_files

        self.inherited = kept_files(folder, self.config.model)

    def on_device(self, batch: Batch) -> dict[str, Tensor]:
        """Return the fields of a micro-batch as tensors on the device."""
        return {name: on_device(array, self.device) for name, array in batch.fields.items()}


def check_switches(config: Config, given: str = "", on: str = "") -> None:
    """Refuse a growth by a switch that a task does not give, and name switches of the model that will not count.

    `given`: the switch that the task gives to the trunk `on`; none where it is empty.
    """
    gives = (
        f"this task gives '{given}'{f' to {on}' if on else ''} alone" if given else "text is learned without switches"
    )
    for stage in config.growth if isinstance(config.growth, list) else []:
        if stage.switch and (stage.switch, stage.on or "") != (given, on):
            where = f" on {stage.on}" if stage.on else ""
            what = f"growth.switch is '{stage.switch}'{where}, but {gives}"
            raise UserError(f"{what}, so what it adds would never learn: leave it out")
    every = {f"{name}.": trunk for name, trunk in config.model.trunks.items()} or {"": config.model}
    names = {name for at, trunk in every.items() for name in trunk.switch_names() - ({given} if at == on else set())}
    for name in sorted(names if config.adapter is None else ()):
        said = f"{gives}, not '{name}'" if given else f"text is learned without the switch '{name}'"
        warnings.warn(f"{said}: its segments and ids do not learn", stacklevel=3)


def pinned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Allocate pinned memory, from which a GPU copies while the program goes on."""
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(shape, dtype=kind, pin_memory=True).numpy()


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array of the loader to a device. Pinned memory keeps its own storage, which is then freed late enough."""
    tensor = array.base if isinstance(array.base, Tensor) else torch.from_numpy(array)
    return tensor.to(device, non_blocking=True)
