"""How a model is trained: every key of a recipe, its default and its meaning. Part of config.py's `Config`."""

import math
from dataclasses import dataclass
from typing import Literal

from tokenformer.strict import key, need

DEGREES = ("pipeline", "replicate", "shard", "token")  # from the outermost to the innermost


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule."""

    kind: Literal["muon", "adamw"] = key(
        "muon: Muon on parameter tokens and the other matrices of the blocks, AdamW on embeddings, head and norms; "
        "adamw: AdamW on everything (the official recipe)",
        "muon",
    )
    rate: float = key("peak learning rate; Muon's steps are matched in RMS to AdamW's, so one rate serves both", 2e-3)
    betas: list[float] = key("AdamW's two decay rates", make=lambda: [0.9, 0.95])
    eps: float = key("AdamW's epsilon", 1e-8)
    weight_decay: float = key("decoupled, on everything but norms", 0.1)
    momentum: float = key("Muon's momentum (Nesterov)", 0.95)
    orthogonal_steps: int = key("Muon's Newton–Schulz steps", 5)
    orthogonal_dtype: Literal["auto", "bf16", "fp32"] = key(
        "type of Muon's Newton–Schulz products; auto: bf16 on a GPU, that of the parameters elsewhere", "auto"
    )
    segments: Literal["apart", "joint"] = key(
        "Muon orthogonalises each segment's matrix by itself, or those of a projection's segments as one", "apart"
    )

    def __post_init__(self) -> None:
        need(0 < self.rate < 1, f"optimizer.rate is {self.rate}: give a number between 0 and 1")
        need(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"optimizer.betas is {self.betas}: give two numbers from 0 to below 1",
        )
        need(0 <= self.momentum < 1, f"optimizer.momentum is {self.momentum}: give 0 to below 1")
        need(0 <= self.weight_decay < math.inf, f"optimizer.weight_decay is {self.weight_decay}: give 0 or more")
        need(0 <= self.eps < 1, f"optimizer.eps is {self.eps}: give a small number, such as 1e-8")
        need(
            0 < self.orthogonal_steps < 100,
            f"optimizer.orthogonal_steps is {self.orthogonal_steps}: give a small number above 0, such as 5",
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = key(
        "after the warm-up: down to the floor by a cosine or a line, constant, or wsd (stable, then down by a line)",
        "cosine",
    )
    count: Literal["steps", "compute"] = key(
        "what the schedule goes by: steps, or the share of the run's compute (FLOPs of the models that it passes "
        "through) that lies before a step",
        "steps",
    )
    warmup: float = key("steps of linear warm-up from 0, or a share of all steps (compute) when below 1", 0.01)
    decay: float = key("wsd: steps of the final decay, or a share of all steps (compute) when below 1", 0.3)
    floor: float = key("the last rate as a share of the peak", 0.1)
    steps: int | None = key("length of the schedule; absent = that of the run", None)

    def __post_init__(self) -> None:
        for name in ("warmup", "decay"):
            need(getattr(self, name) >= 0, f"schedule.{name} is {getattr(self, name)}: give 0 or more")
        need(0 <= self.floor <= 1, f"schedule.floor is {self.floor}: it is a share of the peak rate, from 0 to 1")
        need(self.steps is None or self.steps > 0, f"schedule.steps is {self.steps}: give a number above 0")
        for name in ("warmup", "decay", "steps") if self.count == "compute" else ():
            need(
                (getattr(self, name) or 0) < 1,
                f"schedule.{name} is {getattr(self, name)}, but schedule.count is compute: "
                + ("leave it out" if name == "steps" else "give a share below 1"),
            )


@dataclass(frozen=True)
class TrainConfig:
    """How a step is computed."""

    device: Literal["auto", "cpu", "cuda"] = key("auto: a GPU if there is one", "auto")
    precision: Literal["bf16", "fp16", "fp32"] = key(
        "compute type; parameters and optimizer state are fp32 always; fp16 scales the loss", "bf16"
    )
    clip: float = key("largest norm of the gradient; 0 = no clipping", 1.0)
    activation_checkpointing: Literal["none", "full", "selective"] = key(
        "what backward computes again: nothing, whole blocks, or all but products and attention", "none"
    )
    compile: Literal["auto", "none", "inductor", "aot_eager"] | bool = key(
        "torch.compile of each block: auto = inductor on a GPU and none elsewhere, true = inductor, false = none; "
        "aot_eager traces without generating code",
        "none",
    )
    skip_limit: int = key("stop after this many steps in a row with a non-finite loss or gradient", 30)
    spike: float = key("log a loss this many deviations above its running mean", 6.0)
    loss_scale: float = key("fp16: first scale of the loss", 4096.0)
    loss_scale_window: int = key("fp16: double the scale after this many good steps", 1000)
    loss_scale_hysteresis: int = key("fp16: overflows before the scale is halved", 2)
    loss_scale_min: float = key("fp16: smallest scale", 1.0)

    def __post_init__(self) -> None:
        need(0 <= self.clip < math.inf, f"train.clip is {self.clip}: give 0 (off) or more")
        need(self.skip_limit > 0, f"train.skip_limit is {self.skip_limit}: give a number above 0")
        need(self.spike > 0, f"train.spike is {self.spike}: give a number above 0")
        need(
            0 < self.loss_scale_min <= self.loss_scale < math.inf,
            f"train.loss_scale is {self.loss_scale}: give a number that is not below loss_scale_min "
            f"({self.loss_scale_min}), which is above 0",
        )
        for name in ("loss_scale_window", "loss_scale_hysteresis"):
            need(getattr(self, name) > 0, f"train.{name} is {getattr(self, name)}: give a number above 0")


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run keeps to resume."""

    every: int = key("steps between checkpoints; 0 = only at the end and when interrupted", 500)
    also: list[int] = key("further steps to save at", make=list)
    keep: int = key("how many of the last ones stay; 0 = all", 3)
    keep_every: int = key("those at multiples of this many steps stay for good; 0 = none", 0)
    background: bool = key("write while training goes on", False)
    on_failure: Literal["stop", "continue"] = key("when one cannot be written (disk full)", "stop")

    def __post_init__(self) -> None:
        for name in ("every", "keep", "keep_every"):
            need(getattr(self, name) >= 0, f"checkpoint.{name} is {getattr(self, name)}: give 0 or more")


