"""What a model costs, from its config alone: parameters, FLOPs (with parameters and with other tokens apart), cache.

Attention is counted causally, once: 2·layers·dim·context forward a token. Many tools count it twice.
"""

import dataclasses
import math

from tokenformer.config import PROJECTIONS, ModelConfig


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts of one model. FLOPs are per data token; training is three times forward."""

    parameters: int
    matmul_parameters: int  # in the blocks; the output head is counted apart
    head_parameters: int  # read by the output head (the embedding's own, if tied)
    projections: dict[str, int]  # matmul parameters of each projection, all layers together
    layers: int
    dim: int
    cache_values: int  # numbers that the key/value cache holds for a token

    @property
    def parameter_flops(self) -> int:
        """Forward, between a token and the parameters; free of the context."""
        return 2 * (self.matmul_parameters + self.head_parameters)

    def token_flops(self, context: int) -> int:
        """Forward, between a token and those before it, in the mean over a causal context."""
        return 2 * self.layers * self.dim * context

    def training_flops(self, context: int) -> int:
        return 3 * (self.parameter_flops + self.token_flops(context))

    def cache_bytes(self, width: int = 2) -> int:
        return width * self.cache_values


def cost(config: ModelConfig) -> Cost:
    """
    >>> from tokenformer.config import load
    >>> cost(load("lm/150m").model).parameters
    151881216
    """
    c, kv = config, (config.kv_heads or config.heads) * config.head_dim
    if c.kind == "tokenformer":
        tokens = {w: sum(n for i in range(c.layers) for n, _ in c.segments(w, i)) for w in PROJECTIONS}
        each = {"query": "qkv", "key": "qkv", "value": "qkv", "proj": "proj", "ffn": "ffn"}
        projections = {name: 2 * c.dim * tokens[which] for name, which in each.items()}
    else:
        ffn = (3 if c.kind == "llama" else 2) * c.dim * c.mlp_dim
        one = {"query": c.dim**2, "key": c.dim * kv, "value": c.dim * kv, "proj": c.dim**2, "ffn": ffn}
        projections = {name: c.layers * n for name, n in one.items()}
    matmul, embedding = sum(projections.values()), c.vocab * c.dim
    norms = (2 * c.layers + 1) * c.dim if c.kind == "llama" else 2 * c.dim
    return Cost(
        parameters=matmul + norms + embedding * (1 if c.tied else 2),
        matmul_parameters=matmul,
        head_parameters=embedding,
        projections=projections,
        layers=c.layers,
        dim=c.dim,
        cache_values=2 * c.layers * kv,
    )


def equal_transformer(config: ModelConfig) -> ModelConfig:
    """A Transformer with as many parameters: the same depth, vocabulary and head size, as wide as it must be, and the
    rest, less than a head's width, in its MLP.

    >>> from tokenformer.config import load
    >>> equal_transformer(load("grow/124m").model).dim
    768
    """
    wanted, step = cost(config).parameters, config.head_dim
    a, b = 12 * config.layers, config.vocab * (1 if config.tied else 2) + 2  # a·d² + b·d = wanted
    dim = max(step, round((math.sqrt(b * b + 4 * a * wanted) - b) / (2 * a) / step) * step)
    ffn_dim = max(1, round(((wanted - b * dim) / config.layers / dim - 4 * dim) / 2))
    shape = {"layers": config.layers, "context": config.context, "vocab": config.vocab, "tied": config.tied}
    return ModelConfig(
        kind="transformer", dim=dim, ffn_dim=ffn_dim, heads=dim // step, rotary_fraction=config.rotary_fraction, **shape
    )
