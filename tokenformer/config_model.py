"""The config of models: every key, with its type, default and meaning. Part of config.py's `Config`.

Unusual: where `tau` is absent it is √n; `resolved()` writes these numbers out once, so that later growth can keep them.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokenformer.errors import UserError
from tokenformer.strict import Section, foreign, key, need

Tokens = int | list[int]
WIDE = 2**20  # the largest width that a model may have
LONG = 2**30  # and the largest number of rows
PROJECTIONS = ("qkv", "proj", "ffn")
OF_TOKENS = (*(f"{which}_tokens" for which in PROJECTIONS), "tau", "switch", "layer_overrides")
OF_KIND = {  # keys that have a meaning for some kinds of model only
    "tokenformer": OF_TOKENS,
    "transformer": ("ffn_dim", "bias", "norm_affine"),
    "llama": ("ffn_dim", "kv_heads"),
}
OF = ("language", "image", "text", "pair", "caption")  # the kinds whose keys are known
TRUNKS = {  # what the trunks of a model of several are of
    "pair": {"image": "image", "text": "text"},
    "caption": {"image": "image", "text": "language"},
}
UNSEEN = (
    "heads",
    "kv_heads",
    "theta",
    "tau",
    "switch",
    "layer_overrides",
    "rotary_fraction",
    "rotary_base",
    "norm_eps",
    "activation",
    "pool",
    "loss",
)  # fmt: skip  what no shape of a tensor shows
PROJECTION_OF = {"query": "qkv", "key": "qkv", "value": "qkv", "proj": "proj", "ffn": "ffn"}  # of a block's layers


def meaningless(kind: str) -> list[str]:
    """Return the keys of a model that have no meaning for a kind of model."""
    return [name for names in OF_KIND.values() for name in names if name not in OF_KIND[kind]]


@dataclass(frozen=True)
class LayerOverride(Section, section="model.layer_overrides"):
    """How one layer differs from the rest, after shrinking per layer or growth in depth."""

    qkv_tokens: Tokens | None = key("as in the model", None, most=LONG)
    proj_tokens: Tokens | None = key("as in the model", None, most=LONG)
    ffn_tokens: Tokens | None = key("as in the model", None, most=LONG)
    tau: dict[str, list[float]] = key("as in the model", make=dict)
    switch: dict[str, list[str]] = key("as in the model", make=dict)


@dataclass(frozen=True)
class ModelConfig(Section, section="model"):
    """The shape of a model: all that decides its function, and nothing else."""

    layers: int = key("blocks; required", 0, quiet=True, least=0, most=10_000)
    dim: int = key("width of the residual stream; required", 0, quiet=True, least=0, most=WIDE)
    heads: int = key("attention heads, a divisor of dim; required", 0, quiet=True, least=0, most=WIDE)
    of: str = key(
        "what the model is of: language, image, pair (images and texts; its trunks are of image and text), caption (a "
        "language model that reads images; its trunks are image, of image, and text, of language), or what a caller's "
        "`build` makes",
        "language",
        quiet=True,
    )
    trunks: dict[str, "ModelConfig"] = key(
        "of a model of several trunks: name → that trunk's own keys; its parameters are called NAME.…", make=dict
    )
    kind: Literal["tokenformer", "transformer", "llama"] = key(
        "projections: parameter tokens; linear with a GELU MLP; linear with SwiGLU, RMSNorm and grouped heads",
        "tokenformer",
    )
    qkv_tokens: Tokens | None = key("parameter tokens of each of q, k, v; a list: one per segment", None, most=LONG)
    proj_tokens: Tokens | None = key("parameter tokens of the projection after attention", None, most=LONG)
    ffn_tokens: Tokens | None = key("parameter tokens of the feed-forward Pattention", None, most=LONG)
    theta: Literal["l2_norm_gelu", "gelu_l2_norm", "softmax", "l1_norm_gelu"] = key(
        "Θ, the score normalisation (ops/pattention.py, THETAS)", "l2_norm_gelu"
    )
    tau: dict[str, list[float]] = key("the scale inside Θ, e.g. {ffn: [48.0]}: one per segment; absent = √n", make=dict)
    switch: dict[str, list[str]] = key(
        'segments that count only in calls that give their switch, e.g. {ffn: ["", image]}: one name per segment, '
        '"" = always; absent = always',
        make=dict,
    )
    layer_overrides: dict[int, LayerOverride] = key("layer number → where that layer differs", make=dict)
    ffn_dim: int | None = key("hidden width of the MLP (transformer, llama); absent = 4·dim", None, above=0, most=LONG)
    kv_heads: int | None = key("key/value heads (llama); absent = heads", None, above=0, most=LONG)
    context: int = key("longest sequence the model is trained on", 2048, of="language text", above=0, most=LONG)
    vocab: int = key(
        "rows of the embedding; released: a multiple of 128", 50304, of="language text", above=0, most=LONG
    )
    tied: bool = key("output head = embedding", True, of="language")
    added_vocab: int = key(
        "rows that a growth added to the vocabulary; their ids follow those of `vocab`",
        0,
        quiet=True,
        of="language",
        least=0,
        most=LONG,
    )
    added_switch: str = key(
        "the switch with which the added rows count; absent = always", "", quiet=True, of="language"
    )
    image_size: int | list[int] = key(
        "height and width of the images that it is trained on; one number: square", 224, of="image", above=0, most=WIDE
    )
    patch: int = key("height and width of a patch", 16, of="image", above=0, most=WIDE)
    channels: int = key("colour channels of an image", 3, of="image", above=0, most=WIDE)
    classes: int = key(
        "rows of the head; 0 = none, the model returns what it would read", 1000, of="image", least=0, most=LONG
    )
    pool: Literal["class", "mean", "end"] = key(
        "what stands for the whole: of an image a class token or the mean of patches; of a text its end token, with "
        "causal attention, or the mean of its tokens, which then all see each other",
        "class",
        of="image text",
    )
    positions: Literal["learned", "rotary"] = key(
        "of patches: learned, interpolated to other sizes; or rotary, half of the angles by row, half by column; of a "
        "text's tokens: learned or rotary",
        "learned",
        of="image text",
    )
    first_norm: bool = key("a norm before the blocks, as CLIP has it", False, quiet=True, of="image")
    bias: bool = key("kind transformer: projections have biases", False, of="image text")
    norm_affine: bool = key("kind transformer: norms of the blocks have weights and biases", False, of="image text")
    activation: Literal["gelu", "quick_gelu"] = key(
        "kind transformer: of the MLP; quick_gelu is x · sigmoid(1.702 x)", "gelu", quiet=True, of="image text"
    )
    embed: int = key("width of the space in which images and texts are compared", 512, of="pair", above=0, most=WIDE)
    loss: Literal["softmax", "sigmoid"] = key(
        "softmax: each image against all texts of the batch, and back (CLIP); sigmoid: each image with each text by "
        "itself, with a learned bias (SigLIP)",
        "softmax",
        of="pair",
    )
    rotary_fraction: float = key("share of each head's channels that is rotated", 0.25, least=0, most=1)
    rotary_base: float = key("base of the rotary frequencies", 10000.0, above=0)
    norm_eps: float = key("epsilon of LayerNorm or RMSNorm", 1e-5, above=0)
    init: Literal["official", "centred", "zero"] = key(
        "centred subtracts from values their mean over the tokens; with zero, blocks add nothing at first", "official"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            kinds = field.metadata["of"].split()
            need(
                self.of not in OF or not kinds or self.of in kinds or foreign(field, self),
                f"model.{field.name} belongs to models of {' and '.join(kinds)}, and this one is of {self.of}: "
                "remove it",
            )
        need(
            self.of not in TRUNKS or bool(self.trunks),
            f"model.trunks is missing: a model of {self.of} has two, image and text",
        )
        if self.trunks:
            for field in dataclasses.fields(self):
                own = field.name in ("of", "trunks") or self.of in field.metadata["of"]
                moves = field.name in ("layers", "dim", "heads", *OF_TOKENS) or (self.of in TRUNKS and not own)
                need(
                    not moves or getattr(self, field.name) in (field.default, {}),
                    f"model.{field.name} belongs to each of model.trunks: move it there",
                )
            if self.of in TRUNKS:
                self._check_trunks()
            return
        for name in ("layers", "dim", "heads"):
            need(getattr(self, name) > 0, f"key 'model.{name}' is missing: give a number above 0")
        divisors = [str(n) for n in range(1, min(self.dim, 128) + 1) if self.dim % n == 0]
        need(
            self.dim % self.heads == 0,
            f"model.heads is {self.heads}, which does not divide dim {self.dim}: give one of {', '.join(divisors)}",
        )
        need(
            self.rotary_dims % 2 == 0 or (self.of in ("image", "text") and self.positions == "learned"),
            f"model.rotary_fraction {self.rotary_fraction} of {self.head_dim} channels per head rotates "
            f"{self.rotary_dims} of them: choose a fraction that gives an even number",
        )
        if self.of == "image":
            self._check_image()
        need(
            bool(self.added_vocab) or not self.added_switch,
            f"model.added_switch is {self.added_switch}, but no rows were added: remove it",
        )
        need(
            self.of != "text" or self.pool != "class",
            "model.pool is class, but a text has no class token: give end or mean",
        )
        need(
            self.activation == "gelu" or self.kind == "transformer",
            f"model.activation has no meaning for kind {self.kind}: remove it",
        )
        for name in meaningless(self.kind):
            need(not getattr(self, name), f"model.{name} has no meaning for kind {self.kind}: remove it")
        if self.kind == "tokenformer":
            for layer in [None, *self.layer_overrides]:
                need(
                    layer is None or 0 <= layer < self.layers,
                    f"model.layer_overrides names layer {layer}, but layers go from 0 to {self.layers - 1}",
                )
                for which in PROJECTIONS:
                    self.switches(which, layer)
            return
        divides = self.heads % (self.kv_heads or self.heads) == 0
        need(divides, f"model.kv_heads is {self.kv_heads}, which does not divide heads {self.heads}")

    def _check_image(self) -> None:
        sides = self.image_size if isinstance(self.image_size, list) else [self.image_size] * 2
        need(
            len(sides) == 2 and all(side % self.patch == 0 for side in sides),
            f"model.image_size is {self.image_size}: give a multiple of the patch ({self.patch}), or two of them",
        )
        need(self.pool != "end", "model.pool is end, but an image has no end token: give class or mean")
        need(
            self.positions == "learned" or self.rotary_dims % 4 == 0,
            f"model.rotary_fraction {self.rotary_fraction} rotates {self.rotary_dims} channels of a head: with "
            "positions rotary choose a fraction that gives a multiple of 4, half for rows and half for columns",
        )

    def _check_trunks(self) -> None:
        kinds, wanted = {name: trunk.of for name, trunk in self.trunks.items()}, TRUNKS[self.of]
        need(
            kinds == wanted,
            f"model.trunks are {kinds}, but a {self.of} has a trunk image with `of: image` and a trunk text "
            f"with `of: {wanted['text']}`",
        )
        image, text = self.trunks["image"], self.trunks["text"]
        need(
            image.classes == 0,
            f"model.trunks.image.classes is {image.classes}, but images of a {self.of} have no classes: set it to 0",
        )
        need(
            self.of != "caption" or text.context > image.length,
            f"model.trunks.text.context is {text.context}, but an image has {image.length} positions, and its text "
            "comes after them: give more",
        )

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding of texts, wherever it is."""
        return self.trunks["text"].vocab if self.of in TRUNKS else self.vocab

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of an image.

        >>> ModelConfig(layers=1, dim=32, heads=2, of="image", kind="transformer", image_size=[32, 64]).grid
        (2, 4)
        """
        sides = self.image_size if isinstance(self.image_size, list) else [self.image_size] * 2
        return sides[0] // self.patch, sides[1] // self.patch

    @property
    def length(self) -> int:
        """Positions of a sample: the context, or an image's patches and class token."""
        return self.grid[0] * self.grid[1] + (self.pool == "class") if self.of == "image" else self.context

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def rotary_dims(self) -> int:
        return int(self.head_dim * self.rotary_fraction)

    @property
    def mlp_dim(self) -> int:
        return self.ffn_dim or 4 * self.dim

    def segments(self, which: str, layer: int | None = None) -> list[tuple[int, float]]:
        """Return (parameter tokens, τ) of each segment of a projection (`qkv`, `proj` or `ffn`) in a layer.

        >>> tiny = ModelConfig(layers=1, dim=32, heads=2, qkv_tokens=9, proj_tokens=4, ffn_tokens=[4, 16])
        >>> tiny.segments("ffn")
        [(4, 2.0), (16, 4.0)]
        """
        tokens, tau = getattr(self, f"{which}_tokens"), self.tau
        override = self.layer_overrides.get(layer) if layer is not None else None
        if override is not None:
            own = getattr(override, f"{which}_tokens")
            if own is not None:
                tokens, tau = own, {}  # other tokens: the model's τ was not made for them
            tau = {**tau, **override.tau}
        at = f"model.{which}_tokens" if override is None else f"model.layer_overrides.{layer}.{which}_tokens"
        need(tokens is not None, f"{at} is missing: give a number of parameter tokens, or a list (segments)")
        sizes = tokens if isinstance(tokens, list) else [tokens]
        need(len(sizes) <= 1000, f"{at} has {len(sizes):,} segments: give at most 1,000")
        need(len(sizes) > 0 and min(sizes) > 0, f"{at} is {tokens}: every segment needs at least one token")
        for name in tau:
            need(name in PROJECTIONS, f"tau names '{name}': its keys are qkv, proj and ffn")
        scales = tau.get(which) or [math.sqrt(n) for n in sizes]
        need(
            len(scales) == len(sizes),
            f"{at} has {len(sizes)} segments but tau.{which} has {len(scales)} numbers: give one number per segment",
        )
        need(all(0 < t < math.inf for t in scales), f"tau.{which} is {scales}: every τ is a finite number above 0")
        return list(zip(sizes, scales, strict=True))

    def switches(self, which: str, layer: int | None = None) -> list[str]:
        """Return the switch of each segment of a projection in a layer; a segment with "" always counts.

        >>> keys = {"qkv_tokens": 9, "proj_tokens": 4, "ffn_tokens": [4, 16], "switch": {"ffn": ["", "image"]}}
        >>> ModelConfig(layers=1, dim=32, heads=2, **keys).switches("ffn")
        ['', 'image']
        """
        names, sizes = self.switch, self.segments(which, layer)
        override = self.layer_overrides.get(layer) if layer is not None else None
        if override is not None:  # other tokens: the model's switches are not theirs
            names = {**(names if getattr(override, f"{which}_tokens") is None else {}), **override.switch}
        for name in names:
            need(name in PROJECTIONS, f"switch names '{name}': its keys are qkv, proj and ffn")
        found = names.get(which) or [""] * len(sizes)
        need(
            len(found) == len(sizes),
            f"switch.{which} has {len(found)} names for {len(sizes)} segments: give one per segment, '' for none",
        )
        return found

    def switch_names(self) -> set[str]:
        """Return the names of all switches of the model."""
        every = [self.switch, *(override.switch for override in self.layer_overrides.values())]
        every.append({"vocab": [self.added_switch]})
        return {name for switch in every for names in switch.values() for name in names if name}

    def check_switches(self, names: Iterable[str], adapters: Iterable[str] = ()) -> None:
        """Refuse names of switches that the model does not have; `adapters` are attached, some without segments."""
        known = self.switch_names() | set(adapters)
        for name in names:
            there = ", ".join(sorted(known)) or "none"
            need(name in known, f"the model has no adapter or switch '{str(name)[:80]}': there are {there}")

    @property
    def language_prefix(self) -> str | None:
        """The prefix of the parameters of the language model in this one; None if it has none."""
        if self.of == "language":
            return ""
        return next((f"{name}." for name, trunk in self.trunks.items() if trunk.of == "language"), None)

    def checked_weights(self, weights: Mapping[str, float], adapters: Iterable[str] = ()) -> dict[str, float]:
        """Return weights of switches as plain numbers; refuse names as `check_switches` does, and no finite numbers."""
        if not isinstance(weights, Mapping):
            raise UserError(f"{str(weights)[:80]!r} gives no weights: write {{'NAME': 0.5, ...}}")
        self.check_switches(weights, adapters)
        for name, weight in weights.items():
            try:
                fits = math.isfinite(weight)
            except OverflowError:
                raise UserError(f"the weight of '{name}' is too large: give a finite number") from None
            except (TypeError, ValueError, RuntimeError):
                fits = False
            need(fits, f"the weight of '{name}' is {str(weight)[:80]}: give a finite number")
            need(
                abs(weight) < 3.4e38, f"the weight of '{name}' is {weight:g}, too large for float32: give a smaller one"
            )
        return {name: float(weight) for name, weight in weights.items()}

    def trunk(self, prefix: str) -> "ModelConfig":
        """Return the config of a trunk by the prefix of its parameters, such as "image."; "" is the model itself."""
        return self.trunks[prefix.removesuffix(".")] if prefix else self

    def with_trunk(self, prefix: str, trunk: "ModelConfig") -> "ModelConfig":
        """Return the same model with another config for one trunk."""
        changed = {**self.trunks, prefix.removesuffix("."): trunk}
        return dataclasses.replace(self, trunks=changed) if prefix else trunk

    def resolved(self) -> "ModelConfig":
        """Return the same model with every τ written out."""
        if self.trunks:
            return dataclasses.replace(self, trunks={name: trunk.resolved() for name, trunk in self.trunks.items()})
        if self.kind != "tokenformer":
            return self

        def scales(layer: int | None) -> dict[str, list[float]]:
            return {w: [t for _, t in self.segments(w, layer)] for w in PROJECTIONS}

        overrides = {i: dataclasses.replace(o, tau=scales(i)) for i, o in self.layer_overrides.items()}
        return dataclasses.replace(self, tau=scales(None), layer_overrides=overrides)


def unlike(one: ModelConfig, other: ModelConfig, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that differ although no shape of a tensor shows it, with both values."""
    for name in UNSEEN:
        if (mine := getattr(one, name)) != (theirs := getattr(other, name)):
            yield prefix + name, mine, theirs
    for trunk in sorted(one.trunks.keys() & other.trunks.keys()):
        yield from unlike(one.trunks[trunk], other.trunks[trunk], f"{prefix}trunks.{trunk}.")
