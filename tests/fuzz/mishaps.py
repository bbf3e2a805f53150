"""What happens to folders without malice: half a download, files of another folder, a stale index, a mistyped option.

The fuzzer's second set of mutations, written without reading the first (`harm.py`); beside accidents it has changes
inside of a format (`formats.py`), devices and links, and files that another process replaces while they are read.
"""

import gzip
import hashlib
import json
import os
import random
import shutil
import struct
import threading
import time
import unicodedata
from pathlib import Path

from tests.fuzz import formats

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"
PAGE = b"<!DOCTYPE html><html><head><title>404 Not Found</title></head><body>Entry not found</body></html>\n"
STEPS = [
    "step-00001491",
    "step-1490",
    "step-99999999",
    "step-99999999999999999999",
    "step--0000001",
    "step-0000149x",
    "step-",
    "STEP-00001490",
]
STEPS += ["step-00001490.tmp", "step-00001490 (1)", "step-00000000", "step-٠٠٠٠١٤٩٠"]
SHORT = "steps=1"  # without it an official config's training merely takes long
VALUES = [
    "-1",
    "0",
    "1",
    "3",
    "1e9",
    "99999999999",
    "1.5",
    "nan",
    "inf",
    "",
    " ",
    "abc",
    "null",
    "[]",
    "{}",
    "[1,",
    "auto",
    "é",
    "\n",
    "9" * 5000,
]
VALUES += [
    "..",
    "/",
    "folder",
    "missing",
    "/dev/null",
    "/proc/self/mem",
    "a/b/c",
    "~",
    "x" * 5000,
    "cuda",
    "hub:",
    "user/name",
    "*",
    "-",
    "--help",
]
KEYS = [
    "steps",
    "batch",
    "model.layers",
    "model.dim",
    "model.heads",
    "model.tau",
    "optimizer.rate",
    "data.path",
    "data.split",
    "seed",
    "growth",
]
KEYS += [
    "train.device",
    "model",
    "start",
    "layers",
    "model.",
    ".model",
    "",
    "=",
    "model.tau.ffn",
    "checkpoint.every",
    "log.every",
    "validation",
]


