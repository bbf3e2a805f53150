"""A growth, described once: to what size and how (`Growth`, for every caller), and when in a run (`GrowthStage`);
or a run that begins small by itself (`Progressive`).

Every key of a stage, its default and its meaning; part of config.py's `Config`.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

from tokenformer.config_train import ScheduleConfig
from tokenformer.strict import Section, key, need

TOTALS = ("qkv_tokens", "proj_tokens", "ffn_tokens", "layers", "vocab")


@dataclass(frozen=True, kw_only=True)
class Growth(Section):
    """To what size a model grows, and by which rules. What is absent stays as it is."""

    retired = ("dim", "ffn_dim", "new_layers", "widen")
    on: str = key("which trunk of a model of several, such as 'image.'", "", quiet=True)
    # bounded, since a typing error must not fill the memory
    qkv_tokens: int | None = key("parameter tokens in total afterwards", None, above=0, most=1 << 30)
    proj_tokens: int | None = key("parameter tokens in total afterwards", None, above=0, most=1 << 30)
    ffn_tokens: int | None = key("parameter tokens in total afterwards", None, above=0, most=1 << 30)
    layers: int | None = key("blocks in total afterwards", None, above=0, most=10_000)
    vocab: int | None = key(
        "ids in total afterwards, padding included: new ones, such as codes of images, follow the old",
        None,
        above=0,
        most=1 << 30,
    )
    switch: str = key("new segments and ids count only in calls that give this switch", "", quiet=True)
    new_tokens: str | dict[str, str] | None = key(
        "segment (default), zero_key, zero_value or random; or one for each, such as {ffn: segment, qkv: zero_key}",
        None,
    )
    tau: str | dict[str, str] | None = key("hold or sqrt_n, where rows are appended", None)
    positions: str | list[int] | None = key("new blocks: even (default), end, or their layer numbers", None)
    noise: float = key("random numbers added to old parameter tokens, as a share of their RMS", 0.0, least=0, most=1e6)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in TOTALS:
            size = getattr(self, name)
            need(size is None or type(size) is int, f"{name} is {size}: give one whole number, the total afterwards")


@dataclass(frozen=True, kw_only=True)
class GrowthStage(Growth, section="growth"):
    """One growth of a run: when, to what size, by which rules, and how training continues."""

    at: dict[str, float] = key(
        "when: {step: 1000} ({step: 0}: before the first one), {tokens: 2e9} (whatever the task counts), "
        "{compute: 0.25} (a share of the run's compute), or {plateau: 0.01, patience: 3}: the validation loss fell "
        "by less than this share over that many validations",
        least=0,
    )
    rate: float = key("the learning rate is multiplied by this from here on, until the next stage", 1.0, least=0)
    warmup: int = key("steps of linear warm-up from 0 after the growth", 0, least=0)
    schedule: ScheduleConfig | None = key("a schedule that begins here; absent = the current one continues", None)
    state: Literal["keep", "drop"] = key("the optimizer's state of old parameters (the official code drops it)", "keep")
    old_tokens: float = key(
        "rate of the parameter tokens that were there before, as a share; 0 freezes all that was there, embedding, "
        "norms and head too",
        1.0,
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = len(self.at) == 1 and "patience" not in self.at  # a step, a plateau, or a unit that its task knows
        need(
            alone or set(self.at) == {"plateau", "patience"},
            f"growth.at is {self.at}: give {{step: N}}, {{tokens: N}}, {{compute: SHARE}}, or {{plateau: SHARE, "
            "patience: N}",
        )
        need(
            self.at.keys() <= {"step"} or min(self.at.values()) > 0,
            f"growth.at is {self.at}: give a number above 0, or {{step: 0}} to grow before the first step",
        )
        need(self.at.get("compute", 0) < 1, f"growth.at is {self.at}: it is a share of the run's compute, below 1")
        need(
            self.old_tokens == 1 or self.new_tokens in (None, "segment"),
            "growth.old_tokens trains old and new parameters apart, which are apart only where new_tokens is segment: "
            "choose that, or leave old_tokens out",
        )


@dataclass(frozen=True, kw_only=True)
class Progressive(Section, section="growth.progressive"):
    """A run that begins with a small model. What is absent follows growth/progressive.py's table `RECIPES`."""

    budget: float = key(
        "compute that the run may spend, as a share of that of `steps` steps of `model`", 1.0, above=0, most=1000
    )
    from_: float | dict[str, float] | None = key(
        "parameter tokens of the first model as a share of the final ones: one number, or such as {qkv: 0.1, ffn: 1}",
        None,
        above=0,
        most=1,
    )
    hops: int | None = key(
        "growths on the way; each multiplies the parameter tokens by the same factor", None, above=0, most=99
    )
    at: list[float] = key(
        "the share of the compute that lies before each growth, such as [0.03, 0.12]", make=list, above=0, below=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        need(
            not isinstance(self.from_, dict) or self.from_.keys() <= {"qkv", "proj", "ffn"},
            f"growth.progressive.from is {self.from_}: give one share, or one for each of qkv, proj and ffn",
        )
        need(
            all(a < b for a, b in itertools.pairwise(self.at)),
            f"growth.progressive.at is {self.at}: give each growth a larger share than the one before",
        )
        need(
            not self.at or self.hops in (None, len(self.at)),
            f"growth.progressive.at names {len(self.at)} growths, but hops is {self.hops}: leave hops out",
        )


@dataclass(frozen=True)
class ProgressiveGrowth:
    """`growth: {progressive: {…}}`; `growth: progressive` alone is the same with nothing given."""

    progressive: Progressive = key("a run that begins with a small model and grows on the way", make=Progressive)
