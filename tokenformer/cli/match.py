"""Find images by texts: for each text the images that fit it best, as lines, JSON or a sheet of pictures.

example: tokenformer match runs/pairs examples/icons/val --text "a red fruit" --top 3
         tokenformer match runs/pairs photos --texts captions.txt --sheet found.png

MODEL is a run, a folder or a Hugging Face export of a pair (`model.of: pair`); FILE is an image, or a folder with
images in it or below. The number behind an image is the cosine of its features and the text's. A damaged image is
named and left out, and the exit code is then 2.
"""

import argparse
import json
from pathlib import Path

from tokenformer.cli.embed import Finder, pair_arguments, read_texts
from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    pair_arguments(parser, files="+")
    add("--top", type=int, default=5, metavar="N", help="images per text (default 5)")
    add("--json", action="store_true", help="JSON lines: text, and file and score of its images")
    add("--sheet", type=Path, metavar="FILE", help="a PNG with a row for each text")
    add("--force", action="store_true", help="replace a file of that name")


def run(args: argparse.Namespace) -> int:
    from tokenformer.data.images.sheet import matches_sheet
    from tokenformer.files import atomic_file, check_writable

    texts = read_texts(args)
    if not texts:
        raise UserError('there is nothing to look for: give --text "a red fruit", or --texts with a file')
    if args.sheet:
        check_writable(args.sheet, args.force, ".png")
    finder = Finder(args)
    features, names, damaged = finder.images(args.files)
    scores = finder.texts(texts) @ features.T
    best = scores.topk(min(args.top, len(names)))
    found = [
        [(names[number], score) for number, score in zip(numbers, values, strict=True)]
        for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    for text, images in zip(texts, found, strict=True):
        if args.json:
            print(json.dumps({"text": text, "images": [{"file": name, "score": score} for name, score in images]}))
        else:
            print(f"{text}: " + ", ".join(f"{name} {score:.3f}" for name, score in images))
    if args.sheet:
        files = [[name for name, _ in images] for images in found]
        with atomic_file(args.sheet) as beside:
            beside.write_bytes(matches_sheet(texts, files, finder.settings, max(64, finder.size)))
        print(args.sheet)
    return 2 if damaged else 0
