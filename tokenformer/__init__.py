"""TokenFormer: parameters are tokens. The public names; each is imported when it is first used."""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tokenformer.adapters import active as active
    from tokenformer.adapters import attach as attach
    from tokenformer.adapters import detached as detached
    from tokenformer.config import Config as Config
    from tokenformer.config import ModelConfig as ModelConfig
    from tokenformer.errors import UserError as UserError
    from tokenformer.growth.model import grow as grow
    from tokenformer.growth.model import slice as slice
    from tokenformer.growth.shrink import shrink as shrink
    from tokenformer.hub import load as load
    from tokenformer.hub import save as save
    from tokenformer.inside import ablate as ablate
    from tokenformer.inside import explore as explore
    from tokenformer.models import ImageModel as ImageModel
    from tokenformer.models import LanguageModel as LanguageModel
    from tokenformer.models import Pattention as Pattention

_MODULES = {"UserError": "errors", "grow": "growth.model", "slice": "growth.model", "shrink": "growth.shrink"}
_MODULES |= {"Config": "config", "ModelConfig": "config", "LanguageModel": "models", "Pattention": "models"}
_MODULES["ImageModel"] = "models"
_MODULES |= {
    "explore": "inside",
    "ablate": "inside",
    "load": "hub",
    "save": "hub",
    "attach": "adapters",
    "detached": "adapters",
    "active": "adapters",
}
__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'tokenformer' has no attribute '{name}'")
    return getattr(importlib.import_module(f"tokenformer.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