def apply(file: Path, root: Path, chance: random.Random) -> str:
    """Do one thing to `file` or around it, and say what."""
    if file.stat().st_size > 10**8:
        return "nothing more"
    data = file.read_bytes()
    craft = formats.craft_of(file, data[:4])
    if craft and chance.random() < 0.55:
        try:
            new, said = craft(data, chance)
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration, ArithmeticError, struct.error):
            new, said = data[: len(data) // 3], "a third of it"  # an earlier change left nothing to work on
        file.write_bytes(new)
        return said
    return chance.choice(
        [_download, _download, _encoding, _edited, _other_file, _other_file, _node, _name, _around, _around]
    )(file, root, chance)


def _write(file: Path, data: bytes, said: str) -> str:
    file.write_bytes(data)
    return said


def _download(file: Path, root: Path, chance: random.Random) -> str:
    data = file.read_bytes()
    half = chance.choice([0, 1, len(data) // 2, len(data) - 1, len(data) // 4096 * 4096, min(len(data), 1024)])
    how = chance.choice(["cut", "zeros", "page", "pointer", "gzip", "part", "again", "sparse", "late half", "flip"])
    if how == "cut":
        return _write(file, data[:half], f"cut to {half} bytes")
    if how == "zeros":  # set aside, never filled
        return _write(file, data[:half] + bytes(len(data) - half), f"zeros from {half}")
    if how == "page":
        return _write(file, PAGE, "the page of an error")
    if how == "pointer":
        return _write(file, POINTER.format(hashlib.sha256(data).hexdigest(), len(data)).encode(), "git-lfs's pointer")
    if how == "gzip":
        return _write(file, gzip.compress(data, mtime=0), "packed by the server")
    if how == "part":
        file.rename(file.with_name(file.name + chance.choice([".part", ".incomplete", ".crdownload", ".tmp"])))
        return "never renamed"
    if how == "again":
        return _write(file, data[:half] + data, f"begun again after {half} bytes")
    if how == "sparse":
        with file.open("r+b") as out:
            out.truncate(chance.choice([10**9, 10**12]))
        return "a hole of a terabyte behind it"
    if how == "late half":
        return _write(file, data[half:], f"its first {half} bytes are missing")
    at = chance.randrange(max(1, len(data)))
    return _write(
        file,
        data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if data else b"x",
        f"a bit at {at}",
    )


def _encoding(file: Path, root: Path, chance: random.Random) -> str:
    data = file.read_bytes()
    text = data.decode("utf-8", "replace")
    how = chance.choice(
        ["utf-8-sig", "utf-16", "utf-32", "latin-1", "cp500", "crlf", "cr", "nul", "quotes", "nfd", "no end", "bom bom"]
    )
    if how in ("utf-8-sig", "utf-16", "utf-32", "latin-1", "cp500"):
        return _write(file, text.encode(how, "replace"), how)
    if how == "crlf":
        return _write(file, data.replace(b"\n", b"\r\n"), how)
    if how == "cr":
        return _write(file, data.replace(b"\n", b"\r"), how)
    if how == "nul":
        return _write(file, chance.choice([data + bytes(64), bytes(2) + data, data[:9] + b"\0" + data[9:]]), how)
    if how == "quotes":
        return _write(file, text.replace('"', "”").replace("'", "’").replace("-", "–").encode(), how)
    if how == "nfd":
        return _write(file, unicodedata.normalize("NFD", text).encode(), how)
    return _write(file, data.rstrip(b"\n}") if how == "no end" else b"\xef\xbb\xbf" * 2 + data, how)


def _edited(file: Path, root: Path, chance: random.Random) -> str:
    lines = file.read_bytes().split(b"\n")
    at = chance.randrange(len(lines))
    how = chance.choice(["conflict", "twice", "line twice", "line gone", "lines swapped", "shell", "marker"])
    if how == "conflict":
        lines[at : at + 1] = [b"<<<<<<< HEAD", lines[at], b"=======", lines[at][::-1], b">>>>>>> theirs"]
    elif how == "twice":
        lines += lines
    elif how == "line twice":
        lines[at:at] = [lines[at]]
    elif how == "line gone":
        del lines[at]
    elif how == "lines swapped":
        other = chance.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    elif how == "shell":
        lines[at] = b"$(touch EXECUTED) `touch EXECUTED` ${HOME} ; touch EXECUTED"
    else:
        lines[at] += b" <|endoftext|>\xe2\x80\x8b"
    return _write(file, b"\n".join(lines), f"{how} at line {at}")


def _files(root: Path) -> list[Path]:
    found = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return sorted(path for path in found if path.stat().st_size < 10**8)


def _other_file(file: Path, root: Path, chance: random.Random) -> str:
    """Files of the same kind, of the same name or of none such, in another's place."""
    others = [path for path in _files(root) if path != file]
    alike = [path for path in others if path.suffix == file.suffix]
    other = chance.choice(alike if alike and chance.random() < 0.7 else others or [file])
    mine, theirs = file.read_bytes(), other.read_bytes()
    said = f"{other.relative_to(root)}"
    if (
        chance.random() < 0.5 and other.parent == file.parent
    ):  # elsewhere may lie a text that the command is asked about
        other.write_bytes(mine)
        return _write(file, theirs, f"exchanged with {said}")
    return _write(file, theirs, f"replaced by {said}")


def _node(file: Path, root: Path, chance: random.Random) -> str:
    """Something else than a file of its own stands there."""
    data = file.read_bytes()
    how = chance.choice(
        [
            "loop",
            "nowhere",
            "link",
            "out",
            "/dev/zero",
            "/dev/tty",
            "/dev/urandom",
            "/proc/self/mem",
            "/proc/self/environ",
            "fifo",
            "folder",
            "full folder",
            "hard",
            "locked",
            "gone",
        ]
    )
    if how == "fifo" and file.suffix in (".txt", ".jsonl", ".xz", ".csv"):
        how = "gone"  # text may come through a pipe
    file.unlink()
    if how == "loop":
        file.symlink_to(file.name)
    elif how == "nowhere":
        file.symlink_to("gone/" + file.name)
    elif how == "link":  # as a cache of downloads does
        blob = file.with_name("blob")
        blob.write_bytes(data)
        file.symlink_to(blob.name)
    elif how == "out":
        file.symlink_to("..")
    elif how.startswith("/"):
        file.symlink_to(how)
    elif how == "fifo":
        os.mkfifo(file)
    elif "folder" in how:
        file.mkdir()
        if how == "full folder":
            (file / file.name).write_bytes(data)
    elif how == "hard":
        other = file.with_name(file.stem + "-copy" + file.suffix)
        other.write_bytes(data)
        os.link(other, file)
    elif how == "locked":
        file.write_bytes(data)
        file.chmod(0)
    return how


def _name(file: Path, root: Path, chance: random.Random) -> str:
    new = chance.choice(
        [
            file.name.upper(),
            file.stem + " (1)" + file.suffix,
            file.name + " ",
            "." + file.name,
            file.name + ".bak",
            file.stem,
            file.name + "\n",
            "é" + file.name,
            file.name.encode() + b"\xff",
        ]
    )
    target = os.path.join(os.fsencode(file.parent), os.fsencode(new))
    copy = chance.random() < 0.4
    os.link(file, target) if copy else os.rename(file, target)
    return f"{'also' if copy else 'now'} called {new!r}"


def _around(file: Path, root: Path, chance: random.Random) -> str:
    """Something beside the file: leftovers, stale indexes, further checkpoints, a folder too many."""
    data, folder = file.read_bytes(), file.parent
    how = chance.choice(["beside", "beside", "index", "nested", "steps", "foreign", "many", "half removed"])
    if how == "beside":
        names = [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "adapter_config.json",
        ]
        names += [
            "adapter_model.safetensors",
            "manifest.json",
            "config.yml",
            "config.json",
            "history.json",
            "tokenizer.json",
            "vocab.json",
            ".lock",
            "last",
            "latest",
        ]
        names += [
            "shard-00002-model-00001-of-00001.safetensors",
            ".metadata",
            "state.json",
            "modelz.safetensors",
            "model",
            "mp_rank_01_model_states.pt",
            "growth.json",
        ]
        name = chance.choice(names)
        target = folder / name
        if target.exists():
            return _write(target, data, f"over {name} beside it") if target.is_file() else "nothing"
        return _write(target, chance.choice([data, b"", b"{}", PAGE]), f"{name} beside it")
    if how == "index":
        there = chance.choice(
            ["model.safetensors", "model-00001-of-00002.safetensors", "../x", "/dev/zero", file.name, "", 7]
        )
        index = {
            "metadata": {"total_size": chance.choice([0, -1, 10**15, "x"])},
            "weight_map": chance.choice([{}, {"embedding.weight": there}, [], None, {"x": there, "y": "z"}]),
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return f"an index file that names {there}"
    if how == "nested":  # unpacked into a folder of its name
        inner = folder / folder.name
        inner.mkdir(exist_ok=True)
        for path in [path for path in folder.iterdir() if path != inner]:
            path.rename(inner / path.name)
        return "one folder deeper"
    if how == "steps":
        found = sorted(root.glob("**/checkpoints/step-*"))
        if found:
            target = found[0].with_name(chance.choice(STEPS))
            if not target.exists():
                shutil.copytree(found[0], target) if chance.random() < 0.6 else target.mkdir()
                for path in chance.sample(_files(target), len(_files(target)) // 2) if chance.random() < 0.5 else []:
                    path.unlink()
            return f"{target.name} beside it"
    if how == "foreign":
        others = sorted({path.parent for path in _files(root)} - {folder})
        if others:
            other = chance.choice(others)
            for path in other.iterdir():
                if path in _files(root):
                    shutil.copy(path, folder / path.name)
            return f"all of {other.relative_to(root)} copied over"
    if how == "half removed":
        files = [path for path in _files(folder) if path.parent == folder]
        for path in files[: (len(files) + 1) // 2]:
            path.unlink()
        return "half of the folder removed"
    for number in range(300):
        (folder / f"{file.stem}-{number:05}{file.suffix}").write_bytes(data[:100])
    return "300 more of them beside it"


def sign(file: Path, root: Path) -> bool:
    """Make the manifests above a file describe what lies there now; whether there was one."""
    signed = False
    for manifest in (path for path in _files(root) if path.suffix == ".json"):
        try:
            said = json.loads(manifest.read_bytes())
            entries = [(name, entry) for name, entry in said["files"].items() if isinstance(entry, dict)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
            continue
        for name, entry in entries:
            there = manifest.parent / name
            try:
                if "\0" in name or not there.is_file() or "dev" in str(there.resolve()) or there.stat().st_size > 10**8:
                    continue
                data = there.read_bytes()
            except OSError:
                continue
            new = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            signed |= {key: entry.get(key) for key in new} != new
            entry |= new
        if signed:
            manifest.write_text(json.dumps(said))
    return signed


def manifests(root: Path) -> str:
    """What the manifests say: while that is equal, what they vouch for must be."""
    names = ("manifest.json", "alice.json")
    return repr([(str(path), path.read_bytes()) for path in _files(root) if path.name in names])


def mistake(words: list[str], chance: random.Random) -> tuple[list[str], str]:
    """The command line as a tired user types it."""
    words = list(words)
    at = chance.choice([i for i in range(1, len(words)) if words[i] != SHORT])
    how = chance.choice(["value", "value", "drop", "twice", "swap", "key", "key", "case", "slash", "unknown", "inside"])
    if how == "value":
        words[at] = chance.choice(VALUES)
    elif how == "drop":
        del words[at]
    elif how == "twice":
        words[at:at] = [words[at]]
    elif how == "swap":
        other = chance.randrange(1, len(words))
        words[at], words[other] = words[other], words[at]
    elif how == "key":
        key, value = chance.choice(KEYS), chance.choice(VALUES)
        words.append(f"{key}={value}" if key != "steps" or value not in ("1e9", "99999999999") else SHORT)
    elif how == "case":
        words[at] = words[at].upper()
    elif how == "slash":
        words[at] += chance.choice(["/", "//", "/.", "/..", "/../" + words[at], "/missing"])
    elif how == "unknown":
        words.append(
            chance.choice(["--nothing", "-x", "--out", "--device=tpu", "--tokens=-1", "--seed", "--", "@file"])
        )
    else:
        words[at] += "/manifest.json"
    return words, f"typed {how}: {' '.join(words)[:200]}"


def later(file: Path, chance: random.Random) -> None:
    """Another process replaces or removes the file while the command runs (by rename, as every good writer does)."""
    wait, gone, data = chance.random() * 0.4, chance.random() < 0.5, file.read_bytes()[::-1]
    fresh = file.with_name(file.name + ".new")
    if not gone:
        fresh.write_bytes(data)

    def act() -> None:
        time.sleep(wait)
        file.unlink(missing_ok=True) if gone else os.replace(fresh, file)

    threading.Thread(target=act, daemon=True).start()
