"""Many devices: a mesh with the axes data, fsdp and token, and where each parameter lies on it.

Unusual: the program is written for one device. Where arrays lie is said here and at a few places of model.py, and XLA
inserts what is sent: weights are gathered over `fsdp` where they are used, and of parameter tokens that are split over
`token` one number per row and segment is all-reduced (softmax: two), then the outputs.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tokenformer.config import ParallelConfig
from tokenformer.errors import UserError

AXES = ("data", "fsdp", "token")
ROWS = ("data", "fsdp")  # the samples of a batch are split over both


def make_mesh(config: ParallelConfig, device: str = "auto") -> Mesh:
    """Return the mesh of a config: replicate × shard × token devices, on the axes data × fsdp × token."""
    try:
        devices = jax.devices() if device == "auto" else jax.devices(device.replace("cuda", "gpu"))
    except RuntimeError:
        raise UserError(f"train.device is {device}, but JAX sees no such device: give train.device=auto") from None
    if config.pipeline != 1 or config.offload:
        raise UserError("parallel.pipeline and parallel.offload are not in JAX: give parallel.shard and parallel.token")
    sizes = [-1 if config.replicate is None else config.replicate, config.shard, config.token]
    known = math.prod(size for size in sizes if size > 0)
    sizes = [len(devices) // known if size < 0 else size for size in sizes]
    count = math.prod(sizes)
    if not 0 < count <= len(devices) or (jax.process_count() > 1 and count < len(devices)):
        asked = f"parallel asks for {' × '.join(map(str, sizes))} devices (replicate × shard × token)"
        raise UserError(f"{asked}, but there are {len(devices)}: give degrees whose product is that")
    if sizes[0] * sizes[1] % jax.process_count():
        raise UserError(f"parallel.token={sizes[2]} spans {jax.process_count()} processes: give a smaller one")
    return Mesh(np.array(devices[:count]).reshape(sizes), AXES)


def constrain(x: Array, mesh: Mesh | None, *axes: Any) -> Array:
    """Say inside a program how an array is split; without a mesh it is returned as it is."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def placement(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Return where a parameter, or what an optimizer keeps for it, lies: rows over `token`, columns over `fsdp`."""
    if len(shape) < 2:
        return NamedSharding(mesh, PartitionSpec())
    rows, columns = shape
    if rows % mesh.shape["token"]:
        do = "give a degree that divides the parameter tokens of every segment, and the vocabulary"
        raise UserError(f"'{name}' has {rows} rows, which parallel.token={mesh.shape['token']} does not divide: {do}")
    return NamedSharding(mesh, PartitionSpec("token", "fsdp" if columns % mesh.shape["fsdp"] == 0 else None))


def put(arrays: Mapping[str, np.ndarray], mesh: Mesh, prefix: str = "") -> dict[str, Array]:
    """Lay whole arrays, which every process holds, over the devices."""
    where = {name: placement(prefix or name, array.shape, mesh) for name, array in arrays.items()}
    return {n: jax.make_array_from_callback(array.shape, where[n], array.__getitem__) for n, array in arrays.items()}


def put_rows(array: np.ndarray, mesh: Mesh, lead: int = 0) -> Array:
    """Lay this process's samples of a batch over its devices; `lead` axes stand before that of the samples."""
    where = NamedSharding(mesh, PartitionSpec(*[None] * lead, ROWS))
    return jax.make_array_from_process_local_data(where, array)


def whole(array: Array) -> np.ndarray:
    """Return an array of the devices as one in memory, in every process."""
    here = array.is_fully_addressable
    return np.asarray(array if here else multihost_utils.process_allgather(array, tiled=True))
