"""Translates names of tensors, official ↔ ours. Ours have a segment number, official ones a pipeline index."""

import re

from tokenformer.errors import UserError

_TOKENS = re.compile(r"sequential\.(\d+)\.(?:attention\.(query|key|value|proj)|(mlp))\.(key|value)_param_tokens")


def to_ours(name: str, layers: int) -> str:
    """
    >>> to_ours("sequential.2.mlp.key_param_tokens", layers=3)
    'blocks.0.ffn.segments.0.key_tokens'
    """
    if name == "sequential.0.word_embeddings.weight":
        return "embedding.weight"
    if name in (f"sequential.{layers + 3}.norm.weight", f"sequential.{layers + 3}.norm.bias"):
        return name.split(".", 2)[2]
    match = _TOKENS.fullmatch(name)
    if not match or not 0 <= int(match[1]) - 2 < layers:
        raise UserError(f"tensor '{name}' is not one of an official TokenFormer of {layers} layers: check the config")
    projection = "ffn" if match[3] else f"attention.{match[2]}"
    return f"blocks.{int(match[1]) - 2}.{projection}.segments.0.{match[4]}_tokens"


def to_official(name: str, layers: int) -> str:
    """
    >>> to_official("blocks.0.attention.proj.segments.0.value_tokens", layers=3)
    'sequential.2.attention.proj.value_param_tokens'
    """
    if name == "embedding.weight":
        return "sequential.0.word_embeddings.weight"
    if name.startswith("norm."):
        return f"sequential.{layers + 3}.{name}"
    _, layer, *projection, _, _, tokens = name.split(".")
    where = "mlp" if projection == ["ffn"] else ".".join(projection)
    return f"sequential.{int(layer) + 2}.{where}.{tokens.removesuffix('_tokens')}_param_tokens"
