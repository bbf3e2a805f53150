"""Print what the possible layouts of a training run over many GPUs need, ranked by the expected time of a step.

example: tokenformer plan lm/1.5b batch=512 --gpus 64 --hardware h100

For each layout: estimated peak memory of the fullest GPU, bytes that it sends and receives in a step, the expected time
of a step and what that is spent on. The micro-batch, activation checkpointing, ZeRO-2 or ZeRO-3 and where gradients add
up are searched, too. What is among the settings (parallel.shard=8, micro_batch=4) stays as it is.
--hardware is a100, h100, h200, b200 or a YAML file; settings such as hardware.network=25 change single figures of it.
"""

import argparse
import dataclasses

from tokenformer.cli.main import split_settings
from tokenformer.errors import UserError
from tokenformer.terminal import table

HEAD = ("pipeline", "replicate", "shard", "token", "micro", "recompute", "sharding", "memory", "sent", "step", "why")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="config file, preset, or run folder")
    parser.add_argument("settings", nargs="*", default=[], metavar="a.b=c", help="keys laid over the config")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of the run")
    parser.add_argument("--hardware", default="h100", help="a100, h100, h200, b200 or a YAML file (default: h100)")
    parser.add_argument("--memory", help="memory of one GPU, such as 80GB (default: that of the hardware)")
    parser.add_argument("--spare", type=float, default=0.1, help="share of the memory that stays free (default: 0.1)")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs joined by fast links (default: those of the hardware)")
    parser.add_argument(
        "--failures", metavar="N/HOURSh", help="of one GPU, such as 1/50000h: the useful share of a run"
    )
    parser.add_argument("--save-seconds", type=float, default=10, help="that a checkpoint stops training (default: 10)")
    parser.add_argument("--restart-seconds", type=float, default=300, help="from a failure to training (default: 300)")
    parser.add_argument("--all", action="store_true", help="show every layout, not the best ten")


def run(args: argparse.Namespace) -> int:
    from tokenformer.growth.progressive import describe, resolve
    from tokenformer.growth.stages import chain
    from tokenformer.hub.open import read_config
    from tokenformer.parallel.choose import SEARCHED, choose, settings_of, trades
    from tokenformer.parallel.failures import describe as describe_failures
    from tokenformer.parallel.failures import mean_hours
    from tokenformer.parallel.hardware import read_hardware
    from tokenformer.train import fp8
    from tokenformer.train.run import with_batch_sizes

    hours = mean_hours(args.failures) if args.failures else None
    for name in ("gpus", "gpus_per_node", "save_seconds", "restart_seconds"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give a number above 0")
    if not 0 <= args.spare < 1:
        raise UserError(f"--spare is {args.spare}: give a share of the memory from 0 to below 1, such as 0.1")
    more, given = split_settings(args.settings)
    figures = [s.removeprefix("hardware.") for s in given if s.startswith("hardware.")]
    figures += [f"memory={gigabytes(args.memory)}"] if args.memory is not None else []
    figures += [f"per_node={args.gpus_per_node}"] if args.gpus_per_node is not None else []
    hardware = read_hardware(args.hardware, figures)
    given = [s for s in given if not s.startswith("hardware.")]
    config = read_config(args.config, *more, overrides=given, training=True)
    config = with_batch_sizes(config, args.gpus if config.batch is None else 1)  # official batches are per GPU
    small_first = not isinstance(config.growth, list)
    config, stages = resolve(config)
    models = chain(config.model, stages)
    if small_first:
        print(*describe(config), sep="\n")
    if stages:
        print(f"planned for the model after its {f'{len(stages)} growths' if len(stages) > 1 else 'growth'}")
    config = dataclasses.replace(config, model=models[-1], growth=[])
    if config.train.precision == "fp8":
        print(*fp8.planned(config, models, hardware), sep="\n")
    asked = {s.partition("=")[0] for s in given}
    every = dataclasses.asdict(config.parallel) | dataclasses.asdict(config.train) | {"micro_batch": config.micro_batch}
    fixed = {name: every[name] for name, key in SEARCHED.items() if key in asked}
    found, best = choose(config, args.gpus, hardware, fixed, args.spare)
    room = hardware.memory * 1e9 * (1 - args.spare)
    gpus = f"{args.gpus} GPU{'s' * (args.gpus > 1)} of {hardware.memory:g} GB ({args.hardware})"
    rows = [row(e, room, e is best) for i, e in enumerate(found) if args.all or i < 10 or e is best]
    table(HEAD, rows, f"{args.config}: {gpus}, {hardware.per_node} per node, batch {config.batch}")
    if best is None:
        least = min(e.total for e in found) / 1e9
        print(
            f"none fits: the smallest needs {least:.1f} GB, and {room / 1e9:.1f} GB may be used. Give more GPUs or a "
            "shorter model.context, or keep what is updated on the host (parallel.offload=true)"
        )
    else:
        for what, parts in (("memory", best.memory), ("sent", best.sent)):
            said = [f"{name} {n / 1e9:.2f} GB" for name, n in parts.items() if n > 5e6]
            print(f"{what}: {', '.join(said) or 'nothing'}")
        for trade in trades(best, hardware):
            print(f"instead: {trade}")
        print("recommended:", *settings_of(best, config))
        if (share := best.time["compute"] / best.seconds) < 0.5:
            print(f"a GPU computes for {share:.0%} of its time: give a larger batch or fewer GPUs to use them better")
    if config.parallel.offload:
        print("parallel.offload: the time of copies between GPUs and host is not counted")
    if hours is not None:
        print(describe_failures(args.gpus, hours, args.save_seconds, args.restart_seconds))
    return 0


def row(e, room: float, best: bool) -> tuple:
    """Return the line of one estimate."""
    from tokenformer.parallel.choose import reason, sharding

    d, recompute = e.degrees, e.config.train.activation_checkpointing
    sizes = (f"{e.total / 1e9:.1f} GB", f"{e.traffic / 1e9:.2f} GB", f"{e.seconds:.3f} s")
    why = reason(e, room) + "  <- recommended" * best
    return d.pipeline, d.replicate, d.shard, d.token, e.config.micro_batch, recompute, sharding(e), *sizes, why


def gigabytes(text: str) -> float:
    """
    >>> gigabytes("80GB"), gigabytes("141")
    (80.0, 141.0)
    """
    try:
        found = float(text.upper().removesuffix("GB").strip())
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise UserError(f"--memory is '{text}': give gigabytes, such as 80GB")
    return found
