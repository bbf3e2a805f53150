"""What every parameter token did on a text: counts and sums that can be merged, and where it was strongest.

Unusual: a place in the text and the activation there are one whole number, so the strongest places do not depend on how
the text was cut into batches, not even where activations are equal. Tallies of two parts of a text merge to that of the
whole. Legend: T rows of data, N parameter tokens of one segment, K places that are kept.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.growth.measure import Where, mass, watching
from tokenformer.inside.ablation import check_model, refuse_switches

PLACES = 16  # that are kept of each token, strongest and most negative
FIRES = 1.0  # the activation above which a token fires; under the L2 forms, one deviation of a row's scores
DEAD = 1e-14  # the most that a dead token has of any row's statistic: without it, numbers change by rounding alone


@dataclass
class Tally:
    """`tables` per segment: sum and square of the activation, how often it fires (each (N,)), `most` (N,), the largest
    share that a token had of a row's statistic, and `high`, `low` (N, K), places as `pack` makes them.
    """

    rows: int = 0
    tables: dict[Where, dict[str, Tensor]] = field(default_factory=dict)

    def add(self, where: Where, score_TN: Tensor, active_TN: Tensor, theta: str, places_T: Tensor) -> None:
        """Take what a segment did on some rows, at these places of the text."""
        terms_TN = mass(score_TN.float(), theta)
        share_TN = terms_TN / terms_TN.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        new = {
            "sum": active_TN.sum(0, dtype=torch.float64),
            "square": active_TN.double().square().sum(0),
            "fires": (active_TN > FIRES).sum(0),
            "most": share_TN.amax(0),
            "high": strongest(pack(active_TN.float(), places_T).T),
            "low": strongest(pack(-active_TN.float(), places_T).T),
        }
        self._merge(where, new)

    def merge(self, other: "Tally") -> None:
        """Add the tally of the part of the text that follows: its places are counted on from this one's."""
        shapes = [{w: len(tables["sum"]) for w, tables in tally.tables.items()} for tally in (self, other)]
        if self.tables and other.tables and shapes[0] != shapes[1]:
            raise UserError("these are tallies of models of different shapes: merge those of one model")
        for where, tables in other.tables.items():
            moved = {name: tables[name] - self.rows for name in ("high", "low")}  # the place is subtracted in them
            self._merge(where, {**tables, **moved})
        self.rows += other.rows

    def _merge(self, where: Where, new: Mapping[str, Tensor]) -> None:
        old = self.tables.setdefault(where, {})
        for name, table in new.items():
            if name not in old:
                old[name] = table
            elif name == "most":
                old[name] = torch.maximum(old[name], table)
            elif name in ("high", "low"):
                old[name] = strongest(torch.cat([old[name], table], -1))
            else:
                old[name] = old[name] + table

    def mean(self, where: Where) -> Tensor:
        if not self.rows:
            raise UserError("nothing was explored yet: give batches of ids")
        return self.tables[where]["sum"] / self.rows

    def spread(self, where: Where) -> Tensor:
        """The standard deviation of the activation."""
        return (self.tables[where]["square"] / self.rows - self.mean(where).square()).clamp_min(0).sqrt()

    def dead(self, where: Where) -> Tensor:
        """Which tokens were in no sum of any row (N,): without them, the model would have computed the same."""
        return self.tables[where]["most"] <= DEAD

    def to(self, device: str | torch.device) -> "Tally":
        return Tally(self.rows, {w: {n: t.to(device) for n, t in ts.items()} for w, ts in self.tables.items()})


def pack(active_TN: Tensor, places_T: Tensor) -> Tensor:
    """Make whole numbers that are ordered by the activation, then by the place, earlier ones first.

    >>> packed = pack(torch.tensor([[0.5], [-2.0], [0.5]]), torch.tensor([7, 8, 9]))
    >>> [(round(value, 2), place) for value, place in zip(*(part.tolist() for part in unpack(packed[:, 0])))]
    [(0.5, 7), (-2.0, 8), (0.5, 9)]
    >>> packed[:, 0].argsort(descending=True).tolist()
    [0, 2, 1]
    """
    bits = active_TN.contiguous().view(torch.int32)
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    return (ordered << 32) | (0xFFFFFFFF - places_T)[:, None]


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activations and the places of what `pack` made."""
    ordered = (packed >> 32).int()
    bits = torch.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF)
    return bits.view(torch.float32), 0xFFFFFFFF - (packed & 0xFFFFFFFF)


def strongest(packed_NT: Tensor) -> Tensor:
    return packed_NT.topk(min(PLACES, packed_NT.shape[-1])).values


@torch.no_grad()
def explore(
    model: Any,
    batches: Iterable[Tensor],
    *,
    tally: Tally | None = None,
    after: Callable[[Tally], object] = lambda tally: None,
) -> Tally:
    """Run a language model over batches of ids (B, T), one pass, and return what its parameter tokens did.

    The places of a text are counted through all batches, row by row. `tally`: one to go on with. `after` is called
    after each batch. The blocks run uncompiled, since what is inside of a compiled one cannot be seen.

    >>> from tokenformer import ModelConfig, models
    >>> tiny = models.build(ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=9, vocab=64))
    >>> found = explore(tiny, [torch.arange(64).view(2, 32)])
    >>> found.rows, found.mean((0, "ffn", 0)).shape
    (64, torch.Size([9]))
    """
    check_model(model)
    refuse_switches(model)
    tally = tally or Tally()
    theta, places_T = model.config.theta, torch.empty(0)

    def visit(where: Where, score_TN: Tensor, active_TN: Tensor) -> None:
        tally.add(where, score_TN, active_TN, theta, places_T)

    with watching(model, visit), torch.compiler.set_stance("force_eager"):
        for ids_BT in batches:
            if not isinstance(ids_BT, Tensor) or ids_BT.ndim != 2 or not ids_BT.numel():
                raise UserError("explore reads tensors of ids (rows, positions), at least one of each: give these")
            places_T = torch.arange(tally.rows, tally.rows + ids_BT.numel(), device=ids_BT.device)
            model.hidden(ids_BT)
            tally.rows += ids_BT.numel()
            after(tally)
    return tally
