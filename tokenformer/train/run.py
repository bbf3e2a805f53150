"""The run folder: what may be begun or continued there, by one process at a time, and how a user continues it."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from tokenformer import config as native
from tokenformer.config import Config
from tokenformer.errors import UserError
from tokenformer.files import writing
from tokenformer.hub.run_folder import all_steps

FIXED = ("batch", "seed", "start", "adapter")  # another value makes another run; so do another model and optimizer
ELSEWHERE = "give another --out"
OWN = {*".lock config.yml environment.json metrics.jsonl log trace.json checkpoints samples tensorboard wandb".split()}


def with_batch_sizes(config: Config, world: int, pipeline: int = 1, before: Config | None = None) -> Config:
    """Return the config with `batch` and `micro_batch` as numbers that divide.

    `world` ranks have a share of the batch each; the micro-batches of a share go through `pipeline` ranks. A run that
    goes on keeps the batch that it had `before`.

    >>> from tokenformer.config import load
    >>> config = with_batch_sizes(load("lm/150m", overrides=["batch=12", "micro_batch=2"]), world=3)
    >>> config.batch, config.micro_batch
    (12, 2)
    """
    batch, micro = before.batch if before and config.batch is None else config.batch, config.micro_batch
    if batch is None:
        if micro is None or config.accumulation is None:
            if config.start:
                raise UserError(
                    f"{config.start} has weights but no recipe, so batch is missing: give a config before it, such as "
                    f"lm/3m {config.start}, or batch, steps and optimizer.rate yourself"
                )
            raise UserError("batch is missing: say how many sequences a step has, such as batch=64")
        batch = micro * config.accumulation * world
    micro = min(micro or batch, max(1, batch // world))  # a preset's may be larger than a small batch
    if batch % (micro * world):
        raise UserError(
            f"batch {batch} cannot be cut into micro-batches of {micro} "
            f"on each of {world} ranks: give a multiple of {micro * world}, or another micro_batch"
        )
    if (count := batch // (micro * world)) % pipeline:
        raise UserError(
            f"a step has {count} micro-batches, not a multiple of the {pipeline} ranks of the pipeline: "
            "give another micro_batch or batch"
        )
    return dataclasses.replace(config, batch=batch, micro_batch=micro, accumulation=None)


def earlier(folder: Path, resume: bool) -> Config | None:
    """Return the config of the run that stands in the folder, if there is something to continue.

    Refuse a folder that holds something, unless it is to be continued or is a run that has not come to a checkpoint.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, but a run is a folder: give another name by --out")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    kept = folder / "checkpoints"
    continued = kept.is_dir() and any(not path.name.startswith(".") for path in kept.iterdir())
    if not resume and names and (continued or ".lock" not in names or names - OWN):
        raise UserError(f"{folder} is there already: go on with it by --resume, or give another name by --out")
    if not continued:
        return None
    if not (folder / "config.yml").is_file():
        raise UserError(f"{folder} has checkpoints but no config.yml: put it back, or give another name by --out")
    return native.load(folder / "config.yml")


def changes(folder: Path, was: Config, now: Config) -> list[str]:
    """Return what differs from the run's own config, in words. Refuse what would make it another run."""
    pairs = {name: (getattr(was, name), getattr(now, name)) for name in FIXED}
    if now.adapter:  # its digest says which weights they are, wherever they lie now
        del pairs["start"]
    pairs["task"] = (was.task or was.model.of, now.task or now.model.of)
    pairs["optimizer.kind"] = (was.optimizer.kind, now.optimizer.kind)
    if was.model.resolved() != now.model.resolved():
        lines = differences(native.to_dict(was.model.resolved()), native.to_dict(now.model.resolved()), "model.")
        raise UserError(f"{folder} was begun with another model ({'; '.join(lines)}): keep it, or give another --out")
    for name, (old, new) in pairs.items():
        if old != new and dataclasses.is_dataclass(old) and dataclasses.is_dataclass(new):
            lines = "; ".join(differences(native.to_dict(old), native.to_dict(new), f"{name}."))
            raise UserError(f"{folder} was begun with another {name} ({lines}): keep it, or give another --out")
        if old != new:
            raise UserError(f"{folder} was begun with {name} {old}, not {new}: keep it, or give another --out")
    reached = max(all_steps(folder), default=0)
    if now.steps < min(reached, was.steps):
        raise UserError(
            f"{folder} has {reached} steps behind it, and steps is {now.steps}: give more, or another --out"
        )
    return differences(native.to_dict(was), native.to_dict(now))


def differences(was: dict, now: dict, at: str = "") -> list[str]:
    """Return the keys whose values differ, with both values.

    >>> differences({"a": {"b": 1}}, {"a": {"b": 2}, "c": 3})
    ['a.b: 1 → 2', 'c: None → 3']
    """
    lines = []
    for name in [*was, *(n for n in now if n not in was)]:
        old, new, where = was.get(name), now.get(name), f"{at}{name}"
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{where}.")
        elif old != new:
            lines.append(f"{where}: {old} → {new}")
    return lines


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock the folder of a run: one process trains it at a time."""
    import fcntl

    with contextlib.ExitStack() as held:
        with writing(f"the run {folder}", ELSEWHERE):
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(folder / ".lock", "w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is being trained by another process: wait for it, or stop it first") from None
        except OSError as error:
            give = "mount its file system with locks, or give another --out"
            raise UserError(f"{folder} cannot be locked ({error.strerror}): {give}") from None
        yield


def resume_command(folder: Path, alone: bool) -> str:
    launcher = "" if alone else f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE')} -m "
    return f"{launcher}tokenformer train {folder} --resume"


def less_memory(config: Config, to: int | None = None) -> str:
    """Return which settings to give if the memory does not suffice, such as the micro-batch `to`."""
    micro = config.micro_batch or 1
    if micro == 1:
        return "train.activation_checkpointing=full, a larger parallel.shard or a smaller model (micro_batch= is 1)"
    return f"micro_batch={to or micro // 2} (it is {micro}; the batch of {config.batch} stays as it is)"
