"""Growth inside a run: which models the run passes through, whether a growth is due, what the rate is after it.

Pure functions of the config and of `Progress`, which is small and kept in a checkpoint.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenformer.config import ModelConfig
from tokenformer.config_growth import GrowthStage
from tokenformer.config_train import ScheduleConfig
from tokenformer.growth.plan import plan_growth
from tokenformer.strict import need


def chain(model: ModelConfig, stages: Sequence[GrowthStage]) -> list[ModelConfig]:
    """The configs of a run's models: the first, and the one after each growth. Refuses an impossible growth.

    >>> tiny = ModelConfig(layers=1, dim=32, heads=2, qkv_tokens=9, proj_tokens=4, ffn_tokens=4)
    >>> [m.ffn_tokens for m in chain(tiny, [GrowthStage(at={"step": 10}, ffn_tokens=20)])]
    [4, [4, 16]]
    """
    found, last = [model.resolved()], 0.0
    for number, stage in enumerate(stages):
        step = stage.at.get("step", last)
        need(step >= last, f"growth stage {number + 1} is at step {step:g}, before the one in front of it: sort them")
        last = step
        found.append(plan_growth(found[-1], [], stage, number=number).config)
    return found


@dataclass
class Progress:
    """What a run has grown so far: state that a checkpoint keeps."""

    steps: list[int] = field(default_factory=list)  # the step of each growth so far
    losses: list[float] = field(default_factory=list)  # validation losses since the last growth

    def state_dict(self) -> dict:
        return {"steps": list(self.steps), "losses": list(self.losses)}

    def load_state_dict(self, state: dict) -> None:
        self.steps, self.losses = [int(step) for step in state["steps"]], [float(loss) for loss in state["losses"]]

    def grew(self, step: int) -> None:
        self.steps.append(step)
        self.losses.clear()


def due(stages: Sequence[GrowthStage], progress: Progress, step: int, units_per_step: int) -> GrowthStage | None:
    """The next stage, if its growth comes before step `step` (0 is the first).

    >>> stages = [GrowthStage(at={"tokens": 1000}, ffn_tokens=20)]
    >>> [due(stages, Progress(), step, units_per_step=300) is not None for step in (2, 3, 4, 5)]
    [False, False, True, True]
    """
    if len(progress.steps) == len(stages):
        return None
    stage = stages[len(progress.steps)]
    if "plateau" in stage.at:
        return stage if plateau(progress.losses, stage.at["plateau"], int(stage.at.get("patience", 3))) else None
    return stage if step >= step_of(stage, units_per_step) else None


def step_of(stage: GrowthStage, units_per_step: int) -> int:
    """Return the step before which a stage that names a step, or units of its task, grows."""
    ((unit, number),) = stage.at.items()
    return math.ceil(number / (1 if unit == "step" else units_per_step))


def check_units(stages: Sequence[GrowthStage], unit: str) -> None:
    """Refuse a growth that waits for something that the task of the run does not count."""
    for name in {name for stage in stages for name in stage.at} - {"step", "plateau", "patience"}:
        need(name == unit, f"growth.at names {name}, but this task counts {unit}: give these, or a step")


def check_reached(stages: Sequence[GrowthStage], progress: Progress, steps: int, units_per_step: int) -> None:
    """Refuse a growth that comes after the last step of the run. Whether a plateau comes cannot be known before."""
    for number, stage in list(enumerate(stages, 1))[len(progress.steps) :]:
        if "plateau" not in stage.at:
            step = step_of(stage, units_per_step)
            need(
                step < steps,
                f"growth stage {number} comes after step {step}, but the run has {steps} steps, so it would never "
                "happen: give more steps, or leave the stage out",
            )


def check_passed(stages: Sequence[GrowthStage], progress: Progress, run: object) -> None:
    """Refuse a config that puts a growth later than it came: it would not be the config of this run."""
    for number, (stage, at) in enumerate(zip(stages, progress.steps, strict=False), 1):
        step = stage.at.get("step", at)
        need(
            step <= at,
            f"growth {number} of {run} came at step {at}, but this config puts it at step {step:g}: resume with the "
            f"run's own config (tokenformer train {run} --resume), to which settings can be given",
        )


def plateau(losses: Sequence[float], share: float, patience: int) -> bool:
    """Whether the best loss of the last `patience` validations is less than this share below the best one before.

    >>> plateau([4.0, 3.0, 2.9, 2.85], 0.2, 2), plateau([4.0, 3.0, 2.9, 2.85], 0.01, 2)
    (True, False)
    """
    if len(losses) <= patience:
        return False
    return min(losses[-patience:]) > (1 - share) * min(losses[:-patience])


def rate(
    stages: Sequence[GrowthStage],
    progress: Progress,
    step: int,
    steps: int,
    schedule: ScheduleConfig,
    factor: Callable[[ScheduleConfig, int, int], float],
    before: Callable[[int], int] = int,
) -> float:
    """What the peak rate is multiplied by in a step: the schedule's factor, times the stage's `rate` and warm-up.

    `factor(schedule, step, steps)` is that of train/schedule.py. A stage's own schedule counts from the growth.
    `before(step)` is the compute that was spent before a step, for schedules that count compute.

    >>> stages = [GrowthStage(at={"step": 10}, ffn_tokens=20, rate=0.5, warmup=4)]
    >>> constant = lambda schedule, step, steps: 1.0
    >>> [rate(stages, Progress(steps=[10]), step, 99, ScheduleConfig(), constant) for step in (10, 12, 14)]
    [0.0, 0.25, 0.5]
    """
    start, scale = 0, 1.0
    for stage, at in zip(stages, progress.steps, strict=False):
        if stage.schedule is not None:
            schedule, start = stage.schedule, at
        scale = stage.rate * (min(1.0, (step - at) / stage.warmup) if stage.warmup else 1.0)
    if schedule.count == "compute":
        start, step, steps = before(start), before(step), before(steps)
    return scale * factor(schedule, step - start, steps - start)


def spent(costs: Sequence[int], growths: Sequence[int], step: int) -> int:
    """Return the compute before a step: a step of model i costs `costs[i]`, growth i comes before step `growths[i]`.

    >>> [spent([1, 3], [10], step) for step in (5, 10, 12)]
    [5, 10, 16]
    """
    edges = [0, *(min(at, step) for at in growths), step]
    return sum(cost * (end - begin) for cost, (begin, end) in zip(costs, itertools.pairwise(edges), strict=True))
