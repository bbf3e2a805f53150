"""Growth inside a run: every key of a stage, its default and its meaning. Part of config.py's `Config`."""

from dataclasses import dataclass
from typing import Literal

from tokenformer.config_train import ScheduleConfig
from tokenformer.strict import key, need


@dataclass(frozen=True)
class GrowthStage:
    """One growth of a run: when, to what size, how, and how training goes on."""

    at: dict[str, float] = key(
        "when: {step: 1000}, {tokens: 2e9}, or {plateau: 0.01, patience: 3}: the validation loss fell by less than "
        "this share over that many validations"
    )
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
    rate: float = key("the learning rate is multiplied by this from here on, until the next stage", 1.0)
    warmup: int = key("steps over which the rate climbs from 0 again", 0)
    schedule: ScheduleConfig | None = key("a schedule that begins here; absent = the one before goes on", None)
    state: Literal["keep", "drop"] = key("the optimizer's state of old parameters (the official code drops it)", "keep")
    old_tokens: float = key("rate of the parameter tokens that were there before, as a share: 0 = frozen", 1.0)
    noise: float = key("random numbers added to old parameter tokens, as a share of their RMS", 0.0)

    def __post_init__(self) -> None:
        kinds = ({"step"}, {"tokens"}, {"plateau"}, {"plateau", "patience"})
        need(
            set(self.at) in kinds and all(number > 0 for number in self.at.values()),
            f"growth.at is {self.at}: give {{step: N}}, {{tokens: N}} or {{plateau: SHARE, patience: N}}, all above 0",
        )
        for name in ("rate", "old_tokens", "noise", "warmup"):
            need(getattr(self, name) >= 0, f"growth.{name} is {getattr(self, name)}: give 0 or more")
        need(
            self.old_tokens == 1 or self.new_tokens in (None, "segment"),
            "growth.old_tokens trains old and new tokens apart, which are parameters of their own only "
            "where new_tokens is segment: choose that, or leave old_tokens out",
        )

    def how(self) -> dict:
        """The arguments of a growth's plan."""
        names = (
            "qkv_tokens",
            "proj_tokens",
            "ffn_tokens",
            "layers",
            "dim",
            "ffn_dim",
            "new_tokens",
            "tau",
            "positions",
        )
        names += ("new_layers", "widen")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
