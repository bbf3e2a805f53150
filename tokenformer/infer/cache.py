"""The static key/value cache: one block of memory; position p of a row stands in slot p, so what a query may see is
slots ≤ its position, whatever lies behind (padding of shorter prompts) and whoever is beside it.

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
        """(B, 1, T, S): a query sees the slots up to its own position."""
        return (self.slots_S <= positions_BT[..., None])[:, None]

    def at(self, positions_BT: Tensor, start: int | None = None) -> "Placed":
        """As blocks know a cache: new keys and values go to these positions (`start`: the same for all rows)."""
        return Placed(self, positions_BT, start)

    def put(self, layer: int, k_BGTC: Tensor, v_BGTC: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """All rows write slots start … start + T; returns everything up to there."""
        stop = start + k_BGTC.shape[2]
        for held, new in ((self.k[layer], k_BGTC), (self.v[layer], v_BGTC)):
            held[:, :, start:stop] = new
        return self.k[layer, :, :, :stop], self.v[layer, :, :, :stop]

    def put_at(self, layer: int, k_BGTC: Tensor, v_BGTC: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Each row writes at its own positions; returns all slots."""
        for held, new in ((self.k[layer], k_BGTC), (self.v[layer], v_BGTC)):
            held[self.rows_B1, :, positions_BT] = new.transpose(1, 2)
        return self.k[layer], self.v[layer]

    def spread(self, rows: Tensor, slots: int) -> "StaticCache":
        """A new cache whose row i is a copy of row `rows[i]`, with more slots."""
        new = object.__new__(StaticCache)
        pad = slots - self.slots
        new.k, new.v = (torch.nn.functional.pad(t[:, rows], (0, 0, 0, pad)) for t in (self.k, self.v))
        new.rows_B1 = torch.arange(len(rows), device=rows.device)[:, None]
        new.slots_S = torch.arange(slots, device=rows.device)
        return new


class Placed(NamedTuple):
    """A static cache, and where the positions of one call go."""

    cache: StaticCache
    positions_BT: Tensor
    start: int | None

    @property
    def length(self) -> int:
        return self.start or 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.start is not None:
            return self.cache.put(layer, k, v, self.start)
        return self.cache.put_at(layer, k, v, self.positions_BT)
