"""Makes small image sets in every format, each as its own tools write it."""

import gzip
import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ["ant", "bee", "cat"]


def picture(number: int, width: int = 48, height: int = 40) -> Image.Image:
    """Smooth colours with a bright corner (top left), another picture for each number."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 200, (4, 4, 3), dtype=np.uint8))
    pixels = np.array(small.resize((width, height), Image.Resampling.BICUBIC))
    pixels[: height // 4, : width // 4] = 255
    return Image.fromarray(pixels)


def encoded(image: Image.Image, form: str = "JPEG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def label(number: int) -> int:
    return number % len(CLASSES)


def make_folder(root: Path, count: int = 12, held_out: int = 6) -> Path:
    for part, numbers in (("train", range(count)), ("val", range(count, count + held_out))):
        for n in numbers:
            path = root / part / CLASSES[label(n)] / f"{n:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(picture(n)))
    return root


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def make_tars(root: Path, count: int = 12, each: int = 5) -> str:
    """Shards train-000.tar …, half of them with .cls and half with .json, and files that are no samples."""
    root.mkdir(parents=True, exist_ok=True)
    last = (count - 1) // each
    for shard in range(last + 1):
        with tarfile.open(root / f"train-{shard:03}.tar", "w") as tar:
            for n in range(shard * each, min(count, (shard + 1) * each)):
                about = ("json", json.dumps({"label": label(n), "n": n})) if shard % 2 else ("cls", f"{label(n)}\n")
                add(tar, f"images/{n:03}.jpg", encoded(picture(n)))
                add(tar, f"images/{n:03}.{about[0]}", about[1].encode())
            add(tar, "README", b"no sample")
    return f"{root}/train-{{000..{last:03}}}.tar"


def make_parquet(root: Path, count: int = 12) -> Path:
    import pyarrow
    from pyarrow import parquet

    rows = [{"bytes": encoded(picture(n)), "path": f"{n}.jpg"} for n in range(count)]
    table = pyarrow.table({"image": rows, "label": [label(n) for n in range(count)]})
    features = {"info": {"features": {"label": {"names": CLASSES, "_type": "ClassLabel"}}}}
    root.mkdir(parents=True, exist_ok=True)
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    parquet.write_table(table, root / "train-00000-of-00001.parquet", row_group_size=5)
    return root


def small(number: int) -> np.ndarray:
    return np.asarray(picture(number, 32, 32))


def make_cifar(root: Path, counts: tuple[int, ...] = (7, 5), held_out: int = 4) -> Path:
    """CIFAR-10's binary version: a byte of label, then 1024 bytes each of red, green and blue."""
    root.mkdir(parents=True, exist_ok=True)
    number = 0
    for name, count in [*((f"data_batch_{i}.bin", c) for i, c in enumerate(counts, 1)), ("test_batch.bin", held_out)]:
        numbers = range(number, number := number + count)
        records = [bytes([label(n)]) + small(n).transpose(2, 0, 1).tobytes() for n in numbers]
        (root / name).write_bytes(b"".join(records))
    (root / "batches.meta.txt").write_text("\n".join([*CLASSES, *"defghij"]) + "\n\n")
    return root


def make_mnist(root: Path, count: int = 12, held_out: int = 4, zipped: bool = True) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for prefix, numbers in (("train", range(count)), ("t10k", range(count, count + held_out))):
        grey = b"".join(picture(n, 28, 28).convert("L").tobytes() for n in numbers)
        files = {
            f"{prefix}-images-idx3-ubyte": struct.pack(">4I", 0x803, len(numbers), 28, 28) + grey,
            f"{prefix}-labels-idx1-ubyte": struct.pack(">2I", 0x801, len(numbers)) + bytes(label(n) for n in numbers),
        }
        for name, data in files.items():
            (root / (name + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
    return root
