"""Name what is on images: the likeliest classes of each, with their shares.

example: tokenformer predict runs/icons photo.jpg holiday/
         tokenformer predict my-folder photos --top 1 --json

MODEL is a run, a folder or a Hugging Face export of an image model; FILE is an image, or a folder with images in it or
in the folders below. An image that cannot be decoded is named in a sentence, the others are classified all the same,
and the exit code is then 2.
"""

import argparse
import json
import sys
from functools import partial

from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="MODEL", help="a run, a folder, a Hugging Face export")
    add("files", nargs="+", metavar="FILE", help="images, and folders of them")
    add("--top", type=int, default=5, metavar="N", help="classes per image (default 5)")
    add("--json", action="store_true", help="JSON lines: file, and class, number and share of the classes; or error")
    add("--size", type=int, metavar="N", help="pixels of the square that the model sees (default: its own)")
    add("--batch", type=int, help="images at a time (default 64, on a CPU 8)")
    add("--adapter", action="append", default=[], metavar="FOLDER[=WEIGHT]", help="attach one; may be given often")
    add("--weights", choices=["average", "raw"], help="of a run with train.ema (default: average)")
    add("--device", help="cuda, cuda:1, cpu (default: cuda where there is one)")
    add("--dtype", help="float32, bfloat16, float16 (default: bfloat16 on cuda, else as stored)")


def run(args: argparse.Namespace) -> int:
    import dataclasses

    from tokenformer.adapters import attach_all
    from tokenformer.data.images.folders import find_images
    from tokenformer.data.images.samples import batches
    from tokenformer.hub.open import open_model
    from tokenformer.infer.images import at_once, class_names, classify, reading
    from tokenformer.terminal import progress

    for option in ("top", "batch"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise UserError(f"--{option} is {getattr(args, option)}: give 1 or more")
    images = find_images(args.files)
    opened = open_model(args.source, device=args.device, dtype=args.dtype, weights=args.weights)
    opened.need("image")
    if args.adapter:
        opened.prepare = partial(attach_all, words=args.adapter, average=args.weights != "raw")
        opened.raw = False  # --weights chooses the adapter's: its base is the average, on which it was trained
    model = opened.model.eval()
    settings, size = reading(model, args.size)
    settings, names, damaged = dataclasses.replace(settings, damaged="skip"), class_names(model), 0
    with progress("looking at images", len(images), " images") as advance:
        for first, pixels, _, damage in batches(images, settings, size, at_once(model, args.batch)):
            top = classify(model, pixels, settings).softmax(-1).topk(min(args.top, len(names)))
            rows = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            for row, found in enumerate([list(zip(*pair, strict=True)) for pair in rows]):
                damaged += row in damage
                _show(images.name(first + row), found, damage.get(row), names, args.json)
            advance(len(pixels))
    return 2 if damaged else 0


def _show(file: str, found: list[tuple[float, int]], damage: str | None, names: list[str], as_json: bool) -> None:
    if damage is not None:
        print(f"tokenformer: {file} is damaged ({damage}): mend or remove it", file=sys.stderr)
    if as_json:
        top = [{"class": names[number], "number": number, "share": share} for share, number in found]
        print(json.dumps({"file": file, **({"classes": top} if damage is None else {"error": damage})}))
    elif damage is None:
        print(f"{file}: " + ", ".join(f"{names[number]} {share:.1%}" for share, number in found))
