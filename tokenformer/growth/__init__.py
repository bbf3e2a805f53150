"""Bigger and smaller without starting again: arithmetic on (config, tensors, optimizer state).

Plans need no torch; what makes tensors of them is imported when it is used.
"""

import importlib
from typing import TYPE_CHECKING

from tokenformer.config_growth import Growth as Growth
from tokenformer.growth.plan import plan as plan
from tokenformer.growth.recipes import Plan as Plan

if TYPE_CHECKING:
    from tokenformer.growth.make import apply as apply
    from tokenformer.growth.merge import merge_segments as merge_segments
    from tokenformer.growth.model import follow as follow
    from tokenformer.growth.model import grow as grow
    from tokenformer.growth.model import plan_for as plan_for
    from tokenformer.growth.model import slice as slice

_HOME = dict.fromkeys(("follow", "grow", "plan_for", "slice"), "model") | {"apply": "make", "merge_segments": "merge"}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'tokenformer.growth' has no attribute '{name}'")
    return getattr(importlib.import_module(f"tokenformer.growth.{_HOME[name]}"), name)
