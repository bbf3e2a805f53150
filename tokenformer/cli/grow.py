"""A bigger model from a trained one: more parameter tokens, more layers, the same function. Prints a certificate.

tokenformer grow my-folder --ffn-tokens 8560 --qkv-tokens 2140 --proj-tokens 2140 --out bigger
tokenformer grow my-folder --to grow/354m --text held-out.txt --out bigger
tokenformer grow my-folder --layers 24 --no-verify --out deeper
"""

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.config import PROJECTIONS
from tokenformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tokenformer.config import ModelConfig
    from tokenformer.growth.recipes import Plan
    from tokenformer.growth.verify import Certificate
    from tokenformer.hub.open import Opened


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", help="a folder, a weight file, or a hub name")
    add("config", nargs="*", help="config files, for official weights that have none beside them")
    add("--out", required=True, type=Path, help="the folder to make")
    for which in PROJECTIONS:
        add(f"--{which}-tokens", type=int, metavar="N", help="parameter tokens of a layer in total afterwards")
    add("--layers", type=int, metavar="N", help="blocks in total afterwards")
    add("--to", metavar="CONFIG", help="take these sizes from a config or preset, such as grow/354m")
    add(
        "--new-tokens",
        nargs="+",
        metavar="RULE",
        help="segment (default), zero_key, zero_value or random; or one for each, such as ffn=segment qkv=zero_key",
    )
    add("--tau", choices=["hold", "sqrt_n"], help="τ where rows are appended (default: hold for zero_key, else sqrt_n)")
    add("--positions", nargs="+", metavar="WHERE", help="new blocks: even (default), end, or their layer numbers")
    add("--new-layers", choices=["identity", "stack"], help="identity blocks (default), or copies of the blocks")
    add("--dim", type=int, metavar="N", help="widen by Net2Net: exact for whole multiples")
    add("--ffn-dim", type=int, metavar="N", help="widen the MLP of a baseline alone: exact")
    add("--widen", choices=["net2net", "block"], help="the rule of --dim and --ffn-dim (block: the paper's form)")
    add("--seed", type=int, default=0, help="of the new values (default 0)")
    verify = "run both models and print a certificate (default; without it one tensor at a time is in memory)"
    add("--verify", action=argparse.BooleanOptionalAction, default=True, help=verify)
    add("--force", action="store_true", help="replace a folder of this name that tokenformer wrote")
    add("--text", type=Path, help="text to verify on, beside random tokens")
    add(
        "--tokenizer", help="for --text: a tokenizer.json, its folder, byte or gpt-neox-20b (default: the source's own)"
    )


