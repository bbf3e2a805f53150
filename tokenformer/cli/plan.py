"""Print what the possible layouts of a training run over many GPUs need, and recommend one.

example: tokenformer plan lm/1.5b batch=512 --gpus 64 --memory 80GB

For each layout: estimated peak memory a GPU, and bytes that collectives move on one GPU in a step.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="config file or preset")
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="keys laid over the config")
    parser.add_argument("--gpus", type=int, required=True, help="how many")
    parser.add_argument("--memory", default="80GB", help="of one GPU (default: 80GB)")
    parser.add_argument("--all", action="store_true", help="every layout, not the best ten")


def run(args: argparse.Namespace) -> int:
    from tokenformer.errors import UserError
    from tokenformer.hub.official_config import load_config
    from tokenformer.parallel.plan import choose
    from tokenformer.train.run import settle

    if args.gpus < 1:
        raise UserError(f"--gpus is {args.gpus}: give a number above 0")
    config = settle(load_config(args.config, overrides=args.settings, training=True), 1)
    every, best = choose(config, args.gpus, gigabytes(args.memory) * 1e9)
    print(f"{args.config}: {args.gpus} GPUs of {args.memory}, batch {config.batch}")
    print(f"{'replicate':>9} {'shard':>6} {'token':>6} {'micro':>6} {'memory':>9} {'sent a step':>12}")
    for e in every if args.all else every[:10]:
        d, mark = e.degrees, "  <- recommended" if e is best else ""
        line = f"{d.replicate:>9} {d.shard:>6} {d.token:>6} {e.micro_batch:>6}"
        print(f"{line} {e.total / 1e9:>6.1f} GB {e.traffic / 1e9:>9.2f} GB{mark}")
    if best is None:
        print("none fits: give more GPUs, a smaller micro_batch, or train.activation_checkpointing=full")
        return 0
    d = best.degrees
    print(f"memory: {', '.join(f'{name} {n / 1e9:.2f}' for name, n in best.memory.items())} GB")
    print(f"recommended: parallel.replicate={d.replicate} parallel.shard={d.shard} parallel.token={d.token}")
    return 0


def gigabytes(text: str) -> float:
    """
    >>> gigabytes("80GB"), gigabytes("141")
    (80.0, 141.0)
    """
    from tokenformer.errors import UserError

    try:
        return float(text.upper().removesuffix("GB").strip())
    except ValueError:
        raise UserError(f"--memory is '{text}': give gigabytes, such as 80GB") from None
