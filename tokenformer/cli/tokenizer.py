"""Train a tokenizer from text, or describe one.

tokenformer tokenizer train books/*.txt --vocab 8192 --out tokenizer.json
tokenformer tokenizer info gpt-neox-20b
"""

import argparse
import contextlib
from pathlib import Path

from tokenformer import files
from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    train = actions.add_parser("train", help="a byte-level BPE of a given size from text")
    train.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, globs, or -")
    train.add_argument("--vocab", type=int, required=True, metavar="N", help="number of ids, 257 or more")
    train.add_argument("--out", default="tokenizer.json", metavar="FILE")
    train.add_argument("--force", action="store_true", help="replace a file of that name")
    train.add_argument("--format", choices=["text", "jsonl", "parquet"], help="instead of what the names end in")
    train.add_argument("--field", default="text", help="of JSON lines or Parquet (default: text)")
    train.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="what to do with bad documents")
    train.set_defaults(action=_train)
    info = actions.add_parser("info", help="size, end of document, padded size")
    info.add_argument("name", help="gpt-neox-20b, byte, or a path")
    info.add_argument("--text", help="show the tokens of this text")
    info.set_defaults(action=_info)


def run(args: argparse.Namespace) -> None:
    args.action(args)


def _train(args: argparse.Namespace) -> None:
    from tokenformer.data.text.inputs import find_inputs
    from tokenformer.data.text.reading import Reading, read_units
    from tokenformer.data.text.tokenizer import load_tokenizer, train_tokenizer
    from tokenformer.terminal import meter

    files.check_writable(args.out, args.force)
    inputs = find_inputs(args.inputs)
    reading = Reading(format=args.format, field=args.field, on_error=args.on_error)
    cuts = load_tokenizer("gpt-neox-20b").cuts
    done = 0

    def seen(count: int) -> None:
        nonlocal done
        done += count
        show(done, f"{done / 1e6:.1f} MB read")

    with contextlib.ExitStack() as stack:
        beside = stack.enter_context(files.atomic_file(args.out))
        show = stack.enter_context(meter("training a tokenizer", sum(s.bytes for s in inputs) or None))
        units = (unit.text for one in inputs for unit in read_units(one, reading, cuts, seen))
        tokenizer = train_tokenizer(units, args.vocab)
        if tokenizer.vocab_size < args.vocab:
            wanted = f"{tokenizer.vocab_size} ids, not {args.vocab}"
            raise UserError(f"the text gives only {wanted}: give more text or a smaller --vocab")
        beside.write_text(tokenizer.to_json(), encoding="utf-8")
    print(Path(args.out))


def _info(args: argparse.Namespace) -> None:
    from tokenformer.data.text.tokenizer import fingerprint, load_tokenizer, padded_vocab
    from tokenformer.terminal import table

    tokenizer = load_tokenizer(args.name)
    rows = [
        ["ids", tokenizer.vocab_size],
        ["padded for a model", padded_vocab(tokenizer.vocab_size)],
        ["end of document", tokenizer.end_of_document],
        ["special ids", ", ".join(map(str, tokenizer.special_ids)) or "–"],
        ["long texts are cut", "yes" if tokenizer.cuts else "no (needs memory for a whole document)"],
        ["sha256", fingerprint(tokenizer)],
    ]
    table(["tokenizer", tokenizer.name], rows)
    if args.text is not None:
        print(" ".join(f"{i}:{tokenizer.decode([i])!r}" for i in tokenizer.encode(args.text)))
