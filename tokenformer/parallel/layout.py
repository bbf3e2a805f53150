"""Which part of each parameter lies on which rank; how a whole is cut into parts and gathered from them.

Unusual: the optimizer, the norm and the checkpoint see plain local tensors and a box, the part's place in the whole; no
DTensor leaves this file. A parameter is split by the token degree along one dimension, then by FSDP along the first.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from tokenformer.config import ParallelConfig
from tokenformer.models import LanguageModel
from tokenformer.models.names import parse
from tokenformer.parallel.mesh import Place

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Split:
    """A whole parameter's shape, and where the token degree splits it (`cuts`: each rank's first row, and the end)."""

    shape: tuple[int, ...]
    dim: int | None = None
    cuts: tuple[int, ...] = ()

    def local(self, token: int) -> tuple[int, ...]:
        """Return the shape of a token rank's part."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] = self.cuts[token + 1] - self.cuts[token]
        return tuple(shape)

    def box(self, token: int, shard: int, shards: int) -> Box:
        """Return the part that a rank holds.

        >>> Split((10, 4), 0, (0, 5, 10)).box(token=1, shard=0, shards=2)
        (slice(5, 8, None), slice(0, 4, None))
        """
        begin, size = [0] * len(self.shape), list(self.local(token))
        if self.dim is not None:
            begin[self.dim] = self.cuts[token]
        if size:
            first, last = rows(size[0], shard, shards)
            begin[0], size[0] = begin[0] + first, last - first
        return tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))


