"""Ways to damage files and folders: bytes, text, JSON and YAML, safetensors headers, pickles, index files, names.

Every way takes a random generator, does its harm, and says in a few words what it did. `apply` chooses.
"""

import hashlib
import json
import lzma
import os
import pickle
import random
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CANARY = "EXECUTED"  # a file in the case's folder that only executed code makes
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3.5, -0.0, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, -(10**18),
    1e9, 1e308, 1e-308,
    float("nan"), float("inf"), float("-inf"), "", " ", "a", "²", "١", "1e5", "nan", "null", "true", "a\nb", "a\x00b",
    "\ud800", "é" * 40, "x" * 300, "y" * 70_000, "../../../etc/passwd", "/dev/zero", "/", ".", "~", "2001-99-99",
    "hub:nobody/nothing", [], {}, [[]], [1, 2], [None], ["a", 1], {"a": 1}, {"": None}, [[[[[[[[1]]]]]]]],
]  # fmt: skip
YAML = [
    "2001-99-99", "2001-01-01", "!!python/object/apply:os.system ['touch EXECUTED']", "!!binary aGVsbG8=",
    "!!set {a, b}",
    "? [1, 2]\n: 3", "{[1, 2]: 3}", "&a [*a]", "*nothing", "0x7fffffffffffffffff", "1_000_000_000_000", "190:20:30",
    "~",
    ".inf", "-.inf", ".nan", "1e400", "'", '"\\ud800"', "!!float x", "!!int 'a'", "<<: {a: 1}", "<<: [1]", "yes",
    "|\n  a",
    "[" * 2000, "{" * 500, "[" * 300 + "]" * 300, "a: b: c", "\t- x", "%YAML 9.9", "---\n---", "!nope x", "1" * 5000,
]  # fmt: skip
BOMB = (
    "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{n}: &{n} [{', '.join(['*' + p] * 9)}]\n" for p, n in zip("abcdefghij", "bcdefghijk", strict=True))
)  # fmt: skip


def apply(file: Path, root: Path, chance: random.Random) -> str:
    """Damage `file`, which lies somewhere below the case's folder `root`."""
    ways: list[Callable[[Path, Path, random.Random], str]] = [by_bytes, by_name]
    suffix = file.suffix.lower()
    if suffix in (".json", ".jsonl"):
        ways += [by_json, by_json, by_json, by_json_text]
    if suffix in (".yml", ".yaml"):
        ways += [by_yaml, by_yaml, by_yaml, by_yaml, by_json_text]
    if suffix == ".safetensors":
        ways += [by_header, by_header, by_header]
    if suffix in (".bin", ".pt") and file.read_bytes()[:2] == b"PK":
        ways += [by_pickle, by_pickle, by_pickle, by_zip]
    if suffix == ".idx":
        ways += [by_index, by_index]
    if suffix == ".xz":
        ways += [by_xz]
    if suffix in (".txt", "") and file.stat().st_size < 10**6:
        ways += [by_text]
    try:
        return chance.choice(ways)(file, root, chance)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error, zipfile.BadZipFile, lzma.LZMAError):
        return by_bytes(file, root, chance)  # an earlier harm left nothing of the format


def sign(file: Path, root: Path) -> bool:
    """Let the manifests that speak for a file speak for it as it is now: crafted, not damaged. Whether there is one."""
    signed = False
    for folder in file.parents:
        if folder == root.parent:
            break
        for manifest in folder.glob("*.json"):
            if manifest == file or manifest.is_symlink() or not manifest.is_file():
                continue
            try:
                raw = json.loads(manifest.read_text(encoding="utf-8"))
                entries = raw["files"]
                name = str(file.relative_to(folder))
                if isinstance(entries[name], dict):
                    if file.is_file() and not file.is_symlink():
                        data = file.read_bytes()
                        entries[name] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                    manifest.write_text(json.dumps(raw))
                    signed = True
            except (ValueError, OSError, LookupError, TypeError, RecursionError):
                continue
    return signed


