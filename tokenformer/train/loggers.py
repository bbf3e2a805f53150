"""TensorBoard and Weights & Biases, both optional; the only file that imports them. metrics.jsonl is written always."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from tokenformer.config import Config, to_dict
from tokenformer.errors import UserError

Logger = Callable[[int, dict[str, float]], None]


def check(config: Config) -> None:
    """Refuse what is not installed before anything is written."""
    wanted = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb != "none"}
    for name, on in wanted.items():
        if on and importlib.util.find_spec(name) is None:
            raise UserError(f"log.{name} needs the package {name}: pip install 'tokenformer[log]'")


def open_loggers(config: Config, run: Path, run_id: str, step: int) -> list[tuple[Logger, Callable[[], None]]]:
    """(log, close) of each that the config asks for; `step` is where a resumed run goes on."""
    opened: list[tuple[Logger, Callable[[], None]]] = []
    if config.log.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

        def scalars(at: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, at)

        opened.append((scalars, writer.close))
    if config.log.wandb != "none":
        import wandb

        online = wandb.init(
            project=config.log.wandb_project,
            name=run.name,
            id=run_id,
            resume="allow",
            mode=config.log.wandb,
            dir=str(run),
            config=to_dict(config),
        )
        opened.append((lambda at, values: online.log(values, step=at), online.finish))
    return opened
