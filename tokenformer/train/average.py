"""The running average of the weights (EMA), of this rank's part of each parameter."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tokenformer.parallel.layout import Layout


class Average:
    """Begins at the weights. What verbs read of a run, and what is validated."""

    def __init__(self, decay: float, layout: Layout, tensors: dict[str, Tensor] | None = None) -> None:
        """`tensors` are what the average is already; a parameter that is not among them enters it at its value."""
        self.decay, self.layout, given = decay, layout, tensors or {}
        held = {name: p for name, p in layout.named.items() if name not in layout.elsewhere}
        self.tensors = {n: given[n] if n in given else p.detach().clone() for n, p in held.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the weights after step `step` (0 is the first); early ones count more."""
        decay = min(self.decay, (1 + step) / (10 + step))
        parameters: list[Tensor] = [self.layout.named[name] for name in self.tensors]
        torch._foreach_lerp_(list(self.tensors.values()), parameters, 1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the average meanwhile."""
        with torch.no_grad():
            own = {name: self.layout.named[name].detach().clone() for name in self.tensors}
            self._set(self.tensors)
            try:
                yield
            finally:
                self._set(own)

    def _set(self, tensors: dict[str, Tensor]) -> None:
        for module in self.layout.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what was gathered for evaluation would be used on
        for name, tensor in tensors.items():
            self.layout.named[name].copy_(tensor)
