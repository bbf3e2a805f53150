"""Look inside a language model: what each parameter token does on a text, and a page to search it.

example: tokenformer explore runs/small --text sample.txt --out looked
         tokenformer explore my-folder --text corpus.jsonl --tokens 5000000 --out looked

One pass over the text; stopped or killed, the same command goes on where it was. --out then holds index.html (open it
in a browser), tokens.jsonl (a line for each parameter token) and tables.safetensors, for `shrink --by explored`.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.main import source_arguments
from tokenformer.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tokenformer.hub.open import Opened


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source_arguments(parser)
    add("--text", type=Path, required=True, help="a text, JSON lines, Parquet, or a prepared set")
    add("--field", default="text", help="the field of JSON lines or Parquet that holds the text (default: text)")
    add("--tokens", type=int, default=1_000_000, metavar="N", help="how much of it, in tokens (default 1,000,000)")
    add("--sample", type=int, default=160, metavar="N", help="tokens of the text view (default 160)")
    add(
        "--switch-off",
        type=int,
        default=2,
        metavar="N",
        help="tokens per word that are really switched off (default 2)",
    )
    add("--batch", type=int, help="rows of the context at a time (default 8)")
    add("--save-every", type=float, default=60, metavar="SECONDS", help="how often the state is saved (default 60)")
    add("--device", help="cuda, cuda:1, cpu (default: cuda where there is one)")


def run(args: argparse.Namespace) -> None:
    import hashlib
    import time

    from tokenformer.adapters import digest
    from tokenformer.files import refuse_existing, refuse_overlap
    from tokenformer.hub.open import open_model
    from tokenformer.inside.record import load_state, save_state
    from tokenformer.inside.tally import Tally, explore
    from tokenformer.terminal import progress

    for option, least in (("tokens", 2), ("sample", 2), ("batch", 1), ("switch_off", 0)):
        if (value := getattr(args, option)) is not None and value < least:
            raise UserError(f"--{option.replace('_', '-')} is {value}: give {least} or more")
    refuse_existing(args.out, args.force)
    refuse_overlap(args.out, args.source)
    opened = open_model(args.source, args.config, tokenizer=args.tokenizer, device=args.device, dtype="float32")
    opened.need("language")
    ids_BT = read_ids(args.text, args.field, opened, args.tokens)
    model = opened.model.eval()
    identity = {
        "model": digest(model.config, dict(model.named_parameters())),
        "text": hashlib.sha256(ids_BT.numpy().tobytes()).hexdigest(),
    }
    state = args.out.with_name(f".{args.out.name}.exploring")
    tally = Tally()
    if state.exists():
        tally = load_state(state, identity).to(opened.device)
        print(f"going on after {tally.rows:,} tokens of {args.text.name}")
    last = time.monotonic()

    def save(now: Tally) -> None:
        nonlocal last
        advance(now.rows - shown[0])
        shown[0] = now.rows
        if time.monotonic() - last > args.save_every:
            save_state(state, now, identity)
            last = time.monotonic()

    left = ids_BT[tally.rows // ids_BT.shape[1] :]
    shown = [tally.rows]
    batches = (rows.to(opened.device) for rows in left.split(args.batch or 8))
    with progress("reading", ids_BT.numel(), " tokens", tally.rows) as advance:
        tally = explore(model, batches, tally=tally, after=save)
    save_state(state, tally, identity)
    write(args, opened, model.cpu(), tally.to("cpu"), ids_BT, identity)
    state.unlink(missing_ok=True)
    dead = sum(int(tally.dead(where).sum()) for where in tally.tables)
    count = sum(len(tables["sum"]) for tables in tally.tables.values())
    print(f"{count:,} parameter tokens on {tally.rows:,} tokens of {args.text.name}: {dead:,} were in no sum (dead)")
    print(args.out / "index.html")


def read_ids(path: Path, field: str, opened: "Opened", most: int) -> "Tensor":
    """Return the first tokens of a text in rows of the model's context; what does not fill a row is left out."""
    import itertools

    import numpy as np
    import torch

    every = itertools.chain.from_iterable(read_tokens(path, field, opened.tokenizer))
    found = np.fromiter(itertools.islice(every, most), dtype=np.int32)
    length = min(opened.config.context, 1024, max(2, len(found)))
    rows = len(found) // length
    if not rows:
        raise UserError(f"{path} has fewer than 2 tokens: give a longer text")
    return torch.from_numpy(found[: rows * length]).long().view(rows, length)


def read_tokens(path: Path, field: str, tokenizer: Any) -> "Iterator[Sequence[int]]":
    """Yield the tokens of texts, a fragment of a long one at a time; the token that ends documents stands between."""
    from tokenformer.eval.perplexity import is_prepared, open_documents, read_fragments

    whole = ((document, True) for document in open_documents(path, tokenizer)) if is_prepared(path) else None
    between: list[int] = []
    for part, last in whole or read_fragments(path, tokenizer, field):
        yield from (between, part.ids)
        between = [tokenizer.end_of_document] if last else []


def write(args: argparse.Namespace, opened: "Opened", model: Any, tally: Any, ids_BT: "Tensor", identity: dict) -> None:
    import json
    from functools import partial

    from tokenformer.data.text.token_names import token_names
    from tokenformer.files import atomic_folder
    from tokenformer.inside import page, record
    from tokenformer.inside.learned import what_growth_learned
    from tokenformer.terminal import progress

    ids, names = ids_BT.flatten().tolist(), token_names(opened.tokenizer)
    around = partial(record.context, ids, ids_BT.shape[1], names)
    vocab = min(opened.tokenizer.vocab_size, model.config.vocab)
    cards = []
    with progress("reading values", len(tally.tables), " segments") as advance:
        for card in record.cards(model, tally, vocab):
            cards.append(card)
            advance(1)
    segments = page.segments_of(cards)
    sample = ids_BT[-1, : args.sample]
    view = page.text_view(model, sample, segments, args.switch_off)
    compared = ids_BT[: max(1, 65536 // ids_BT.shape[1])]
    learned = what_growth_learned(model, compared)
    growth = None if learned is None else page.growth_view(learned, compared, vocab)
    notes = [
        f"{model.cost().parameters:,} parameters, {sum(s['count'] for s in segments):,} parameter tokens; "
        f"{tally.rows:,} tokens of {args.text.name}. A token fires where its activation Θ is above 1.",
    ]
    if tally.rows > page.CARRIED:
        notes.append(f"The page carries the first {page.CARRIED:,} tokens; places behind them are in tokens.jsonl.")
    about = {**identity, "source": str(args.source), "file": args.text.name, "rows": tally.rows}
    with atomic_folder(args.out, args.force) as beside:
        record.save_state(beside / record.TABLES, tally, identity)
        (beside / record.ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        with open(beside / "tokens.jsonl", "w", encoding="utf-8") as file:
            for card, place in zip(cards, segments, strict=True):
                file.writelines(line + "\n" for line in record.lines(card, place["first"], names, around))
        title = f"Inside {Path(str(args.source)).name}"
        made = page.make_page(title, notes, cards, ids_BT, names, vocab, view, growth)
        (beside / "index.html").write_text(made, encoding="utf-8")
