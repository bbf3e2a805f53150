"""Draw the loss curves of one or several runs.

example: tokenformer plot runs/demo
         tokenformer plot runs/a runs/b --names "small,large" --title "Two sizes" --out compare.png
         tokenformer plot runs/small runs/on --chain --out both.png    # runs/on begins with the weights of runs/small

Without --out a picture and a page are written into the (first) run's folder: curves.png and curves.html.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--out", action="append", metavar="FILE", help="a .png or .html file; may be given twice")
    across = "step, hours, compute, or what the runs count: tokens, images, … (default: compute where models differ)"
    parser.add_argument("--x", metavar="AXIS", help=across)
    parser.add_argument("--chain", action="store_true", help="each run continues the one before: draw it behind that")
    parser.add_argument("--title", default="", metavar="TEXT", help="title of picture and page")
    parser.add_argument("--names", metavar="A,B", help="names of the runs, in their order (default: their folders')")


def run(args: argparse.Namespace) -> None:
    from tokenformer.errors import UserError
    from tokenformer.files import check_writable
    from tokenformer.train.page import write_page
    from tokenformer.train.plot import draw_png, in_a_row, read_curve

    first = Path(args.runs[0])
    paths = [Path(p) for p in args.out or [first / "curves.png", first / "curves.html"]]
    for path in paths:
        if path.suffix not in (".png", ".html"):
            raise UserError(f"{path} is neither a .png nor a .html file: give --out a name with one of these endings")
        check_writable(path)
    names = args.names.split(",") if args.names else [None] * len(args.runs)
    if len(names) != len(args.runs):
        raise UserError(f"--names gives {len(names)} names for {len(args.runs)} runs: give one for each")
    grown = len(args.runs) > 1 or any(read_curve(run).growths for run in args.runs)
    axis = args.x or ("compute" if grown else "step")
    curves = [read_curve(run, axis, name) for run, name in zip(args.runs, names, strict=True)]
    if args.chain:
        curves = in_a_row(curves)
    title = args.title or f"Loss of {' and '.join(c.name for c in curves)}"
    for path in paths:
        if path.suffix == ".png":
            draw_png(curves, path, axis, title)
        else:
            write_page(path, curves, axis, title)
        print(path)
