"""Models whose every nonlinearity matters, ids, and logits: what the tests of growth share."""

import math

import torch

from tokenformer import LanguageModel, ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.growth.model import plan_for
from tokenformer.growth.plan import Plan
from tokenformer.models import build

THETAS = ("l2_norm_gelu", "gelu_l2_norm", "softmax", "l1_norm_gelu")


def config(layers=3, theta="l2_norm_gelu", **changes) -> ModelConfig:
    tokens = {"qkv_tokens": 24, "proj_tokens": 20, "ffn_tokens": 48}
    return ModelConfig(**{"layers": layers, "dim": 32, "heads": 4, "vocab": 128, "theta": theta, **tokens, **changes})


def baseline(kind="transformer", layers=3, **changes) -> ModelConfig:
    extra = {"kv_heads": 2, "ffn_dim": 72, "tied": False} if kind == "llama" else {"ffn_dim": 128}
    return ModelConfig(**{"kind": kind, "layers": layers, "dim": 32, "heads": 4, "vocab": 128, **extra, **changes})


def lively(shape: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """As if trained: no output is near zero, no norm is 1, softmax scores spread."""
    model = build(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.2 * noise)
            elif name.endswith("value_tokens"):
                p.copy_(noise / math.sqrt(len(p)))
            elif p.ndim == 2 and "embedding" not in name:
                p.copy_(noise / math.sqrt(p.shape[-1]))
            else:
                p.copy_(0.5 * noise)
    return model.to(dtype)


def planned(model: LanguageModel, **how) -> Plan:
    return plan_for(model, Growth(**how))


def random_ids(rows=3, length=24, vocab=128, seed=0) -> torch.Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def moved(old: LanguageModel, new: LanguageModel, ids=None) -> float:
    """Largest change of a logit over the largest logit."""
    ids = random_ids(vocab=old.config.vocab) if ids is None else ids
    before, after = old(ids).logits, new(ids).logits
    return ((after - before).abs().max() / before.abs().max()).item()
