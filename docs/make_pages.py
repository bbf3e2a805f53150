"""Writes the pages that are made from the code: config.md (every key) and commands.md (every command's help).

A test compares both with what the code says today; after a change of keys or options, run this file.
"""

import argparse
import re
from functools import partial
from pathlib import Path

from tokenformer.cli.main import build_parser
from tokenformer.config import Config, preset_folder, presets
from tokenformer.strict import Key, all_keys

HERE = Path(__file__).parent
MADE = "<!-- made by docs/make_pages.py: change the code instead -->\n"
HOME = "\n[All pages](../README.md#start)\n"


def config_page() -> str:
    lines = [
        "# Every key of a config\n",
        "After this page you know what can be set, and to what. `tokenformer train --keys` prints the same.\n",
        "```yaml\nsteps: 500              # a key\noptimizer: {rate: 1e-3}  # a key of a section\n```\n",
        "On the command line `steps=500 optimizer.rate=1e-3` does the same, and overrides the file. `[]` behind a name "
        "means each item of a list, `.*` each entry of a mapping. An unknown key is refused with a suggestion. "
        "How they work together: [training](training.md), [data](data.md), [images](images.md), [growth](growth.md), "
        "[many GPUs](parallelism.md).\n",
    ]
    groups: dict[str, list[Key]] = {}
    for key in all_keys(Config):
        groups.setdefault(re.split(r"[.\[]", key.name)[0], []).append(key)
    alone = [keys[0] for keys in groups.values() if len(keys) == 1]
    lines += ["## The run\n", *table(alone)]
    for name, keys in groups.items():
        if len(keys) > 1:
            doc = keys[0].doc
            own = keys[1:] if keys[0].type == "section" else keys
            lines += [f"\n## {name}\n", f"{doc[0].upper()}{doc[1:]}.\n", *table(own)]
    lines += ["", "## Presets\n", "| name | what |", "|---|---|"]
    for name in presets():
        first = (preset_folder() / f"{name}.yml").read_text(encoding="utf-8").splitlines()[0]
        lines.append(f"| `{name}` | {first.removeprefix('#').strip()} |")
    return MADE + "\n".join([*lines, HOME])


def table(keys: list[Key]) -> list[str]:
    rows = [[f"`{key.name}`", key.type, f"`{key.default}`" if key.default else "", key.doc] for key in keys]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| key | type | default | meaning |", "|---|---|---|---|", *lines]


def commands_page() -> str:
    lines = [
        "# Every command\n",
        "After this page you know which commands there are and what each of them takes; `tokenformer COMMAND --help` "
        "prints the same. The first steps: [tutorial](tutorial.md).\n",
    ]
    for name, parser in subcommands(build_parser()).items():
        lines += [f"## {name}\n", help_block(parser)]
        for action, inner in subcommands(parser).items():
            lines += [f"### {name} {action}\n", help_block(inner)]
    return MADE + "\n".join([*lines, HOME])


def help_block(parser: argparse.ArgumentParser) -> str:
    """Return a parser's help as a block, on any terminal and with any Python 98 columns wide and without colours."""
    parser.formatter_class, parser.color = partial(parser.formatter_class, width=98), False
    return f"```\n{parser.format_help().strip()}\n```\n"


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def main() -> None:
    (HERE / "config.md").write_text(config_page(), encoding="utf-8")
    (HERE / "commands.md").write_text(commands_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