def run(args: argparse.Namespace) -> None:
    import torch

    from tokenformer import hub
    from tokenformer.config import load
    from tokenformer.config_growth import Growth
    from tokenformer.files import refuse_existing
    from tokenformer.growth.make import make_tensors
    from tokenformer.growth.model import apply_plan
    from tokenformer.growth.plan import plan_growth
    from tokenformer.growth.verify import verify
    from tokenformer.hub.folder import write_folder
    from tokenformer.hub.open import open_model
    from tokenformer.models import build, cost

    refuse_existing(args.out, args.force)
    if args.text and not args.verify:
        raise UserError("--text is for verifying, and --no-verify leaves that out: give one of them")
    wanted = load(args.to).model if args.to else None
    opened = open_model(args.source, args.config, tokenizer=args.tokenizer)
    tensors, dtypes, history = opened.tensors(stream=not args.verify)
    config = opened.config.resolved()
    with torch.device("meta"):
        ends = build(config).ends
    asked = Growth(**(_given(args) | (_sizes(config, wanted) if wanted else {})))
    plan = plan_growth(config, list(tensors), asked, ends=ends, seed=args.seed, number=len(history))
    before, after = cost(config).parameters, cost(plan.config).parameters
    if not args.verify:
        types = {name: dtypes[recipe.source] for name, recipe in plan.recipes.items()}
        events, made = [*history, plan.event], make_tensors(plan, tensors)
        write_folder(args.out, plan.config, events, made, types, opened.tokenizer_json, force=args.force)
    else:
        width = max(dtype.itemsize for dtype in dtypes.values()) / 1e6
        print(
            f"verifying holds both models and gradients of what is new: {width * (before + after):,.0f} to "
            f"{width * (before + 4 * after):,.0f} MB and activations (--no-verify: a tensor at a time)",
            flush=True,
        )
        ids = {"random tokens": random_ids(config, args.seed)}
        if args.text:
            ids[args.text.name] = text_ids(args.text, opened, 1 << 13)
        bigger = apply_plan(opened.model, plan, share=True)
        show({what: verify(opened.model, bigger, i, plan) for what, i in ids.items()}, plan)
        hub.save(bigger, args.out, tokenizer_json=opened.tokenizer_json, force=args.force)
    print(f"{args.out}: {before:,} → {after:,} parameters")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a `Growth` that were given."""
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
    """The totals of the wanted model that this one has not."""
    from tokenformer.growth.shape import sizes

    if (config.kind, config.dim) != (wanted.kind, wanted.dim):
        raise UserError(
            f"--to names a {wanted.kind} of dim {wanted.dim}, but this is a {config.kind} of dim {config.dim}: "
            "tokens and layers grow at the same dim (--dim widens)"
        )
    now, then = sizes(config), sizes(wanted)
    if uneven := [name for name, size in then.items() if isinstance(size, list)]:
        raise UserError(f"--to names a model whose layers differ in {uneven[0]}: give the sizes themselves")
    return {name: size for name, size in then.items() if size != now[name]}


def random_ids(config: "ModelConfig", seed: int) -> "Tensor":
    import torch

    length = min(config.context, 128)
    return torch.randint(config.vocab, (4, length), generator=torch.Generator().manual_seed(seed))


def text_ids(path: Path, opened: "Opened", tokens: int) -> "Tensor":
    """About so many tokens of a text, in rows of the model's context (512 at most) from all over it."""
    from tokenformer.eval.perplexity import is_prepared, open_documents

    encoder, length = opened.tokenizer, min(opened.config.context, 512)
    rows = max(1, tokens // length)
    if is_prepared(path):
        ids = itertools.chain.from_iterable(document.ids for document in open_documents(path, encoder))
        whole = list(itertools.islice(ids, rows * length))
        return _rows([whole[i : i + length] for i in range(0, len(whole), length)], length, path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error}): give a text file in UTF-8") from None
    if len(text) <= 16 * tokens:  # short: from its beginning, row after row
        whole = encoder.encode(text)
        encoded = [whole[i : i + length] for i in range(0, len(whole), length)][:rows]
    else:  # a row begins in each piece; 8 characters per token are enough for it
        piece = len(text) // rows
        encoded = [encoder.encode(text[i : i + 8 * length])[:length] for i in range(0, piece * rows, piece)]
    return _rows(encoded, length, path)


def _rows(encoded: list[list[int]], length: int, path: Path) -> "Tensor":
    import torch

    full = [ids for ids in encoded if len(ids) == length]
    if not full:
        raise UserError(f"{path} is shorter than {length} tokens: give a longer text")
    return torch.tensor(full)


def show(certificates: dict[str, "Certificate"], plan: "Plan") -> None:
    """Print what verifying found."""
    from tokenformer.terminal import table

    rule = ", ".join(f"{which} {name}" for which, name in plan.event["rule"].items())
    added = f", new blocks at {plan.event['new_layers']}" if plan.event["new_layers"] else ""
    promise = "exact up to rounding" if plan.exact else "changes the function"
    print(f"rule: {rule or 'identity blocks'}{added}: {promise}")
    rows = [
        [what, f"{c.logit_absolute:.2e}", f"{c.logit_relative:.2e}", f"{c.loss_before:.6f}", f"{c.loss_after:.6f}"]
        for what, c in certificates.items()
    ]
    table(["on", "largest change of a logit", "relative", "loss before", "after"], rows)
    _, certificate = list(certificates.items())[-1]
    rows = [[what, a.rows, a.at_once, a.within_two] for what, a in certificate.gradient.items()]
    table(["new", "rows", "learn at once", "within two steps"], rows)
