"""Mutations that know the format: a file that is still of its form, with one thing in it that cannot be.

Written without reading `harm.py`, whose damage is of another kind. A tree (JSON or YAML) is read, changed at one place
and written; headers of safetensors, operations of a pickle (`archives.py`) and fields of an index are changed one at a
time.
"""

import json
import lzma
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.archives import in_archive
from tests.fuzz.harm import CANARY
from tests.fuzz.samples import in_csv, in_parquet, in_png, in_tar

EDGES = [
    -1,
    0,
    1,
    2,
    7,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
    -(10**30),
]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e-45, 1e38, 3.5e38, 1e308, math.inf, -math.inf, math.nan]
TEXTS = [
    "",
    " ",
    "\n",
    "\0",
    "null",
    "true",
    "0",
    "-1",
    "1e9",
    "NaN",
    "..",
    "../folder",
    "/dev/zero",
    "/proc/self/mem",
    "~",
    "é",
    "e\u0301",
]
TEXTS += [
    "\u202egnp",
    "\ufeff",
    "\ud800",
    "𝔪odel",
    "%s%n{}{0}",
    "$(touch EXECUTED)",
    "a" * 300,
    "x" * 70_000,
    "word " * 50,
    "\x1b[2J",
    "softmax",
]
Tree = Any
Spot = tuple[Any, Any]  # a container, and the key of what is changed in it


def wrong(chance: random.Random) -> Tree:
    """A value that few places expect."""
    kinds = [EDGES, FLOATS, TEXTS, [None, True, False, [], {}, [[]], [None], {"": None}, {"0": 0}, [1, "2", 3.0]]]
    return chance.choice(chance.choice(kinds))


def spots(tree: Tree) -> list[Spot]:
    found: list[Spot] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(min(len(node), 12)) if isinstance(node, list) else []
        found += [(node, key) for key in keys]
        waiting += [node[key] for key in keys]
    return found


def change(tree: Tree, chance: random.Random) -> tuple[Tree, str]:
    """One change somewhere in a tree."""
    places = spots(tree)
    if not places:
        return wrong(chance), "another whole"
    node, key = chance.choice(places)
    value = node[key]
    other, that = chance.choice(places)
    how = chance.choice(["value", "near", "type", "drop", "swap", "move", "rename", "wrap", "list", "copy", "whole"])
    if how == "value":
        node[key] = wrong(chance)
    elif how == "near" and isinstance(value, int | float) and not isinstance(value, bool):
        node[key] = chance.choice([value + 1, value - 1, -value, value * 2, value / 2, value * 1000, float(value)])
    elif how == "near" and isinstance(value, str):
        node[key] = chance.choice(
            [value.upper(), value + " ", value[:-1], value[::-1], value * 3, [value], value + "\n"]
        )
    elif how == "type":
        node[key] = chance.choice(
            [str(value), [value], {"value": value}, {str(value)[:20]: 1}, json.dumps(value)[:500]]
        )
    elif how == "drop":
        del node[key]
    elif how == "swap":
        node[key], other[that] = json.loads(json.dumps(other[that])), json.loads(json.dumps(value))
    elif how == "move" and isinstance(node, dict):  # a key at the wrong place of a config
        del node[key]
        homes = [c for c, _ in places if isinstance(c, dict) and c is not node] + [tree]
        home = chance.choice(homes)
        if isinstance(home, dict):
            home[str(key)] = value
    elif how == "rename" and isinstance(node, dict):
        del node[key]
        name = str(key)
        node[
            chance.choice(
                [
                    name.upper(),
                    name + "s",
                    name.replace("_", "-"),
                    " " + name,
                    name.replace("e", "е"),
                    "",
                    7,
                    "__class__",
                ]
            )
        ] = value
    elif how == "wrap":
        for _ in range(chance.choice([1, 40, 900, 30_000])):
            value = [value]
        node[key] = value
    elif how == "list" and isinstance(value, list):
        node[key] = chance.choice(
            [value + value, value[:-1], value[::-1], [], value * 5000, [*value, None], [*value, *value[:1]]]
        )
    elif how == "copy":
        node[key] = json.loads(json.dumps(other[that]))
    else:
        how, tree = "whole", chance.choice([wrong(chance), [tree], {"model": tree}, {"config": tree}])
    return tree, f"{how} at {str(key)[:40]!r}"


def dumped(tree: Tree) -> str:
    """JSON, also of what is nested deeper than the writer goes."""
    try:
        return json.dumps(tree)
    except RecursionError:
        return "[" * 30_000 + "1" + "]" * 30_000


