"""Mutations of what samples lie in: cells of CSV, members of a tar, columns of Parquet, chunks of a PNG."""

import csv
import io
import random
import struct
import tarfile
import zlib

CELLS = [
    "",
    " ",
    "\0",
    "é",
    "../0.png",
    "/dev/zero",
    "missing.png",
    "x" * 5000,
    '"',
    "a\nb",
    "NaN",
    "-1",
    "\u2028",
    ".",
]


def in_csv(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    rows = list(csv.reader(io.StringIO(data.decode(), newline="")))
    at = chance.randrange(len(rows))
    how = chance.choice(["cell"] * 4 + ["short", "long", "header", "twice", "tabs", "quote", "semicolons", "columns"])
    if how == "cell":
        rows[at][chance.randrange(len(rows[at]))] = chance.choice(CELLS)
    elif how == "short":
        rows[at] = rows[at][:1]
    elif how == "long":
        rows[at] = rows[at] * 3
    elif how == "header":
        rows[0] = chance.choice(
            [["image", "image"], ["IMAGE", "CAPTION"], [], ["caption", "image"], ["\ufeffimage", "caption"]]
        )
    elif how == "twice":
        rows[at:at] = [rows[at], rows[0]]
    elif how == "columns":
        rows = [row[::-1] for row in rows]
    out = io.StringIO(newline="")
    csv.writer(out, delimiter={"tabs": "\t", "semicolons": ";"}.get(how, ",")).writerows(rows)
    text = out.getvalue()
    return (text.replace(",", ',"', 2) if how == "quote" else text).encode(), f"{how} at row {at}"


def in_tar(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as source:
        members = [(info, source.extractfile(info).read()) for info in source.getmembers()]
    at = chance.randrange(len(members))
    info, content = members[at]
    how = chance.choice(["gone", "swap", "empty", "cut", "name", "kind", "size", "twice", "sum", "format", "text"])
    raw, form = None, tarfile.PAX_FORMAT
    if how == "gone":
        del members[at]
    elif how == "swap":
        other = chance.randrange(len(members))
        members[at], members[other] = (info, members[other][1]), (members[other][0], content)
    elif how in ("empty", "cut"):
        members[at] = (info, b"" if how == "empty" else content[: len(content) // 2])
    elif how == "name":
        info.name = chance.choice(["../x.png", "/etc/x.png", "a/b/0.png", "0.PNG", ".png", "0", "é.png", "x" * 300])
    elif how == "kind":
        info.type, info.linkname = chance.choice([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]), "/dev/zero"
    elif how == "twice":
        members.append((info, content[::-1]))
    elif how == "format":
        form = chance.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
    elif how == "text":
        members[at] = (info, chance.choice([b"\xff\xfe\xfd", b"\0" * 50, b"\n\n", b"99999999999999999999", b"-1"]))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for one, held in members:
            one.size = len(held)
            tar.addfile(one, io.BytesIO(held))
    raw = bytearray(out.getvalue())
    if how == "size":
        raw[124:136] = chance.choice([b"77777777777\0", b"-0000000001\0", b"\xff" * 12, b"00000000001\0"])
        raw[148:156] = b"%06o\0 " % (sum(raw[:148]) + 256 + sum(raw[156:512]))
    elif how == "sum":
        raw[148:156] = b"0000000\0"
    return bytes(raw), f"{how} of member {at}"


def in_parquet(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    import pyarrow
    from pyarrow import parquet

    table = parquet.read_table(io.BytesIO(data))
    columns = {name: table[name].to_pylist() for name in table.column_names}
    name, at = chance.choice(sorted(columns)), chance.randrange(len(table))
    how = chance.choice(["null", "drop", "rename", "type", "none", "empty", "numbers", "swap", "metadata"])
    metadata = table.schema.metadata
    if how in ("null", "empty"):
        columns[name][at] = None if how == "null" else type(columns[name][at])()
    elif how == "drop":
        del columns[name]
    elif how == "rename":
        columns[name.upper()] = columns.pop(name)
    elif how == "type":
        columns[name] = [str(value) for value in columns[name]]
    elif how == "none":
        columns = {key: [] for key in columns}
    elif how == "numbers":
        columns[name] = [chance.choice([-1, 0, 2**40, 1]) for _ in columns[name]]
    elif how == "swap":
        columns[name].reverse()
    else:
        metadata = {
            "huggingface": chance.choice(
                ["", "{", "[]", '{"info": 1}', '{"info": {"features": {"label": {"names": 7}}}}']
            )
        }
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns).replace_schema_metadata(metadata), out)
    return out.getvalue(), f"{how} in {name} at {at}"


def in_png(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    chunks, at = [], 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    how = chance.choice(["size", "depth", "gone", "twice", "pixels", "check", "text"])
    number = chance.randrange(len(chunks))
    kind, body = chunks[number]
    if how == "size":
        sides = chance.choice([(0, 20), (2**31 - 1, 2**31 - 1), (60_000, 60_000), (1, 1), (20, 19)])
        chunks[0] = (chunks[0][0], struct.pack(">2I", *sides) + chunks[0][1][8:])
    elif how == "depth":
        chunks[0] = (
            chunks[0][0],
            chunks[0][1][:8] + bytes(chance.choice([(16, 2), (1, 0), (8, 3), (9, 9)])) + b"\0\0\0",
        )
    elif how == "gone":
        del chunks[number]
    elif how == "twice":
        chunks.insert(number, (kind, body))
    elif how == "pixels":
        chunks = [(k, zlib.compress(bytes(10**7)) if k == b"IDAT" else b) for k, b in chunks]
    elif how == "text":
        chunks.insert(1, (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(10**8))))
    out = data[:8]
    for kind, body in chunks:
        check = zlib.crc32(kind + body) ^ (how == "check")
        out += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)
    return out, f"{how} at chunk {number}"
