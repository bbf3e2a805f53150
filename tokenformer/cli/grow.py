"""Grow a trained model: more parameter tokens, more layers, the same function. Prints a certificate.

tokenformer grow my-folder --ffn-tokens 8560 --qkv-tokens 2140 --proj-tokens 2140 --out bigger
tokenformer grow my-folder --to grow/354m --text held-out.txt --out bigger
tokenformer grow my-folder --layers 24 --no-verify --out deeper
tokenformer grow runs/pairs --on image. --ffn-tokens 576 --out bigger
"""

import argparse
import dataclasses
import html
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.main import source_arguments, text_arguments
from tokenformer.config import PROJECTIONS
from tokenformer.errors import UserError
from tokenformer.parsing import is_file

if TYPE_CHECKING:
    import re

    from torch import Tensor

    from tokenformer.config import ModelConfig
    from tokenformer.growth.plan import Plan
    from tokenformer.growth.verify import Certificate
    from tokenformer.hub.open import Opened

MOST_TEXT = 1 << 28  # characters


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source_arguments(parser)
    for which in PROJECTIONS:
        add(f"--{which}-tokens", type=int, metavar="N", help="parameter tokens per layer in total afterwards")
    add("--layers", type=int, metavar="N", help="blocks in total afterwards")
    add("--vocab", type=int, metavar="N", help="ids in total afterwards; new ones follow the padded vocabulary")
    add("--switch", default="", metavar="NAME", help="new tokens and ids count only in calls that give this switch")
    add("--on", default="", metavar="TRUNK", help="of a pair: image. or text.")
    add("--to", metavar="CONFIG", help="take these sizes from a config or preset, such as grow/354m")
    rules = "segment (default), zero_key, zero_value or random; or one for each, such as ffn=segment qkv=zero_key"
    add("--new-tokens", nargs="+", metavar="RULE", help=rules)
    add("--tau", choices=["hold", "sqrt_n"], help="τ where rows are appended (default: hold for zero_key, else sqrt_n)")
    add("--positions", nargs="+", metavar="WHERE", help="new blocks: even (default), end, or their layer numbers")
    add("--seed", type=int, default=0, help="of the new values (default 0)")
    verify = "run both models and print a certificate (default; without it one tensor at a time is in memory)"
    add("--verify", action=argparse.BooleanOptionalAction, default=True, help=verify)
    add("--weights", choices=["average", "raw"], help="of a run with train.ema (default: average)")
    text_arguments(parser, "text to verify on, beside random tokens")


