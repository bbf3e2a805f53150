"""`train.freeze`: a language model that stays what it is while segments and ids with a switch learn.

Unusual: what is frozen is decided when a model is built, as for adapters, so that it never has optimizer state; it is
in the checkpoints, which are whole models.
"""

from collections.abc import Sequence
from typing import Any

from tokenformer.config import PROJECTION_OF, Config, ModelConfig
from tokenformer.config_growth import GrowthStage
from tokenformer.models.names import parse
from tokenformer.parallel.parallelize import Build
from tokenformer.strict import need


def language_trunk(config: ModelConfig) -> str | None:
    """Return the prefix of the language model in a model; None if it has none."""
    if config.of == "language":
        return ""
    return next((f"{name}." for name, trunk in config.trunks.items() if trunk.of == "language"), None)


def held(config: ModelConfig, model: Any) -> set[str]:
    """Return the parameters of the language model that count without a switch."""
    on = language_trunk(config)
    text, found = config.trunk(on or ""), set()
    for name, _ in model.named_parameters():
        at = parse(name, model.ends)
        if at.segment is not None and at.layer is not None:
            switch = text.switches(PROJECTION_OF[at.projection], at.layer)[at.segment] if at.trunk == on else ""
        else:
            switch = text.added_switch if name.startswith(f"{on}added_") else ""
        if name.startswith(on or "") and not switch:
            found.add(name)
    return found


def builder(build: Build, config: Config) -> Build:
    """Return a function that builds models in which the language model is frozen, if the config says so."""
    if config.train.freeze == "none":
        return build

    def frozen(model_config: ModelConfig) -> Any:
        model = build(model_config)
        model.held = held(model_config.resolved(), model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in model.held)
        return model

    return frozen


def check(config: Config, stages: Sequence[GrowthStage]) -> None:
    """Refuse a frozen language model where there is none, where nothing would learn, and growth that never would."""
    if config.train.freeze == "none":
        return
    on = language_trunk(config.model)
    need(on is not None, f"train.freeze is language, but the model is of {config.model.of}: leave it out")
    need(
        config.adapter is None,
        "train.freeze and adapter are both given, and an adapter freezes its base: leave one out",
    )
    need(
        bool(on) or bool(config.model.switch_names()) or any(stage.switch for stage in stages),
        "train.freeze is language, but the model has no segment with a switch: nothing would learn",
    )
    for stage in stages:
        need(
            stage.on != on or bool(stage.switch),
            "train.freeze is language, so what a growth adds to it would never learn: give the growth a switch",
        )
