"""Turn images or texts into features: rows of a safetensors file, with the names of the rows in its header.

example: tokenformer embed runs/pairs photos --out images.safetensors
         tokenformer embed runs/pairs --text "a red car" --texts captions.txt --out texts.safetensors

MODEL is a run, a folder or a Hugging Face export of a pair (`model.of: pair`); FILE is an image, or a folder with
images in it or below. `--texts` is a file with a text per line. The tensor is called `features`, (rows, width) in
single precision, each row of length 1, so that products of rows are cosines. `names` in the header is a JSON list. A
damaged image is named and left out, and the exit code is then 2.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    pair_arguments(parser, files="*")
    add("--out", required=True, type=Path, help="the safetensors file to write")
    add("--force", action="store_true", help="replace a file of that name")


def pair_arguments(parser: argparse.ArgumentParser, files: str) -> None:
    """Add what `embed` and `match` share."""
    add = parser.add_argument
    add("source", metavar="MODEL", help="a run, a folder, a Hugging Face export of a pair")
    add("files", nargs=files, metavar="FILE", help="images, and folders of them")
    add("--text", action="append", default=[], help="a text; may be given several times")
    add("--texts", type=Path, metavar="FILE", help="a file with a text per line")
    add("--tokenizer", help="a name, tokenizer.json or folder (default: the model's own)")
    add("--size", type=int, metavar="N", help="pixels of the square that the model sees (default: its own)")
    add("--batch", type=int, help="how many at a time (default 64, on a CPU 8)")
    add("--weights", choices=["average", "raw"], help="of a run with train.ema (default: average)")
    add("--device", help="cuda, cuda:1, cpu (default: cuda where there is one)")
    add("--dtype", help="float32, bfloat16, float16 (default: bfloat16 on cuda, else as stored)")


def run(args: argparse.Namespace) -> int:
    from safetensors.torch import save_file

    from tokenformer.eval.pairs import metadata
    from tokenformer.files import atomic_file, check_writable

    check_writable(args.out, args.force, ".safetensors")
    texts = read_texts(args)
    if bool(args.files) == bool(texts):
        raise UserError("a file holds the features of images or of texts: give images, or --text and --texts")
    finder, of = Finder(args), "texts" if texts else "images"
    features, names, damaged = (finder.texts(texts), texts, 0) if texts else finder.images(args.files)
    with atomic_file(args.out) as beside:
        save_file({"features": features.contiguous()}, beside, metadata(names, of, str(args.source)))
    count = f"1 {of[:-1]}" if len(names) == 1 else f"{len(names):,} {of}"
    print(f"{args.out}: features of {count}, {features.shape[1]} wide")
    return 2 if damaged else 0


def read_texts(args: argparse.Namespace) -> list[str]:
    from tokenformer.parsing import read_text

    for option in ("batch", "top"):
        if getattr(args, option, None) is not None and getattr(args, option) < 1:
            raise UserError(f"--{option} is {getattr(args, option)}: give 1 or more")
    texts = [text.strip() for text in args.text]
    if args.texts:
        texts += [line.strip() for line in read_text(args.texts).splitlines() if line.strip()]
    if not all(texts) or (args.texts and not texts):
        raise UserError("a text is empty: write something, or leave it out")
    return texts


class Finder:
    """A pair that was opened, with what it needs to read images and texts."""

    def __init__(self, args: argparse.Namespace) -> None:
        import dataclasses

        from tokenformer.eval.pairs import encoder
        from tokenformer.hub.open import open_model
        from tokenformer.infer.images import at_once, reading

        how = {"device": args.device, "dtype": args.dtype, "weights": args.weights}
        opened = open_model(args.source, tokenizer=args.tokenizer, **how)
        opened.need("pair")
        self.model: Any = opened.model.eval()
        settings, self.size = reading(self.model, args.size)
        self.settings = dataclasses.replace(settings, damaged="skip")
        self.encode, self.batch = encoder(opened.text_tokenizer, self.model), at_once(self.model, args.batch)

    def texts(self, texts: list[str]) -> "Tensor":
        from tokenformer.infer.pairs import text_features
        from tokenformer.terminal import progress

        with progress("reading texts", len(texts), " texts") as advance:
            return text_features(self.model, texts, self.encode, self.batch, advance)

    def images(self, words: list[str]) -> tuple["Tensor", list[str], int]:
        """Return features and names of the images of the command line, and how many were damaged: these are named."""
        import sys

        import torch

        from tokenformer.data.images.folders import find_images
        from tokenformer.data.images.samples import batches
        from tokenformer.infer.pairs import image_features
        from tokenformer.terminal import progress

        images = find_images(words)
        found, names, damaged = [torch.empty(0, self.model.config.embed)], [], 0
        with progress("looking at images", len(images), " images") as advance:
            for first, pixels, _, damage in batches(images, self.settings, self.size, self.batch):
                good = [row for row in range(len(pixels)) if row not in damage]
                found.append(image_features(self.model, pixels, self.settings)[good])
                names += [images.name(first + row) for row in good]
                for row, why in damage.items():
                    print(f"tokenformer: {images.name(first + row)} is damaged ({why}): left out", file=sys.stderr)
                damaged += len(damage)
                advance(len(pixels))
        if not names:
            raise UserError("no image could be decoded: check the images")
        return torch.cat(found), names, damaged
