"""Shrink a trained model: remove the parameter tokens that do least on a text or on images, or the newest.

tokenformer shrink my-folder --ratio 0.5 --text sample.txt --out smaller
tokenformer shrink runs/icons --ratio 0.5 --images examples/icons --out smaller
tokenformer shrink my-folder --ffn-tokens 2304 --by newest --out as-before
"""

import argparse

from tokenformer.cli.main import source_arguments, text_arguments
from tokenformer.config import PROJECTIONS
from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source_arguments(parser)
    for which in PROJECTIONS:
        add(f"--{which}-tokens", type=int, metavar="N", help="parameter tokens per layer that stay")
    add("--on", default="", metavar="TRUNK", help="of a pair: image. or text. (with --by newest)")
    add("--ratio", type=float, metavar="SHARE", help="instead: the share of all parameter tokens that stays")
    add("--by", choices=["energy", "newest"], default="energy", help="remove what does least on the text (default)")
    add("--across", choices=["layer", "model"], default="layer", help="as many in every layer, or where they do most")
    add("--tau", choices=["match", "hold", "sqrt_n"], help="default: match on the text, sqrt_n without one")
    add("--weights", choices=["average", "raw"], help="of a run with train.ema (default: average)")
    text_arguments(parser, "text to measure on, and to report the change in loss")
    add("--images", metavar="PATH", help="of an image model: 256 images of these are measured on")
    add("--tokens", type=int, default=1 << 15, help="how much of the text, in tokens (default 32768)")


def run(args: argparse.Namespace) -> None:
    from tokenformer import hub
    from tokenformer.cli.grow import name_texts, text_ids
    from tokenformer.eval.images import sample_pixels
    from tokenformer.files import refuse_existing, refuse_overlap
    from tokenformer.growth.shrink import shrink
    from tokenformer.hub.open import open_model

    refuse_existing(args.out, args.force)
    refuse_overlap(args.out, args.source)
    if not args.text and args.images is None and args.by == "energy":
        raise UserError("shrinking by energy measures on a text: give one with --text (or --images), or --by newest")
    opened = open_model(args.source, args.config, tokenizer=args.tokenizer, weights=args.weights)
    model = opened.model
    if args.images:
        opened.need("image")
    ids = text_ids(args.text, opened, args.tokens, args.field) if args.text else None
    ids = sample_pixels(model, args.images, 256) if args.images else ids
    sizes = {f"{which}_tokens": getattr(args, f"{which}_tokens") for which in PROJECTIONS}
    how = {"ratio": args.ratio, "by": args.by, "across": args.across, "tau": args.tau}
    smaller = shrink(model, ids, on=args.on, **sizes, **how)
    hub.save(smaller, args.out, tokenizer_json=opened.tokenizer_json, force=args.force)
    event = smaller.history[-1]
    for name, before in event["before"].items():
        print(f"{name}: {before} → {event['after'][name]}")
    if args.text and ids is not None:
        change = f"{event['loss_before']:.4f} → {event['loss_after']:.4f}"
        print(f"loss on {ids.numel():,} tokens of {name_texts(args.text)}: {change}")
    print(f"{args.out}: {model.cost().parameters:,} → {smaller.cost().parameters:,} parameters")
