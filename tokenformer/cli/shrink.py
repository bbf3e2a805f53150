"""Shrink a trained model: remove the parameter tokens that do least on a text or on images, or the newest.

tokenformer shrink my-folder --ratio 0.5 --text sample.txt --out smaller
tokenformer shrink runs/icons --ratio 0.5 --images examples/icons --out smaller
tokenformer shrink my-folder --ffn-tokens 2304 --by newest --out as-before
tokenformer shrink my-folder --by explored --explored looked --out without-dead-tokens
"""

import argparse
from pathlib import Path
from typing import Any

from tokenformer.cli.main import source_arguments, text_arguments
from tokenformer.config import PROJECTIONS
from tokenformer.errors import UserError

TOKENS = 1 << 15  # of a text


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source_arguments(parser)
    for which in PROJECTIONS:
        add(f"--{which}-tokens", type=int, metavar="N", help="parameter tokens per layer that stay")
    add("--on", default="", metavar="TRUNK", help="of a pair: image. or text. (with --by newest)")
    add("--ratio", type=float, metavar="SHARE", help="instead: the share of all parameter tokens that stays")
    ways = ["energy", "newest", "explored"]
    add(
        "--by",
        choices=ways,
        default="energy",
        help="remove what does least on the text (default), the newest, the dead",
    )
    add("--explored", type=Path, metavar="FOLDER", help="with --by explored: what `tokenformer explore` wrote")
    add("--across", choices=["layer", "model"], default="layer", help="as many in every layer, or where they do most")
    add("--tau", choices=["match", "hold", "sqrt_n"], help="default: match on the text, sqrt_n without one")
    add("--weights", choices=["average", "raw"], help="of a run with train.ema (default: average)")
    text_arguments(parser, "text to measure on, and to report the change in loss")
    add("--images", metavar="PATH", help="of an image model: 256 images of these are measured on")
    add("--tokens", type=int, default=TOKENS, help=f"how much of the text, in tokens (default {TOKENS})")


def run(args: argparse.Namespace) -> None:
    from tokenformer.cli.grow import text_ids
    from tokenformer.eval.images import sample_pixels
    from tokenformer.files import refuse_existing, refuse_overlap
    from tokenformer.growth.shrink import shrink
    from tokenformer.hub.open import open_model

    refuse_existing(args.out, args.force)
    refuse_overlap(args.out, args.source)
    if not args.text and args.images is None and args.by == "energy":
        raise UserError("shrinking by energy measures on a text: give one with --text (or --images), or --by newest")
    if (args.explored is not None) != (args.by == "explored"):
        raise UserError("--by explored and --explored FOLDER belong together: give both, or none")
    opened = open_model(args.source, args.config, tokenizer=args.tokenizer, weights=args.weights)
    model = opened.model
    if args.explored:
        others = ("ratio", "text", "images", "tau", "qkv_tokens", "proj_tokens", "ffn_tokens", "on")
        given = {option: getattr(args, option) for option in others}
        given |= {"across": args.across != "layer", "tokens": args.tokens != TOKENS}
        for option, value in given.items():
            if value:
                raise UserError(f"--by explored removes what is dead, and needs no --{option}: leave it out")
        smaller = without_dead(model, args.explored)
        save(args, opened, smaller)
        return
    if model.config.trunks and args.by == "energy":
        what = f"what tokens of a model of {model.config.of} do is not measured"
        raise UserError(f"{what}: give --by newest, and which trunk with --on")
    if args.images:
        opened.need("image")
    ids = text_ids(args.text, opened, args.tokens, args.field) if args.text else None
    ids = sample_pixels(model, args.images, 256) if args.images else ids
    sizes = {f"{which}_tokens": getattr(args, f"{which}_tokens") for which in PROJECTIONS}
    how = {"ratio": args.ratio, "by": args.by, "across": args.across, "tau": args.tau}
    smaller = shrink(model, ids, on=args.on, **sizes, **how)
    save(args, opened, smaller, 0 if ids is None or not args.text else ids.numel())


def save(args: argparse.Namespace, opened: Any, smaller: Any, measured: int = 0) -> None:
    """Write the smaller model, and say what became of it; `measured`: tokens of the text."""
    from tokenformer import hub
    from tokenformer.cli.grow import name_texts

    hub.save(smaller, args.out, tokenizer_json=opened.tokenizer_json, force=args.force)
    event = smaller.history[-1]
    for name, before in event["before"].items():
        print(f"{name}: {before} → {event['after'][name]}")
    if measured:
        change = f"{event['loss_before']:.4f} → {event['loss_after']:.4f}"
        print(f"loss on {measured:,} tokens of {name_texts(args.text)}: {change}")
    print(f"{args.out}: {opened.model.cost().parameters:,} → {smaller.cost().parameters:,} parameters")


def without_dead(model: Any, folder: Path) -> Any:
    """Remove the tokens that were in no sum when this model was explored."""
    from tokenformer.adapters import digest
    from tokenformer.growth.shrink import remove_dead
    from tokenformer.inside.record import load_explored

    tally, about = load_explored(folder)
    if about.get("model") != digest(model.config, dict(model.named_parameters())):
        raise UserError(f"{folder} is of another model: explore this one, and give that folder")
    return remove_dead(model, {where: tally.dead(where) for where in tally.tables})
