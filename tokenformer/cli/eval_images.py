"""What `tokenformer eval` measures on images: classes by an image model or by names, recall by a pair."""

import argparse
import dataclasses
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenformer.config_data import DataConfig
    from tokenformer.data.images.stored import Images
    from tokenformer.hub.open import Opened

WORST = 20  # classes in the table, where there are many


def open_source(args: argparse.Namespace) -> tuple["Opened", str, list[str]]:
    """Open the model of a command line; return it, its name, and words such as data.images.crop_pct=1."""
    from tokenformer.adapters import attach_all
    from tokenformer.eval.ranks import local_device
    from tokenformer.files import check_writable
    from tokenformer.hub.open import open_model, split_words

    told = [word for word in args.source if word.startswith("data.") and "=" in word]
    source, configs, _ = split_words([word for word in args.source if word not in told])
    for path in (args.out, args.confusion):
        if path:
            check_writable(path, args.force)
    how = {"device": local_device(args.device), "dtype": args.dtype, "weights": args.weights}
    opened = open_model(source, configs, tokenizer=args.tokenizer, **how)
    if args.adapter:
        opened.prepare = partial(attach_all, words=args.adapter, average=args.weights != "raw")
        opened.raw = False  # --weights chooses the adapter's: its base is the average, on which it was trained
    return opened, source, told


def data_of(opened: "Opened", args: argparse.Namespace, told: list[str], path: str) -> tuple["DataConfig", int]:
    """Return how images of a path are read: as in the model's training, unless it was told otherwise."""
    from tokenformer.config import load
    from tokenformer.config_data import DataConfig
    from tokenformer.infer.images import reading
    from tokenformer.strict import build, override

    settings, size = reading(opened.model, args.size)
    data = load(opened.run).data if opened.run else DataConfig()
    keys = dataclasses.asdict(settings) | {"damaged": "skip", "labels": args.labels, "size": size}
    if data.images:
        keys |= {name: getattr(data.images, name) for name in ("image_column", "label_column", "caption_column")}
    raw = override({"data": {"path": path, "cache": data.cache, "images": keys}}, told)["data"]
    return build(DataConfig, raw, "data"), size


def measure_images(args: argparse.Namespace) -> int:
    import numpy as np

    from tokenformer.config_data import ImagesConfig
    from tokenformer.data.images.opening import some_of
    from tokenformer.eval.images import answers, open_labelled, read_class_index, summary
    from tokenformer.eval.pairs import encoder, read_lines
    from tokenformer.eval.ranks import leave, rank
    from tokenformer.files import atomic_file
    from tokenformer.infer.images import at_once, class_names
    from tokenformer.infer.pairs import ZeroShot
    from tokenformer.terminal import progress
    from tokenformer.train.plot import draw_confusion, need_matplotlib

    if args.confusion:
        need_matplotlib()
    index = read_class_index(args.class_index) if args.class_index else None
    opened, source, told = open_source(args)
    pair = opened.config.of == "pair"
    if not pair:
        opened.need("image")
        if args.templates:
            raise UserError("--templates is for pairs, and this model knows its classes by number: leave it out")
    if index and not pair and len(index[0]) > opened.config.classes:
        raise UserError(
            f"{args.class_index} has {len(index[0]):,} classes but the model {opened.config.classes:,}: give its own"
        )
    model = opened.model.eval()
    data, size = data_of(opened, args, told, args.images)
    settings = data.images or ImagesConfig()
    beside = read_lines(None, "names", args.images) if pair and not index else None
    known = index[0] if index else beside or model.images.get("classes")
    images, part = open_labelled(data, args.part, known)
    names = list(images.classes) if pair else class_names(model)
    if index:
        names[: len(index[1])] = index[1]
    images = some_of(images, args.limit or len(images))
    if len(images.classes) > len(names):
        raise UserError(
            f"{args.images} has {len(images.classes):,} classes but the model {len(names):,}: give data of these"
        )
    parameters, batch = model.cost().parameters, at_once(model, args.batch)
    templates = (read_lines(args.templates, "templates", args.images) or ["{}"]) if pair else []
    if pair:
        if rank() == 0 and all(re.fullmatch(r"\d+|n\d{8}", name) for name in names):
            do = "name them by --class-index, or by classnames.txt beside the images"
            print(f"the classes are called {', '.join(names[:2])}, which are no words: {do}", file=sys.stderr)
        model = ZeroShot(model, names, templates, encoder(opened.text_tokenizer, model))
    with progress(f"looking at {Path(args.images).name}", len(images), " images") as advance:
        found = answers(model, images, settings, settings.size or size, batch, advance)
    damaged = {answer.index: answer.damage for answer in found if answer.damage}
    if rank() == 0:
        results = {"model": source, "parameters": parameters, "data": args.images, "part": part}
        results |= {"adapters": args.adapter} if args.adapter else {}
        results |= {"size": settings.size, **summary(found, names)}
        if pair:
            results |= {"templates": templates, "chance": 1 / len(names)}
        report(images, damaged, results, args, show_images)
        if args.confusion:
            with atomic_file(args.confusion) as beside_it:
                draw_confusion(np.array(results["confusion"]), names, beside_it)
            print(args.confusion)
    leave()
    return 2 if damaged else 0


