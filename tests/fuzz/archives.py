"""Mutations of torch's files: members of the zip, and operations of the pickle in it, one at a time."""

import io
import pickletools
import random
import struct
import zipfile

from tests.fuzz.harm import CANARY

RUN = b"cos\nsystem\n(X" + struct.pack("<I", len(f"touch {CANARY}")) + f"touch {CANARY}".encode() + b"tR"
PIECES = [
    RUN, RUN.replace(b"cos\n", b"cposix\n"), b"cbuiltins\nexec\n(X\x04\0\0\0passtR", b"ctorch\nload\n(tR",
    b"ctorch.serialization\nload\n)R",
    b"(X" + struct.pack("<I", len(f"touch {CANARY}")) + f"touch {CANARY}".encode() + b"ios\nsystem\n",
    b"\x8c\x02os\x8c\x06system\x93)R",
    b"\x8e" + struct.pack("<Q", 2**62), b"\x8d" + struct.pack("<Q", 2**40) + b"x", b"\x8b" + struct.pack("<i",
    2**31 - 1), b"\x95" + struct.pack("<Q", 2**50),
    b"h\xff", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f", b"0" * 50, b"1", b"2" * 10, b"}", b"]", b")", b"(", b"N",
    b"Q", b"P1\n", b"R", b"b", b"\x81", b"u", b"e", b"s",
    b"K\x01", b"J\xff\xff\xff\xff", b"I01\n", b"F1e999\n", b"L" + b"9" * 6000 + b"L\n", b"V\\ud800\n", b"S'x'\n",
    b"\x80\x09", b".", b"\x82\x01", b"\x97", b"\x98",
    b"(" * 5000, b"](" * 2000, b")\x85" * 3000, b"ccollections\nOrderedDict\n)R", b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
]  # fmt: skip


def in_pickle(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """One operation put in, left out, said twice, or with another argument."""
    ops = list(pickletools.genops(data))
    at = chance.randrange(1, len(ops))
    begin = ops[at][2]
    end = ops[at + 1][2] if at + 1 < len(ops) else len(data)
    how = chance.choice(["piece", "piece", "drop", "twice", "number", "global", "swap"])
    if how == "number":
        numbers = [i for i, (op, _, _) in enumerate(ops) if op.name in ("BININT", "BININT1", "BININT2")]
        at = chance.choice(numbers)
        begin, end = ops[at][2], ops[at + 1][2]
        value = chance.choice([-1, 0, 1, 3, 255, 2**31 - 1, -(2**31), 2**62, ops[at][1] + 1, ops[at][1] * 1000])
        new = b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
    elif how == "global":
        names = [i for i, (op, _, _) in enumerate(ops) if op.name == "GLOBAL"]
        at = chance.choice(names) if names else at
        begin, end = ops[at][2], ops[at + 1][2] if at + 1 < len(ops) else len(data)
        new = chance.choice([b"ctorch\nHalfStorage\n", b"ctorch\nLongStorage\n",
        b"ctorch.storage\nUntypedStorage\n", b"cbuiltins\ndict\n", b"cbuiltins\nset\n", b"cnumpy\nndarray\n",
        b"ctorch._utils\n_rebuild_parameter\n", b"cos\nsystem\n", b"c\n\n", "cé\né\n".encode()])  # fmt: skip
    else:
        piece, whole = chance.choice(PIECES), data[begin:end]
        new = {"piece": piece + whole, "drop": b"", "twice": whole + whole, "swap": piece}[how]
    return data[:begin] + new + data[end:], f"{how} at operation {at} ({ops[at][0].name}) {new[:30]!r}"


def in_archive(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """torch's: a zip of data.pkl and storages."""
    source = zipfile.ZipFile(io.BytesIO(data))
    members = {info.filename: source.read(info) for info in source.infolist()}
    pickle = next(name for name in members if name.endswith("data.pkl"))
    storages = [name for name in members if "/data/" in name] or [pickle]
    one, other = chance.choice(storages), chance.choice(storages)
    how = chance.choice(
        ["pickle"] * 5
        + ["gone", "swap", "cut", "long", "deflated", "twice", "prefix", "comment", "order", "renamed", "flag", "extra"]
    )
    said, packing, repeat = "", zipfile.ZIP_STORED, []
    if how == "pickle":
        members[pickle], said = in_pickle(members[pickle], chance)
    elif how == "gone":
        one = chance.choice(sorted(members))
        del members[one]
    elif how == "swap":
        members[one], members[other] = members[other], members[one]
    elif how == "cut":
        members[one] = members[one][: -chance.choice([1, 4, 1000])]
    elif how == "long":
        members[one] += bytes(chance.choice([1, 4, 1000]))
    elif how == "deflated":
        packing = zipfile.ZIP_DEFLATED
    elif how == "twice":
        repeat = [(one, bytes(len(members[one])))]
    elif how == "order":
        prefix = pickle[: -len("data.pkl")]
        members[prefix + "byteorder"] = chance.choice([b"big", b"little\n", b"", b"\xff"])
    elif how == "renamed":
        new = chance.choice(["/" + one, "../" + one, one.upper(), one.replace("/", "\\"), "other/" + one, one + "\0x"])
        members[new] = members.pop(one)
    elif how == "extra":
        members[chance.choice(["evil/data.pkl", "constants.pkl", "code/__torch__.py", "x" * 60_000])] = (
            b"\x80\x02" + RUN + b"."
        )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", packing) as target:
        for name, content in [*members.items(), *repeat]:
            target.writestr(zipfile.ZipInfo(name), content, compress_type=packing)
        if how == "comment":
            target.comment = b"c" * 60_000
    raw = out.getvalue()
    if how == "prefix":
        raw = b"#!/bin/sh\n" + raw
    elif how == "flag":  # of the central directory: encrypted, or of another size than the local header says
        at = raw.rindex(b"PK\x01\x02")
        where, value = chance.choice(
            [(8, b"\x01"), (20, b"\xff\xff\xff\x7f"), (24, b"\xff\xff\xff\x7f"), (10, b"\x63"), (42, b"\x01")]
        )
        raw = raw[: at + where] + value + raw[at + where + len(value) :]
    return raw, f"{how} {one[-30:]} {said}"
