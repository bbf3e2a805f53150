"""`train.freeze`: a language model that stays what it is while segments and ids with the switch of a task learn.

Unusual: what is frozen is decided when a model is built, as for adapters, so that it never has optimizer state; it is
in the checkpoints, which are whole models.
"""

from collections.abc import Sequence
from typing import Any

from tokenformer.config import PROJECTION_OF, Config, ModelConfig
from tokenformer.config_growth import GrowthStage
from tokenformer.models.caption import SWITCH as IMAGE
from tokenformer.models.draw import SWITCH as DRAW
from tokenformer.models.names import parse
from tokenformer.parallel.parallelize import Build
from tokenformer.strict import need


def held(config: ModelConfig, model: Any, given: str) -> set[str]:
    """Return the parameters that stay what they are where a task gives the switch `given`: of the language model all
    without this switch, and of a model that learns to draw the image trunk, too.
    """
    on = config.language_prefix
    assert on is not None
    text, found = config.trunk(on), set()
    for name, _ in model.named_parameters():
        at = parse(name, model.ends)
        if not name.startswith(on):
            learns = given != DRAW
        elif at.segment is not None and at.layer is not None:
            learns = text.switches(PROJECTION_OF[at.projection], at.layer)[at.segment] == given
        else:
            learns = name.startswith(f"{on}added_") and text.added_switch == given
        if not learns:
            found.add(name)
    return found


def _given(config: Config) -> str:
    """Return the switch that the task gives."""
    return DRAW if config.task == "draw" else IMAGE


def builder(build: Build, config: Config) -> Build:
    """Return a function that builds models in which the language model is frozen, if the config says so."""
    if config.train.freeze == "none":
        return build
    given = _given(config)

    def frozen(model_config: ModelConfig) -> Any:
        model = build(model_config)
        model.held = held(model_config.resolved(), model, given)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in model.held)
        return model

    return frozen


def check(config: Config, stages: Sequence[GrowthStage]) -> None:
    """Refuse a frozen language model where there is none, where nothing would learn, and growth that never would."""
    if config.train.freeze == "none":
        return
    on = config.model.language_prefix
    need(on is not None, f"train.freeze is language, but the model is of {config.model.of}: set train.freeze=none")
    need(
        config.adapter is None,
        "train.freeze is language, but an adapter freezes its base itself: set train.freeze=none",
    )
    given, names = _given(config), config.model.trunk(on or "").switch_names()
    need(
        given == IMAGE or given in names or any(stage.switch for stage in stages),
        f"train.freeze is language, but the model has no segment with the switch {given}: nothing would learn",
    )
    for stage in stages:
        need(
            stage.on != on or bool(stage.switch),
            "train.freeze is language, so what a growth adds to it would never learn: give the growth a switch",
        )
    need(
        config.start is not None or (given == IMAGE and not on),  # text alone: its task refuses to freeze
        "train.freeze is language, but no weights are named, so random values would be frozen: give start, the "
        "language model that stays what it is",
    )
