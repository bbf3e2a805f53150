"""Print what the possible layouts of a training run over many GPUs need, and recommend one.

example: tokenformer plan lm/1.5b batch=512 --gpus 64 --memory 80GB

For each layout: estimated peak memory of the fullest GPU, bytes that it sends and receives in a step, and the time of a
step on GPUs of 400 TFLOP/s with 300 GB/s inside a node and 40 between nodes: rough, to compare layouts. Degrees among
the settings (parallel.shard=8) leave only the layouts that have them.
"""

import argparse
import dataclasses

from tokenformer.cli.main import split_settings
from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="config file, preset, or run folder")
    parser.add_argument("settings", nargs="*", default=[], metavar="a.b=c", help="keys laid over the config")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of the run")
    parser.add_argument("--memory", default="80GB", help="memory of one GPU (default: 80GB)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs joined by a fast network (default: 8)")
    parser.add_argument(
        "--failures", metavar="N/HOURSh", help="of one GPU, such as 1/50000h: the useful share of a run"
    )
    parser.add_argument("--save-seconds", type=float, default=10, help="that a checkpoint stops training (default: 10)")
    parser.add_argument("--restart-seconds", type=float, default=300, help="from a failure to training (default: 300)")
    parser.add_argument("--all", action="store_true", help="show every layout, not the best ten")


def run(args: argparse.Namespace) -> int:
    from tokenformer.config_train import DEGREES
    from tokenformer.growth.progressive import describe, resolve
    from tokenformer.growth.stages import chain
    from tokenformer.hub.open import read_config
    from tokenformer.parallel.estimate import choose
    from tokenformer.parallel.failures import describe as describe_failures
    from tokenformer.parallel.failures import mean_hours
    from tokenformer.train.run import with_batch_sizes

    hours = mean_hours(args.failures) if args.failures else None
    for name in ("gpus", "gpus_per_node", "save_seconds", "restart_seconds"):
        if getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give a number above 0")
    more, settings = split_settings(args.settings)
    config = read_config(args.config, *more, overrides=settings, training=True)
    config = with_batch_sizes(config, args.gpus if config.batch is None else 1)  # official batches are per GPU
    small_first = not isinstance(config.growth, list)
    config, stages = resolve(config)
    grown = chain(config.model, stages)[-1]
    if small_first:
        print(*describe(config), sep="\n")
    if stages:
        print(f"planned for the model after its {len(stages)} growths")
    config = dataclasses.replace(config, model=grown, growth=[])
    asked = {s.partition("=")[0].removeprefix("parallel.") for s in settings if s.startswith("parallel.")}
    fixed = {name: getattr(config.parallel, name) for name in DEGREES if name in asked}
    every, best = choose(config, args.gpus, gigabytes(args.memory) * 1e9, args.gpus_per_node, fixed)
    print(f"{args.config}: {args.gpus} GPUs of {args.memory}, batch {config.batch}")
    names = f"{'pipeline':>8} {'replicate':>9} {'shard':>6} {'token':>6} {'micro':>6}"
    print(f"{names} {'memory':>9} {'sent':>11} {'step':>9}")
    for e in [e for i, e in enumerate(every) if args.all or i < 10 or e is best]:
        d, mark = e.degrees, "  <- recommended" if e is best else ""
        line = f"{d.pipeline:>8} {d.replicate:>9} {d.shard:>6} {d.token:>6} {e.micro_batch:>6}"
        print(f"{line} {e.total / 1e9:>6.1f} GB {e.traffic / 1e9:>8.2f} GB {e.seconds:>7.2f} s{mark}")
    if best is None:
        print("none fits: give more GPUs, a smaller micro_batch, or train.activation_checkpointing=full")
    else:
        for what, parts in (("memory", best.memory), ("sent", best.sent)):
            print(f"{what}: {', '.join(f'{name} {n / 1e9:.2f} GB' for name, n in parts.items()) or 'nothing'}")
        named = {name: getattr(best.degrees, name) for name in DEGREES}
        print("recommended:", *(f"parallel.{name}={n}" for name, n in named.items() if n > 1 or name == "replicate"))
    if hours is not None:
        print(describe_failures(args.gpus, hours, args.save_seconds, args.restart_seconds))
    return 0


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
