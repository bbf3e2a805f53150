"""The health of a run: loss scaling, clipping and the check for non-finite numbers, on the device without waiting.

What they found is read at the log step, where spikes and the limit of skipped steps are judged.
"""

import math

import torch
from torch import Tensor

from tokenformer.config_train import TrainConfig


class Guard:
    """Decides on the device whether a step counts, and what its gradients are divided by."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.config, self.scaled = config, config.precision == "fp16"
        self.scale = torch.tensor(config.loss_scale if self.scaled else 1.0, device=device)
        self.good = torch.tensor(0, device=device)  # steps since the last overflow
        self.patience = torch.tensor(config.loss_scale_hysteresis, device=device)  # overflows before the scale halves
        self.skipped = torch.tensor(0, device=device)
        self.in_a_row = torch.tensor(0, device=device)

    def check(self, norm: Tensor, loss: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (divisor, skip, norm of the mean loss's gradient); `Trainer.train_step` has the formula.

        `norm` is that of the accumulated gradients: scaled, and still to be divided by `normaliser`.
        """
        divisor = self.scale * normaliser
        norm = norm / divisor
        skip = ~(norm.isfinite() & loss.isfinite())
        if self.config.clip:
            divisor = divisor * (norm / self.config.clip).clamp_min(1.0)
        return divisor, skip.float(), norm

    def update(self, skip: Tensor) -> None:
        skipped = skip.bool()
        self.skipped += skipped
        hopeless = skipped & (self.scale <= self.config.loss_scale_min) if self.scaled else skipped
        self.in_a_row = torch.where(hopeless, self.in_a_row + 1, 0)
        if self.scaled:
            c = self.config
            self.good = torch.where(skipped, 0, self.good + 1)
            grow = ~skipped & (self.good % c.loss_scale_window == 0)
            halve = skipped & (self.patience <= 1)
            smaller = (self.scale / 2).clamp_min(c.loss_scale_min)
            self.scale = torch.where(grow, self.scale * 2, torch.where(halve, smaller, self.scale))
            fewer = (self.patience - 1).clamp_min(1)
            self.patience = torch.where(grow, c.loss_scale_hysteresis, torch.where(skipped, fewer, self.patience))

    def state_dict(self) -> dict:
        return {name: getattr(self, name).item() for name in ("scale", "good", "patience", "skipped", "in_a_row")}

    def load_state_dict(self, state: dict) -> None:
        for name, value in state.items():
            getattr(self, name).fill_(value)


class Spikes:
    """Keeps a running mean and deviation of the loss, and tells when a loss is far above them."""

    def __init__(self, deviations: float) -> None:
        self.deviations, self.seen, self.mean, self.variance = deviations, 0, 0.0, 0.0

    def __call__(self, loss: float) -> bool:
        """Add a loss and return whether it is a spike.

        >>> spikes = Spikes(6.0)
        >>> [spikes(loss) for loss in [2.0, 2.1] * 20 + [9.0, 2.0]][-3:]
        [False, True, False]
        """
        if not math.isfinite(loss):
            return False  # a skipped step, counted as such
        limit = self.mean + self.deviations * math.sqrt(self.variance)
        spike = self.seen >= 20 and loss > limit
        self.seen += 1
        weight = max(0.02, 1 / self.seen)
        off = (limit if spike else loss) - self.mean  # a spike moves the mean no further than the limit
        self.mean += weight * off
        self.variance = (1 - weight) * (self.variance + weight * off * off)
        return spike

    def state_dict(self) -> dict:
        return {"seen": self.seen, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict) -> None:
        self.seen, self.mean, self.variance = int(state["seen"]), float(state["mean"]), float(state["variance"])
