"""Convert weights from one format to another: official ↔ Hugging Face ↔ ours.

tokenformer convert --to hf TokenFormer-150M/pytorch_model.bin 150M_eval.yml --out tokenformer-150m-hf
tokenformer convert --to official my-folder --out official
tokenformer convert --to official grown --merge-segments --text held-out.txt --out official
"""

import argparse

from tokenformer.cli.main import source_arguments, text_arguments
from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    source_arguments(parser)
    parser.add_argument("--to", required=True, choices=["ours", "hf", "official"], help="the format to write")
    help = "one segment per layer, rescaled to fit --text; approximate"
    parser.add_argument("--merge-segments", action="store_true", help=help)
    text_arguments(parser, "for --merge-segments: text like that which the model was trained on")
    parser.add_argument("--merge-softmax", action="store_true", help="with --merge-segments: those of a softmax too")
    parser.add_argument("--weights", choices=["average", "raw"], help="of a run with train.ema (default: average)")


def run(args: argparse.Namespace) -> None:
    from tokenformer import hub
    from tokenformer.files import refuse_existing, refuse_overlap
    from tokenformer.hub.open import open_model

    refuse_existing(args.out, args.force)
    refuse_overlap(args.out, args.source)
    if args.merge_segments != bool(args.text):
        raise UserError("--merge-segments needs --text FILE, which nothing else does: give both or neither")
    opened = open_model(args.source, args.config, tokenizer=args.tokenizer, weights=args.weights)
    model = merged(opened, args) if args.merge_segments else opened.model
    text = opened.tokenizer_json
    hub.save(model, args.out, format=args.to, tokenizer_json=text, force=args.force)
    missing = opened.config.of == "language" and not text
    note = "; no tokenizer was found beside the weights: add one with --tokenizer" if missing else ""
    if getattr(model, "codes", None) is not None and args.to != "ours":
        note += "; it cannot draw there: codes.safetensors, its colours, is left out"
    print(f"{args.out}: {model.cost().parameters:,} parameters, {args.to} format{note}")


def merged(opened, args: argparse.Namespace):
    """Merge the segments of each layer into one, and print what that did to the loss."""
    from tokenformer.cli.grow import name_texts, text_ids
    from tokenformer.growth.merge import merge_segments

    ids = text_ids(args.text, opened, 1 << 14, args.field)
    model = merge_segments(opened.model, ids, force=args.merge_softmax)
    event = model.history[-1]
    before, after = event["loss_before"], event["loss_after"]
    print(f"segments merged: loss on {name_texts(args.text)} {before:.4f} → {after:.4f} ({after - before:+.4f})")
    return model
