"""Small models whose every part matters, of every kind."""

import torch

from tokenformer.config import LayerOverride, ModelConfig
from tokenformer.models import LanguageModel

KINDS = {
    "tokenformer": {"qkv_tokens": [12, 8], "proj_tokens": 10, "ffn_tokens": [16, 4, 4]},
    "gelu_l2_norm": {"qkv_tokens": 12, "proj_tokens": 8, "ffn_tokens": 24, "theta": "gelu_l2_norm"},
    "softmax": {"qkv_tokens": 12, "proj_tokens": [4, 4], "ffn_tokens": 24, "theta": "softmax"},
    "l1_norm_gelu": {"qkv_tokens": 12, "proj_tokens": 8, "ffn_tokens": 24, "theta": "l1_norm_gelu"},
    "overrides": {
        "qkv_tokens": 12,
        "proj_tokens": 8,
        "ffn_tokens": 24,
        "layer_overrides": {1: LayerOverride(qkv_tokens=[6, 5], ffn_tokens=30, tau={"ffn": [2.0]})},
    },
    "transformer": {"kind": "transformer"},
    "llama": {"kind": "llama", "kv_heads": 2, "ffn_dim": 40, "rotary_fraction": 1.0, "tied": False},
}


def make(name: str = "tokenformer", **keys) -> LanguageModel:
    shape = {"layers": 2, "dim": 32, "heads": 4, "vocab": 64, "context": 96}
    model = LanguageModel(ModelConfig(**{**shape, **KINDS[name], **keys}))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.5)
    return model
