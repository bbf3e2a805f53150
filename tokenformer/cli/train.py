"""Train a model into a run folder.

example: tokenformer train lm/150m data.path=prepared/books batch=64 --out runs/books
         tokenformer train runs/books --resume
         tokenformer train bigger data.path=prepared/books batch=64 --out runs/bigger

CONFIG is a file of ours or an official YAML file, a preset (lm/150m), or a run folder to resume (--resume). Weights
instead (a folder, a run, a model of the hub) begin a new run, named by --out, with their model and these weights;
start=null begins from scratch. An existing run is never overwritten: --resume continues from its newest checkpoint (and
begins the run where there is none, so that a job script can always give it). SIGTERM, SIGINT and SIGUSR1 save a
checkpoint and stop.

--keys lists every key with its type, default and meaning.

Many processes: torchrun --nproc-per-node 8 -m tokenformer train CONFIG parallel.shard=8 (docs/parallelism.md).
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tokenformer.cli.main import first_config, split_settings

if TYPE_CHECKING:
    from tokenformer.config import Config


def arguments(parser: argparse.ArgumentParser) -> None:
    help = "config file, preset, run folder, or weights to begin with"
    parser.add_argument("config", metavar="CONFIG", type=first_config, help=help)
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="a.b=c", help="keys laid over the config; more config files"
    )
    parser.add_argument("--out", metavar="RUN", help="run folder (default: the config's `out`, or its name in runs/)")
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    parser.add_argument("--keys", action=ShowKeys, nargs=0, help="list every key that a config may have, and leave")


class ShowKeys(argparse.Action):
    """Prints a table of all keys, wherever it stands among the arguments."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from tokenformer.config import Config
        from tokenformer.strict import Key, all_keys
        from tokenformer.terminal import table

        table(Key._fields, all_keys(Config))
        parser.exit()


def run(args: argparse.Namespace) -> int:
    from tokenformer.config import presets, run_name
    from tokenformer.errors import UserError
    from tokenformer.hub.open import means_weights, read_config
    from tokenformer.parsing import is_file, is_folder

    source, given = Path(args.config), Path(args.out) if args.out else None
    inside = is_file(source / "config.yml")  # a run, or a folder of weights
    if args.resume and not given and not inside and not is_file(source) and args.config not in presets():
        raise UserError(f"there is no run at {source} to resume: give its folder, or a config and --out")
    itself = args.resume and inside and (given is None or given.resolve() == source.resolve())
    if itself and not is_folder(source / "checkpoints") and means_weights(source):
        raise UserError(f"{source} holds weights but no run to resume: give --out RUN to begin one with them")
    more, settings = split_settings(args.settings)
    config = read_config(source / "config.yml" if itself else args.config, *more, overrides=settings, training=True)
    if not itself and given is None and config.out is None and means_weights(args.config):
        raise UserError(
            f"{source} holds weights, and what is trained from them needs a folder of its own: give --out RUN"
            + (", or --resume to continue this run" if is_folder(source / "checkpoints") else "")
        )
    default = source if itself else Path(config.out) if config.out else Path("runs") / run_name(source)
    check(config, given or default, args.resume)
    from tokenformer.parallel.mesh import run_rank
    from tokenformer.train.trainer import Trainer

    trainer = Trainer(config, given or default, resume=args.resume, command=["tokenformer", *sys.argv[1:]])
    return run_rank(trainer.run)


def check(config: "Config", folder: Path, resume: bool) -> None:
    """Refuse frequent mistakes before torch is imported, which takes seconds; the trainer checks everything."""
    from tokenformer.data.text.samples import find_sets
    from tokenformer.eval.ranks import check_launcher
    from tokenformer.growth.progressive import resolve
    from tokenformer.train.run import earlier, with_batch_sizes

    check_launcher()
    resolve(config)
    before = earlier(folder, resume)
    if before is None and os.environ.get("WORLD_SIZE", "1") == "1":
        with_batch_sizes(config, world=1)
    if config.task in (None, "language") and config.model.of == "language":
        find_sets(config.data)
