"""Matrices that are split over many ranks: gather each on one owner, solve it there, scatter the result back.

This is what an optimizer needs whose update is not elementwise (Muon). Matrices that are solved as one are a unit:
each matrix by itself, or the segments of a projection, whose rows make one matrix.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tokenformer.models.names import Name
from tokenformer.parallel.layout import Box, Split, volume
from tokenformer.parallel.mesh import Place

STACK = 1 << 26  # numbers that are solved at once on one rank


def units(names: Iterable[Name], joint: bool) -> list[list[str]]:
    """Group the matrices that are solved as one; `joint`: the segments of a projection together."""
    found: dict[str, list[str]] = {}
    for name in names:
        first = name._replace(segment=0) if joint and name.token else name
        found.setdefault(first.text, []).append(name.text)
    return list(found.values())


def count_alike(blocks: Iterable[dict[Name, Split]], joint: bool) -> Counter[tuple[Split, ...]]:
    """Count the units that are split alike."""
    found: Counter[tuple[Split, ...]] = Counter()
    for block in blocks:
        splits = {name.text: split for name, split in block.items() if name.role.matrix}
        for unit in units((name for name in block if name.role.matrix), joint):
            found[tuple(splits[name] for name in unit)] += 1
    return found


@dataclasses.dataclass(frozen=True)
class Owners:
    """Which of the ranks that hold these blocks solves which unit, and which part of a unit each of them holds.

    Units go to the ranks in turn, across all copies of the model. All units are split alike.
    """

    splits: Sequence[Split]
    place: Place
    count: int  # of units

    @property
    def ranks(self) -> range:
        d = self.place.degrees
        return range(d.replicate * d.shard * d.token)

    @property
    def own(self) -> int:
        return self.place.data_rank * self.place.degrees.token + self.place.token

    def units_of(self, rank: int) -> range:
        return range(rank, self.count, len(self.ranks))

    def boxes(self, rank: int) -> list[Box]:
        d = self.place.degrees
        return [split.box(rank % d.token, rank // d.token % d.shard, d.shard) for split in self.splits]

    def near(self, rank: int) -> bool:
        """Whether a rank belongs to the same copy of the model."""
        copy = self.place.degrees.shard * self.place.degrees.token
        return rank // copy == self.own // copy


def solve_whole(
    parts: Sequence[Sequence[Tensor]], splits: Sequence[Split], place: Place, solve: Callable[[Tensor], Tensor]
) -> list[list[Tensor]]:
    """Solve each unit as a whole, from this rank's parts of its matrices to this rank's parts of the solution."""
    owners, like = Owners(splits, place, len(parts)), parts[0][0]
    wholes = assemble(send_to_owners(parts, owners), owners, like)
    solved = solve(torch.stack(wholes)).to(like.dtype) if wholes else like.new_zeros(0)
    return send_back(list(solved), owners, parts)


def send_to_owners(parts: Sequence[Sequence[Tensor]], owners: Owners) -> list[Tensor]:
    """Send each part to the owner of its unit in the same copy of the model. Return what each rank sent here, flat."""
    units = [owners.units_of(rank) if owners.near(rank) else () for rank in owners.ranks]
    out = [[part.reshape(-1) for unit in theirs for part in parts[unit]] for theirs in units]
    mine = len(owners.units_of(owners.own))
    sizes = [mine * sum(map(volume, owners.boxes(rank))) if owners.near(rank) else 0 for rank in owners.ranks]
    return _all_to_all(out, sizes, parts[0][0], owners.place.groups["stage"])


def assemble(received: Sequence[Tensor], owners: Owners, like: Tensor) -> list[Tensor]:
    """Put the units of this rank together: the rows of their matrices one after another."""
    wholes = [[like.new_zeros(split.shape) for split in owners.splits] for _ in owners.units_of(owners.own)]
    for rank in filter(owners.near, owners.ranks):
        boxes = owners.boxes(rank)
        pieces = iter(received[rank].split([volume(box) for _ in wholes for box in boxes]))
        for whole in wholes:
            for matrix, box in zip(whole, boxes, strict=True):
                matrix[box] = next(pieces).view(matrix[box].shape)
    return [torch.cat(whole) for whole in wholes]


def send_back(solved: Sequence[Tensor], owners: Owners, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Send every rank of every copy its parts of all units."""
    matrices = [unit.split([split.shape[0] for split in owners.splits]) for unit in solved]
    out = [
        [matrix[box].reshape(-1) for unit in matrices for matrix, box in zip(unit, owners.boxes(rank), strict=True)]
        for rank in owners.ranks
    ]
    volumes = [volume(box) for box in owners.boxes(owners.own)]
    sizes = [sum(volumes) * len(owners.units_of(rank)) for rank in owners.ranks]
    flat = _all_to_all(out, sizes, parts[0][0], owners.place.groups["stage"])
    pieces = [iter(flat[rank].split(volumes * len(owners.units_of(rank)))) for rank in owners.ranks]
    return [[next(pieces[i % len(owners.ranks)]).view(part.shape) for part in unit] for i, unit in enumerate(parts)]


def _all_to_all(out: list[list[Tensor]], sizes: list[int], like: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange flat tensors with every rank; return what each had for this one."""
    flat = [torch.cat(parts) if parts else like.new_empty(0) for parts in out]
    received = like.new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat(flat), sizes, [len(f) for f in flat], group=group)
    return list(received.split(sizes))