def run(args: argparse.Namespace) -> None:
    import torch

    from tokenformer.config import load
    from tokenformer.config_growth import Growth
    from tokenformer.files import refuse_existing, refuse_overlap
    from tokenformer.growth.make import make_tensors
    from tokenformer.growth.model import apply_plan
    from tokenformer.growth.plan import plan_growth
    from tokenformer.growth.shape import trunk_of
    from tokenformer.growth.verify import verify
    from tokenformer.hub.folder import CODES, save_folder, write_folder
    from tokenformer.hub.open import open_model
    from tokenformer.models import build, cost

    refuse_existing(args.out, args.force)
    refuse_overlap(args.out, args.source, in_place=not is_file(args.out / "state.json"))  # never a run's checkpoint
    if args.text and not args.verify:
        raise UserError("--text is for verifying, and --no-verify leaves that out: give one of them")
    wanted = load(args.to).model if args.to else None
    opened = open_model(args.source, args.config, tokenizer=args.tokenizer, weights=args.weights)
    tensors, dtypes, history = opened.tensors(stream=not args.verify)
    config = opened.config.resolved()
    with torch.device("meta"):
        ends = build(config).ends
    asked = Growth(**(_given(args) | (_sizes(*(trunk_of(c, args.on) for c in (config, wanted))) if wanted else {})))
    plan = plan_growth(config, list(tensors), asked, ends=ends, seed=args.seed, number=len(history))
    before, after = cost(config).parameters, cost(plan.config).parameters
    if not args.verify:
        types = {name: dtypes[recipe.source] for name, recipe in plan.recipes.items()}
        events, made = [*history, plan.event], make_tensors(plan, tensors)
        more = {"force": args.force, "images": None if config.of == "language" else opened.images}
        codes = opened.folder / CODES
        beside = {CODES: codes.read_bytes()} if codes.exists() else {}
        write_folder(args.out, plan.config, events, made, types, opened.tokenizer_json, **more, more=beside)
    else:
        width = max(dtype.itemsize for dtype in dtypes.values()) / 1e6
        print(
            f"verifying holds both models and gradients of what is new: {width * (before + after):,.0f} to "
            f"{width * (before + 4 * after):,.0f} MB and activations (--no-verify: a tensor at a time)",
            flush=True,
        )
        random = torch.Generator().manual_seed(args.seed)
        trunk = config.trunk(args.on)
        if trunk.of == "image":
            sides = [side * trunk.patch for side in trunk.grid]
            ids = {"random pixels": torch.randn(4, trunk.channels, *sides, generator=random)}
        else:
            ids = {"random tokens": torch.randint(trunk.vocab, (4, min(trunk.context, 128)), generator=random)}
        if args.text:
            ids[name_texts(args.text)] = text_ids(args.text, opened, 1 << 13, args.field)
        bigger = apply_plan(opened.model, plan, share=True)
        found = {what: verify(opened.model, bigger, i, plan) for what, i in ids.items()}
        save_folder(bigger, args.out, opened.tokenizer_json, args.force, more=certify(found, plan, args.out.name))
    print(f"{args.out}: {before:,} → {after:,} parameters")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `Growth` that were given."""
    from tokenformer.config_growth import Growth

    given = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(Growth)}
    rules = args.new_tokens or []
    by_projection = any("=" in rule for rule in rules)
    given["new_tokens"] = dict(rule.partition("=")[::2] for rule in rules) if by_projection else "+".join(rules)
    words = args.positions or []
    numbers = all(word.isdigit() for word in words)
    given["positions"] = [int(word) for word in words] if numbers else " ".join(words)
    return {name: value for name, value in given.items() if value not in (None, "", [])}


def _sizes(config: "ModelConfig", wanted: "ModelConfig") -> dict[str, Any]:
    """Return the sizes in which the wanted model differs from this one."""
    from tokenformer.growth.shape import sizes

    if (config.kind, config.dim, config.mlp_dim) != (wanted.kind, wanted.dim, wanted.mlp_dim):
        raise UserError(
            f"--to names a {wanted.kind} of dim {wanted.dim}, but this is a {config.kind} of dim {config.dim}: "
            "tokens and layers grow, at the same dim and ffn_dim"
        )
    now, then = sizes(config), sizes(wanted)
    if uneven := [name for name, size in then.items() if isinstance(size, list)]:
        raise UserError(f"--to names a model whose layers differ in {uneven[0]}: give the sizes themselves")
    if wanted.added_vocab:
        then["vocab"] = config.vocab + wanted.added_vocab  # they follow the vocabulary that is there
    return {name: size for name, size in then.items() if size != now.get(name)}


def text_ids(paths: Sequence[str], opened: "Opened", tokens: int, field: str = "text") -> "Tensor":
    """Return about so many tokens of texts, in rows of the model's context (512 at most) from all over each of them."""
    import torch

    length = min(opened.config.trunk(opened.config.language_prefix or "").context, 512)
    rows = max(1, tokens // length // len(paths))
    return torch.cat([torch.tensor(_rows(path, opened, rows, length, field)).view(-1, length) for path in paths])


def _rows(path: str, opened: "Opened", rows: int, length: int, field: str) -> list[int]:
    from tokenformer.eval.perplexity import is_prepared, open_documents

    encoder = opened.tokenizer
    if is_prepared(path):
        ids = itertools.chain.from_iterable(document.ids for document in open_documents(path, encoder))
        encoded = list(itertools.islice(ids, rows * length))
    else:
        text = _read(path, field, encoder.cuts)
        if len(text) > 16 * rows * length:  # a row begins in each piece; 8 characters per token are enough for it
            piece = len(text) // rows
            pieces = (encoder.encode(text[i : i + 8 * length])[:length] for i in range(0, piece * rows, piece))
            encoded = [i for ids in pieces if len(ids) == length for i in ids]
        else:  # short: from its beginning, row after row
            encoded = encoder.encode(text)
    if len(encoded) < length:
        raise UserError(f"{path} is shorter than {length} tokens: give a longer text")
    return encoded[: min(rows, len(encoded) // length) * length]


def _read(path: str, field: str, cuts: "re.Pattern | None") -> str:
    """Read the text of a file or folder, as `eval --text` does; of a large one the first 268 million characters."""
    from tokenformer.data.text.inputs import find_inputs
    from tokenformer.data.text.reading import Reading, read_units

    parts, size = [], 0
    for source in find_inputs([path]):
        for unit in read_units(source, Reading(field=field, can_skip=False), cuts):
            parts.append(unit.text + "\n" * unit.last)
            size += len(unit.text)
            if size >= MOST_TEXT:
                return "".join(parts)
    return "".join(parts)


def name_texts(paths: Sequence[str]) -> str:
    return Path(paths[0]).name + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def certify(certificates: dict[str, "Certificate"], plan: "Plan", name: str) -> dict[str, str]:
    """Print what verifying found, and return it as files: certificate.json and a page."""
    from tokenformer.terminal import table
    from tokenformer.train import page

    rule = ", ".join(f"{which} {name}" for which, name in plan.event["rule"].items())
    added = f", new blocks at {plan.event['new_layers']}" if plan.event["new_layers"] else ""
    promise = "exact up to rounding" if plan.exact else "changes the function"
    said = f"rule: {rule or 'identity blocks'}{added}: {promise}"
    moved = [
        [what, f"{c.logit_absolute:.2e}", f"{c.logit_relative:.2e}", f"{c.loss_before:.6f}", f"{c.loss_after:.6f}"]
        for what, c in certificates.items()
    ]
    gradient = list(certificates.values())[-1].gradient
    learn = [[what, a.rows, a.at_once, a.within_two] for what, a in gradient.items()]
    tables = [
        (["on", "largest change of a logit", "relative", "loss before", "after"], moved),
        (["new rows", "how many", "learn at once", "within two steps"], learn),
    ]
    same = all(c.same for c in certificates.values())
    largest = max(c.logit_absolute for c in certificates.values())
    verdict = f"computes the same: {'yes' if same else 'no'}, largest change {largest:.2g}"
    print(said)
    for head, rows in tables:
        table(head, rows)
    print(verdict)
    held = {what: dataclasses.asdict(c) for what, c in certificates.items()}
    about = {"same": same, "largest_change": largest, "exact_by_rule": plan.exact, "event": plan.event, "on": held}
    body = [f"<h1>{html.escape(name)} {verdict}</h1>", f"<p>{html.escape(said)}</p>"]
    body += [page.table(head, rows) for head, rows in tables]
    written = page.page(f"Certificate of {name}", body)
    return {"certificate.json": json.dumps(about, indent=1) + "\n", "certificate.html": written}