@dataclass(frozen=True)
class ValidationConfig:
    """Looking at held-out text during the run."""

    every: int = key("steps between validations; 0 = only at the end; needs a validation part in the data", 500)
    samples: int = key("sequences of held-out text, the same each time", 128, most=10**9)
    batches: int | None = key("instead of samples, as official files have it: that many batches", None, most=10**7)
    generate: int = key("tokens of a sample of text each time; 0 = none", 64, most=10**6)
    prompt: str = key("what the sample goes on from", "The ")
    temperature: float = key("of the sample; 0 = always the likeliest token", 0.8)

    def __post_init__(self) -> None:
        for name in ("every", "generate", "temperature"):
            need(getattr(self, name) >= 0, f"validation.{name} is {getattr(self, name)}: give 0 or more")
        need(self.samples > 0, f"validation.samples is {self.samples}: give a number above 0")


@dataclass(frozen=True)
class LogConfig:
    """What is written while training; metrics.jsonl always."""

    every: int = key("steps between two log lines; the device is read only then", 10)
    tensorboard: bool = key("also for TensorBoard, into the run's folder (extra `log`)", False)
    wandb: Literal["none", "online", "offline"] = key("also to Weights & Biases (extra `log`)", "none")
    wandb_project: str = key("the project there", "tokenformer")
    profile: list[int] = key("[first step, steps]: a trace of these steps for chrome://tracing", make=list)

    def __post_init__(self) -> None:
        need(self.every > 0, f"log.every is {self.every}: give a number above 0")
        need(
            not self.profile or (len(self.profile) == 2 and self.profile[0] >= 0 and self.profile[1] > 0),
            f"log.profile is {self.profile}: give [first step, number of steps]",
        )


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is laid over several processes: the product of the four degrees is their number, one may be -1."""

    replicate: int | None = key("copies of the model; absent = as many as the other degrees leave", None)
    shard: int = key("ranks over which parameters, gradients and optimizer state are split, gathered for use", 1)
    token: int = key("ranks that hold a slice of the parameter tokens, heads and vocabulary each, and use it there", 1)
    pipeline: int = key("ranks that hold some of the blocks each", 1)
    reshard_after_forward: bool = key("with shard: gather parameters again for backward (less memory)", True)
    offload: bool = key("with shard: parameters and optimizer state live in the host's memory", False)
    segments: Literal["split", "per-rank"] = key(
        "with token: every segment is split, or a rank holds whole ones (nothing to reduce for their norms)", "split"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved"] = key("with pipeline: in which order micro-batches go", "1f1b")
    timeout: float = key("seconds that a rank waits for the others before it gives up", 600.0)

    def __post_init__(self) -> None:
        for name in DEGREES:
            degree = getattr(self, name)
            need(
                degree is None or degree == -1 or degree > 0,
                f"parallel.{name} is {degree}: give a number above 0, or -1 for as many as are left",
            )
        free = [name for name in DEGREES if getattr(self, name) == -1]
        need(len(free) < 2, f"parallel.{' and parallel.'.join(free)} are -1, but only one of them can be what is left")
        need(self.timeout > 0, f"parallel.timeout is {self.timeout}: give seconds above 0")