def rows(n: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return a rank's first row and the one after its last, as FSDP splits: equal parts, the last shorter or empty.

    >>> [rows(10, r, 4) for r in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = -(-n // ranks)
    return min(rank * size, n), min((rank + 1) * size, n)


def volume(box: Box) -> int:
    return math.prod(side.stop - side.start for side in box)


class Part(Tensor):
    """A local tensor as DCP sees it: one chunk of a whole, with the whole's shape. It cannot be computed with."""

    tensor: Tensor
    box: Box

    @staticmethod
    def __new__(cls, tensor: Tensor, shape: Sequence[int], box: Box) -> "Part":
        part = Tensor._make_wrapper_subclass(cls, shape, dtype=tensor.dtype, device=tensor.device)
        part.tensor, part.box = tensor, box
        return part

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # pyrefly: ignore
        raise TypeError(f"{func} of a part: parts are only written and read")

    def contiguous(self, *_args: Any, **_kwargs: Any) -> "Part":
        return Part(self.tensor.contiguous(), self.shape, self.box)

    def to(self, *args: Any, **kwargs: Any) -> "Part":
        return Part(self.tensor.to(*args, **kwargs), self.shape, self.box)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.tensor.numel():
            return []
        begin, sizes = [side.start for side in self.box], [side.stop - side.start for side in self.box]
        return [ChunkStorageMetadata(offsets=torch.Size(begin), sizes=torch.Size(sizes))]

    def __create_write_items__(self, name: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.tensor), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.tensor


class Layout:
    """A model and where its parameters lie. `named` are plain Parameters that share memory with the model's own."""

    def __init__(
        self,
        model: LanguageModel,
        place: Place | None = None,
        splits: Mapping[str, Split] | None = None,
        parts: Sequence[LanguageModel] | None = None,
        holders: Mapping[str, int] | None = None,
        pipeline: Any = None,
    ) -> None:
        """Without a place the model is whole in this process.

        `parts` are this rank's stages of a pipeline, `holders` the pipeline rank of each parameter.
        """
        self.place = place = place or Place(ParallelConfig())
        self.model, self.holders, self.pipeline = model, dict(holders or {}), pipeline
        own = {name: p for part in parts or [model] for name, p in part.named_parameters()}
        self.splits = dict(splits or {name: Split(tuple(p.shape)) for name, p in own.items()})
        self.order = {name: number for number, name in enumerate(self.splits)}
        self.named = {name: _plain(p) for name, p in own.items()}
        self.own = own
        self.held_earlier = {n for n in own if self.holders.get(n, place.pipeline) != place.pipeline}  # by a stage
        tied = holders and model.config.tied  # the first and the last stage hold the embedding
        self.tied_ends = {n for n in own if tied and parse(n, model.ends).role.kind == "table"}
        self.elsewhere: set[str] = set()  # frozen parameters that checkpoints leave out: an adapter's base
        self.numbers = {name for name, p in own.items() if not p.ndim}  # which FSDP does not split: on every rank

    def freeze(self, names: Collection[str]) -> None:
        """Freeze these parameters and those that the model was built with as frozen (`held`), and no others."""
        names = {*names, *getattr(self.model, "held", ())}
        for name, parameter in (*self.own.items(), *self.named.items()):
            parameter.requires_grad_(name not in names)

    def collect_gradients(self) -> None:
        """Give each of `named` its part of the gradient of the last backward passes, summed over ranks."""
        for name, parameter in self.own.items():
            plain = self.named[name]
            if plain is not parameter:
                gradient = parameter.grad
                plain.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for name in self.tied_ends:  # its gradient as an embedding plus that as a head
            if (gradient := self.named[name].grad) is not None:
                dist.all_reduce(gradient, group=self.place.groups["ends"])
        for name in self.numbers:
            if (gradient := self.named[name].grad) is not None:
                self.place.sum(gradient)

    def zero_grad(self) -> None:
        for parameter in self.own.values():
            parameter.grad = None

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, after `collect_gradients`."""
        once = [p.grad for name, p in self.named.items() if p.grad is not None and self._counts(name)]
        if self.place.alone:
            return torch.nn.utils.get_total_norm(once)
        device = self.place.mesh.device_type if self.place.mesh is not None else "cpu"
        own = torch.nn.utils.get_total_norm(once) if once else torch.zeros(())
        return self.place.sum(own.to(device).square(), "copy").sqrt()

    def _counts(self, name: str) -> bool:
        """Tell whether this rank counts a part in the norm: the first of the ranks that hold it does."""
        if name in self.numbers:
            return self.place.shard == 0 and self.place.token == 0
        return name not in self.held_earlier and (self.splits[name].dim is not None or self.place.token == 0)

    def box(self, split: Split) -> Box:
        """Return this rank's part of a parameter that is split like this."""
        return split.box(self.place.token, self.place.shard, self.place.degrees.shard)

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Cut this rank's part out of a whole parameter."""
        return whole[self.box(self.splits[name])] if whole.ndim else whole

    def part(self, name: str, tensor: Tensor) -> Any:
        """Return what DCP writes of a parameter, or of a tensor like it; a single number is written as it is."""
        if self.place.alone or not tensor.ndim:
            return tensor.detach()
        return Part(tensor.detach(), self.splits[name].shape, self.box(self.splits[name]))

    def writes(self, name: str, tensor: Tensor) -> bool:
        """Tell whether this rank writes its part of a parameter (or of a tensor like it): holders take turns."""
        if self.place.alone or name in self.held_earlier:
            return self.place.alone
        d, place = self.place.degrees, self.place
        copies, own = d.replicate, place.replicate
        if not tensor.ndim or self.splits[name].dim is None:
            copies, own = copies * d.token, own * d.token + place.token
        if not tensor.ndim:
            copies, own = copies * d.shard, own * d.shard + place.shard
        return self.order[name] % copies == own

    def parts(self) -> dict[str, Any]:
        return {name: self.part(name, p) for name, p in self.named.items() if name not in self.elsewhere}

    def whole(self, name: str, tensor: Tensor | None, number: bool = False) -> Tensor:
        """Gather all parts of a parameter (or of a tensor like it) on every rank. Every rank must call this."""
        if tensor is not None:
            tensor = self._gather(name, tensor.detach())
        if name not in self.holders:
            assert tensor is not None
            return tensor
        if tensor is None:
            kind = torch.float32 if number else torch.get_default_dtype()
            where = next(iter(self.named.values())).device
            tensor = torch.empty(() if number else self.splits[name].shape, dtype=kind, device=where)
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(tensor, group=self.place.groups["pipeline"], group_src=self.holders[name])
        return tensor

    def _gather(self, name: str, tensor: Tensor) -> Tensor:
        if self.place.alone or not tensor.ndim:
            return tensor
        split, d = self.splits[name], self.place.degrees
        local = split.local(self.place.token)
        sizes = [last - first for first, last in (rows(local[0], r, d.shard) for r in range(d.shard))]
        tensor = gather(tensor, sizes, 0, self.place.groups["shard"])
        if split.dim is not None:
            sizes = [last - first for first, last in zip(split.cuts, split.cuts[1:], strict=False)]
            tensor = gather(tensor, sizes, split.dim, self.place.groups["token"])
        return tensor

    def whole_state(self, name: str, state: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Gather all that an optimizer keeps for a parameter. Every rank must call this."""
        entry = state.get(name, {})
        kinds = [sorted(entry)]
        if name in self.holders:
            dist.broadcast_object_list(kinds, group=self.place.groups["pipeline"], group_src=self.holders[name])
        return {kind: self.whole(name, entry.get(kind), number=kind == "step") for kind in kinds[0]}


class Wholes(dict[str, Tensor]):
    """Whole parameters by name, gathered when they are asked for, by all ranks in the same order. None is kept."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __missing__(self, name: str) -> Tensor:
        return self.layout.whole(name, self.layout.named.get(name))


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    with torch.no_grad():
        return nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)


def gather(tensor: Tensor, sizes: Sequence[int], dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather parts of these sizes along a dimension, in the order of the ranks."""
    if len(sizes) == 1:
        return tensor
    own = tensor.movedim(dim, 0)
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    ops = torch.ops._c10d_functional
    every = ops.wait_tensor(ops.all_gather_into_tensor(padded, len(sizes), group.group_name))
    parts = every.view(len(sizes), *padded.shape)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)]).movedim(0, dim)
