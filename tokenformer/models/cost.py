"""What a model costs, from its config alone: parameters, FLOPs (with parameters, with other tokens), cache.

Causal attention is counted once: 2·layers·dim·context forward per token. Many tools count it twice. Attention that is
not causal (`Cost.causal`; images) is 4·layers·dim·length per token.
"""

import dataclasses
import math
from typing import Any

from tokenformer.config import PROJECTION_OF, PROJECTIONS, ModelConfig
from tokenformer.models.names import parse


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts of one model. FLOPs are per data token; training is three times forward."""

    parameters: int
    matmul_parameters: int  # in the blocks; the output head is counted apart
    head_parameters: int  # read by the output head (the embedding's own, if tied)
    projections: dict[str, int]  # matmul parameters of each projection, all layers together
    attended: int  # channels in which data tokens attend to each other: Σ dim over all layers
    cache_values: int  # numbers in the key/value cache per token
    causal: bool = True  # whether a token sees those before it alone
    end_flops: int = 0  # forward, once per sample, outside the blocks: patches and class head of an image; of two
    # trunks all that is computed, since they differ in length

    @property
    def parameter_flops(self) -> int:
        """Forward, between a token and the parameters; the same for every context."""
        return 2 * (self.matmul_parameters + self.head_parameters)

    def token_flops(self, context: int) -> int:
        """Forward, between a token and those it sees: all of the context, or on average half of it where causal."""
        return (2 if self.causal else 4) * self.attended * context

    def training_flops(self, context: int) -> int:
        return 3 * (self.parameter_flops + self.token_flops(context))

    def sample_flops(self, length: int) -> int:
        """Forward, of a whole sample: a sequence of this context, an image of so many positions."""
        return length * (self.parameter_flops + self.token_flops(length)) + self.end_flops

    def product_share(self, length: int) -> float:
        """The share of a sample's FLOPs that are products with the blocks' parameters."""
        return length * 2 * self.matmul_parameters / self.sample_flops(length)

    def cache_bytes(self, width: int = 2) -> int:
        return width * self.cache_values


def cost(config: ModelConfig) -> Cost:
    """Count a model. For several trunks that are no pair, only their blocks and norms: the config knows no more.

    >>> from tokenformer.config import load
    >>> cost(load("lm/150m").model).parameters
    151881216
    """
    if config.trunks:
        count = cost if config.of in ("pair", "caption") else blocks
        parts: list[dict[str, Any]] = [dataclasses.asdict(count(trunk)) for trunk in config.trunks.values()]
        names = list(dict.fromkeys(name for part in parts for name in part["projections"]))
        projections = {name: sum(part["projections"].get(name, 0) for part in parts) for name in names}
        counts = [key for key in parts[0] if key not in ("projections", "causal")]
        sums: dict[str, Any] = {key: sum(part[key] for part in parts) for key in counts}
        if config.of == "caption":
            image, text = config.trunks["image"], config.trunks["text"]
            sums["parameters"] += image.dim * text.dim
            sums["end_flops"] = cost(image).sample_flops(image.length) + 2 * image.length * image.dim * text.dim
            sums["end_flops"] += cost(text).sample_flops(text.context)
        if config.of == "pair":
            projected = config.embed * sum(trunk.dim for trunk in config.trunks.values())
            sums["parameters"] += projected + (2 if config.loss == "sigmoid" else 1)
            whole = [cost(trunk).sample_flops(trunk.length) for trunk in config.trunks.values()]
            sums["end_flops"] = sum(whole) + 2 * projected
        return Cost(projections=projections, **sums)
    c, embedding = config, (config.vocab + config.added_vocab) * config.dim
    if c.of == "image":
        return dataclasses.replace(
            blocks(c),
            parameters=blocks(c).parameters + _image_rows(c) * c.dim + c.classes,
            cache_values=0,
            causal=False,
            end_flops=2 * c.dim * (math.prod(c.grid) * c.channels * c.patch**2 + c.classes),
        )
    if c.of == "text":
        return dataclasses.replace(
            blocks(c), parameters=blocks(c).parameters + _text_rows(c) * c.dim, cache_values=0, causal=c.pool == "end"
        )
    whole = blocks(c).parameters + embedding * (1 if c.tied else 2)
    return dataclasses.replace(blocks(c), parameters=whole, head_parameters=embedding)


def blocks(config: ModelConfig) -> Cost:
    """Count the blocks and the final norm of one trunk."""
    c, kv = config, (config.kv_heads or config.heads) * config.head_dim
    if c.kind == "tokenformer":
        tokens = {w: sum(n for i in range(c.layers) for n, _ in c.segments(w, i)) for w in PROJECTIONS}
        projections = {name: 2 * c.dim * tokens[which] for name, which in PROJECTION_OF.items()}
    else:
        ffn = (3 if c.kind == "llama" else 2) * c.dim * c.mlp_dim
        one = {"query": c.dim**2, "key": c.dim * kv, "value": c.dim * kv, "proj": c.dim**2, "ffn": ffn}
        projections = {name: c.layers * n for name, n in one.items()}
    matmul = sum(projections.values())
    norms = (2 * c.layers + 1) * c.dim if c.kind == "llama" else 2 * c.dim
    norms += 4 * c.layers * c.dim if c.norm_affine else 0
    biases = c.layers * (5 * c.dim + c.mlp_dim) if c.bias else 0
    return Cost(
        parameters=matmul + norms + biases,
        matmul_parameters=matmul,
        head_parameters=0,
        projections=projections,
        attended=c.layers * c.dim,
        cache_values=2 * c.layers * kv,
    )


def _image_rows(config: ModelConfig) -> int:
    """Rows of the stream's width outside the blocks: patch embedding and its bias, positions, class token, head."""
    c = config
    learned = c.length if c.positions == "learned" else 0
    return c.channels * c.patch**2 + 1 + learned + (c.pool == "class") + c.classes + 2 * c.first_norm


