"""Reads and writes our folder: config.yml, model*.safetensors, tokenizer.json or images.json (names of the classes, how
pixels are made), codes.safetensors (colours of a model that draws), history.json, tensors.json (a checksum per tensor,
for `hub/pull.py`); the manifest last.

Unusual: tensors are read and written one at a time, so that a model larger than memory can be grown and converted.
Every read opens the file anew, so that the pages of the last tensor leave memory with it; the writer knows all shapes
before it has any tensor, which is all that the header of a safetensors file needs.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.files import TENSORS, atomic_folder, check_manifest
from tokenformer.hub.fill import check_shapes, check_values, empty, fill
from tokenformer.hub.sidecars import read_config, read_history, sidecars
from tokenformer.models.draw import Codes
from tokenformer.parsing import is_file, parse_json, read_text, shown

CODES = "codes.safetensors"
SHARD_BYTES = 5 * 10**9  # the most that one file holds
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NUMBERS = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}  # beside weights


def read_images(folder: Path) -> dict[str, Any]:
    """Return what an image model knows of images: names of the classes, size, mean, std, crop_pct, interpolation."""
    path = folder / "images.json"
    images = parse_json(read_text(path), str(path)) if path.exists() else {}
    if not isinstance(images, dict) or not all(isinstance(images.get(key, []), list) for key in ("classes", "mean")):
        raise UserError(f"{path} should say how images are read, not {shown(images)}: get it anew")
    return images


def read_codes(folder: Path, config: ModelConfig) -> Codes | None:
    """Return what a model draws with; None if nothing lies beside its weights."""
    path, added = folder / CODES, config.trunk(config.language_prefix or "").added_vocab
    if not path.exists():
        return None
    shape, kind = read_header(path).get("palette", ([], ""))
    with safe_open(path, framework="pt") as file:
        side = str((file.metadata() or {}).get("side"))
        if len(shape) != 2 or shape[1] != 3 or kind != "U8" or not side.isdecimal() or shape[0] >= added:
            raise UserError(
                f"{path} should hold a palette (colours, 3) of bytes for the {added} ids that were added "
                f"to this model, and a side, not {kind} {shape}: get it anew"
            )
        return Codes(file.get_tensor("palette"), int(side))


def kept_files(folder: Path, config: ModelConfig) -> dict[str, bytes]:
    """Return what a run keeps of the files beside the weights it begins with, where its task has none of that name."""
    draws = config.trunk(config.language_prefix or "").added_vocab > 0
    names = [*([CODES] if draws else []), *(["images.json"] if config.of == "caption" else [])]
    return {name: (folder / name).read_bytes() for name in names if is_file(folder / name)}


def codes_file(codes: Codes) -> bytes:
    """Return the content of codes.safetensors."""
    kinds = {"palette": (codes.palette.shape, codes.palette.dtype)}
    return header_bytes(kinds, side=str(codes.side)) + stored_bytes(codes.palette).tobytes()


def tell(model: Any, folder: Path) -> Any:
    """Give a model what stands beside its tensors, and return it."""
    model.history = read_history(folder)
    if model.config.language_prefix is not None:
        model.codes = read_codes(folder, model.config)
    if model.config.of in ("image", "pair", "caption"):
        model.images = read_images(folder)
        names, classes = len(model.images.get("classes", [])), model.config.classes
        if names > classes:
            raise UserError(f"{folder / 'images.json'} names {names:,} classes of a model of {classes:,}: get it anew")
    return model


def load_folder(folder: Path) -> Any:
    stored = Stored(folder)
    return tell(fill(stored.config, Tensors(set(stored.files.values())), str(folder)), folder)  # it checks the values


def load_checkpoint(folder: Path, raw: bool = False) -> Any:
    """Read the `model` folder of a checkpoint whose manifest was checked. Its files hold slices, so DCP reads them.

    The averaged weights are read where the run keeps them, unless `raw`.
    """
    from tokenformer.hub.dcp import read_tensors, stored  # importing DCP takes a while

    config, average = read_config(folder), folder.parent / "average"
    held = average if average.is_dir() and not raw else folder
    check_shapes(config, {name: meta.size for name, meta in stored(held).items()}, str(held))
    return tell(fill(config, read_tensors(held), str(held)), folder)


class Tensors(Mapping[str, Tensor]):
    """The tensors of safetensors files by name, without `prefix`. Headers are read at once, values when asked for."""

    def __init__(self, files: Iterable[Path], prefix: str = "") -> None:
        self.stored: dict[str, str] = {}  # our name → the file's
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for path in files:
            for stored, (shape, kind) in read_header(path).items():
                name = stored.removeprefix(prefix)
                if name in self.files:
                    raise UserError(f"{path}: '{stored}' is there twice, also in {self.files[name]}: get it anew")
                if kind not in DTYPES:
                    raise UserError(f"{path}: '{stored}' holds {kind}, no floating point numbers: get it anew")
                self.files[name], self.shapes[name], self.dtypes[name] = path, shape, DTYPES[kind]
                self.stored[name] = stored

    def __getitem__(self, name: str) -> Tensor:
        path = self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(self.stored[name])
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} changed or was removed while it was read ({error}): start again") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def read_header(path: Path) -> dict[str, tuple[list[int], str]]:
    """Return the shapes and types of a safetensors file's tensors by name."""
    if not is_file(path):
        raise UserError(f"{path} is {'no plain file' if path.exists() else 'missing'}: get it anew")
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise UserError(f"{path} is not a whole safetensors file (it is too short): get it anew")
            parse_json(file.read(size).decode(), f"the header of {path}")  # the library takes names that stand twice
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()}
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}): get it anew") from None


