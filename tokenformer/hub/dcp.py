"""Tensors by name ↔ a folder of safetensors files as DCP writes them, each rank by itself.

Each rank writes its part under the tensor's full name and place, and a reader asks for any part of the whole: saved on
8 ranks, loaded on 1.

Unusual: a shard file holds slices under a tensor's full name, so no plain safetensors reader may touch these folders.
"""

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tokenformer.errors import UserError
from tokenformer.hub.folder import header_bytes, read_header, stored_bytes

FILE_BYTES = 2 * 10**9  # a file ends with the tensor that reaches this
PIECE = 1 << 24  # bytes that are written, then hashed
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def write_tensors(folder: str | Path, tensors: Mapping[str, Any], rank: int = 0) -> dict[str, dict]:
    """Write what one process holds: tensors, or parts of them as DCP knows them; other ranks write the rest.

    Return the manifest's entry of each file by name, hashed while it was written. Equal tensors give equal files.
    Anything else than tensors is refused, since it belongs elsewhere.
    """
    parts: dict[str, tuple[Tensor, list[int]]] = {}  # and where a part begins in the whole
    for name, value in sorted(tensors.items()):
        if hasattr(value, "__create_chunk_list__"):
            for chunk in value.__create_chunk_list__():
                parts[name] = (value.__get_tensor_shard__(None), list(chunk.offsets))
        elif isinstance(value, Tensor):
            parts[name] = (value, [0] * value.ndim)
        else:
            raise TypeError(f"{name} is {type(value).__name__}, not a tensor: it belongs into state.json")
    files: list[list[str]] = []
    size = FILE_BYTES
    for name, (tensor, _) in parts.items():
        if size >= FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensor.nbytes
    Path(folder).mkdir(parents=True, exist_ok=True)
    named = {f"shard-{rank + 1:05d}-model-{i:05d}-of-{len(files):05d}.safetensors": f for i, f in enumerate(files, 1)}
    return {name: _write(Path(folder) / name, {n: parts[n] for n in held}) for name, held in named.items()}


def _write(path: Path, parts: Mapping[str, tuple[Tensor, list[int]]]) -> dict[str, Any]:
    """Write one file to the disk; return its size and checksum."""
    places = {name: {"saved_offsets": begin} for name, (_, begin) in parts.items()}
    kinds = {name: (tensor.shape, tensor.dtype) for name, (tensor, _) in parts.items()}
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:

        def add(piece: Any) -> int:
            file.write(piece)
            digest.update(piece)
            return len(piece)

        size += add(header_bytes(kinds, DCP_SHARDING_INFO=json.dumps(places), DCP_VERSION="1.0"))
        for tensor, _ in parts.values():
            data = stored_bytes(tensor).data
            size += sum(add(data[first : first + PIECE]) for first in range(0, len(data), PIECE))
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def stored(folder: str | Path) -> dict[str, TensorStorageMetadata]:
    """Return what a folder holds: names, shapes and types. What other files than ours hold (codes) does not count."""
    files, others = sorted(Path(folder).glob("*.safetensors")), set[str]()
    for path in files:
        header = read_header(path)  # refuses in a sentence what would make the reader below fail
        others |= set() if path.name.startswith("shard-") else header.keys()
    if not files:
        return {}
    with _as_user_error(folder):
        found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    kinds = {name: meta for name, meta in found.items() if name not in others}
    return {name: meta for name, meta in kinds.items() if isinstance(meta, TensorStorageMetadata)}


def read_tensors(
    folder: str | Path, into: dict[str, Any] | None = None, names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Read all tensors of a folder, whole and on the CPU, or into the given ones (or parts of them).

    The folder must hold exactly the given tensors, or `names`, where this rank reads some of them only.
    """
    shapes = stored(folder)
    if into is None:
        with _as_user_error(folder):
            into = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in shapes.items()}
    wanted = set(into if names is None else names)
    for name in sorted(wanted ^ shapes.keys()):
        missing = "is missing in" if name in wanted else "is too many in"
        raise UserError(f"tensor {name} {missing} {folder}: it was written by another model, or use another checkpoint")
    for name, meta in shapes.items():
        if name in into and into[name].shape != meta.size:
            raise UserError(f"tensor {name} of {folder} is {list(meta.size)}, not {list(into[name].shape)}")
    if shapes:
        reader = dcp.HuggingFaceStorageReader(str(folder))
        with _as_user_error(folder):
            dcp.load(into, storage_reader=reader, no_dist=True)  # every rank reads its own parts
    return into


@contextlib.contextmanager
def _as_user_error(folder: str | Path) -> Iterator[None]:
    """Refuse files that DCP cannot read in a sentence, whatever it raises; lost ranks are no fault of files."""
    try:
        yield
    except (OSError, torch.distributed.DistError):
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception, and holds those of ranks
        error = error.failures[0][0] if isinstance(error, CheckpointException) else error
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        raise UserError(f"{folder} holds tensors that cannot be read ({what}): use another checkpoint") from error
