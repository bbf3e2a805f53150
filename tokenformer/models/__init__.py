"""Plain modules that read like the paper, built from configs. A name, and torch, is imported when it is used."""

import importlib
from typing import TYPE_CHECKING, Any

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.models.cost import Cost as Cost
from tokenformer.models.cost import cost as cost

if TYPE_CHECKING:
    from tokenformer.models.caption import CaptionModel as CaptionModel
    from tokenformer.models.image import ImageModel as ImageModel
    from tokenformer.models.init import init_weights as init_weights
    from tokenformer.models.language import LanguageModel as LanguageModel
    from tokenformer.models.language import Output as Output
    from tokenformer.models.layers import Pattention as Pattention
    from tokenformer.models.pair import PairModel as PairModel
    from tokenformer.models.trunk import Cache as Cache
    from tokenformer.models.trunk import Trunk as Trunk
    from tokenformer.models.trunk import View as View

_HOME = {"ImageModel": "image", "init_weights": "init", "Pattention": "layers", "PairModel": "pair"}
_HOME["CaptionModel"] = "caption"
_HOME |= dict.fromkeys(("LanguageModel", "Output"), "language") | dict.fromkeys(("Cache", "Trunk", "View"), "trunk")


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'tokenformer.models' has no attribute '{name}'")
    return getattr(importlib.import_module(f"tokenformer.models.{_HOME[name]}"), name)


def build(config: ModelConfig, seed: int = 0) -> Any:
    """Build the model that a config describes; `of` is its kind.

    >>> config = ModelConfig(layers=1, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=64, vocab=128)
    >>> type(build(config)).__name__
    'LanguageModel'
    """
    from tokenformer.models.caption import CaptionModel
    from tokenformer.models.image import ImageModel
    from tokenformer.models.language import LanguageModel
    from tokenformer.models.pair import PairModel

    kinds = {"language": LanguageModel, "image": ImageModel, "pair": PairModel, "caption": CaptionModel}
    if config.of not in kinds:
        raise UserError(f"model.of is '{config.of}', but must be {', '.join(kinds)}; or give `Trainer` a `build`")
    return kinds[config.of](config, seed)
