"""Train a model into a run folder.

example: tokenformer train lm/150m data.path=prepared/books batch=64 --out runs/books
         tokenformer train runs/books --resume

CONFIG is a file of ours or an official YAML file, a preset (lm/150m), or a run folder to go on with. An existing run is
never overwritten: --resume goes on from its newest checkpoint (and begins where there is none, so that a job script can
always give it). SIGTERM, SIGINT and SIGUSR1 save and leave.

Many processes: torchrun --nproc-per-node 8 -m tokenformer train CONFIG parallel.shard=8 (docs/parallelism.md).
"""

import argparse
import sys
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="config file, preset, or run folder")
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="keys laid over the config; more config files")
    parser.add_argument("--out", metavar="RUN", help="run folder (default: the config's `out`, or its name in runs/)")
    parser.add_argument("--resume", action="store_true", help="go on with the run")


def run(args: argparse.Namespace) -> int:
    from tokenformer.config import presets
    from tokenformer.errors import UserError
    from tokenformer.hub.open import read_config
    from tokenformer.parallel.mesh import together
    from tokenformer.train.trainer import Trainer

    source = Path(args.config)
    inside = (source / "config.yml").is_file()  # a run
    if args.resume and not args.out and not inside and not source.is_file() and args.config not in presets():
        raise UserError(f"there is no run at {source} to go on with: give its folder, or a config and --out")
    names = [args.config, *(s for s in args.settings if "=" not in s)]
    config = read_config(*names, overrides=[s for s in args.settings if "=" in s], training=True)
    default = source if inside else Path(config.out) if config.out else Path("runs") / source.with_suffix("").name
    out = Path(args.out) if args.out else default
    trainer = Trainer(config, out, resume=args.resume, command=["tokenformer", *sys.argv[1:]])
    return together(trainer.run)