def in_json(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    text = data.decode()
    how = chance.choice(["tree"] * 8 + ["twice", "digits", "comment", "escape", "comma"])
    if how == "tree":
        tree, said = change(json.loads(text), chance)
        return dumped(tree).encode("utf-8", "surrogatepass"), said
    if how == "twice":  # the same key once more, with another value, first or last
        tree = json.loads(text)
        if isinstance(tree, dict) and tree:
            key, value = chance.choice(sorted(tree)), json.dumps(wrong(chance))
            inner = text.strip()[1:-1]
            pair = f"{json.dumps(key)}: {value}"
            text = f"{{{pair}, {inner}}}" if chance.random() < 0.5 else f"{{{inner}, {pair}}}"
    elif how == "digits":
        numbers = [i for i, c in enumerate(text) if c.isdigit()] or [0]
        at = chance.choice(numbers)
        text = (
            text[:at]
            + chance.choice(["9" * 5000, "1e999", "0x10", "٣", "1_0", "01", "--1", "+1", ".5", "5."])
            + text[at + 1 :]
        )
    elif how == "comment":
        text = text.replace("\n", " // said\n", 1) if "\n" in text else "/* said */ " + text
    elif how == "escape":
        text = text.replace('"', '"\\ud83d', 1) if chance.random() < 0.5 else text.replace("e", "\\u0065")
    else:
        text = text.replace("}", ",}", 1)
    return text.encode("utf-8", "surrogatepass"), how


YAML_LINES = [
    "<<: *a", "model: *a", "? [1, 2]\n: 3", "- 1", "...", "---\nsecond: document", "%YAML 9.9", "steps: 1:30",
    "steps: 0o17", "steps: 1_000",
    "batch: yes", "seed: .nan", "seed: .inf", "seed: 2001-12-14", "seed: !!binary aGVsbG8=", "model: !!set {a, b}",
    "model: !!omap [a: 1]",
    f"seed: !!python/object/apply:os.system ['touch {CANARY}']",
    f"seed: !!python/object/new:os.system ['touch {CANARY}']",
    "seed: !!python/name:os.system", "seed: !include config.yml", "seed: !!timestamp x", "seed: !!float one",
    "seed: ~", "base: base.yml",
    "base: config.yml", "base: .", "base: /dev/stdin", "\tseed: 1", "seed: 'unfinished", "seed: |\n", "seed: {",
    "start: folder", "start: .",
    "a: &a [*a]", "a: &a {b: *a}", "model: {layers: 2, layers: 3}", "seed: \"\\ud800\"", "seed: \"\\0\"",
    "growth: [{at: {step: 1}}]", "growth: *x",
    "model:\n    layers: 3", "train: {device: cuda}", "data: {path: [a, b]}", "'': 1", "null: 1", "1: 1", "true: 1",
    "2.5: 1",
]  # fmt: skip


def in_yaml(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    text = data.decode()
    if chance.random() < 0.65:
        tree, said = change(yaml.safe_load(text), chance)
        try:
            text = yaml.safe_dump(tree, allow_unicode=True, default_flow_style=chance.choice([None, True, False]))
        except (RecursionError, yaml.YAMLError):
            text = "seed: " + "[" * 20_000 + "]" * 20_000
        return text.encode("utf-8", "surrogatepass"), said
    how = chance.choice(["line", "line", "line", "indent", "colon", "tabs", "flow"])
    lines = text.splitlines()
    at = chance.randrange(len(lines) + 1)
    if how == "line":
        line = chance.choice(YAML_LINES)
        return "\n".join([*lines[:at], line, *lines[at:]]).encode(), f"the line {line[:40]!r}"
    if how == "indent":
        lines = [(" " if i >= at else "") + line for i, line in enumerate(lines)]
    elif how == "colon":
        lines = [line.replace(": ", ":") if i == at else line for i, line in enumerate(lines)]
    elif how == "tabs":
        lines = [line.replace("  ", "\t") for line in lines]
    else:
        lines = [json.dumps(yaml.safe_load(text), default=str)]
    return "\n".join(lines).encode(), how


SIZES = {
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F64": 8,
    "I64": 8,
    "BF16": 2,
    "F16": 2,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
}


def in_safetensors(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """The header says another thing, or the bytes stand where another tensor is."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    names = [name for name in header if name != "__metadata__"]
    name, other = chance.choice(names), chance.choice(names)
    one = header[name]
    begin, end = one["data_offsets"]
    how = chance.choice(
        ["type", "shape", "rename", "drop", "alias", "swap", "shift", "fill", "length", "metadata", "tail", "hole",
        "empty", "tree", "twice", "cast", "order", "extra"]
    )  # fmt: skip
    if how == "type":
        one["dtype"] = chance.choice([*SIZES, "F4", "C64", "float32", None, 4])
    elif how == "shape":
        shape = one["shape"]
        one["shape"] = chance.choice(
            [shape[::-1], [math.prod(shape)], [1, *shape], [], [0], [-1, *shape[1:]], [*shape[:-1], 2**62], [2**32,
            2**32, 0], [str(n) for n in shape], [float(n) for n in shape]]
        )  # fmt: skip
    elif how == "rename":
        new = chance.choice(
            [
                name.upper(),
                "model." + name,
                "module." + name,
                name + "_",
                name.replace(".0.", ".9."),
                "",
                "../" + name,
                name.replace(".", "/"),
            ]
        )
        header[new] = header.pop(name)
    elif how == "drop":
        del header[name]
    elif how == "alias":
        header[chance.choice([name + ".copy", "model." + name, "lm_head.weight", "head.weight"])] = dict(one)
    elif how == "swap":
        header[name], header[other] = header[other], one
    elif how == "shift":
        by = chance.choice([1, 4, -4, 64, 2**40])
        one["data_offsets"] = chance.choice(
            [[begin + by, end + by], [begin, end + by], [end, begin], [begin], [begin, end, end], [-1, end]]
        )
    elif how == "fill":
        pattern = chance.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\0\0", b"\xff\xff\x7f\x7f", b"\1\0\0\0"])
        body[begin:end] = (pattern * (end - begin))[: end - begin]
    elif how == "metadata":
        header["__metadata__"] = chance.choice(
            [
                None,
                [],
                "pt",
                {"format": "tf"},
                {"format": 1},
                {"a": {"b": "c"}},
                {"x" * 100_000: "y"},
                {},
                {"DCP_SHARDING_INFO": "{}"},
            ]
        )
    elif how == "tail":
        body += bytes(chance.choice([1, 8, 4096]))
    elif how == "hole":
        body[begin:begin] = bytes(8)
        for entry in (header[n] for n in names):
            entry["data_offsets"] = [at + 8 if at >= end else at for at in entry["data_offsets"]]
    elif how == "empty":
        header, body = chance.choice([({}, body), ({}, bytearray()), ({"__metadata__": {}}, bytearray())])
    elif how == "tree":
        header, said = change(header, chance)
        how = "header: " + said
    elif how == "cast":  # all of it in another type, of the right length
        kind = chance.choice(["F64", "BF16"])
        values = struct.unpack(f"<{len(body) // 4}f", body)
        body = bytearray(
            struct.pack(f"<{len(values)}d", *values)
            if kind == "F64"
            else b"".join(body[i + 2 : i + 4] for i in range(0, len(body), 4))
        )
        for entry in (header[n] for n in names):
            entry |= {"dtype": kind, "data_offsets": [at // 4 * SIZES[kind] for at in entry["data_offsets"]]}
    elif how == "order":
        keys = chance.sample(sorted(header), len(header))
        header = {key: header[key] for key in keys}
    elif how == "extra":
        header["extra.weight"] = {"dtype": "F32", "shape": [2], "data_offsets": [len(body), len(body) + 8]}
        body += struct.pack("<2f", 1.0, 2.0)
    text = dumped(header).encode("utf-8", "surrogatepass")
    if how == "twice":
        text = text[:-1] + b", " + json.dumps({name: header[other]}).encode()[1:]
    if chance.random() < 0.5:
        text += b" " * (-len(text) % 8)
    said = (
        len(text)
        if how != "length"
        else chance.choice([0, 1, 7, len(text) - 1, len(text) + 1, len(data), 2**31, 2**63, 2**64 - 1])
    )
    return struct.pack("<Q", said) + text + bytes(body), f"{how} ({name[:50]})"


def in_index(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Megatron's: magic, version, type, two counts, sizes, pointers, documents."""
    magic, version, kind, count, documents = struct.unpack("<9sQBQQ", data[:34])
    sizes = list(struct.unpack(f"<{count}i", data[34 : 34 + 4 * count]))
    pointers = list(struct.unpack(f"<{count}q", data[34 + 4 * count : 34 + 12 * count]))
    bounds = list(struct.unpack(f"<{documents}q", data[34 + 12 * count : 34 + 12 * count + 8 * documents]))
    how = chance.choice(
        [
            "magic",
            "version",
            "type",
            "count",
            "documents",
            "size",
            "pointer",
            "bound",
            "fewer",
            "none",
            "reverse",
            "repeat",
        ]
    )
    at = chance.randrange(max(1, count))
    if how == "magic":
        magic = chance.choice([b"TNTIDX\0\0\0", b"MMIDIDX\0\1", bytes(9), magic[::-1]])
    elif how == "version":
        version = chance.choice([0, 2, 2**63, 1 << 56])
    elif how == "type":
        kind = chance.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 255])
    elif how == "count":
        count = chance.choice([0, 1, count - 1, count + 1, 2**31, 2**61, 2**64 - 1])
    elif how == "documents":
        documents = chance.choice([0, 1, documents - 1, documents + 1, 2**40, 2**64 - 1])
    elif how == "size":
        sizes[at] = chance.choice([0, -1, sizes[at] + 1, sizes[at] - 1, 2**31 - 1, -(2**31)])
    elif how == "pointer":
        pointers[at] = chance.choice([0, -2, 1, pointers[at] + 2, pointers[at] + 1, 2**62, pointers[-1]])
    elif how == "bound":
        bounds[chance.randrange(len(bounds))] = chance.choice([0, -1, 1, len(sizes), len(sizes) + 1, 2**60])
    elif how == "fewer":
        sizes, pointers, bounds = sizes[: at + 1], pointers[: at + 1], list(range(at + 2))
        count, documents = at + 1, at + 2
    elif how == "none":
        sizes, pointers, bounds, count, documents = [], [], [0], 0, 1
    elif how == "reverse":
        pointers = pointers[::-1]
    elif how == "repeat":
        bounds[1:1] = [0] * 3
        documents += 3
    packed = struct.pack("<9sQBQQ", magic, version, kind, count, documents)
    packed += struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(pointers)}q", *pointers)
    return packed + struct.pack(f"<{len(bounds)}q", *bounds), f"{how} ({at})"


