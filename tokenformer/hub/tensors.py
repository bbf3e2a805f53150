"""Tensors by name ↔ a folder of DCP's safetensors files, written and read with or without a process group.

Unusual: a shard file holds slices under a tensor's full name, so no plain safetensors reader may touch these folders.
"""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tokenformer.errors import UserError

FILE_BYTES = 2 * 10**9  # the writer holds one file in memory
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def write_tensors(folder: str | Path, tensors: dict[str, Tensor]) -> None:
    """Every rank of a process group, or one process, writes what it holds. Tensors only: DCP would pickle the rest."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {type(value).__name__}, not a tensor: it belongs into state.json")
    files, size = {}, 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        files[name] = 1 + size // FILE_BYTES
    files = {name: 1 + sorted(set(files.values())).index(file) for name, file in files.items()}  # numbered densely
    Path(folder).mkdir(parents=True, exist_ok=True)
    if tensors:
        writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
        dcp.save({name: t.contiguous() for name, t in tensors.items()}, storage_writer=writer, no_dist=_alone())


def read_tensors(folder: str | Path, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """All tensors of a folder, whole and on the CPU, or into the given ones (sharded or not), which must be all."""
    if not any(Path(folder).glob("*.safetensors")):
        stored = {}
    else:
        stored = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    shapes = {name: meta for name, meta in stored.items() if isinstance(meta, TensorStorageMetadata)}
    if into is None:
        into = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in shapes.items()}
    for name in [*into.keys() - shapes.keys(), *shapes.keys() - into.keys()]:
        missing = "is missing in" if name in into else "is too many in"
        raise UserError(f"tensor {name} {missing} {folder}: it was written by another model, or use another checkpoint")
    for name, meta in shapes.items():
        if into[name].shape != meta.size:
            raise UserError(f"tensor {name} of {folder} is {list(meta.size)}, not {list(into[name].shape)}")
    if into:
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(into, storage_reader=reader, no_dist=_alone())
    return into


def _alone() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())
