"""Two recipes: AdamW on everything, or Muon on the matrices of the blocks and AdamW on the rest.

Unusual: a step takes a divisor for the gradients (loss scale, normaliser and clipping in one) and a skip flag, both on
the device, so that nothing waits for it; Muon works on all matrices of one shape at once. State is known by name.
"""

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from tokenformer.config_train import OptimizerConfig
from tokenformer.parallel.layout import STACK, Layout, Split, spread, units

# Newton–Schulz quintic: drives every singular value of a matrix of norm ≤ 1 to about 0.7–1.2 in five steps.
QUINTIC = (3.4445, -4.7750, 2.0315)


def split(named: Iterable[tuple[str, nn.Parameter]], kind: str) -> dict[str, dict[str, nn.Parameter]]:
    """Parameters by what happens to them: `muon`, `adamw` (with weight decay), `plain` (norms: without)."""
    groups: dict[str, dict[str, nn.Parameter]] = {"muon": {}, "adamw": {}, "plain": {}}
    for name, parameter in named:
        matrix = parameter.ndim == 2 and name.startswith("blocks.")
        which = "plain" if parameter.ndim < 2 else "muon" if matrix and kind == "muon" else "adamw"
        groups[which][name] = parameter
    return groups


class Optimizer:
    """One object for a whole model. A parameter without state starts fresh, with its own step count."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        shares: Mapping[str, float] | None = None,
        layout: Layout | None = None,
    ) -> None:
        """`shares`: parameters that learn at a share of the rate. `layout`: where the parts of each lie."""
        self.config, self.shares, self.layout = config, dict(shares or {}), layout
        groups = split(named, config.kind)
        self.matrices, self.momentum = groups["muon"], {}
        self.others = {**groups["adamw"], **groups["plain"]}
        decays = {"adamw": config.weight_decay, "plain": 0.0}
        alike: dict[tuple[float, float], list[nn.Parameter]] = {}
        for group, decay in decays.items():
            for name, parameter in groups[group].items():
                alike.setdefault((decay, self.shares.get(name, 1.0)), []).append(parameter)
        alike = alike or {(0.0, 1.0): [nn.Parameter(torch.empty(0))]}  # a stage that holds matrices alone
        self.adamw = torch.optim.AdamW(
            [{"params": parameters, "weight_decay": d, "share": share} for (d, share), parameters in alike.items()],
            lr=config.rate,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )

    @torch.no_grad()
    def step(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        """One update by the gradients / divisor; where `skip` is 1, parameters and state stay what they were."""
        held = next(iter((self.others or self.matrices).values())).device  # the host, where parameters live there
        divisor, skip = divisor.to(held), skip.to(held)
        vars(self.adamw).update(grad_scale=divisor, found_inf=skip)  # the fused kernels read them on the device
        if self.others and divisor.dtype == torch.float64:  # of which they read no scale
            torch._foreach_div_([p.grad for p in self.others.values() if p.grad is not None], divisor)
            vars(self.adamw).update(grad_scale=None)
        for group in self.adamw.param_groups:
            group["lr"] = rate * group["share"]
        if self.others:
            self.adamw.step()
        if self.matrices:
            self._muon(rate, divisor, skip.bool())

    def _muon(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        c = self.config
        for splits, names in self._units().items():  # a unit is a matrix, or the segments of a projection
            count, columns = sum(split.shape[0] for split in splits), splits[0].shape[1]
            sizes = tuple(len(self.matrices[name]) for name in names[0])  # of the parts that are here
            length = 0.2 * max(count, columns) ** 0.5  # an orthogonal update of this length has AdamW's RMS
            many = max(1, STACK // (count * columns)) * (self.layout.place.world if self.layout else 1)
            for i in range(0, len(names), many):
                matrices = [[self.matrices[name] for name in unit] for unit in names[i : i + many]]
                momenta = [[self.momentum[name] for name in unit] for unit in names[i : i + many]]
                gradients = [[m.grad for m in unit if m.grad is not None] for unit in matrices]
                gradient = torch.stack([_rows(unit) for unit in gradients]) / divisor
                momentum = torch.stack([_rows(unit) for unit in momenta])
                momentum = torch.where(skip, momentum, momentum.lerp(gradient, 1 - c.momentum))
                direction = self._orthogonal(gradient.lerp(momentum, c.momentum), splits)
                keep = 1 - (~skip).to(gradient.dtype) * (rate * c.weight_decay)
                move = torch.where(skip, 0.0, direction.to(gradient.dtype)) * (rate * length)
                flat: list[Tensor] = [m for unit in matrices for m in unit]
                torch._foreach_copy_([m for unit in momenta for m in unit], _parts(momentum, sizes))
                moves, keeps = _parts(move, sizes), keep
                if self.shares:
                    shares = [self.shares.get(name, 1.0) for unit in names[i : i + many] for name in unit]
                    moves, keeps = torch._foreach_mul(moves, shares), [1 - (1 - keep) * share for share in shares]
                torch._foreach_mul_(flat, keeps)
                torch._foreach_sub_(flat, moves)

    def _orthogonal(self, stack: Tensor, splits: tuple[Split, ...]) -> Tensor:
        """Of each matrix; where only a part of it is here, some rank puts it together, and gives this part back."""
        solve = functools.partial(orthogonalise, steps=self.config.orthogonal_steps, dtype=self._dtype(stack))
        if self.layout is None or self.layout.place.degrees.world == self.layout.place.degrees.pipeline:
            return solve(stack)
        place = self.layout.place
        sizes = [side.stop - side.start for side, *_ in (self.layout.box_of(split) for split in splits)]
        solved = spread([matrix.split(sizes) for matrix in stack], splits, place, solve)
        return torch.stack([_rows(unit) for unit in solved])

    def _units(self) -> dict[tuple[Split, ...], list[list[str]]]:
        """Names of what is orthogonalised as one, by how their parts are cut."""
        names = [name for name, matrix in self.matrices.items() if matrix.grad is not None]
        for name in names:
            if name not in self.momentum:
                self.momentum[name] = torch.zeros_like(self.matrices[name])
        alike: dict[tuple[Split, ...], list[list[str]]] = {}
        for unit in units(names, self.config.segments == "joint"):
            if self.layout is None:
                splits = tuple(Split(tuple(self.matrices[name].shape)) for name in unit)
            else:
                splits = tuple(self.layout.splits[name] for name in unit)
            alike.setdefault(splits, []).append(unit)
        return alike

    def _dtype(self, like: Tensor) -> torch.dtype:
        if self.config.orthogonal_dtype == "auto":
            return torch.bfloat16 if like.is_cuda else like.dtype
        return torch.bfloat16 if self.config.orthogonal_dtype == "bf16" else torch.float32

    def zero_grad(self) -> None:
        for parameter in (*self.matrices.values(), *self.others.values()):
            parameter.grad = None

    def state_by_name(self) -> dict[str, dict[str, Tensor]]:
        """AdamW: exp_avg, exp_avg_sq and step; Muon: momentum. Only for parameters that were updated before."""
        muon = {name: {"momentum": momentum} for name, momentum in self.momentum.items()}
        adamw = {name: dict(self.adamw.state[p]) for name, p in self.others.items() if p in self.adamw.state}
        return {**muon, **adamw}

    @torch.no_grad()
    def load_state_by_name(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Copies; a parameter that is not named starts fresh."""
        self.momentum = {n: state[n]["momentum"].to(p, copy=True) for n, p in self.matrices.items() if n in state}
        self.adamw.state.clear()
        for name, p in self.others.items():
            if name in state:
                step = state[name]["step"].to(device=p.device, dtype=torch.float32, copy=True)
                moments = {key: state[name][key].to(p, copy=True) for key in ("exp_avg", "exp_avg_sq")}
                self.adamw.state[p] = {"step": step, **moments}


def _rows(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _parts(stack: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """The parts of each matrix of a stack, in order."""
    return [part for matrix in stack for part in matrix.split(sizes)]


def orthogonalise(matrices: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Each of (K, rows, columns) → nearly the orthogonal matrix closest to it, by Newton–Schulz steps in `dtype`.

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
