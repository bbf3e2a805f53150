"""Runs a verb of the command line: a file here with a docstring (its help), `arguments(parser)` and `run(args)`.

Exit codes: 0 done, 2 what the user can mend (one sentence, no traceback), 1 what they cannot (a traceback).
"""

import argparse
import errno
import importlib
import os
import pkgutil
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import tokenformer.cli
from tokenformer import __version__
from tokenformer.errors import UserError, out_of_memory
from tokenformer.parsing import cut
from tokenformer.terminal import drop_output

LONGEST = 1000  # characters of a message: a word of the command line or of a file may be of any length
OF_THE_SYSTEM = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EIO}


def verbs() -> dict:
    names = [m.name for m in pkgutil.iter_modules(tokenformer.cli.__path__) if m.name != "main"]
    return {name: importlib.import_module(f"tokenformer.cli.{name}") for name in sorted(names)}


def source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what verbs share that write a folder from weights."""
    add = parser.add_argument
    add("source", help="a folder, a run, a weight file, or a hub name such as Haiyang-W/TokenFormer-150M")
    add("config", nargs="*", help="config files, for official weights that have none beside them")
    add("--out", required=True, type=Path, help="the folder to make")
    add("--tokenizer", help="a tokenizer.json, its folder, byte or gpt-neox-20b (default: the source's own)")
    add("--force", action="store_true", help="replace a folder of this name that tokenformer wrote")


class Verb(argparse.ArgumentParser):
    """Takes options anywhere: `train CONFIG --out RUN steps=9` is read like `train CONFIG steps=9 --out RUN`."""

    mixing = False

    def error(self, message: str) -> NoReturn:
        super().error(cut(message, LONGEST))

    def parse_known_args(self, args=None, namespace=None):
        if self.mixing or self._subparsers is not None:  # of a verb with actions only these do it
            return super().parse_known_args(args, namespace)
        self.mixing = True  # parse_known_intermixed_args calls this method
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.mixing = False


def build_parser() -> argparse.ArgumentParser:
    parser = Verb(prog="tokenformer", description="TokenFormer: parameters are tokens.")
    parser.add_argument("--version", action="version", version=f"tokenformer {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Verb)
    for name, verb in verbs().items():
        doc = (verb.__doc__ or "").strip()
        sub = subparsers.add_parser(
            name, help=doc.split("\n")[0], description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        verb.arguments(sub)
        sub.set_defaults(run=verb.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    # before torch is imported: OpenMP's threads then sleep while they wait for each other. By default they spin, which
    # on a busy machine takes the cores from those that work: there training was 4 to 8 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    args = build_parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except UserError as error:
        print(f"tokenformer: {cut(error, LONGEST)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not _reader_left():
            raise
        drop_output()
        return 0
    except OSError as error:  # of the disk or of a name that no file can have: no fault of the program
        if error.errno not in OF_THE_SYSTEM or error.filename is None:
            raise
        print(f"tokenformer: {cut(error.filename)} cannot be used ({error.strerror}): check it", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tokenformer: interrupted", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError) as error:
        if not (said := out_of_memory(error)):
            raise
        print(f"tokenformer: {said}: give smaller batches, or a device with more of it", file=sys.stderr)
        return 2


def _reader_left() -> bool:
    """Tell whether standard output was closed by its reader (`tokenformer info … | head`), which is no error."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in watch.poll(0))
