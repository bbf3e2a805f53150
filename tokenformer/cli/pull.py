"""Fetch a model or an adapter, or what changed in it, from an address or the Hugging Face hub.

example: tokenformer pull https://host/models/mine
         tokenformer pull owner/mine@main --out models/mine
         tokenformer pull https://host/models/larger --have mine

Tensors that are in the folder already, or in those of --have, are not fetched: of a model that was grown with
old_tokens: 0, only the new segments are. SOURCE must be a folder that tokenformer wrote; the result is compared with
its manifest before it takes the folder's place. A pull that was broken off continues when it is given again.
"""

import argparse
import re
import sys
from pathlib import Path

from tokenformer.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", help="the address of a folder (https://…), or owner/model[@revision] of the hub")
    add("--out", type=Path, help="the folder to make or to renew (default: named as the source, in this folder)")
    add("--have", type=Path, action="append", default=[], metavar="FOLDER", help="a folder whose tensors are used too")
    add("--force", action="store_true", help="remove files in --out that tokenformer did not write")


def run(args: argparse.Namespace) -> None:
    from tokenformer.hub.pull import pull
    from tokenformer.hub.ranges import open_server
    from tokenformer.terminal import in_words

    for folder in args.have:
        if not folder.is_dir():
            raise UserError(f"--have {folder} is no folder: check it")
    server = open_server(args.source)
    if args.out is None and not re.fullmatch(r"\w[\w. -]*", server.name):
        raise UserError(f"{server.source} does not end in a plain name: give the folder to make, --out FOLDER")
    out = args.out or Path(server.name)
    done = pull(server, out, args.have, args.force)
    for name in done.left_out:
        print(f"{name} was changed on the server and is left out: its manifest.json says otherwise", file=sys.stderr)
    what = f"{done.fetched} of {done.pieces} tensors and files" if done.fetched else "nothing new"
    print(f"{out}: {in_words(done.moved)} of {in_words(done.total)} fetched ({what}); equal to its manifest")
