"""Draw the loss curves of one or several runs.

example: tokenformer plot runs/demo
         tokenformer plot runs/a runs/b --out compare.png --x tokens

Without --out a picture and a page are written into the (first) run's folder: curves.png and curves.html.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--out", action="append", metavar="FILE", help="a .png or .html file; may be given twice")
    across = "step (default), hours, compute, or what the runs count: tokens, images, …"
    parser.add_argument("--x", metavar="AXIS", default="step", help=across)
    parser.add_argument("--title", default="", help="title of the picture")


def run(args: argparse.Namespace) -> None:
    from tokenformer.errors import UserError
    from tokenformer.files import check_writable
    from tokenformer.train.page import write_page
    from tokenformer.train.plot import draw_png, read_curve

    first = Path(args.runs[0])
    paths = [Path(p) for p in args.out or [first / "curves.png", first / "curves.html"]]
    for path in paths:
        if path.suffix not in (".png", ".html"):
            raise UserError(f"{path} is neither a .png nor a .html file: give --out a name with one of these endings")
        check_writable(path)
    curves = [read_curve(r, args.x) for r in args.runs]
    for path in paths:
        if path.suffix == ".png":
            draw_png(curves, path, args.x, args.title)
        else:
            write_page(path, curves, args.x, args.title or ", ".join(c.name for c in curves))
        print(path)
