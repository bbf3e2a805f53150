"""How a model is trained: every key of a recipe, its default and its meaning. Part of config.py's `Config`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from tokenformer.strict import Section, key, need

DEGREES = ("pipeline", "replicate", "shard", "token")  # from the outermost to the innermost


@dataclass(frozen=True)
class OptimizerConfig(Section, section="optimizer"):
    """The update rule."""

    familiar: ClassVar[dict[str, str]] = dict.fromkeys(("lr", "learning_rate", "max_lr"), "rate")

    kind: Literal["muon", "adamw"] = key(
        "muon: Muon on parameter tokens and the other matrices of the blocks, AdamW on embeddings, head and norms; "
        "adamw: AdamW on everything (the official recipe)",
        "muon",
    )
    rate: float = key("peak learning rate, for AdamW and for Muon (matched in RMS)", 2e-3, above=0, below=1)
    betas: list[float] = key("AdamW's two decay rates", make=lambda: [0.9, 0.95], least=0, below=1)
    eps: float = key("AdamW's epsilon", 1e-8, least=0, below=1)
    weight_decay: float = key("decoupled; not on norms, biases, learned positions and single numbers", 0.1, least=0)
    momentum: float = key("Muon's momentum (Nesterov)", 0.95, least=0, below=1)
    orthogonal_steps: int = key("Muon's Newton–Schulz steps", 5, above=0, below=100)
    layer_decay: float = key(
        "for fine-tuning: the rate of each block as a share of the next one's; head and final norm have the whole rate",
        1.0,
        quiet=True,
        above=0,
        most=1,
    )
    orthogonal_dtype: Literal["auto", "bf16", "fp32"] = key(
        "type of Muon's Newton–Schulz products; auto: bf16 on a GPU, that of the parameters elsewhere", "auto"
    )
    segments: Literal["apart", "joint"] = key(
        "Muon orthogonalises each segment's matrix by itself, or those of a projection's segments as one", "apart"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        need(len(self.betas) == 2, f"optimizer.betas is {self.betas}: give two numbers")


@dataclass(frozen=True)
class ScheduleConfig(Section, section="schedule"):
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
    warmup: float = key("steps of linear warm-up from 0, or a share of all steps (compute) when below 1", 0.01, least=0)
    decay: float = key("wsd: steps of the final decay, or a share of all steps (compute) when below 1", 0.3, least=0)
    floor: float = key("the last rate as a share of the peak", 0.1, least=0, most=1)
    steps: int | None = key("length of the schedule; absent = that of the run", None, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warmup", "decay", "steps") if self.count == "compute" else ():
            need(
                (getattr(self, name) or 0) < 1,
                f"schedule.{name} is {getattr(self, name)}, but schedule.count is compute: "
                + ("leave it out" if name == "steps" else "give a share below 1"),
            )


@dataclass(frozen=True)
class TrainConfig(Section, section="train"):
    """How a step is computed."""

    device: Literal["auto", "cpu", "cuda"] = key("auto: a GPU if there is one", "auto")
    precision: Literal["bf16", "fp16", "fp32", "fp8"] = key(
        "compute type; parameters and optimizer state are fp32 always; fp16 scales the loss; fp8: bf16, with products "
        "of blocks in fp8 but for weight gradients (GPUs from compute capability 8.9; emulated on a CPU, for checks)",
        "bf16",
    )
    fp8: Literal["auto", "all"] | list[str] = key(
        "with precision fp8, which products: auto = of shapes that get faster, measured when the run begins (on a CPU "
        "all); all; or of these shapes, which a run writes to its config.yml so that it resumes with them",
        "auto",
        quiet=True,
    )
    clip: float = key("largest norm of the gradient; 0 = no clipping", 1.0, least=0)
    activation_checkpointing: Literal["none", "full", "selective"] = key(
        "what backward recomputes: nothing, whole blocks, or all but matrix products and attention", "none"
    )
    compile: Literal["auto", "none", "inductor", "aot_eager"] | bool = key(
        "torch.compile of each block: auto = inductor on a GPU and none elsewhere, true = inductor, false = none; "
        "aot_eager traces without generating code",
        "none",
    )
    ema: float = key(
        "decay of the running average of the weights, which verbs read and validation measures; 0 = none; early steps "
        "count more",
        0.0,
        quiet=True,
        least=0,
        below=1,
    )
    freeze: Literal["none", "language"] = key(
        "language: of the language model only what counts with a switch learns, segments and added ids, so that texts "
        "without images stay what they were",
        "none",
        quiet=True,
    )
    drop_path: float = key(
        "task classify: probability that the last block's branches are left out for an image, less for earlier blocks",
        0.0,
        quiet=True,
        least=0,
        below=1,
    )
    skip_limit: int = key("stop after this many steps in a row with a non-finite loss or gradient", 30, above=0)
    spike: float = key("log a loss this many deviations above its running mean", 6.0, above=0)
    loss_scale: float = key("fp16: first scale of the loss", 4096.0, above=0)
    loss_scale_window: int = key("fp16: double the scale after this many good steps", 1000, above=0)
    loss_scale_hysteresis: int = key("fp16: overflows before the scale is halved", 2, above=0)
    loss_scale_min: float = key("fp16: smallest scale", 1.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        scale, least = self.loss_scale, self.loss_scale_min
        need(scale >= least, f"train.loss_scale is {scale}: give a number that is not below loss_scale_min ({least})")
        need(
            self.fp8 == "auto" or self.precision == "fp8",
            f"train.fp8 says what is computed in fp8, but train.precision is {self.precision}: leave one of them out",
        )


@dataclass(frozen=True)
class AdapterConfig(Section, section="adapter"):
    """New parameter tokens that learn while the weights that a run starts with stay as they are."""

    qkv_tokens: int | None = key("new parameter tokens of each of q, k, v; absent = none", None, above=0, most=1 << 30)
    proj_tokens: int | None = key("of the projection after attention", None, above=0, most=1 << 30)
    ffn_tokens: int | None = key("of the feed-forward Pattention", None, above=0, most=1 << 30)
    layers: list[int] = key("layer numbers that get them; absent = all", make=list, least=0)
    also: list[str] = key("parameters of the base that learn too, such as [norm, embedding]; absent = none", make=list)
    name: str = key("the switch of its segments in the run", "adapter")
    hold: Literal["fp32", "bf16"] = key("the type in which the frozen parameters are held", "fp32")
    base: str | None = key("digest of the weights in `start`; the run writes it, and resume demands it", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        some = self.qkv_tokens or self.proj_tokens or self.ffn_tokens or self.also
        need(bool(some), "adapter has nothing that learns: give qkv_tokens, proj_tokens or ffn_tokens")
        need(self.name != "", "adapter.name is empty: give a word, or leave it out")


@dataclass(frozen=True)
class CheckpointConfig(Section, section="checkpoint"):
    """What a run keeps to resume."""

    every: int = key("steps between checkpoints; 0 = only at the end and when interrupted", 500, least=0)
    also: list[int] = key("further steps to save at", make=list)
    keep: int = key("how many of the newest are kept; 0 = all", 3, least=0)
    keep_every: int = key("those at multiples of this many steps are kept for good; 0 = none", 0, least=0)
    background: Literal["auto"] | bool = key(
        "write in a thread while training continues; auto: on GPUs, where the hosts' memory has room for a copy", "auto"
    )
    verify: Literal["full", "sizes"] = key(
        "before resuming: read every byte of the checkpoint, each rank a share, or compare the files' sizes alone",
        "full",
        quiet=True,
    )
    on_failure: Literal["stop", "continue"] = key("when one cannot be written (disk full)", "stop")


@dataclass(frozen=True)
class ValidationConfig(Section, section="validation"):
    """What is measured on held-out data during the run."""

    every: int = key("steps between validations; 0 = only at the end; needs validation data", 500, least=0)
    samples: int = key("sequences of held-out text, the same ones each time", 128, above=0, most=10**9)
    batches: int | None = key("instead of samples, as official files have it: that many batches", None, most=10**7)
    generate: int = key("tokens of a sample of text each time; 0 = none", 64, least=0, most=10**6)
    prompt: str = key("what the sample continues", "The ")
    temperature: float = key("of the sample; 0 = always the likeliest token", 0.8, least=0)


@dataclass(frozen=True)
class LogConfig(Section, section="log"):
    """What is written while training; metrics.jsonl always."""

    every: int = key("steps between two log lines; the device is read only then", 10, above=0)
    tensorboard: bool = key("also write TensorBoard's files into the run's folder (extra `log`)", False)
    wandb: Literal["none", "online", "offline"] = key("also log to Weights & Biases (extra `log`)", "none")
    wandb_project: str = key("the project there", "tokenformer")
    profile: list[int] = key("[first step, steps]: a trace of these steps for chrome://tracing", make=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        need(
            not self.profile or (len(self.profile) == 2 and self.profile[0] >= 0 and self.profile[1] > 0),
            f"log.profile is {self.profile}: give [first step, number of steps]",
        )


@dataclass(frozen=True)
class ParallelConfig(Section, section="parallel"):
    """How a model is laid over several processes: the product of the four degrees is their number, one may be -1."""

    replicate: int | None = key("copies of the model; absent = as many as the other degrees leave", None)
    shard: int = key("ranks over which parameters, gradients and optimizer state are split, gathered for use", 1)
    token: int = key("ranks over which parameter tokens, heads and vocabulary are split and computed with", 1)
    pipeline: int = key("ranks that hold some of the blocks each", 1)
    reshard_after_forward: bool = key("with shard: free parameters after forward, gather them again in backward", True)
    accumulate: Literal["auto", "whole", "sharded"] = key(
        "gradients of micro-batches: whole = kept whole on every rank, reduced once per step; sharded = each reduced "
        "inside its shard group, over replicas once per step; auto: whole where a rank holds whole parameters anyway "
        "(shard 1, or without reshard_after_forward)",
        "auto",
        quiet=True,
    )
    offload: bool = key("with shard: parameters and optimizer state live in the host's memory", False)
    segments: Literal["split", "per-rank"] = key(
        "with token: every segment is split, or a rank holds whole ones (no all-reduce for their norms)", "split"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved"] = key("with pipeline: the order of the micro-batches", "1f1b")
    timeout: float = key("seconds that a rank waits for the others before it gives up", 600.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in DEGREES:
            degree = getattr(self, name)
            need(
                degree is None or degree == -1 or degree > 0,
                f"parallel.{name} is {degree}: give a number above 0, or -1 for as many as are left",
            )
        free = [name for name in DEGREES if getattr(self, name) == -1]
        need(len(free) < 2, f"parallel.{' and parallel.'.join(free)} are -1, but only one of them can be what is left")