def measure_pairs(args: argparse.Namespace) -> int:
    from tokenformer.config_data import ImagesConfig
    from tokenformer.data.images.opening import some_of
    from tokenformer.data.images.pairs import open_pairs
    from tokenformer.eval.captions import captioning
    from tokenformer.eval.images import open_labelled
    from tokenformer.eval.pairs import retrieval
    from tokenformer.eval.ranks import leave, rank
    from tokenformer.infer.images import at_once
    from tokenformer.terminal import progress

    for option in ("class_index", "labels", "confusion", "templates"):
        if getattr(args, option) is not None:
            raise UserError(f"--{option.replace('_', '-')} goes with --images: give these, or leave it out")
    opened, source, told = open_source(args)
    captions = opened.config.of == "caption"
    if not captions:
        opened.need("pair")
    model = opened.model.eval()
    data, size = data_of(opened, args, told, args.pairs)
    settings = data.images or ImagesConfig()
    images, part = open_labelled(data, args.part, None, lambda data, part, _: open_pairs(data, part))
    images = some_of(images, args.limit or len(images))
    with progress(f"looking at {Path(args.pairs).name}", len(images), " images") as advance:
        tokenizer, batch = opened.text_tokenizer, at_once(model, args.batch)
        measure = captioning if captions else retrieval
        found, damaged = measure(model, images, tokenizer, settings, settings.size or size, batch, advance)
    if rank() == 0:
        results = {"model": source, "parameters": model.cost().parameters, "data": args.pairs, "part": part}
        show = show_captions if captions else show_pairs
        report(images, damaged, results | {"size": settings.size, **found}, args, show)
    leave()
    return 2 if damaged else 0


def report(images: "Images", damaged: "Mapping[int, str]", results: dict, args: argparse.Namespace, show: Any) -> None:
    """Name what is damaged, show the results, and write them where --out says."""
    from tokenformer.files import write_text

    for number, why in damaged.items():
        print(f"{images.name(number)} is damaged ({why}): it counts in no figure", file=sys.stderr)
    show(results)
    if args.out:
        write_text(args.out, json.dumps(results, indent=1) + "\n")
        print(args.out)


def show_images(results: dict[str, Any]) -> None:
    from tokenformer.terminal import table

    rows = [
        [c["class"], c["images"], f"{c['top1']:.2%}", f"{c['top5']:.2%}", c["taken_for"] or ""]
        for c in sorted(results["classes"].values(), key=lambda c: c["top1"])
    ]
    more = len(rows) - WORST if len(rows) > 5 * WORST else 0
    title = f"the {WORST} worst classes of {len(rows):,} (--out has all)" if more else None
    table(["class", "images", "top-1", "top-5", "most often taken for"], rows[:WORST] if more else rows, title=title)
    found = f"top-1 {results['top1']:.2%}, top-5 {results['top5']:.2%}, loss {results['loss']:.4f}"
    chance = f" (chance {results['chance']:.2%})" if "chance" in results else ""
    damaged = f", {results['damaged']:,} damaged left out" if results["damaged"] else ""
    print(f"{results['images']:,} images ({results['part']}): {found}{chance}{damaged}")


def show_captions(results: dict[str, Any]) -> None:
    from tokenformer.terminal import table

    among, chance = results["among"], 1 / results["among"]
    rows = [
        ["captions that are exact", f"{results['exact']:.2%}", ""],
        ["words in common with the caption (F1)", f"{results['word_f1']:.2%}", ""],
        [f"the right name is the likeliest of {among}", f"{results['first']:.2%}", f"{chance:.2%}"],
        [
            f"the right name is among the five likeliest of {among}",
            f"{results['first_five']:.2%}",
            f"{min(1, 5 * chance):.2%}",
        ],
    ]
    table(["", "share", "by chance"], rows)
    damaged = f", {results['damaged']:,} damaged left out" if results["damaged"] else ""
    print(f"{results['images']:,} images ({results['part']}){damaged}")


def show_pairs(results: dict[str, Any]) -> None:
    from tokenformer.terminal import table

    rows = []
    ways = {"image_to_text": "images that find one of their texts", "text_to_image": "texts that find their image"}
    for way, what in ways.items():
        for name, found in ((what, results), ("  by chance", results["chance"])):
            rows.append([name, *(f"{found[f'{way}_r{k}']:.2%}" for k in (1, 5, 10))])
    table(["", "R@1", "R@5", "R@10"], rows)
    damaged = f", {results['damaged']:,} damaged left out" if results["damaged"] else ""
    print(f"{results['images']:,} images with {results['captions']:,} captions ({results['part']}){damaged}")
    if results["shared"]:
        print(f"{results['shared']:,} captions belong to several images: by these no image finds its text at R@1")
