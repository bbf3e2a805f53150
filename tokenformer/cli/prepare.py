"""Turn raw text into a prepared set: tokens and index, ready for training.

INPUT is a named set (enwik8, openwebtext2, pile, pile_subset, wikitext), alone to download it or followed by local
copies; or any files, folders, globs or '-' (standard input): text, JSON lines, Parquet, plain or packed
(.gz .xz .zst .bz2 .zip .tar). A text file is one document unless --separator cuts it.

Interrupted work is continued when the same command is given again. The output is the same for any --workers.

  tokenformer prepare books/*.txt.gz --out data --name books
  tokenformer prepare enwik8 ~/enwik8.xz --tokenizer byte --out data
  zcat *.gz | tokenformer prepare - --format jsonl --out data --name mine
  tokenformer prepare pile --out data --shard $SLURM_ARRAY_TASK_ID/30
"""

import argparse
import dataclasses
import re
import sys
from pathlib import Path

from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a named set, files, folders, globs, or -")
    parser.add_argument("--out", default="data", metavar="FOLDER", help="where the set goes (default: data)")
    parser.add_argument("--name", help="name of the set (default: after the input)")
    parser.add_argument("--tokenizer", default="gpt-neox-20b", help="gpt-neox-20b, byte, or a path")
    parser.add_argument("--end", metavar="TOKEN", help="the token that ends a document, where it has an unusual name")
    parser.add_argument("--format", choices=["text", "jsonl", "parquet"], help="instead of what the names end in")
    parser.add_argument("--field", default="text", help="of JSON lines or Parquet (default: text)")
    parser.add_argument("--separator", metavar="S", help=r"between two documents of a text; \n, \r and \t are known")
    parser.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="what to do with bad documents")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--shard", metavar="I/N", help="only the I-th of N shares of the files; see `data merge`")
    parser.add_argument("--downloads", metavar="FOLDER", help="where archives go (default: downloads in --out)")
    parser.add_argument("--force", action="store_true", help="replace a set of this name")


def run(args: argparse.Namespace) -> None:
    from tokenformer.data.text.named import SETS, fetch, resolve
    from tokenformer.data.text.prepare import prepare
    from tokenformer.data.text.reading import Reading

    separator = args.separator
    for written, meant in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
        separator = separator and separator.replace(written, meant)
    if separator == "":
        raise UserError("--separator is empty: give the text between two documents")
    named, inputs = resolve(args.inputs)
    reading = SETS[named].reading if named else Reading()
    changes = {"format": args.format, "field": args.field, "on_error": args.on_error}
    changes |= {"separator": separator, "before": None} if separator else {}
    reading = dataclasses.replace(reading, **changes)
    shard = _shard(args.shard) if args.shard else None
    downloads = args.downloads or Path(args.out) / "downloads"
    prefix = prepare(
        inputs or (lambda: fetch(str(named), downloads, shard)),
        args.out,
        args.name or named or _name(inputs),
        tokenizer=args.tokenizer,
        end=args.end,
        reading=reading,
        workers=args.workers,
        shard=shard,
        force=args.force,
        say=lambda sentence: print(sentence, file=sys.stderr),
    )
    print(prefix)


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match:
        raise UserError(f"--shard {text} is not a share: write I/N, such as 2/8")
    return int(match[1]), int(match[2])


def _name(inputs: list[str]) -> str:
    if len(inputs) > 1 or "*" in inputs[0]:
        return "text"
    return Path(inputs[0]).name.split(".")[0].strip("-") or "text"
