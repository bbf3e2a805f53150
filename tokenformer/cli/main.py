"""Runs a verb of the command line: a file here with a docstring (its help), `arguments(parser)` and `run(args)`.

Exit codes: 0 done, 2 what the user can mend (one sentence, no traceback), 1 what they cannot (a traceback).
"""

import argparse
import difflib
import errno
import importlib
import io
import itertools
import os
import re
import select
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokenformer import __version__
from tokenformer.errors import UserError, out_of_memory
from tokenformer.parsing import cut, shown
from tokenformer.terminal import drop_output

LONGEST = 1000  # characters of a message: a word of the command line or of a file may be of any length
OF_THE_SYSTEM = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EIO}
FORMAT = warnings.formatwarning
ORDER = "info tokenizer prepare data train compare plot eval generate draw predict embed match grow shrink".split()
ORDER += "explore edit".split()
ORDER += "adapter serve pull convert plan slurm".split()

WITH_SETTINGS = ("info", "train", "compare", "plan", "slurm")  # take a.b=c


def verbs() -> dict:
    """Return the modules of all verbs, in the order in which they are used."""
    return {name: importlib.import_module(f"tokenformer.cli.{name}") for name in ORDER}


def source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what verbs share that write a folder from weights."""
    add = parser.add_argument
    add("source", help="a folder, a run, a weight file, or a hub name such as Haiyang-W/TokenFormer-150M")
    help = "config files, for official weights that have none beside them"
    add("config", nargs="*", default=[], type=config_file, help=help)
    add("--out", required=True, type=Path, help="the folder to make")
    add("--tokenizer", help="a tokenizer.json, its folder, byte or gpt-neox-20b (default: the source's own)")
    add("--force", action="store_true", help="replace a folder of this name that tokenformer wrote")


def first_config(word: str) -> str:
    if "=" in word and not os.path.exists(word):
        raise UserError(f"{cut(word)} is a setting: name a config first, such as lm/3m {cut(word)}")
    return word


def config_file(word: str) -> str:
    if Path(word).suffix not in (".yml", ".yaml"):
        raise UserError(f"{cut(word)} is one word too many: config files end in .yml, and of texts each has its --text")
    return word


def text_arguments(parser: argparse.ArgumentParser, help: str) -> None:
    """Add what verbs share that measure on a text."""
    what = f"{help}: a file, also compressed, a folder or a prepared set; may be given several times"
    parser.add_argument("--text", action="append", default=[], help=what)
    parser.add_argument("--field", default="text", help="of JSON lines or Parquet in --text (default: text)")


def split_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into names (of configs, of weights) and settings `a.b=c`. Refuse settings that are written otherwise.

    >>> split_settings(["lm/150m", "steps=9"])
    (['lm/150m'], ['steps=9'])
    """
    if spaced := re.search(r"(\S+)(?: +=| *= +(?!\S*=)) *(\S+)", " ".join(words)):
        raise UserError(f"a setting is one word: write {cut(f'{spaced[1]}={spaced[2]}')}, without spaces")
    for word, after in itertools.pairwise([*words, "VALUE"]):
        name, colon, value = word.partition(":")
        if colon and "=" not in word and (key := as_key(name, exactly=True)):
            raise UserError(f"{word} is no setting: write {key}={value}")
        if "=" not in word and not os.path.exists(word) and (key := as_key(word, exactly=True)):
            raise UserError(f"{word} is a key of the config, and needs a value: write {key}={cut(after)}")
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def as_key(word: str, exactly: bool = False) -> str | None:
    """Return the key of a config that a word means.

    >>> as_key("batch-size"), as_key("rate", exactly=True), as_key("nowhere")
    ('batch', 'optimizer.rate', None)
    >>> as_key("step"), as_key("learning-rate"), as_key("lr")
    ('steps', 'optimizer.rate', 'optimizer.rate')
    """
    from tokenformer.config import Config
    from tokenformer.strict import all_keys

    names = [key.name for key in all_keys(Config) if key.type != "section" and not set(key.name) & set("[*")]
    last = {name.split(".")[-1]: name for name in reversed(names)}
    word = word.replace("-", "_")
    if word in names or exactly:
        return word if word in names else last.get(word)
    if word in Config.familiar:
        return Config.familiar[word]
    close = difflib.get_close_matches(word, last, n=1, cutoff=0.8) + [part for part in word.split("_") if part in last]
    return last[close[0]] if close else None


