"""Describe adapters, add them up, or merge them into their base.

example: tokenformer adapter list runs/books poems
         tokenformer adapter merge base books=0.5 poems --out both
         tokenformer adapter add books=0.5 poems --out sum
         tokenformer adapter add runs/books --out books

ADAPTER is the folder of one or a run that trains one (train start=BASE adapter.ffn_tokens=64), with =WEIGHT behind it
where it is to count more or less than 1. merge writes a plain model that computes what the base does with these
adapters attached; add writes an adapter that is their weighted sum, or, of one run, the adapter alone, to be sent.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, about in (
        ("list", "of which base they are, and how large"),
        ("merge", "a plain model of a base and adapters"),
        ("add", "an adapter that is a weighted sum of adapters"),
    ):
        action = actions.add_parser(name, help=about)
        if name == "merge":
            action.add_argument("base", metavar="BASE", help="a folder, a run or a hub name")
        action.add_argument("adapters", nargs="+", metavar="ADAPTER[=WEIGHT]", help="folders, or runs that train one")
        if name != "list":
            action.add_argument("--out", required=True, type=Path, help="the folder to make")
            action.add_argument("--force", action="store_true", help="replace a folder that tokenformer wrote")
        action.set_defaults(action={"list": _list, "merge": _merge, "add": _add}[name])


def run(args: argparse.Namespace) -> None:
    args.action(args)


def _list(args: argparse.Namespace) -> None:
    from collections import Counter

    from tokenformer.adapters import segment_name, split_weight
    from tokenformer.config import PROJECTION_OF
    from tokenformer.hub.adapter_folder import read_adapter
    from tokenformer.terminal import table

    rows = []
    for word in args.adapters:
        adapter = read_adapter(split_weight(word)[0])
        tokens: dict[str, Counter[int]] = {}  # of all segments of a projection, by layer
        named = [(segment_name(text), tensor) for text, tensor in adapter.tensors.items()]
        for name, tensor in named:
            if name is not None and name.role.kind == "key" and name.projection not in ("key", "value"):
                tokens.setdefault(PROJECTION_OF[name.projection], Counter())[name.layer] += len(tensor)
        layers = {layer for found in tokens.values() for layer in found}
        sizes = [f"{w} {'/'.join(map(str, sorted(set(found.values()))))}" for w, found in sorted(tokens.items())]
        also = sum(name is None for name, _ in named)
        sizes = ", ".join(sizes + ([f"also {also} tensors of the base"] if also else []))
        count = sum(tensor.numel() for tensor in adapter.tensors.values())
        rows.append([word, adapter.about.base, adapter.about.sha256[:12], sizes, len(layers), f"{count:,}"])
    table(["adapter", "base", "digest of the base", "tokens", "layers", "parameters"], rows)


def _check_out(args: argparse.Namespace, sources: list[str]) -> None:
    """Refuse a folder that exists, or that is, holds or lies in what is read."""
    from tokenformer.files import refuse_existing, refuse_overlap

    refuse_existing(args.out, args.force)
    for source in sources:
        refuse_overlap(args.out, source)


def _merge(args: argparse.Namespace) -> None:
    from tokenformer.adapters import attach_all, merged, split_weight
    from tokenformer.hub import save
    from tokenformer.hub.open import open_model

    _check_out(args, [args.base, *(split_weight(word)[0] for word in args.adapters)])
    opened = open_model(args.base)
    model = merged(attach_all(opened.model, args.adapters))
    save(model, args.out, tokenizer_json=opened.tokenizer_json, force=args.force)
    print(f"{args.out}: a model of {model.cost().parameters:,} parameters")


def _add(args: argparse.Namespace) -> None:
    from tokenformer.adapters import added, split_weight
    from tokenformer.hub.adapter_folder import read_adapter, write_adapter

    weighted = [split_weight(word) for word in args.adapters]
    _check_out(args, [source for source, _ in weighted])
    summed = added([(read_adapter(source), weight) for source, weight in weighted])
    write_adapter(args.out, summed.about, summed.tensors, summed.history, args.force)
    count = sum(tensor.numel() for tensor in summed.tensors.values())
    print(f"{args.out}: an adapter of {count:,} parameters for {summed.about.base}")
