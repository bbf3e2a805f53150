"""TensorBoard and Weights & Biases, both optional; the only file that imports them. metrics.jsonl is written always."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokenformer.config import Config, to_dict
from tokenformer.errors import UserError


class Logger(NamedTuple):
    """A package that numbers are sent to."""

    name: str
    log: Callable[[int, dict[str, float]], object]  # (step, values by name)
    close: Callable[[], object]


def check(config: Config) -> None:
    """Refuse a logger that is not installed, before anything is written."""
    wanted = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb != "none"}
    for name, on in wanted.items():
        if on and importlib.util.find_spec(name) is None:
            raise UserError(f"log.{name} needs the package {name}: pip install 'tokenformer[log]'")


def open_loggers(config: Config, run: Path, run_id: str, step: int) -> list[Logger]:
    """Open the loggers that the config asks for; `step` is where a resumed run continues."""
    opened: list[Logger] = []
    if config.log.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

        def scalars(at: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, at)

        opened.append(Logger("tensorboard", scalars, writer.close))
    if config.log.wandb != "none":
        import wandb

        settings = {"project": config.log.wandb_project, "name": run.name, "mode": config.log.wandb, "dir": str(run)}
        try:
            online = wandb.init(id=run_id, resume="allow", config=to_dict(config), **settings)
        except (wandb.Error, OSError) as error:
            raise UserError(f"log.wandb could not be started ({error}): mend that, or set log.wandb=offline") from None
        opened.append(Logger("wandb", lambda at, values: online.log(values, step=at), online.finish))
    return opened