def in_rows(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """JSON lines."""
    rows = data.decode().splitlines() or [""]
    at = chance.randrange(len(rows))
    how = chance.choice(
        ["row"] * 5 + ["same line", "array", "blank", "nul", "half", "carriage", "separator", "scalar", "long"]
    )
    said = ""
    if how == "row":
        changed, said = in_json(rows[at].encode(), chance)
        lines = [row.encode() for row in rows]
        lines[at] = changed
        return b"\n".join(lines), f"row {at}: {said}"
    if how == "same line":
        rows[at : at + 2] = ["".join(rows[at : at + 2])]
    elif how == "array":
        rows = ["[" + ",".join(rows) + "]"]
    elif how == "blank":
        rows[at:at] = ["", "  ", "\t"]
    elif how == "nul":
        rows[at] = "\0" * 200
    elif how == "half":
        rows[at] = rows[at][: len(rows[at]) // 2]
    elif how == "carriage":
        rows = ["\r".join(rows)]
    elif how == "separator":
        rows[at] = rows[at].replace(" ", "\u2028")
    elif how == "scalar":
        rows[at] = dumped(wrong(chance))
    else:
        rows[at] = rows[at] * 3000
    return "\n".join(rows).encode("utf-8", "surrogatepass"), f"{how} at row {at}"


def in_xz(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    plain = lzma.decompress(data)
    how = chance.choice(["rows", "rows", "streams", "padding", "alone", "raw", "check", "dictionary", "zeros"])
    if how == "rows":
        plain, said = in_rows(plain, chance)
        return lzma.compress(plain), "xz of " + said
    if how == "streams":
        return data + bytes(4) + lzma.compress(b"\xff\xfe") + data, how
    if how == "padding":
        return data + bytes(3), how
    if how == "alone":
        return lzma.compress(plain, lzma.FORMAT_ALONE), how
    if how == "raw":
        return plain, how
    if how == "check":
        return lzma.compress(plain, check=lzma.CHECK_NONE), how
    if how == "dictionary":  # a reader must set aside as much as the header says
        return lzma.compress(plain, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**30}]), how
    return lzma.compress(bytes(50_000_000)), how


def in_tokens(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Ids of two bytes each."""
    at = chance.randrange(0, max(2, len(data)), 2)
    how = chance.choice(["beyond", "all beyond", "odd", "endian", "end marks", "shift"])
    if how == "beyond":
        return data[:at] + b"\xff\xff" + data[at + 2 :], how
    if how == "all beyond":
        return b"\x01\x7f" * (len(data) // 2), how
    if how == "odd":
        return data[:-1], how
    if how == "endian":
        return b"".join(data[i : i + 2][::-1] for i in range(0, len(data), 2)), how
    return (bytes(len(data)) if how == "end marks" else data[1:] + data[:1]), how


def craft_of(file: Path, head: bytes) -> Callable[[bytes, random.Random], tuple[bytes, str]] | None:
    """Which mutation a file's format has, if any."""
    by = {".json": in_json, ".jsonl": in_rows, ".xz": in_xz, ".safetensors": in_safetensors, ".idx": in_index}
    by |= {".yml": in_yaml, ".yaml": in_yaml, ".csv": in_csv, ".tar": in_tar, ".parquet": in_parquet, ".png": in_png}
    if file.suffix in by:
        return by[file.suffix]
    if head.startswith(b"PK"):
        return in_archive
    return in_tokens if file.suffix == ".bin" else None
