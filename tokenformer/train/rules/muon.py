"""Muon: every matrix of the blocks moves along its orthogonalised momentum, at the RMS of an AdamW step.

Unusual: all matrices of one shape are orthogonalised at once; a matrix that is sharded is gathered on one rank, solved
there and scattered back (parallel/gather.py).
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokenformer.config_train import OptimizerConfig
from tokenformer.models.names import Role, parse
from tokenformer.parallel.gather import STACK, solve_whole, units
from tokenformer.parallel.layout import Layout, Split
from tokenformer.train.rules import Learner, State

# Newton–Schulz quintic: drives every singular value of a matrix of norm ≤ 1 to about 0.7–1.2 in five steps.
QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon:
    """Keeps a `momentum` per matrix. `optimizer.segments: joint` treats the segments of a projection as one matrix."""

    def __init__(self, learners: Mapping[str, Learner], config: OptimizerConfig, layout: Layout) -> None:
        self.config, self.layout, self.momentum = config, layout, dict[str, Tensor]()
        self.matrices = {name: learner.parameter for name, learner in learners.items()}
        self.shares = {name: learner.share for name, learner in learners.items() if learner.share is not None}

    @staticmethod
    def wants(role: Role) -> bool:
        return role.matrix

    def step(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        for splits, names in self._units().items():
            count, columns = sum(split.shape[0] for split in splits), splits[0].shape[1]
            length = 0.2 * max(count, columns) ** 0.5  # an orthogonal update of this length has AdamW's RMS
            many = max(1, STACK // (count * columns)) * self.layout.place.world
            for i in range(0, len(names), many):
                self._update(names[i : i + many], splits, rate, length, divisor, skip.bool())

    def _update(
        self,
        names: Sequence[Sequence[str]],
        splits: Sequence[Split],
        rate: float,
        length: float,
        divisor: Tensor,
        skip: Tensor,
    ) -> None:
        """Update units that are split alike: (units, rows, columns) at once."""
        c, flat = self.config, [name for unit in names for name in unit]
        sizes = [len(self.matrices[name]) for name in names[0]]  # rows of the parts that are here
        matrices: list[Tensor] = [self.matrices[name] for name in flat]
        gradients = {name: m.grad for name, m in zip(flat, matrices, strict=True) if m.grad is not None}
        gradient = _stack(names, gradients) / divisor
        momentum = _stack(names, self.momentum)
        momentum = torch.where(skip, momentum, momentum.lerp(gradient, 1 - c.momentum))
        direction = self._orthogonal(gradient.lerp(momentum, c.momentum), splits)
        keep = 1 - (~skip).to(gradient.dtype) * (rate * c.weight_decay)
        move = torch.where(skip, 0.0, direction.to(gradient.dtype)) * (rate * length)
        torch._foreach_copy_([self.momentum[name] for name in flat], _parts(momentum, sizes))
        moves, keeps = _parts(move, sizes), keep
        if self.shares:
            shares = [self.shares.get(name, 1.0) for name in flat]
            moves, keeps = torch._foreach_mul(moves, shares), [1 - (1 - keep) * share for share in shares]
        torch._foreach_mul_(matrices, keeps)
        torch._foreach_sub_(matrices, moves)

    def _orthogonal(self, stack: Tensor, splits: Sequence[Split]) -> Tensor:
        """Orthogonalise each matrix. A matrix that is split over ranks is gathered on one of them."""
        solve = functools.partial(orthogonalise, steps=self.config.orthogonal_steps, dtype=self._dtype(stack))
        place = self.layout.place
        if place.degrees.world == place.degrees.pipeline:
            return solve(stack)
        sizes = [side.stop - side.start for side, *_ in map(self.layout.box, splits)]
        solved = solve_whole([matrix.split(sizes) for matrix in stack], splits, place, solve)
        return torch.stack([torch.cat(unit) if len(unit) > 1 else unit[0] for unit in solved])

    def _units(self) -> dict[tuple[Split, ...], list[list[str]]]:
        """Return the names of the matrices that are orthogonalised as one, by how they are split."""
        names = [name for name, matrix in self.matrices.items() if matrix.grad is not None]
        for name in names:
            if name not in self.momentum:
                self.momentum[name] = torch.zeros_like(self.matrices[name])
        alike: dict[tuple[Split, ...], list[list[str]]] = {}
        for unit in units((parse(name, self.layout.model.ends) for name in names), self.config.segments == "joint"):
            alike.setdefault(tuple(self.layout.splits[name] for name in unit), []).append(unit)
        return alike

    def _dtype(self, like: Tensor) -> torch.dtype:
        if self.config.orthogonal_dtype == "auto":
            return torch.bfloat16 if like.is_cuda else like.dtype
        return torch.bfloat16 if self.config.orthogonal_dtype == "bf16" else torch.float32

    def state_by_name(self) -> State:
        return {name: {"momentum": momentum} for name, momentum in self.momentum.items()}

    def load_state_by_name(self, state: State) -> None:
        self.momentum = {n: state[n]["momentum"].to(p, copy=True) for n, p in self.matrices.items() if n in state}


def _stack(names: Sequence[Sequence[str]], tensors: Mapping[str, Tensor]) -> Tensor:
    """Stack the units, each of which is its matrices one below the other."""
    return torch.stack([torch.cat([tensors[n] for n in unit]) if len(unit) > 1 else tensors[unit[0]] for unit in names])


def _parts(stack: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return the matrices of all units of a stack, in order."""
    return [part for unit in stack for part in unit.split(sizes)]


def orthogonalise(matrices: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Replace each of (K, rows, columns) by nearly the closest orthogonal matrix, by Newton–Schulz steps in `dtype`.

    >>> q = orthogonalise(torch.tensor([[[3.0, 0.0], [0.0, 2.0]]]), 5, torch.float32)
    >>> bool((q.diagonal(dim1=1, dim2=2) > 0.6).all()), q[0, 0, 1].item()
    (True, 0.0)
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    a, b, c = QUINTIC
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