def by_bytes(file: Path, _root: Path, chance: random.Random) -> str:
    data = bytearray(file.read_bytes())
    n = len(data)
    at = chance.randrange(n + 1)
    size = min(n - at, chance.choice([1, 2, 8, 100, 4096, n]))
    kind = chance.choice(
        ["flip", "cut", "empty", "garbage", "insert", "remove", "repeat", "zeros", "ones", "append", "front"]
    )
    if kind == "flip" and n:
        data[min(at, n - 1)] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "empty":
        data.clear()
    elif kind == "garbage":
        data[at : at + size] = chance.randbytes(size)
    elif kind == "insert":
        data[at:at] = chance.randbytes(chance.choice([1, 7, 500]))
    elif kind == "remove":
        del data[at : at + size]
    elif kind == "repeat":
        data[at:at] = data[at : at + size]
    elif kind in ("zeros", "ones"):
        data[at : at + size] = (b"\0" if kind == "zeros" else b"\xff") * size
    elif kind == "append":
        data += chance.choice([b"\0", b"\n", b"}", chance.randbytes(64)])
    elif kind == "front":
        data[:0] = chance.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" ", b"#"])
    file.write_bytes(data)
    return f"bytes: {kind} at {at} of {n}"


def by_name(file: Path, root: Path, chance: random.Random) -> str:
    """What is in a folder, rather than in a file."""
    kind = chance.choice(
        ["remove", "pipe", "folder", "loop", "nowhere", "zero", "swap", "stray", "stray other", "rename", "copy"]
    )
    if kind == "pipe" and file.suffix in (".txt", ".jsonl", ".xz"):
        kind = "remove"  # text may come through a pipe
    if kind == "remove":
        file.unlink()
    elif kind in ("pipe", "folder", "loop", "nowhere", "zero"):
        file.unlink()
        {
            "pipe": lambda: os.mkfifo(file),
            "folder": lambda: (file / "inner").mkdir(parents=True),
            "loop": lambda: os.symlink(file, file),
            "nowhere": lambda: os.symlink("nothing/here", file),
            "zero": lambda: os.symlink("/dev/zero", file),
        }[kind]()
    elif kind == "swap":
        others = sorted(p for p in file.parent.iterdir() if p.is_file() and p != file)
        if others:
            other = chance.choice(others)
            file.rename(file.with_name("between"))
            other.rename(file)
            file.with_name("between").rename(other)
            return f"names: {file.name} and {other.name} swapped"
        return "names: nothing to swap"
    elif kind.startswith("stray"):
        new = file.with_name(
            chance.choice([f"{file.stem}z{file.suffix}", f"0{file.name}", f".{file.name}", f"{file.name}~"])
        )
        data = bytearray(file.read_bytes())
        if kind == "stray other" and data:
            for _ in range(20):
                data[chance.randrange(len(data))] ^= 0x41
        new.write_bytes(data)
        return f"names: a {kind} {new.name}"
    elif kind == "rename":
        new = file.with_name(chance.choice([file.name.upper(), f"{file.name}.bak", "²" + file.name, "a" * 200]))
        file.rename(new)
        return f"names: {file.name} is {new.name[:40]}"
    else:
        folder = file.parent
        inside = root / "a copy inside"
        pipes = lambda _, names: [name for name in names if (folder / name).is_fifo()]  # noqa: E731
        shutil.copytree(
            folder, inside, dirs_exist_ok=True, symlinks=True, ignore=pipes
        ) if folder != root else shutil.copy(file, inside)
    return f"names: {kind} {file.relative_to(root)}"


def by_json(file: Path, _root: Path, chance: random.Random) -> str:
    """One value, key or row of the tree."""
    lines = file.suffix == ".jsonl"
    text = file.read_text(encoding="utf-8")
    try:
        rows = [json.loads(line) for line in text.splitlines()] if lines else [json.loads(text)]
    except ValueError:
        return by_bytes(file, _root, chance)
    at = chance.randrange(len(rows))
    holder = [rows[at]]
    said = _change(holder, chance)
    parts = [json.dumps(row, ensure_ascii=chance.random() < 0.5) for row in [*rows[:at], holder[0], *rows[at + 1 :]]]
    file.write_text("\n".join(parts), encoding="utf-8", errors="surrogatepass")
    return f"JSON: {said}"


