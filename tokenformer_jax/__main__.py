"""The twin's command line, with the YAML files, presets and settings of `tokenformer`.

example: python -m tokenformer_jax train lm/150m data.path=prepared/books batch=64 --out runs/books
         python -m tokenformer_jax generate runs/books --prompt "The " --tokens 40 --temperature 0.8
         python -m tokenformer_jax eval runs/books    # the loss on held-out text
"""

import argparse
import dataclasses
import json
import math
import re
import sys
import tempfile
from pathlib import Path

from tokenformer.cli.main import Verb, split_settings
from tokenformer.errors import UserError, out_of_memory
from tokenformer.parsing import is_file
from tokenformer_jax import need_jax


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    found = Verb("python -m tokenformer_jax", description=__doc__, formatter_class=raw)
    verbs = found.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Verb)
    train = verbs.add_parser("train", help="train a model into a run folder")
    train.add_argument("config", metavar="CONFIG", help="config file, preset, run folder, or weights to begin with")
    train.add_argument("--out", metavar="RUN", help="run folder (default: the config's `out`, or its name in runs/)")
    train.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    measure = verbs.add_parser("eval", help="held-out loss and perplexity of a run, or of weights on a prepared set")
    measure.add_argument("config", metavar="MODEL", help="run, or folder of weights (then also data.path=SET)")
    for verb in (train, measure):
        verb.add_argument("settings", nargs="*", default=[], metavar="a.b=c", help="keys laid over the config")
        verb.add_argument("--distributed", nargs="?", const="", metavar="HOST:PORT,NUMBER,COUNT", help="one of several")
    generate = verbs.add_parser("generate", help="continue a text")
    generate.add_argument("model", metavar="MODEL", help="our folder, or a run")
    generate.add_argument("--prompt", default="", help="text to continue")
    generate.add_argument("--tokens", type=int, default=64, help="how many to add (default 64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (default): always the most likely token")
    generate.add_argument("--seed", type=int, default=0, help="of sampling")
    for verb in (train, measure, generate):
        verb.set_defaults(parser=verb)
    return found


def run(args: argparse.Namespace) -> int:
    need_jax()
    import jax
    import numpy as np

    from tokenformer.config import run_name
    from tokenformer.data.text.tokenizer import FileTokenizer
    from tokenformer.hub.open import read_config
    from tokenformer_jax import How, generator, load
    from tokenformer_jax.train import Trainer

    if args.verb == "generate":
        model = load(args.model)
        if model.tokenizer_json is None:
            raise UserError(f"{args.model} has no tokenizer beside it: write one there by `tokenformer convert`")
        tokenizer = FileTokenizer(model.tokenizer_json, f"of {args.model}")
        ids = np.array([tokenizer.encode(args.prompt) or [tokenizer.end_of_document]])
        how = How(None if jax.default_backend() == "cpu" else jax.numpy.bfloat16)
        made = generator(model.config, how)(model.params, ids, args.tokens, args.temperature, args.seed)
        print(tokenizer.decode(made[0].tolist()))
        return 0
    if args.distributed is not None:
        found = re.fullmatch(r"(.+:\d+),(\d+),(\d+)", args.distributed)
        if args.distributed and not found:
            raise UserError(f"--distributed is {args.distributed}: give HOST:PORT,NUMBER,COUNT; nothing on a TPU slice")
        address, number, count = (found[1], int(found[2]), int(found[3])) if found else (None, None, None)
        jax.distributed.initialize(address, count, number)
    source, (more, settings) = Path(args.config), split_settings(args.settings)
    if args.verb == "train":
        itself = args.resume and is_file(source / "config.yml") and args.out in (None, args.config)
        config = read_config(source / "config.yml" if itself else source, *more, overrides=settings, training=True)
        default = source if itself else Path(config.out or Path("runs") / run_name(source))
        asked = Trainer(config, args.out or default, resume=args.resume).run()
        return 128 + asked if asked else 0
    config = read_config(source, *more, overrides=[*settings, "growth=[]"])
    with tempfile.TemporaryDirectory() as nothing:  # a run that never begins
        found = Trainer(dataclasses.replace(config, batch=config.batch or 8), nothing).measure()
    if found is None:
        raise UserError(f"the validation part of {config.data.path} is empty: give another data.split")
    print(json.dumps({"loss": found, "perplexity": math.exp(min(found, 700))}))
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        args, left = parser().parse_known_args(argv)
        return args.parser.refuse(left) if left else run(args)
    except UserError as error:
        print(f"tokenformer_jax: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error) is None and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        do = "give a smaller micro_batch, train.activation_checkpointing=full or a larger parallel.shard"
        print(f"tokenformer_jax: out of memory: {do}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
