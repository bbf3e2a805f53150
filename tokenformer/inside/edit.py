"""Change single parameter tokens of a model: mute them (zero values), or multiply their values."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from tokenformer.inside.ablation import Token, find
from tokenformer.strict import need


def edit(model: Any, factors: Mapping[Token, float]) -> Any:
    """Return a copy in which the values of these tokens are multiplied; its history says so.

    >>> from tokenformer import ModelConfig, models
    >>> tiny = models.build(ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=9, vocab=64))
    >>> edit(tiny, {Token(0, "ffn", 3): 0.0}).history[-1]["factors"]
    {'0:ffn:3': 0.0}
    """
    need(bool(factors), "nothing to edit: name tokens to mute or to boost")
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for token, factor in factors.items():
            module, segment, row = find(changed, token)
            value = module.segments[segment].value_tokens[row].mul_(factor)
            need(bool(value.isfinite().all()), f"{token} times {factor:g} is no finite number: give another factor")
    said = {str(token): factor for token, factor in factors.items()}
    changed.history = [*model.history, {"what": "edit", "number": len(model.history), "factors": said}]
    return changed