def _change(holder: list, chance: random.Random) -> str:
    """Somewhere in a tree of lists and mappings."""
    places: list[tuple[Any, Any, str]] = [(holder, 0, "")]

    def walk(value: Any, path: str) -> None:
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for k, v in list(pairs)[:400]:
            places.append((value, k, f"{path}.{k}"))
            walk(v, f"{path}.{k}")

    walk(holder[0], "")
    parent, key, path = chance.choice(places)
    kind = chance.choice(["value", "value", "value", "value", "remove", "key", "deep", "add", "near"])
    old = parent[key]
    if kind == "near" and isinstance(old, int | float) and not isinstance(old, bool):
        parent[key] = chance.choice([old + 1, old - 1, -old, old * 2, old * 1000, str(old), float(old), [old]])
    elif kind == "near" and isinstance(old, str) and old:
        parent[key] = chance.choice([old[:-1], old + "x", old.upper(), old * 2, [old], old.encode().hex()])
    elif kind == "remove" and parent is not holder:
        del parent[key]
    elif kind == "key" and isinstance(parent, dict):
        parent[chance.choice(["", "x", "²", "a" * 1000, "\ud800", f"{key} ", "../x", "/x"])] = parent.pop(key)
    elif kind == "deep":
        for _ in range(chance.choice([10, 400])):
            old = [old] if chance.random() < 0.5 else {"a": old}
        parent[key] = old
    elif kind == "add" and isinstance(parent[key], dict):
        parent[key][chance.choice(["extra", "__class__", "base", "0", "model"])] = chance.choice(VALUES)
    else:
        parent[key] = chance.choice(VALUES)
    return f"{kind} {path[:80]} {str(parent[key])[:60] if kind == 'value' else ''}"


