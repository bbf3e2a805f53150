"""The static key/value cache, one block of memory. Position p of a row is in slot p, so a query may see the slots up
to its own position, whatever comes after (padding of shorter prompts).

Legend: L layers, B batch, G key/value heads, S slots, C head_dim, T new positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.config import ModelConfig


class StaticCache:
    """
    >>> config = ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=4)
    >>> StaticCache(config, batch=3, slots=16, device="cpu", dtype=torch.float32).k.shape
    torch.Size([1, 3, 2, 16, 8])
    """

    def __init__(
        self, config: ModelConfig, batch: int, slots: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (config.layers, batch, config.kv_heads or config.heads, slots, config.head_dim)
        # zeros: what is masked must be finite
        self.k, self.v = torch.zeros(2, *shape, device=device, dtype=dtype).unbind(0)
        self.rows_B1 = torch.arange(batch, device=device)[:, None]
        self.slots_S = torch.arange(slots, device=device)

    @property
    def batch(self) -> int:
        return self.k.shape[1]

    @property
    def slots(self) -> int:
        return self.k.shape[3]

    def mask(self, positions_BT: Tensor) -> Tensor:
        """Return (B, 1, T, S): a query sees the slots up to its own position."""
        return (self.slots_S <= positions_BT[..., None])[:, None]

    def part(self, rows: slice, slots: int | None = None) -> "StaticCache":
        """Return some rows, and their first slots, as a cache on the same memory."""
        part = object.__new__(StaticCache)
        part.k, part.v = self.k[:, rows, :, :slots], self.v[:, rows, :, :slots]
        part.rows_B1, part.slots_S = self.rows_B1[: part.batch], self.slots_S[:slots]
        return part

    def copy_row(self, row: int, to: int, slots: int) -> None:
        """Copy the first slots of a row to another row."""
        for held in (self.k, self.v):
            held[:, to, :, :slots] = held[:, row, :, :slots]

    def spread(self, rows: Tensor, slots: int) -> "StaticCache":
        """Return a new cache whose row i is a copy of row `rows[i]`, with more slots."""
        new = object.__new__(StaticCache)
        pad = slots - self.slots
        new.k, new.v = (torch.nn.functional.pad(t[:, rows], (0, 0, 0, pad)) for t in (self.k, self.v))
        new.rows_B1 = torch.arange(len(rows), device=rows.device)[:, None]
        new.slots_S = torch.arange(slots, device=rows.device)
        return new


class Placed(NamedTuple):
    """A cache as blocks know it: new keys and values go to these positions, or to `start`, start + 1, … in all rows."""

    cache: StaticCache
    positions_BT: Tensor
    start: int | None

    @property
    def length(self) -> int:
        return self.start or 0

    def update(self, layer: int, k_BGTC: Tensor, v_BGTC: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values to their slots; return those that the new positions may see."""
        cache, stop = self.cache, None if self.start is None else self.start + k_BGTC.shape[2]
        for held, new in ((cache.k[layer], k_BGTC), (cache.v[layer], v_BGTC)):
            if stop is None:
                held[cache.rows_B1, :, self.positions_BT] = new.transpose(1, 2)
            else:
                held[:, :, self.start : stop] = new
        return cache.k[layer, :, :, :stop], cache.v[layer, :, :, :stop]
