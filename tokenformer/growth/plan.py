"""The plan of a growth: from a config, parameter names and a `Growth` to the new config and a recipe per parameter.

Unusual: a plan needs no torch, no memory and no time; make.py follows it one tensor at a time.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from tokenformer.config import ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.growth.net2net import stack, widen
from tokenformer.growth.recipes import Plan
from tokenformer.growth.shape import trunk_of
from tokenformer.growth.tokens import by_tokens
from tokenformer.models.names import Role, parse
from tokenformer.strict import need


def plan(
    config: ModelConfig,
    names: Iterable[str],
    growth: Growth,
    *,
    ends: Mapping[str, Role] | None = None,
    seed: int = 0,
    number: int = 0,
) -> Plan:
    """How a model with these parameters becomes the one that a `Growth` asks for.

    `ends` are what the model declares outside its blocks; without names there are no recipes, but the config and all
    refusals. New values belong to `seed`, to `number` (how many growths came before) and to the parameter's name.

    >>> tiny = ModelConfig(layers=1, dim=32, heads=2, qkv_tokens=9, proj_tokens=4, ffn_tokens=4)
    >>> plan(tiny, [], Growth(ffn_tokens=20)).config.ffn_tokens
    [4, 16]
    """
    config, on = config.resolved(), growth.on
    trunk = trunk_of(config, on)
    parsed = [parse(name, ends or {}) for name in names]
    wide = growth.dim is not None or growth.ffn_dim is not None
    need(wide or growth.widen is None, "widen is about width: give dim or ffn_dim with it")
    need(
        growth.new_layers in (None, "identity", "stack"),
        f"new_layers is '{growth.new_layers}', but must be identity or stack",
    )
    how = widen if wide else stack if growth.new_layers == "stack" else by_tokens
    found = how(trunk, parsed, growth)
    event = {"what": found.event.pop("what"), "number": number, **({"on": on} if on else {}), "seed": seed}
    old_tokens = {n.text for n in parsed if n.token}
    disturbed = {name for name, recipe in found.recipes.items() if growth.noise and recipe.old in old_tokens}
    return dataclasses.replace(
        found,
        config=config.with_trunk(on, found.config),
        event=event | found.event,
        noise=dict.fromkeys(disturbed, growth.noise),
        ends=ends or {},
    )
