"""Weights from one format to another: official ↔ Hugging Face ↔ ours.

tokenformer convert --to hf TokenFormer-150M/pytorch_model.bin 150M_eval.yml --out tokenformer-150m-hf
tokenformer convert --to official my-folder --out official
tokenformer convert --to official grown --merge-segments --text held-out.txt --out official
"""

import argparse
from pathlib import Path

from tokenformer.errors import UserError

NEOX_VOCAB = 50304  # gpt-neox-20b's 50,277 tokens, padded: what every released model has


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a folder, a weight file, or a hub name such as Haiyang-W/TokenFormer-150M")
    parser.add_argument("config", nargs="*", help="config files, for official weights that have none beside them")
    parser.add_argument("--to", required=True, choices=["ours", "hf", "official"], help="the format to write")
    parser.add_argument("--out", required=True, type=Path, help="the folder to make")
    parser.add_argument(
        "--tokenizer",
        help="a tokenizer.json, its folder or gpt-neox-20b, to put in (default: the source's own, or gpt-neox-20b "
        "for official weights with its vocabulary)",
    )
    parser.add_argument(
        "--merge-segments", action="store_true", help="one segment a layer, rescaled to fit --text; approximate"
    )
    parser.add_argument("--text", type=Path, help="for --merge-segments: text like that which the model was trained on")
    parser.add_argument("--force", action="store_true", help="merge segments of a softmax too")


def run(args: argparse.Namespace) -> None:
    from tokenformer import hub
    from tokenformer.data.text.tokenizer import BUNDLED, load_tokenizer
    from tokenformer.files import refuse_existing
    from tokenformer.hub.official_config import load_config

    refuse_existing(args.out)
    if args.merge_segments != bool(args.text):
        raise UserError("--merge-segments needs --text FILE, which nothing else does: give both or neither")
    text = load_tokenizer(args.tokenizer).to_json() if args.tokenizer else None
    config = load_config(*args.config).model if args.config else None
    model = hub.load(args.source, config=config)
    if args.merge_segments:
        model = merged(model, args)
    text = text or hub.tokenizer_json(args.source)
    if text is None and hub.locate(args.source)[0] == "official" and model.config.vocab == NEOX_VOCAB:
        text = load_tokenizer(BUNDLED).to_json()
    hub.save(model, args.out, format=args.to, tokenizer_json=text)
    note = "" if text else "; no tokenizer was found beside the weights: add one with --tokenizer"
    print(f"{args.out}: {model.cost().parameters:,} parameters, {args.to} format{note}")


def merged(model, args: argparse.Namespace):
    """One segment a layer; says what that did to the loss."""
    from tokenformer.cli.grow import text_ids
    from tokenformer.growth import merge_segments

    ids = text_ids(args.text, args.source, model.config, args.tokenizer, 1 << 14)
    model = merge_segments(model, ids, force=args.force)
    event = model.history[-1]
    before, after = event["loss_before"], event["loss_after"]
    print(f"segments merged: loss on {args.text.name} {before:.4f} → {after:.4f} ({after - before:+.4f})")
    return model