class Stored(Tensors):
    """Our folder, read one tensor at a time; the values of each are checked when it is read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        check_manifest(self.folder)
        self.config, self.history = read_config(self.folder), read_history(self.folder)
        super().__init__(sorted(self.folder.glob("model*.safetensors")))
        check_shapes(self.config, self.shapes, str(folder))

    def __getitem__(self, name: str) -> Tensor:
        return check_values(name, super().__getitem__(name), str(self.folder))


def save_folder(
    model: Any,
    folder: str | Path,
    tokenizer_json: str | None = None,
    force: bool = False,
    *,
    max_shard_size: int | None = None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Write our folder of a model; `more` are further files, text by name."""
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    named, images = model.named_parameters(), getattr(model, "images", None)
    codes = getattr(model, "codes", None)
    beside = {**(more or {}), **({CODES: codes_file(codes)} if codes else {})}
    rest = {"images": images, "max_shard_size": max_shard_size, "more": beside}
    write_folder(folder, model.config, model.history, named, types, tokenizer_json, force, **rest)


def write_folder(
    folder: str | Path,
    config: ModelConfig,
    history: list[dict],
    tensors: Iterable[tuple[str, Tensor]],
    dtypes: Mapping[str, torch.dtype],
    tokenizer_json: str | None = None,
    force: bool = False,
    images: dict[str, Any] | None = None,
    max_shard_size: int | None = None,
    more: Mapping[str, str | bytes] | None = None,
) -> None:
    """Write a folder from tensors that come one by one, in the order and types of `dtypes`."""
    shapes = {name: p.shape for name, p in empty(config).named_parameters()}
    check_shapes(config, {name: shapes.get(name, ()) for name in dtypes}, "what is to be written")
    with atomic_folder(folder, force) as beside:
        for name, text in {**sidecars(config, history, tokenizer_json, images), **(more or {})}.items():
            (beside / name).write_bytes(text.encode() if isinstance(text, str) else text)
        kinds = {name: (shapes[name], dtype) for name, dtype in dtypes.items()}
        write_tensors(beside, tensors, kinds, max_shard_size)


def write_tensors(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]],
    most: int | None = None,
    stem: str = "model",
) -> dict[str, str]:
    """Write safetensors files of at most `most` (SHARD_BYTES) bytes, or one tensor, and the checksums of all tensors;
    return the file of each tensor.
    """
    shards: list[dict[str, int]] = [{}]
    for name, (shape, dtype) in kinds.items():
        size = shape.numel() * dtype.itemsize
        if shards[-1] and sum(shards[-1].values()) + size > (most or SHARD_BYTES):
            shards.append({})
        shards[-1][name] = size
    coming, many, digests = iter(tensors), len(shards), {}
    for i, shard in enumerate(shards, 1):
        file = f"{stem}.safetensors" if many == 1 else f"{stem}-{i:05d}-of-{many:05d}.safetensors"
        digests[file] = _write(folder / file, shard, kinds, coming)
    (folder / TENSORS).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    return {name: file for file, shard in digests.items() for name in shard}


def _write(
    path: Path,
    shard: dict[str, int],
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]],
    coming: Iterator[tuple[str, Tensor]],
) -> dict[str, str]:
    """Write one safetensors file; return the sha256 of the stored bytes of each tensor."""
    digests = {}
    with open(path, "wb") as file:
        file.write(header_bytes({name: kinds[name] for name in shard}))
        for name in shard:
            came, tensor = next(coming)
            if (came, (tensor.shape, tensor.dtype)) != (name, kinds[name]):
                raise RuntimeError(f"'{came}' {tuple(tensor.shape)} came where '{name}' {kinds[name]} was due")
            stored = stored_bytes(tensor)
            file.write(stored.data)
            digests[name] = hashlib.sha256(stored.data).hexdigest()
            del tensor, stored
    return digests


def header_bytes(kinds: Mapping[str, tuple[torch.Size, torch.dtype]], **metadata: str) -> bytes:
    """Return what stands before the data of a safetensors file that holds these tensors one after another."""
    names = {dtype: name for name, dtype in (DTYPES | NUMBERS).items()}
    header: dict[str, dict] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for name, (shape, dtype) in kinds.items():
        end = start + shape.numel() * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def stored_bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor as a safetensors file has them; from the CPU without a copy."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
