"""What a run keeps to resume: `checkpoints/step-00000040/` with model/, optim/, state.json and, written last, the
manifest. A checkpoint is written to a hidden folder and renamed when it is complete; `last` names the newest one.
`Trainer.resume` calls the functions that read one.
"""

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer.config import CheckpointConfig
from tokenformer.errors import UserError
from tokenformer.files import atomic_folder, check_manifest, write_text
from tokenformer.hub.dcp import read_tensors, stored, write_tensors
from tokenformer.hub.run_folder import Found, find_newest, remove_old
from tokenformer.hub.run_folder import expected_form as expected_form
from tokenformer.hub.run_folder import read_state as read_state
from tokenformer.parallel.layout import Layout
from tokenformer.parallel.mesh import Place
from tokenformer.train.rules import State


class Checkpoints:
    """Writes a run's checkpoints and removes old ones. In the background: tensors are copied, then a thread writes."""

    def __init__(self, run: Path, config: CheckpointConfig, place: Place, device: torch.device) -> None:
        self.run, self.config, self.place, self.device = run, config, place, device
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None
        self.saved: int | None = None  # the step of the last one that is complete

    def due(self, step: int) -> bool:
        return (self.config.every > 0 and step % self.config.every == 0) or step in self.config.also

    def save(
        self,
        step: int,
        layout: Layout,
        optimizer: State,
        files: dict[str, Any],
        state: dict,
        average: dict[str, Tensor] | None = None,
    ) -> None:
        """Write a checkpoint, with `files` beside the tensors in model/. In the background `wait` raises failures."""
        named: dict[str, list[tuple[str, str, Tensor]]] = {}
        named["model"] = [(n, n, t) for n, t in layout.named.items() if n not in layout.elsewhere]
        named["optim"] = [(f"{k}/{name}", name, t) for name, entry in optimizer.items() for k, t in entry.items()]
        if average is not None:
            named["average"] = [(name, name, tensor) for name, tensor in average.items()]
        parts = {
            which: {key: layout.part(name, t) for key, name, t in tensors if layout.writes(name, t)}
            for which, tensors in named.items()
        }
        if not self.in_background(parts):
            return self._write(step, parts, files, state)
        for part in parts.values():
            part.update({name: tensor.to("cpu", copy=True) for name, tensor in part.items()})
        self.pending = self.thread.submit(self._write, step, parts, files, state)

    def in_background(self, parts: dict[str, dict[str, Any]]) -> bool:
        """Tell whether to write while training continues; all ranks decide the same.

        `auto`: on GPUs, if the memory of every host has room for the copies and half as much again. On a CPU the
        thread would take the cores of the training.
        """
        if self.config.background != "auto":
            return self.config.background
        if self.device.type == "cpu":
            return False
        mine = sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values())
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return not self.place.max(1.5 * mine * processes > free_memory())

    def wait(self) -> None:
        """Wait until nothing is being written; raise if the last one failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, parts: dict[str, dict[str, Any]], files: dict[str, Any], state: dict) -> None:
        """Write this rank's parts into a folder that the first rank makes, completes and renames."""
        path = self.run / "checkpoints" / f"step-{step:08d}"
        known: dict[str, dict] = {}  # of all ranks, on the first
        try:
            with plain_reasons(), contextlib.ExitStack() as hidden:

                def begin() -> Path:
                    with plain_reasons():
                        return hidden.enter_context(atomic_folder(path, known=known))

                folder = self.place.run_on_first(begin)

                def write() -> dict[str, dict]:
                    return {
                        f"{part}/{name}": entry
                        for part, tensors in parts.items()
                        for name, entry in write_tensors(folder / part, tensors, self.place.rank).items()
                    }

                for entries in self.place.run_on_each(write):
                    known.update(entries)

                def complete() -> None:
                    for name, text in files.items():
                        (folder / "model" / name).write_bytes(text.encode() if isinstance(text, str) else text)
                    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
                    with plain_reasons():
                        hidden.close()
                    write_text(self.run / "checkpoints" / "last", path.name + "\n")
                    remove_old(self.run, self.config.keep, self.config.keep_every)

                self.place.run_on_first(complete)
        except (OSError, UserError) as error:
            raise CheckpointFailed(f"the checkpoint of step {step} could not be written ({reason(error)})") from error
        self.saved = step


class CheckpointFailed(Exception):
    """A checkpoint could not be written; the ones before it are untouched."""


@contextlib.contextmanager
def plain_reasons() -> Iterator[None]:
    """Raise the operating system's error instead of the sentence that `atomic_folder` makes of it."""
    try:
        yield
    except UserError as error:
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def reason(error: BaseException) -> str:
    """Return the operating system's own words."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def free_memory() -> int:
    """Return the bytes that this host can still give to programs."""
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def find_together(run: Path, place: Place, verify: str) -> Found:
    """Find the newest whole checkpoint, the same on every rank; each of them reads its share of the files.

    `verify` sizes: weights are compared by their size alone, by the first rank.
    """
    if verify == "sizes":
        return place.run_on_first(lambda: find_newest(run, functools.partial(check_manifest, values=False)))

    def check(path: Path) -> None:
        place.run_on_each(lambda: check_manifest(path, share=(place.rank, place.world)))

    return find_newest(run, check)


def read_model(checkpoint: Path, layout: Layout) -> None:
    """Read the weights into the layout's own parameters; any layout may have written them."""
    names = layout.splits.keys() - layout.elsewhere
    read_tensors(checkpoint / "model", layout.parts(), names)


def read_average(checkpoint: Path, layout: Layout) -> dict[str, Tensor] | None:
    """Read this rank's part of the averaged weights, where the run had them."""
    if not (checkpoint / "average").is_dir():
        return None
    found = {name: torch.empty_like(p) for name, p in layout.named.items() if name not in layout.elsewhere}
    into, names = {n: layout.part(n, tensor) for n, tensor in found.items()}, layout.splits.keys() - layout.elsewhere
    read_tensors(checkpoint / "average", into, names)
    return found


def read_optimizer(checkpoint: Path, layout: Layout) -> State:
    """Read the optimizer's state of this rank's parts of the parameters."""
    state: State = {}
    held = stored(checkpoint / "optim")
    for name, meta in held.items():
        kind, _, parameter = name.partition("/")
        if parameter in layout.named:
            shape = layout.named[parameter].shape if meta.size else ()
            state.setdefault(parameter, {})[kind] = torch.empty(shape, dtype=meta.properties.dtype)
    into = {f"{kind}/{name}": layout.part(name, t) for name, entry in state.items() for kind, t in entry.items()}
    read_tensors(checkpoint / "optim", into, held)
    return state


def rng_state() -> dict[str, list[int]]:
    """Return the random states as plain integers."""
    state = {"cpu": torch.get_rng_state().tolist()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def restore_rng(state: dict[str, list[int]]) -> None:
    torch.set_rng_state(torch.tensor(state["cpu"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
