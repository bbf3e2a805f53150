"""Reads text that somebody else may have written: UTF-8, JSON and YAML; what is wrong is refused in a sentence.

Unusual: size, depth and the expansion of YAML's aliases are bounded, and a key that stands twice is refused, so that no
file can hang the reader, fill its memory or mean two things.
"""

import itertools
import json
import os
import re
import reprlib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from tokenformer.errors import UserError

JSON_BYTES = 1 << 26  # the largest tokenizer.json that we have seen has 34 MB
YAML_BYTES = 1 << 19  # PyYAML reads some 100 kB per second
YAML_NODES = 1 << 17  # after aliases are written out
YAML_CAUSES = {  # what PyYAML says → what is the matter
    "'\\t'": "begins with a tab: use spaces",
    "mapping values are not allowed": "has a second colon: put quotes around the value, or begin a new line",
    "expected <block end>": "is indented in another way than the lines above: give keys of one section equal spaces",
    "expected ',' or": "has a bracket that is not closed, or the lines before it have one: close it",
    "unexpected end of stream": "ends inside quotes: close them",
}
# Unlike Path's methods these say False, and raise nothing, for a name that no file can have; a FIFO is no file.
is_file, is_folder = os.path.isfile, os.path.isdir
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: Any) -> str:
    """Return a value as messages show it: cut off where it is long.

    >>> shown([1, "a"]), len(shown("x" * 10**6))
    ("[1, 'a']", 80)
    """
    return _SHORT.repr(value)


def read_text(path: str | Path, most: int = JSON_BYTES) -> str:
    """Read the text of a file, which may have `most` bytes."""
    try:
        if not is_file(path):
            exists = os.path.lexists(path)
            raise UserError(f"{cut(path)} is {'no plain file: give one' if exists else 'missing: check the path'}")
        size = os.stat(path).st_size
        if size > most:
            raise UserError(f"{path} has {size:,} bytes, more than the {most:,} that such a file may have: get it anew")
        with open(path, "rb") as file:
            # files of the system have another size than they say; Python reserves as many bytes as it may read
            return file.read(min(most, max(size, JSON_BYTES))).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file in UTF-8 (byte {error.start}): give one, or get it anew") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{cut(path)} cannot be read ({getattr(error, 'strerror', None) or error})") from None


def first_text(path: str | Path, most: int = 100) -> str:
    """Read the beginning of a file that should hold a name: whatever the file is, it cannot fill the memory."""
    try:
        with open(path, "rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore it") from None


def read_json(path: str | Path) -> dict:
    """Read a JSON object from a file."""
    value = parse_json(read_text(path), str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, not {shown(value)}: restore it or get it anew")
    return value


def parse_json(text: str, where: str, do: str = "restore it or get it anew") -> Any:
    """Parse JSON; `where` is what messages call it, `do` what they advise."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        return value
    except UnicodeEncodeError:
        raise UserError(f"{where} is not UTF-8 text (it holds half a surrogate pair): mend it") from None
    except RecursionError:
        raise UserError(f"{where} is nested too deeply: {do}") from None
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}): {do}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(twice)} stands twice")
    return found


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML; `1e-3` is a number (PyYAML alone reads it as text)."""
    import yaml

    if len(text) > YAML_BYTES:
        raise UserError(f"{where} has {len(text):,} characters, more than the {YAML_BYTES:,} that a config may have")
    depths = itertools.accumulate(1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", text))
    if max(depths, default=0) > 200:  # PyYAML's time grows with the square of the depth
        raise UserError(f"{where} is nested too deeply: write it flatter")
    try:
        loader = _loader()(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _nodes(node, {}) > YAML_NODES:
            raise UserError(f"{where} is too large when its aliases (*name) are written out: write less")
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = str(error.problem or error.context)
        cause = problem if "stands twice" in problem else ""
        cause = next((ours for theirs, ours in YAML_CAUSES.items() if theirs in problem), cause)
        raise UserError(f"{where}{line}, {cause or f'is not YAML that we read: {problem}'}") from None
    except RecursionError:
        raise UserError(f"{where} is nested too deeply, or into itself: write it flatter") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{where} is not YAML that we read: {cut(' '.join(str(error).split()))}") from None


def _nodes(node: Any, known: dict[int, int]) -> int:
    """Count the nodes of a tree with every alias written out. A node that contains itself recurses without an end."""
    if id(node) not in known:
        items = node.value if isinstance(node.value, list) else []  # a mapping's are pairs of nodes
        parts = [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_nodes(part, known) for part in parts)
    return known[id(node)]


@cache
def _loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            seen = set()
            for name, _ in node.value:
                if not isinstance(name, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(None, None, "a key is not plain text", name.start_mark)
                if name.tag == "tag:yaml.org,2002:bool":  # YAML reads the key `on` as true
                    name.tag = "tag:yaml.org,2002:str"
                if name.value in seen:
                    problem = f"key {shown(name.value)} stands twice: leave one out"
                    raise yaml.constructor.ConstructorError(None, None, problem, name.start_mark)
                seen.add(name.value)
            return super().construct_mapping(node, deep)

    number = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


def cut(text: object, most: int = 200) -> str:
    return str(text) if len(str(text)) <= most else f"{str(text)[:most]}…"
