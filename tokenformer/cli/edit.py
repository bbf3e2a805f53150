"""Change single parameter tokens: mute them, or multiply what they write.

example: tokenformer edit runs/small --mute 3:ffn:120 --boost 2:ffn:7=2 --out edited

A token is layer:projection:token, as `tokenformer explore` names it; projections are query, key, value, proj and ffn.
The new folder's history.json says what was changed.
"""

import argparse

from tokenformer.cli.main import source_arguments
from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source_arguments(parser)
    add("--mute", action="append", default=[], metavar="TOKEN", help="zero its values; may be given several times")
    add("--boost", action="append", default=[], metavar="TOKEN=FACTOR", help="multiply its values by this number")


def run(args: argparse.Namespace) -> None:
    import math

    from tokenformer import hub
    from tokenformer.files import refuse_existing, refuse_overlap
    from tokenformer.hub.open import open_model
    from tokenformer.inside.ablation import Token, parse_token
    from tokenformer.inside.edit import edit

    refuse_existing(args.out, args.force)
    refuse_overlap(args.out, args.source)
    wanted, factors = [(name, 0.0) for name in args.mute], dict[Token, float]()
    for text in args.boost:
        name, _, number = text.partition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not math.isfinite(factor):
            raise UserError(f"--boost is '{text[:80]}': write TOKEN=FACTOR, such as 3:ffn:120=2")
        wanted.append((name, factor))
    for name, factor in wanted:
        token = parse_token(name)
        if token in factors:
            raise UserError(f"{token} is named twice: name it once")
        factors[token] = factor
    opened = open_model(args.source, args.config, tokenizer=args.tokenizer)
    opened.need("language")
    changed = edit(opened.model, factors)
    hub.save(changed, args.out, tokenizer_json=opened.tokenizer_json, force=args.force)
    print(f"{args.out}: {len(factors)} of the model's parameter tokens were changed")
