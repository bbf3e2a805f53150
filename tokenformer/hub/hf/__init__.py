"""transformers' classes for our models; importing this makes its Auto classes know them.

The only place that imports transformers; folders are read and written without it (`hub/hf_folder.py`).
"""

from tokenformer.hub.hf.image import TokenFormerForImageClassification, TokenFormerImageConfig
from tokenformer.hub.hf.language import TokenFormerConfig, TokenFormerForCausalLM
from tokenformer.hub.hf.pair import TokenFormerPairConfig, TokenFormerPairModel

__all__ = [
    "TokenFormerConfig",
    "TokenFormerForCausalLM",
    "TokenFormerForImageClassification",
    "TokenFormerImageConfig",
    "TokenFormerPairConfig",
    "TokenFormerPairModel",
]
