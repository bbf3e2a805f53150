"""The plan of a growth: from a config, parameter names and a `Growth` to the new config and a recipe per parameter.

Unusual: a plan needs no torch, no memory and no time; make.py then makes one tensor at a time.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from tokenformer.config import ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.growth.recipes import Plan
from tokenformer.growth.shape import trunk_of
from tokenformer.growth.tokens import plan_tokens_and_layers
from tokenformer.models.names import Role, parse


def plan_growth(
    config: ModelConfig,
    names: Iterable[str],
    growth: Growth,
    *,
    ends: Mapping[str, Role] | None = None,
    seed: int = 0,
    number: int = 0,
) -> Plan:
    """Plan how a model with these parameters becomes the one that a `Growth` asks for.

    `ends`: the parameters that the model declares outside its blocks. Without names the plan has no recipes, but a
    config, and it refuses what cannot be. New values depend on `seed`, `number` (of growths before) and the name.

    >>> tiny = ModelConfig(layers=1, dim=32, heads=2, qkv_tokens=9, proj_tokens=4, ffn_tokens=4)
    >>> plan_growth(tiny, [], Growth(ffn_tokens=20)).config.ffn_tokens
    [4, 16]
    """
    config, on = config.resolved(), growth.on
    trunk = trunk_of(config, on)
    parsed = [parse(name, ends or {}) for name in names]
    found = plan_tokens_and_layers(trunk, parsed, growth)
    event = {"what": found.event.pop("what"), "number": number, **({"on": on} if on else {}), "seed": seed}
    old_tokens = {n.text for n in parsed if n.token}
    noisy = {name for name, recipe in found.recipes.items() if growth.noise and recipe.old in old_tokens}
    return dataclasses.replace(
        found,
        config=config.with_trunk(on, found.config),
        event=event | found.event,
        noise=dict.fromkeys(noisy, growth.noise),
        ends=ends or {},
        seed=seed,
        number=number,
    )
