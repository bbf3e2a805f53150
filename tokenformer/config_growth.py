"""A growth, described once: to what size and how (`Growth`, for every caller), and when in a run (`GrowthStage`);
or a run that begins small by itself (`Progressive`).

Every key of a stage, its default and its meaning; part of config.py's `Config`.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

from tokenformer.config_train import ScheduleConfig
from tokenformer.strict import key, need

TOTALS = {  # what a size may be at most: a typing error must not fill the memory
    "qkv_tokens": 1 << 30,
    "proj_tokens": 1 << 30,
    "ffn_tokens": 1 << 30,
    "layers": 10_000,
    "dim": 1 << 20,
    "ffn_dim": 1 << 24,
}


@dataclass(frozen=True, kw_only=True)
class Growth:
    """To what size a model grows, and how. What is absent stays as it is."""

    on: str = key("which trunk of a model of several, such as 'image.'", "", quiet=True)
    qkv_tokens: int | None = key("parameter tokens in total afterwards", None)
    proj_tokens: int | None = key("parameter tokens in total afterwards", None)
    ffn_tokens: int | None = key("parameter tokens in total afterwards", None)
    layers: int | None = key("blocks in total afterwards", None)
    dim: int | None = key("widen by Net2Net to this", None)
    ffn_dim: int | None = key("widen the MLP of a baseline to this", None)
    new_tokens: str | dict[str, str] | None = key(
        "segment (default), zero_key, zero_value or random; or one for each, such as {ffn: segment, qkv: zero_key}",
        None,
    )
    tau: str | dict[str, str] | None = key("hold or sqrt_n, where rows are appended", None)
    positions: str | list[int] | None = key("new blocks: even (default), end, or their layer numbers", None)
    new_layers: Literal["identity", "stack"] | None = key("identity blocks (default), or copies of the blocks", None)
    widen: Literal["net2net", "block"] | None = key("the rule of dim and ffn_dim", None)
    noise: float = key("random numbers added to old parameter tokens, as a share of their RMS", 0.0)
    copy_noise: float = key(
        "with dim and ffn_dim: how much the copies of a unit differ, as a share of the RMS; what reads them sees none "
        "of it",
        0.1,
        quiet=True,
    )

    def __post_init__(self) -> None:
        for name, most in TOTALS.items():
            size = getattr(self, name)
            need(
                size is None or (type(size) is int and 0 < size <= most),
                f"{name} is {size}: give one number, the total afterwards, from 1 to {most:,}",
            )
        for name in ("noise", "copy_noise"):
            need(0 <= getattr(self, name) < 1e6, f"{name} is {getattr(self, name)}: give 0 or more")

    def alone(self, *names: str) -> bool:
        """Whether no size but these is given."""
        return all(getattr(self, name) is None for name in TOTALS if name not in names)


@dataclass(frozen=True, kw_only=True)
class GrowthStage(Growth):
    """One growth of a run: when, to what size, how, and how training goes on."""

    at: dict[str, float] = key(
        "when: {step: 1000}, {tokens: 2e9} (whatever the task counts), {compute: 0.25} (a share of the run's compute), "
        "or {plateau: 0.01, patience: 3}: the validation loss fell by less than this share over that many validations"
    )
    rate: float = key("the learning rate is multiplied by this from here on, until the next stage", 1.0)
    warmup: int = key("steps over which the rate climbs from 0 again", 0)
    schedule: ScheduleConfig | None = key("a schedule that begins here; absent = the one before goes on", None)
    state: Literal["keep", "drop"] = key("the optimizer's state of old parameters (the official code drops it)", "keep")
    old_tokens: float = key(
        "rate of the parameter tokens that were there before, as a share; 0 freezes all that was there, embedding, "
        "norms and head too",
        1.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = len(self.at) == 1 and "patience" not in self.at  # a step, a plateau, or a unit that its task knows
        need(
            (alone or set(self.at) == {"plateau", "patience"}) and all(number > 0 for number in self.at.values()),
            f"growth.at is {self.at}: give {{step: N}}, {{tokens: N}}, {{compute: SHARE}} or {{plateau: SHARE, "
            "patience: N}}, all above 0",
        )
        need(self.at.get("compute", 0) < 1, f"growth.at is {self.at}: it is a share of the run's compute, below 1")
        for name in ("rate", "old_tokens", "warmup"):
            need(getattr(self, name) >= 0, f"growth.{name} is {getattr(self, name)}: give 0 or more")
        need(
            self.old_tokens == 1
            or (self.new_tokens in (None, "segment") and self.dim is None and self.ffn_dim is None),
            "growth.old_tokens trains old and new parameters apart, which are apart only where new_tokens is segment "
            "and nothing is widened: choose that, or leave old_tokens out",
        )


@dataclass(frozen=True, kw_only=True)
class Progressive:
    """A run that begins with a small model. What is absent follows growth/progressive.py's table `RECIPES`."""

    budget: float = key("compute that the run may spend, as a share of that of `steps` steps of `model`", 1.0)
    from_: float | dict[str, float] | None = key(
        "parameter tokens of the first model as a share of the final ones: one number, or such as {qkv: 0.1, ffn: 1}",
        None,
    )
    hops: int | None = key("growths on the way; each multiplies the parameter tokens by the same factor", None, most=99)
    at: list[float] = key("the share of the compute that lies before each growth, such as [0.03, 0.12]", make=list)

    def __post_init__(self) -> None:
        need(0 < self.budget <= 1000, f"growth.progressive.budget is {self.budget}: give a share above 0, such as 1.0")
        shares = self.from_ if isinstance(self.from_, dict) else {} if self.from_ is None else {"qkv": self.from_}
        need(
            all(name in ("qkv", "proj", "ffn") and 0 < share <= 1 for name, share in shares.items()),
            f"growth.progressive.from is {self.from_}: give a share up to 1, or one for each of qkv, proj, ffn",
        )
        need(self.hops is None or self.hops > 0, f"growth.progressive.hops is {self.hops}: give a number above 0")
        need(
            all(a < b for a, b in itertools.pairwise([0, *self.at, 1])),
            f"growth.progressive.at is {self.at}: give shares between 0 and 1, each above the one before",
        )
        need(
            not self.at or self.hops in (None, len(self.at)),
            f"growth.progressive.at names {len(self.at)} growths, but hops is {self.hops}: leave hops out",
        )


@dataclass(frozen=True)
class ProgressiveGrowth:
    """`growth: {progressive: {…}}`; `growth: progressive` alone is the same with nothing given."""

    progressive: Progressive = key("how", make=Progressive)
