"""Draw what a text says: one picture, or a grid with a row for each text.

example: tokenformer draw runs/draw "a red heart" --out heart.png
         tokenformer draw runs/draw "a red heart" "a green tree" --count 8 --guidance 3 --out grid.png

MODEL is a run or a folder of a language model that was trained with `task: draw`, by itself or in a model that reads
images; codes.safetensors beside its weights holds its colours. --guidance g draws by a + g · (with the text − a), where
a is without a text: 1 follows the text as training did, more follows it more closely. Picture i of a text is drawn with
seed + i.
"""

import argparse
from functools import partial
from pathlib import Path

from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="MODEL", help="a run or a folder")
    add("texts", nargs="+", metavar="TEXT", help="what to draw; a row of the grid each")
    add("--out", required=True, type=Path, help="the PNG file to write")
    add("--count", type=int, default=1, metavar="N", help="pictures of each text (default 1)")
    add("--guidance", type=float, default=2.0, help="how closely to follow the text (default 2; 1 = as trained)")
    add("--temperature", type=float, default=1.0, help="0 = the most likely colours (default 1)")
    add("--top-k", type=int, default=0, help="only the k most likely colours of a pixel")
    add("--top-p", type=float, default=0.0, help="only the most likely colours of this probability in total")
    add("--seed", type=int, default=0, help="of the first picture of each text")
    add("--scale", type=int, metavar="N", help="pixels of the file per pixel of a picture (default: about 128 in all)")
    add("--batch", type=int, default=16, help="pictures at a time")
    add("--force", action="store_true", help="replace a file of that name")
    add("--adapter", action="append", default=[], metavar="FOLDER[=WEIGHT]", help="attach one; may be given often")
    add("--tokenizer", help="a name, tokenizer.json or folder (default: the model's own)")
    add("--weights", choices=["average", "raw"], help="of a run with train.ema (default: average)")
    add("--device", help="cuda, cuda:1, cpu (default: cuda where there is one)")
    add("--dtype", help="float32, bfloat16, float16 (default: bfloat16 on cuda, else as stored)")


def run(args: argparse.Namespace) -> None:
    import numpy as np

    from tokenformer.adapters import attach_all
    from tokenformer.data.images.decode import MOST_PIXELS, png
    from tokenformer.files import atomic_file, check_writable
    from tokenformer.hub.open import open_model
    from tokenformer.infer.draw import Drawer, grid
    from tokenformer.infer.sampling import Sampling
    from tokenformer.terminal import progress

    for option in ("count", "batch", "scale"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise UserError(f"--{option} is {getattr(args, option)}: give 1 or more")
    if not all(text.strip() for text in args.texts):
        raise UserError("a text is empty: say what to draw")
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    check_writable(args.out, args.force, ".png")
    how = {"device": args.device, "dtype": args.dtype, "weights": args.weights}
    opened = open_model(args.source, tokenizer=args.tokenizer, **how)
    opened.need("language", "caption")
    if args.adapter:
        opened.prepare = partial(attach_all, words=args.adapter, average=args.weights != "raw")
        opened.raw = False  # --weights chooses the adapter's: its base is the average, on which it was trained
    drawer = Drawer(opened.model.eval(), opened.tokenizer)
    side = drawer.codes.side
    scale = args.scale or max(1, 128 // side)
    if len(args.texts) * args.count * (side * scale) ** 2 > MOST_PIXELS:
        raise UserError(f"--scale {scale} makes a file of more than {MOST_PIXELS:,} pixels: give a smaller one")
    wanted = [(text, args.seed + i) for text in args.texts for i in range(args.count)]
    for text in args.texts:
        drawer.prompt(text)
    pictures = []
    with progress("drawing", len(wanted), " pictures") as advance:
        for first in range(0, len(wanted), args.batch):
            texts, seeds = zip(*wanted[first : first + args.batch], strict=True)
            pictures.append(drawer.draw(texts, sampling, guidance=args.guidance, seeds=seeds))
            advance(len(texts))
    drawn = np.concatenate(pictures)
    with atomic_file(args.out) as beside:
        beside.write_bytes(png(grid(drawn, args.count, scale)))
    print(f"{args.out}: {len(drawn)} {'pictures' if len(drawn) > 1 else 'picture'} of {side} × {side} pixels")
