"""Train several configs, one after the other, and draw them on one page.

example: tokenformer compare my.yml --transformer --out runs/compared
         tokenformer compare small.yml wide.yml data.path=data/books steps=500 --out runs/compared

Settings (a.b=c) are laid over every config. Data, seed, batch and context must be the same in all, so that the models
see the same samples in the same order. What was interrupted is resumed by the same command; what is finished is not
trained again. Into --out go a run for each config, compare.html, and compare.png where matplotlib is installed.
"""

import argparse
import dataclasses
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tokenformer.cli.main import split_settings

if TYPE_CHECKING:
    from tokenformer.config import Config

HARMLESS = ("log.", "checkpoint.", "validation.", "micro_batch:", "out:", "data.workers:")  # change no result


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="CONFIG", help="config files or presets, and a.b=c for all of them")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder for the runs and the page")
    parser.add_argument("--transformer", action="store_true", help="add a Transformer as large as the first model")
    parser.add_argument("--x", metavar="AXIS", default="compute", help="as for plot (default: compute)")


def run(args: argparse.Namespace) -> int:
    from tokenformer.cli.train import check
    from tokenformer.files import check_writable
    from tokenformer.models import cost
    from tokenformer.terminal import table

    configs = read_configs(args.words, args.transformer)
    for name, config in configs.items():
        check(config, args.out / name, resume=True)
        refuse_other_settings(config, args.out / name)
    for ending in ("html", "png"):
        check_writable(args.out / f"compare.{ending}")
    from tokenformer.train.page import write_page
    from tokenformer.train.plot import draw_png, read_curve
    from tokenformer.train.trainer import Trainer

    for name, config in configs.items():
        print(f"\n{name}: {cost(config.model).parameters:,} parameters", flush=True)
        command = ["tokenformer", *sys.argv[1:]]
        if (stop := Trainer(config, args.out / name, resume=True, command=command).run()) is not None:
            print(f"interrupted; the same command continues with {name}", file=sys.stderr)
            return 128 + stop
    curves = [read_curve(args.out / name, args.x, name) for name in configs]
    write_page(args.out / "compare.html", curves, args.x, " and ".join(configs))
    if importlib.util.find_spec("matplotlib"):
        draw_png(curves, args.out / "compare.png", args.x)
    facts = list(dict.fromkeys(fact for curve in curves for fact in curve.facts))
    shown = [[curve.facts.get(fact) for fact in facts] for curve in curves]
    rows = [[f"{v:,.4g}" if isinstance(v, float) else "–" if v is None else f"{v:,}" for v in row] for row in shown]
    print()
    table(["run", *facts], [[name, *row] for name, row in zip(configs, rows, strict=True)])
    print(args.out / "compare.html")
    return 0


def refuse_other_settings(config: "Config", folder: Path) -> None:
    """Refuse a run that was begun with other settings: its results would be shown as those of these settings."""
    from tokenformer.errors import UserError
    from tokenformer.growth.progressive import resolve
    from tokenformer.train.run import changes, earlier, with_batch_sizes

    before = earlier(folder, resume=True)
    if before is None:
        return
    config = with_batch_sizes(resolve(config)[0], world=1)
    if config.adapter and before.adapter:  # the trainer compares the base
        config = dataclasses.replace(config, adapter=dataclasses.replace(config.adapter, base=before.adapter.base))
    longer = ("steps:",) if config.steps > before.steps else ()
    other = [line for line in changes(folder, before, config) if not line.startswith((*HARMLESS, *longer))]
    if other:
        raise UserError(
            f"{folder} was begun with other settings ({'; '.join(other)}): keep them, or give another --out"
        )


def read_configs(words: list[str], transformer: bool) -> dict[str, "Config"]:
    """Return the configs by the names of their runs. Refuse those that would not be trained on the same samples."""
    from tokenformer.config import run_name
    from tokenformer.errors import UserError
    from tokenformer.hub.open import read_config
    from tokenformer.models.cost import equal_transformer

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("compare trains in one process: train each config by itself, then draw them with plot")
    sources, settings = split_settings(words)
    found: dict[str, Config] = {}
    for source in sources:
        name = run_name(source)
        if name in found:
            raise UserError(f"two configs are called {name}, and so would their runs: rename one of the files")
        found[name] = read_config(source, overrides=settings, training=True)
    if transformer and found:
        name, config = next(iter(found.items()))
        if config.start:
            unequal = f"{name} starts with the weights of {config.start}, and a Transformer would start with none"
            raise UserError(f"{unequal}: leave --transformer out, or give start=null")
        rival = equal_transformer(config.model)
        progressive = getattr(config.growth, "progressive", None)  # whose budget is another one than that of `steps`
        steps = max(1, round(config.steps * (progressive.budget if progressive else 1)))
        found[f"{name}-transformer"] = dataclasses.replace(config, model=rival, growth=[], steps=steps)
    if len(found) < 2:
        raise UserError("there is nothing to compare with: give a second config, or --transformer")
    first, *others = found
    for name in others:
        for what in ("data", "seed", "batch", "context"):
            values = [c.model.length if what == "context" else getattr(c, what) for c in (found[first], found[name])]
            if values[0] != values[1]:
                raise UserError(
                    f"{first} and {name} differ in {what}, so they would not see the same samples: make them equal"
                )
    return found
