"""`python -m tokenformer_jax train|generate|eval …`: the twin's command line, with the YAML files of `tokenformer`.

example: python -m tokenformer_jax train lm/150m data.path=prepared/books batch=64 --out runs/books
         python -m tokenformer_jax generate runs/books --prompt "The " --tokens 40 --temperature 0.8
         python -m tokenformer_jax eval runs/books
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

from tokenformer.cli.main import split_settings
from tokenformer.errors import UserError, out_of_memory
from tokenformer.parsing import is_file


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser("python -m tokenformer_jax", description=__doc__, formatter_class=raw)
    verbs = found.add_subparsers(dest="verb", metavar="VERB", required=True)
    words = {"nargs": "*", "default": [], "metavar": "a.b=c", "help": "keys laid over the config; more config files"}
    train = verbs.add_parser("train", help="train a model into a run folder")
    train.add_argument("config", metavar="CONFIG", help="config file, preset, run folder, or weights to begin with")
    train.add_argument("--out", metavar="RUN", help="run folder (default: the config's `out`, or its name in runs/)")
    train.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    measure = verbs.add_parser("eval", help="held-out loss and perplexity of a run, or of weights on a prepared set")
    measure.add_argument("config", metavar="MODEL", help="run, or folder of weights (then also data.path=SET)")
    for verb in (train, measure):
        verb.add_argument("settings", **words)
        verb.add_argument("--distributed", action="store_true", help="one of several processes: every host of a slice")
    generate = verbs.add_parser("generate", help="continue a text")
    generate.add_argument("model", metavar="MODEL", help="our folder, or a run")
    generate.add_argument("--prompt", default="", help="text to continue")
    generate.add_argument("--tokens", type=int, default=64, help="how many to add (default 64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (default): always the most likely token")
    generate.add_argument("--top-k", type=int, default=0, help="only the k most likely tokens; 0 (default): all")
    generate.add_argument("--seed", type=int, default=0, help="of sampling")
    return found


def run_train(args: argparse.Namespace) -> int:
    from tokenformer.hub.open import read_config
    from tokenformer_jax.train import Trainer

    source, more, settings = Path(args.config), *split_settings(args.settings)
    itself = args.resume and is_file(source / "config.yml") and args.out in (None, args.config)
    config = read_config(source / "config.yml" if itself else args.config, *more, overrides=settings, training=True)
    default = source if itself else Path(config.out or Path("runs") / source.with_suffix("").name)
    asked = Trainer(config, args.out or default, resume=args.resume).run()
    return 128 + asked if asked else 0


def run_eval(args: argparse.Namespace) -> int:
    import tempfile

    from tokenformer.hub.open import read_config
    from tokenformer_jax.train import Trainer

    more, settings = split_settings(args.settings)
    config = read_config(args.config, *more, overrides=[*settings, "growth=[]"])
    config = dataclasses.replace(config, batch=config.batch or 8, steps=max(1, config.steps))
    with tempfile.TemporaryDirectory() as nothing:  # a run that never begins
        found = Trainer(config, nothing).measure()
    if found is None:
        raise UserError(f"the validation part of {config.data.path} is empty: give another data.split")
    print(json.dumps({"loss": found, "perplexity": math.exp(min(found, 700))}))
    return 0


def run_generate(args: argparse.Namespace) -> int:
    import numpy as np

    from tokenformer.data.text.tokenizer import FileTokenizer
    from tokenformer_jax import generator, load

    model = load(args.model)
    if model.tokenizer_json is None:
        raise UserError(f"{args.model} has no tokenizer beside it: write one there by `tokenformer convert`")
    tokenizer = FileTokenizer(model.tokenizer_json, f"of {args.model}")
    ids = np.array([tokenizer.encode(args.prompt) or [tokenizer.end_of_document]])
    how = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    print(tokenizer.decode(generator(model.config)(model.params, ids, args.tokens, **how)[0].tolist()))
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_intermixed_args(argv) if argv is not None else parser().parse_args()
    try:
        if getattr(args, "distributed", False):
            import jax

            jax.distributed.initialize()  # on a TPU slice it finds the other hosts by itself
        return {"train": run_train, "eval": run_eval, "generate": run_generate}[args.verb](args)
    except UserError as error:
        print(f"tokenformer_jax: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not (said := out_of_memory(error)) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        do = "give a smaller micro_batch, train.activation_checkpointing=full or a larger parallel.shard"
        print(f"tokenformer_jax: {said or 'out of memory'}: {do}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
