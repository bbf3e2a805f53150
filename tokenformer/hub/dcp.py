"""Tensors by name ↔ a folder of DCP's safetensors files, written and read with or without a process group.

Each rank writes its part under the tensor's full name and place, and a reader asks for any part of the whole: saved on
8 ranks, loaded on 1.

Unusual: a shard file holds slices under a tensor's full name, so no plain safetensors reader may touch these folders.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tokenformer.errors import UserError
from tokenformer.hub.folder import read_header

FILE_BYTES = 2 * 10**9  # the writer holds one file in memory
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def write_tensors(folder: str | Path, tensors: Mapping[str, Any], group: Any = None) -> None:
    """Write what each rank of a process group, or the only process, holds: tensors, or parts of them as DCP knows them.

    Anything else is refused, since DCP would pickle it.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor) and not hasattr(value, "__create_chunk_list__"):
            raise TypeError(f"{name} is {type(value).__name__}, not a tensor: it belongs into state.json")
    files, size = {}, 0
    for name, nbytes in _of_all_ranks({name: tensor.nbytes for name, tensor in tensors.items()}, group).items():
        size += nbytes
        files[name] = 1 + size // FILE_BYTES
    files = {name: 1 + sorted(set(files.values())).index(file) for name, file in files.items()}  # numbered densely
    Path(folder).mkdir(parents=True, exist_ok=True)
    if files:
        writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        dcp.save(whole, storage_writer=writer, process_group=group, no_dist=_single_process())


def stored(folder: str | Path) -> dict[str, TensorStorageMetadata]:
    """Return what a folder holds: names, shapes and types."""
    files = sorted(Path(folder).glob("*.safetensors"))
    for path in files:
        read_header(path)  # refuses in a sentence what would make the reader below fail
    if not files:
        return {}
    with _as_user_error(folder):
        found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: meta for name, meta in found.items() if isinstance(meta, TensorStorageMetadata)}


def read_tensors(
    folder: str | Path, into: dict[str, Any] | None = None, names: Iterable[str] | None = None, group: Any = None
) -> dict[str, Any]:
    """Read all tensors of a folder, whole and on the CPU, or into the given ones (or parts of them).

    The given ones, or else `names` where a rank holds some of them only, must be all that the folder has.
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
            dcp.load(into, storage_reader=reader, process_group=group, no_dist=_single_process())
    return into


@contextlib.contextmanager
def _as_user_error(folder: str | Path) -> Iterator[None]:
    """Refuse files that DCP cannot read in a sentence, whatever it raises; lost ranks are no fault of files."""
    try:
        yield
    except (OSError, torch.distributed.DistError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        raise UserError(f"{folder} holds tensors that cannot be read ({what}): use another checkpoint") from error


def _of_all_ranks(sizes: dict[str, int], group: Any) -> dict[str, int]:
    """Gather the sizes that every rank holds: DCP's writer must know the file of each tensor."""
    if _single_process():
        return sizes
    every: list[dict[str, int]] = [{}] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, sizes, group=group)
    return {name: n for one in every for name, n in one.items()}


def _single_process() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())