def by_json_text(file: Path, _root: Path, chance: random.Random) -> str:
    """What is wrong before anything is understood."""
    text = file.read_text(encoding="utf-8", errors="replace")
    kind = chance.choice(
        [
            "utf-16",
            "latin",
            "bom",
            "deep",
            "deep maps",
            "number",
            "twice",
            "surrogate",
            "list",
            "null",
            "text",
            "two",
            "half",
        ]
    )
    if kind == "twice":
        found = re.search(r'"([^"\n]+)":\s*([^,\[{}\n]+)', text)
        new = (
            text
            if found is None
            else text[: found.start()] + found[0] + ", " + f'"{found[1]}": 1' + text[found.end() :]
        )
    else:
        new = {
            "bom": "\ufeff" + text, "deep": "[" * 100_000, "deep maps": '{"a":' * 50_000, "number": "1" * 10_000,
            "surrogate": '{"a": "\\ud800"}', "list": "[1, 2, 3]", "null": "null", "text": '"a"', "two": text + text,
            "half": text[: len(text) // 2],
        }.get(kind, text)  # fmt: skip
    encoding = {"utf-16": "utf-16", "latin": "latin-1"}.get(kind, "utf-8")
    file.write_bytes(
        (new + ("é" if kind == "latin" else "")).encode(encoding, "surrogatepass" if encoding == "utf-8" else "replace")
    )
    return f"text: {kind}"


def by_yaml(file: Path, _root: Path, chance: random.Random) -> str:
    """A scalar somewhere becomes another; a line goes, comes twice, or is what YAML alone can do."""
    text = file.read_text(encoding="utf-8")
    kind = chance.choice(["value", "value", "value", "value", "line", "twice", "bomb", "front", "back", "indent"])
    lines = text.splitlines(keepends=True)
    at = chance.randrange(len(lines))
    if kind == "value":
        scalars = list(re.finditer(r"(?<=[:,\[] )[^\s,{}\[\]#\"]+|(?<=\[)[^\s,{}\[\]#\"]+|\"[^\"]*\"", text))
        found = chance.choice(scalars)
        new = chance.choice(YAML) if chance.random() < 0.4 else _scalar(chance.choice(VALUES))
        text = text[: found.start()] + new + text[found.end() :]
        kind += f" {found[0][:30]} → {new[:40]!r}"
    elif kind == "bomb":
        text = BOMB + f"{chance.choice(['model', 'base', 'optimizer', 'data', 'x'])}: *k\n" + chance.choice([text, ""])
    else:
        lines[at : at + 1] = {
            "line": [],
            "twice": [lines[at]] * 2,
            "front": [chance.choice(YAML) + "\n", lines[at]],
            "back": [lines[at].rstrip("\n") + chance.choice(YAML) + "\n"],
            "indent": [" " + lines[at]],
        }[kind]
        text = "".join(lines)
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    return f"YAML: {kind}"


def _scalar(value: Any) -> str:
    text = json.dumps(value)
    return {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}.get(text, text)


def by_header(file: Path, root: Path, chance: random.Random) -> str:
    """A safetensors file: its table of names, types, shapes and places, and the length that stands before it."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    kind = chance.choice(
        ["length", "tree", "tree", "tree", "text", "shape", "offsets", "dtype", "name", "twice", "meta", "drop"]
    )
    if kind == "length":
        new = chance.choice([0, 1, size - 1, size + 1, len(data), 2**32, 2**63, 2**64 - 1])
        file.write_bytes(struct.pack("<Q", new) + data[8:])
        return f"header: length {new}"
    table = json.loads(data[8 : 8 + size])
    names = [name for name in table if name != "__metadata__"]
    name = chance.choice(names)
    entry, said = table[name], kind
    if kind == "shape":
        shape = entry["shape"]
        entry["shape"] = chance.choice(
            [shape[::-1], [*shape, 1], shape[1:], [2**62, 4], [-1], [0], [], [2**40] * 3, [1.5]]
        )
    elif kind == "offsets":
        a, b = entry["data_offsets"]
        entry["data_offsets"] = chance.choice(
            [[b, a], [a, b + 4], [a, b - 4], [0, 0], [-4, b], [2**63, 2**63], [a], None]
        )
    elif kind == "dtype":
        entry["dtype"] = chance.choice(["F16", "F64", "I32", "BOOL", "F8_E4M3", "X", "", None, 1, "U8"])
    elif kind == "name":
        table[chance.choice([name + "x", "x" * 1000, "", "model." + name, name.replace("0", "1", 1), "²"])] = table.pop(
            name
        )
    elif kind == "drop":
        del table[name]
    elif kind == "meta":
        table["__metadata__"] = chance.choice(
            [None, 1, {"a": 1}, {"a": "b" * 10_000}, [], {"DCP_SHARDING_INFO": "{"}, {"": ""}]
        )
    elif kind == "tree":
        holder = [table]
        said = _change(holder, chance)
        table = holder[0]
    text = json.dumps(table)
    if kind == "twice":
        text = text.replace("{", '{"' + name + '": ' + json.dumps(entry) + ", ", 1)
    if kind == "text":
        text = chance.choice(["", "{}", "[]", "null", "{" * 1000, text[:-1], text + " " * 10_000, "\x00" * 8, text[1:]])
    raw = text.encode("utf-8", "surrogatepass")
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + size :])
    return f"header: {said}"


def by_zip(file: Path, _root: Path, chance: random.Random) -> str:
    """The archive around a pickle: members gone, doubled, renamed, much larger than they seem."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = chance.choice(sorted(members))
    kind = chance.choice(["drop", "cut", "bomb", "rename", "deflate", "slip", "extra", "resize"])
    if kind == "drop":
        del members[name]
    elif kind == "cut":
        members[name] = members[name][: len(members[name]) // 2]
    elif kind == "resize":
        members[name] += b"\0" * 4096
    elif kind == "rename":
        members[name.replace("/data/", "/date/") if "/data/" in name else f"{name}x"] = members.pop(name)
    elif kind == "slip":
        members["../../slipped"] = b"x"
    elif kind == "extra":
        members[f"{name.split('/')[0]}/data/999"] = b"\0" * 64
    elif kind == "bomb":
        members[name] = b"\0" * 10**8
    packing = zipfile.ZIP_DEFLATED if kind in ("bomb", "deflate") else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", packing) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return f"zip: {kind} {name}"


class _Call:
    """Pickles as a call of a function by name."""

    def __init__(self, function: Callable, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def by_pickle(file: Path, _root: Path, chance: random.Random) -> str:
    """A pickle that does, asks for, or holds what it should not, instead of the one in the archive."""
    kind = chance.choice(sorted(PICKLES))
    made = PICKLES[kind](chance)
    if chance.random() < 0.2:
        file.write_bytes(made)  # as files were before there were archives
        return f"pickle: {kind}, bare"
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    if kind == "mixed":
        raw = bytearray(members[name])
        for _ in range(chance.choice([1, 3, 20])):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        made = bytes(raw)
    with zipfile.ZipFile(file, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, made if member == name else content)
    return f"pickle: {kind}"


def _nested(open_: bytes, close: bytes, depth: int) -> bytes:
    return b"\x80\x02" + open_ * depth + close * depth + b"."


PICKLES: dict[str, Callable[[random.Random], bytes]] = {
    "system": lambda c: pickle.dumps(_Call(os.system, f"touch {CANARY}"), c.choice([0, 2, 4])),
    "exec": lambda c: pickle.dumps(_Call(exec, f"open({CANARY!r}, 'w').close()"), c.choice([0, 2, 4])),
    "eval in a mapping": lambda c: pickle.dumps({"a": _Call(eval, f"open({CANARY!r}, 'w')")}, 2),
    "import": lambda c: pickle.dumps({"w": _Call(__import__, "antigravity")}, 2),
    "getattr": lambda c: b"c__builtin__\ngetattr\n.",
    "a class by a dotted name": lambda c: b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93.",
    "old instance": lambda c: f"(S'touch {CANARY}'\nios\nsystem\n.".encode(),
    "tuples as keys": lambda c: b"\x80\x02}" + b"(" + b"K\x01" + b"\x85" * 60 + b"K\x02" + b"u.",
    "doubling tuples as keys": lambda c: b"\x80\x02}K\x01" + b"2\x86" * 60 + b"K\x02s.",
    "deep tuples": lambda c: b"\x80\x02N" + b"\x85" * 1_000_000 + b".",
    "deep lists": lambda c: _nested(b"](", b"e", 300_000),
    "deep marks": lambda c: b"\x80\x02" + b"(" * 1_000_000 + b".",
    "a long text": lambda c: b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",
    "a large memo": lambda c: b"\x80\x02Nr" + struct.pack("<I", 2**31) + b".",
    "an unknown protocol": lambda c: b"\x80\xff.",
    "nothing": lambda c: b"",
    "a stop alone": lambda c: b".",
    "a list": lambda c: pickle.dumps([1, 2, 3], 2),
    "numbers by name": lambda c: pickle.dumps({"sequential.0.word_embeddings.weight": 3}, 2),
    "an odd persistent id": lambda c: b"\x80\x02(X\x07\x00\x00\x00storageK\x01K\x02tQ.",
    "a set": lambda c: pickle.dumps({"a": {1, 2}}, 2),
    "bytes as a name": lambda c: pickle.dumps({b"a": 1}, 4),
    "a number as a name": lambda c: pickle.dumps({1.5: None, None: 2}, 2),
    "mixed": lambda c: b"",
}


def by_index(file: Path, _root: Path, chance: random.Random) -> str:
    """The numbers of a Megatron index: magic, version, type, counts, sizes, places, documents."""
    data = bytearray(file.read_bytes())
    at = chance.choice([0, 9, 17, 18, 26, 34 + 4 * chance.randrange(40), chance.randrange(34, max(35, len(data) - 8))])
    wide = at in (9, 18, 26) or chance.random() < 0.3
    value = chance.choice([0, 1, -1, 2, 2**31 - 1, -(2**31), 8, 99, 2**62 if wide else 2**30])
    raw = struct.pack("<q" if wide else "<i", value)
    data[at : at + len(raw)] = raw
    file.write_bytes(data)
    return f"index: {value} at {at}"


def by_xz(file: Path, _root: Path, chance: random.Random) -> str:
    """Other content, well packed: a bomb, or lines of something else."""
    kind = chance.choice(["bomb", "one line bomb", "rows", "not text"])
    with lzma.open(file, "wb", preset=0) as packed:
        if kind.endswith("bomb"):
            block = (b"\n" if kind == "bomb" else b"a") * 10**7
            for _ in range(60):
                packed.write(block)
        else:
            packed.write(b'{"goal": 1, "sol1": null}\n' * 3 if kind == "rows" else chance.randbytes(1000))
    return f"xz: {kind}"


def by_text(file: Path, _root: Path, chance: random.Random) -> str:
    text = chance.choice(
        ["", "\n", "\0", "\ud800", "step-²", "step-", "../../..", "step-99999999999999999999", "a" * 5000, "/dev/zero",
         "-1",
         "step-0000149O", "step-00001490\nstep-00000000", "é" * 200, "\x1b[2J", "<|endoftext|>" * 20,
         "a\rb\u2028c\x85d"]
    )  # fmt: skip
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return f"text: {text[:30]!r}"
