"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math

from tokenformer.config_train import ScheduleConfig


def factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Return the factor of the peak rate in step `step` (0 is the first, at rate 0 if there is a warm-up).

    >>> cosine = ScheduleConfig(kind="cosine", warmup=10, floor=0.1)
    >>> [round(factor(cosine, step, 110), 3) for step in (0, 5, 10, 60, 110, 200)]
    [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]
    """
    steps = schedule.steps or steps
    warmup = _steps(schedule.warmup, steps)
    if step < warmup:
        return step / warmup
    if schedule.kind == "constant":
        return 1.0
    start = warmup if schedule.kind != "wsd" else max(warmup, steps - _steps(schedule.decay, steps))
    done = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    shape = (1 + math.cos(math.pi * done)) / 2 if schedule.kind == "cosine" else 1 - done
    return schedule.floor + (1 - schedule.floor) * shape


def _steps(amount: float, steps: int) -> int:
    """Return a number of steps, given as such or, below 1, as a share of all."""
    return round(amount * steps) if amount < 1 else round(amount)
