"""Models of four kinds, native and as a class of transformers, for several test files."""

import copy

import pytest
import tokenizers
import torch

import tokenformer
from tokenformer.config import LayerOverride, ModelConfig
from tokenformer.models import LanguageModel

pytest.importorskip("transformers", minversion="5.17")

from transformers import AutoModelForCausalLM, AutoTokenizer

from tokenformer.hub.hf import TokenFormerForCausalLM

SHAPE = {"layers": 3, "dim": 64, "heads": 4, "vocab": 256, "context": 32}
CONFIGS = {
    "one": ModelConfig(**SHAPE, qkv_tokens=40, proj_tokens=24, ffn_tokens=72),
    "segmented": ModelConfig(
        **SHAPE,
        qkv_tokens=[16, 24],
        proj_tokens=24,
        ffn_tokens=[24, 48],
        tau={"ffn": [4.0, 9.5]},
        layer_overrides={1: LayerOverride(ffn_tokens=[8, 8, 8])},
    ),
    "transformer": ModelConfig(**SHAPE, kind="transformer"),
    "llama": ModelConfig(**SHAPE, kind="llama", kv_heads=2, tied=False, rotary_fraction=1.0),
}
IDS = torch.randint(256, (3, 10), generator=torch.Generator().manual_seed(0))
LABELS = IDS.clone().masked_fill(IDS < 60, -100)
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def lively(config: ModelConfig) -> LanguageModel:
    """A model whose greedy text is not one token again and again."""
    model = LanguageModel(config, seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return model


def pair(kind: str) -> tuple[LanguageModel, TokenFormerForCausalLM]:
    """The same model, native and in transformers."""
    model = lively(CONFIGS[kind])
    return model, TokenFormerForCausalLM.from_native(copy.deepcopy(model))


def padded(model, folder):
    """An export with 201 tokens in a vocabulary of 256, and its tokenizer."""
    words = {f"w{i}": i for i in range(200)} | {"<|endoftext|>": 200}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenformer.save(model, folder, format="hf", tokenizer_json=tokenizer.to_str())
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