def _text_rows(config: ModelConfig) -> int:
    """Of a text trunk: embedding and learned positions."""
    return config.vocab + (config.context if config.positions == "learned" else 0)


def training_flops_per_sample(config: ModelConfig) -> int:
    """Training FLOPs of a sample of full length; of several trunks those of their blocks, each at its own."""
    if config.of in ("pair", "caption"):
        return 3 * cost(config).sample_flops(0)
    if config.trunks:
        return sum(3 * blocks(trunk).sample_flops(trunk.length) for trunk in config.trunks.values())
    return 3 * cost(config).sample_flops(config.length)


def equal_transformer(config: ModelConfig) -> ModelConfig:
    """A Transformer with as many parameters: the same depth, vocabulary and head size. The width is a multiple of the
    head size; the MLP takes the parameters that are left.

    >>> from tokenformer.config import load
    >>> equal_transformer(load("grow/124m").model).dim
    768
    """
    if config.of in ("pair", "caption"):
        return dataclasses.replace(config, trunks={n: equal_transformer(t) for n, t in config.trunks.items()})
    c, wanted, step = config, cost(config).parameters, config.head_dim
    a, b = 12 * c.layers, (c.vocab + c.added_vocab) * (1 if c.tied else 2) + 2  # a·d² + b·d = wanted
    shape: dict[str, Any] = {"layers": c.layers, "rotary_fraction": c.rotary_fraction, "init": c.init}
    own = ("context", "vocab", "tied", "added_vocab", "added_switch")
    if c.of == "image":
        wanted, b = wanted - c.classes, _image_rows(c) + 2
        own = ("of", "image_size", "patch", "channels", "classes", "pool", "positions")
    if c.of == "text":
        b, own = _text_rows(c) + 2, ("of", "context", "vocab", "pool", "positions")
    shape |= {name: getattr(c, name) for name in own}
    dim = max(step, round((math.sqrt(b * b + 4 * a * wanted) - b) / (2 * a) / step) * step)
    ffn_dim = max(1, round(((wanted - b * dim) / c.layers / dim - 4 * dim) / 2))
    return ModelConfig(kind="transformer", dim=dim, ffn_dim=ffn_dim, heads=dim // step, **shape)


def model_cost(model: Any) -> Cost:
    """Count a model of several trunks: its config describes the blocks, its parameters what lies outside them."""
    outside = {n: p.numel() for n, p in model.named_parameters() if parse(n, model.ends).layer is None}
    products = sum(size for name, size in outside.items() if model.ends[name].matrix)
    whole = sum(parameter.numel() for parameter in model.parameters())
    return dataclasses.replace(cost(model.config), parameters=whole, head_parameters=products)