class Verb(argparse.ArgumentParser):
    """Takes options anywhere: `train CONFIG --out RUN steps=9` is read like `train CONFIG steps=9 --out RUN`.

    A mistake is answered in a sentence, as all others are.
    """

    mixing = False

    def error(self, message: str) -> NoReturn:
        for action in self._actions:  # of an option that is missing, say what it may be
            if action.required and action.choices and action.option_strings and "are required:" in message:
                name = action.option_strings[0]
                message = re.sub(rf"{name}\b", f"{name} ({', '.join(action.choices)})", message)
        message = re.sub(r"argument (\S+): invalid int value: (.*)", r"\1 is \2, but must be a whole number", message)
        message = re.sub(r"argument (\S+): invalid float value: (.*)", r"\1 is \2, but must be a number", message)
        self.exit(2, f"tokenformer: {cut(message, LONGEST)} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            close = difflib.get_close_matches(str(value), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"give one of {', '.join(known)}"
            option = f"{'/'.join(action.option_strings)} is" if action.option_strings else ""
            self.error(f"{option or f'there is no {str(action.metavar).lower()}'} {shown(value)}: {hint}")

    def refuse(self, words: list[str]) -> NoReturn:
        """Refuse words that are left over."""
        name, _, value = words[0].partition("=")
        close = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.8)
        if close:
            self.error(f"there is no option {name}: did you mean {close[0]}?")
        if name.startswith("--") and self.prog.split()[-1] in WITH_SETTINGS and (key := as_key(name[2:])):
            value = value or (words[1] if len(words) > 1 else "VALUE")
            self.error(f"there is no option {name}: settings are written without dashes, as {key}={value}")
        if name.startswith("-"):
            self.error(f"there is no option {name}: leave it out")
        self.error(f"{words[0]} is one word too many: leave it out")

    def parse_known_args(self, args=None, namespace=None):
        if self.mixing or self._subparsers is not None:  # of a verb with actions only these do it
            return super().parse_known_args(args, namespace)
        self.mixing = True  # parse_known_intermixed_args calls this method
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.mixing = False


def build_parser() -> Verb:
    about = "TokenFormer: parameters are tokens."
    example = "example: tokenformer train lm/150m data.path=data/books batch=64 --out runs/books"
    raw = argparse.RawDescriptionHelpFormatter
    parser = Verb(prog="tokenformer", description=f"{about}\n\n{example}", formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"tokenformer {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Verb)
    for name, verb in verbs().items():
        doc = (verb.__doc__ or "").strip()
        sub = subparsers.add_parser(name, help=doc.split("\n")[0], description=doc, formatter_class=raw)
        verb.arguments(sub)
        sub.set_defaults(run=verb.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    # before torch is imported: OpenMP's threads then sleep while they wait for each other. By default they spin, which
    # on a busy machine takes the cores from those that work: there training was 4 to 8 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a text may have letters that the terminal has not
    warnings.formatwarning = one_line
    try:
        try:
            args, left = build_parser().parse_known_args(argv)
            if left:
                args.parser.refuse(left)
            code = args.run(args) or 0
        except SystemExit:  # --help, or a mistake in the words
            print(end="", flush=True)
            raise
        print(end="", flush=True)  # what cannot be written is noticed here, not while Python shuts down
        return code
    except UserError as error:
        print(f"tokenformer: {cut(error, LONGEST)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not _reader_left():
            raise
        drop_output()
        return 0
    except OSError as error:  # of the disk or of a name that no file can have: no fault of the program
        if error.errno not in OF_THE_SYSTEM or (error.filename is None and not _output_fails()):
            raise
        name = "standard output" if error.filename is None else cut(error.filename)
        if error.filename is None:
            drop_output()
        print(f"tokenformer: {name} cannot be used ({error.strerror}): check it", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tokenformer: interrupted", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError) as error:
        if not (said := out_of_memory(error)):
            raise
        print(f"tokenformer: {said}: give smaller batches, or a device with more of it", file=sys.stderr)
        return 2


def one_line(message: Warning | str, category: type[Warning], filename: str, *where: Any, **line: Any) -> str:
    """Return what is printed of a warning: one of ours is a sentence, without the place of the code that says it."""
    ours = category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[1])
    return f"tokenformer: {message}\n" if ours else FORMAT(message, category, filename, *where, **line)


def _output_fails() -> bool:
    """Tell whether what was printed cannot be written to standard output, such as a file on a full disk."""
    try:
        print(end="", flush=True)
    except OSError:
        return True
    return False


def _reader_left() -> bool:
    """Tell whether standard output was closed by its reader (`tokenformer info … | head`), which is no error."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in watch.poll(0))
