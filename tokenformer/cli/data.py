"""Describe, check, split and merge prepared sets.

tokenformer data verify data/books
tokenformer data stats data/books --context 2048
tokenformer data peek data/books --document 3
tokenformer data split data/books --shares 90,5,5 --out data
tokenformer data merge data/pile-*-of-30_text_document.idx --out data/pile
"""

import argparse

from tokenformer.config_data import DataConfig
from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    verify = actions.add_parser("verify", help="check files, checksums, structure and every token")
    verify.add_argument("sets", nargs="+", metavar="SET")
    verify.add_argument("--vocab", type=int, metavar="N", help="ids must be below it (default: the tokenizer's)")
    verify.set_defaults(action=_verify)
    stats = actions.add_parser("stats", help="documents, tokens, lengths, parts")
    stats.add_argument("set", metavar="SET")
    stats.add_argument("--shares", default="969,30,1", help="of train, validation, test (default: 969,30,1)")
    stats.add_argument("--context", type=int, default=2048)
    stats.set_defaults(action=_stats)
    peek = actions.add_parser("peek", help="print a document")
    peek.add_argument("set", metavar="SET")
    peek.add_argument("--document", type=int, default=0, metavar="N")
    peek.add_argument("--tokens", type=int, default=200, metavar="N", help="how many of its first (default: 200)")
    peek.add_argument("--tokenizer", help="instead of the set's own")
    peek.add_argument("--ids", action="store_true", help="print ids, not text")
    peek.set_defaults(action=_peek)
    split = actions.add_parser("split", help="write the parts as sets of their own")
    split.add_argument("set", metavar="SET")
    split.add_argument("--shares", default="969,30,1", help="of train, validation, test (default: 969,30,1)")
    split.add_argument("--out", default=".", metavar="FOLDER")
    split.set_defaults(action=_split)
    merge = actions.add_parser("merge", help="one set from several, such as the shards of `prepare --shard`")
    merge.add_argument("sets", nargs="+", metavar="SET")
    merge.add_argument("--out", required=True, metavar="PATH", help="path and name of the new set")
    merge.set_defaults(action=_merge)


def run(args: argparse.Namespace) -> None:
    args.action(args)


def _shares(text: str) -> list[float]:
    try:
        return DataConfig(split=[float(share) for share in text.split(",")]).split
    except (ValueError, UserError):
        raise UserError(f"--shares {text} are not up to three numbers: write them as 969,30,1") from None


def _verify(args: argparse.Namespace) -> None:
    from tokenformer.data.text import indexed, sets
    from tokenformer.terminal import progress

    for path in args.sets:
        prefix = indexed.find_prefix(path)
        size = 2 * sum(p.stat().st_size for p in prefix.parent.glob(f"{prefix.name}.*") if p.is_file())
        with progress(f"checking {path}", size, " bytes") as advance:
            source = sets.verify(path, args.vocab, advance)
        what = "checksums, structure and tokens" if source.description else "structure and tokens (no description)"
        print(f"{source.prefix}: {source.documents:,} documents, {len(source.tokens):,} tokens; {what} are right")


def _stats(args: argparse.Namespace) -> None:
    from tokenformer.data.text import sets
    from tokenformer.data.text.indexed import Indexed
    from tokenformer.terminal import table

    if args.context < 1:
        raise UserError(f"--context is {args.context}: give a number above 0")
    source = Indexed(args.set)
    table(["set", source.prefix.name], sets.stats(source, _shares(args.shares), args.context))


def _peek(args: argparse.Namespace) -> None:
    from tokenformer.data.text.indexed import Indexed
    from tokenformer.data.text.sets import set_tokenizer
    from tokenformer.data.text.tokenizer import load_tokenizer

    source = Indexed(args.set)
    if not 0 <= args.document < source.documents:
        raise UserError(
            f"{source.prefix.name} has no document {args.document}: they go from 0 to {source.documents - 1}"
        )
    ids = source.document(args.document)
    shown = ids[: max(0, args.tokens)].tolist()
    if args.ids:
        print(*shown)
    else:
        tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else set_tokenizer(source)
        print(tokenizer.decode(shown))
    if len(shown) < len(ids):
        print(f"… {len(ids) - len(shown):,} more tokens (--tokens)")


def _split(args: argparse.Namespace) -> None:
    from tokenformer.data.text import sets
    from tokenformer.data.text.indexed import Indexed
    from tokenformer.terminal import progress

    shares = _shares(args.shares)
    with progress(f"splitting {args.set}", len(Indexed(args.set, "quick").tokens), " tokens") as advance:
        made = sets.split(args.set, shares, args.out, advance)
    for prefix in made.values():
        print(prefix)


def _merge(args: argparse.Namespace) -> None:
    from tokenformer.data.text import sets
    from tokenformer.data.text.indexed import Indexed
    from tokenformer.terminal import progress

    with progress("merging", sum(len(Indexed(p, "quick").tokens) for p in args.sets), " tokens") as advance:
        print(sets.merge(args.sets, args.out, advance))
