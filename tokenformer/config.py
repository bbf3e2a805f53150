"""The config of models and runs: each key with its type, default and meaning. Config files and presets are read here.

Unusual: where `tau` is absent it is √n; `resolved()` writes these numbers out once, so that later growth can keep them.
"""

import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenformer import strict
from tokenformer.config_data import DataConfig
from tokenformer.config_growth import GrowthStage, ProgressiveGrowth
from tokenformer.config_train import (
    CheckpointConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)
from tokenformer.errors import UserError
from tokenformer.parsing import YAML_BYTES, is_file, parse_yaml, read_text, shown
from tokenformer.strict import Section, build, foreign, key, need
from tokenformer.strict import to_dict as to_dict
from tokenformer.strict import to_yaml as to_yaml

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
    of: str = key("what the model is of: language, image, or what a caller's `build` makes", "language", quiet=True)
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
    context: int = key("longest sequence the model is trained on", 2048, of="language", above=0, most=LONG)
    vocab: int = key("rows of the embedding; released: a multiple of 128", 50304, of="language", above=0, most=LONG)
    tied: bool = key("output head = embedding", True, of="language")
    image_size: int | list[int] = key(
        "height and width of the images that it is trained on; one number: square", 224, of="image", above=0, most=WIDE
    )
    patch: int = key("height and width of a patch", 16, of="image", above=0, most=WIDE)
    channels: int = key("colour channels of an image", 3, of="image", above=0, most=WIDE)
    classes: int = key(
        "rows of the head; 0 = none, the model returns what it would read", 1000, of="image", least=0, most=LONG
    )
    pool: Literal["class", "mean"] = key(
        "what the head reads: a class token, or the mean of the patches", "class", of="image"
    )
    positions: Literal["learned", "rotary"] = key(
        "of the patches: learned, interpolated to other sizes; or rotary, half of the angles by row, half by column",
        "learned",
        of="image",
    )
    bias: bool = key("kind transformer: projections have biases", False, of="image")
    norm_affine: bool = key("kind transformer: norms of the blocks have weights and biases", False, of="image")
    rotary_fraction: float = key("share of each head's channels that is rotated", 0.25, least=0, most=1)
    rotary_base: float = key("base of the rotary frequencies", 10000.0, above=0)
    norm_eps: float = key("epsilon of LayerNorm or RMSNorm", 1e-5, above=0)
    init: Literal["official", "centred"] = key("centred subtracts from values their mean over the tokens", "official")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trunks:
            for name in ("layers", "dim", "heads", *OF_TOKENS):
                need(not getattr(self, name), f"model.{name} belongs to each of model.trunks: move it there")
            return
        for name in ("layers", "dim", "heads"):
            need(getattr(self, name) > 0, f"key 'model.{name}' is missing: give a number above 0")
        divisors = [str(n) for n in range(1, min(self.dim, 128) + 1) if self.dim % n == 0]
        need(
            self.dim % self.heads == 0,
            f"model.heads is {self.heads}, which does not divide dim {self.dim}: give one of {', '.join(divisors)}",
        )
        need(
            self.rotary_dims % 2 == 0,
            f"model.rotary_fraction {self.rotary_fraction} of {self.head_dim} channels per head rotates "
            f"{self.rotary_dims} of them: choose a fraction that gives an even number",
        )
        for field in dataclasses.fields(self):
            of = field.metadata["of"]
            need(
                self.of not in ("language", "image") or of in ("", self.of) or foreign(field, self),
                f"model.{field.name} belongs to models of {of}, and this one is of {self.of}: remove it",
            )
        if self.of == "image":
            self._check_image()
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
        need(
            self.positions == "learned" or self.rotary_dims % 4 == 0,
            f"model.rotary_fraction {self.rotary_fraction} rotates {self.rotary_dims} channels of a head: with "
            "positions rotary choose a fraction that gives a multiple of 4, half for rows and half for columns",
        )

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
        return {name for switch in every for names in switch.values() for name in names if name}

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


@dataclass(frozen=True)
class Config(Section):
    """A whole configuration file."""

    model: ModelConfig = key("the model")
    task: str | None = key("what is learned: language, or classify (images); absent = as model.of says", None)
    out: str | None = key("run folder where the command line names none", None)
    steps: int = key("optimizer steps of the run", 1000, least=0, most=10**9)
    batch: int | None = key("sequences per step, over all ranks", None, above=0, most=10**7)
    micro_batch: int | None = key(
        "sequences that one rank computes at once; absent = its whole share of the batch", None, above=0, most=10**7
    )
    accumulation: int | None = key(
        "instead of batch, as official files have it: batch = micro_batch × accumulation × ranks at the first start",
        None,
        above=0,
        most=10**7,
    )
    seed: int = key("seed of the initial values and of the order of the data", 1234)
    start: str | None = key(
        "weights to begin with (folder, run, official); of a smaller model they fill the first parameter tokens", None
    )
    data: DataConfig = key("what it is trained on", make=DataConfig)
    optimizer: OptimizerConfig = key("the update rule", make=OptimizerConfig)
    schedule: ScheduleConfig = key("the learning rate over the run", make=ScheduleConfig)
    growth: list[GrowthStage] | Literal["progressive"] | ProgressiveGrowth = key(
        "growths of the run, in order; `model` is what it begins with. Or progressive: `model` is the final one and "
        "`steps` its budget, and the run begins with a small one",
        make=list,
    )
    train: TrainConfig = key("how a step is computed", make=TrainConfig)
    validation: ValidationConfig = key("what is measured on held-out data", make=ValidationConfig)
    checkpoint: CheckpointConfig = key("what is kept to resume", make=CheckpointConfig)
    log: LogConfig = key("what is logged", make=LogConfig)
    parallel: ParallelConfig = key("how it is laid over several processes", make=ParallelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = self.growth if isinstance(self.growth, list) else []
        plateau = any("plateau" in stage.at for stage in listed)
        need(not plateau or self.validation.every > 0, "growth at a plateau needs validations: set validation.every")
        schedules = [self.schedule, *(stage.schedule for stage in listed if stage.schedule)]
        need(
            not plateau or all(schedule.count == "steps" for schedule in schedules),
            "schedule.count is compute, but how much a run computes that grows at a plateau is not known before: "
            "give the growths a step, or leave schedule.count out",
        )
        need(
            self.start is None or isinstance(self.growth, list),
            f"growth is progressive, which begins with a small model of its own, but start is {self.start}: give "
            "start=null to train from scratch, or a list of growths to begin with these weights",
        )


@dataclass(frozen=True)
class ModelFile:
    """The config.yml beside weights: the model alone."""

    model: ModelConfig = key("the model")


def preset_folder() -> Path:
    """Return the folder of the presets: beside the package in a checkout, inside it when installed."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def presets() -> list[str]:
    """Return the names of all presets, such as `lm/150m`."""
    folder = preset_folder()
    return sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yml"))


def find(name: str | Path) -> Path:
    """Return the path of a config file, of a folder's config.yml, or of a preset by its name (`lm/150m`)."""
    for path in (Path(name), Path(name) / "config.yml"):
        if is_file(path):
            return path
    if str(name) in presets():
        return preset_folder() / f"{name}.yml"
    close = difflib.get_close_matches(str(name), presets(), n=1)
    hint = f"did you mean the preset '{close[0]}'?" if close else f"presets are {', '.join(presets())}"
    raise UserError(f"there is no config file or preset {shown(str(name))}: {hint}")


def merge(below: dict, above: dict) -> dict:
    """Lay one raw config over another. If this changes `model.kind`, keys below that mean nothing there are dropped.

    >>> merge({"model": {"dim": 64, "ffn_tokens": 8}, "growth": "progressive"}, {"model": {"kind": "transformer"}})
    {'model': {'dim': 64, 'kind': 'transformer'}}
    """
    was, now = below.get("model"), above.get("model")
    kind = now.get("kind") if isinstance(now, dict) else None
    if isinstance(was, dict) and kind in OF_KIND and kind != was.get("kind", "tokenformer"):
        below = {**below, "model": {name: value for name, value in was.items() if name not in meaningless(kind)}}
        if any(word in str(below.get("growth")) for word in ("_tokens", "progressive")):
            del below["growth"]
    return strict.merge(below, above)


def override(raw: dict, assignments: Sequence[str]) -> dict:
    """Lay assignments `a.b=c` over a raw config."""
    for assignment in assignments:
        raw = merge(raw, strict.override({}, [assignment]))
    return raw


def read(name: str | Path, _seen: tuple[Path, ...] = ()) -> dict:
    """Return the raw mapping of a config, laid over that of the file or preset that its `base:` names."""
    path = find(name)
    raw = parse_yaml(read_text(path, YAML_BYTES), str(path))
    if not isinstance(raw, dict):
        holds = "is empty" if raw is None else f"holds {shown(raw)}"
        raise UserError(f"{path} should hold keys and values, such as 'model:', but {holds}")
    if "base" not in raw:
        return raw
    base = raw.pop("base")
    if not isinstance(base, str):
        raise UserError(f"{path}: base is {shown(base)}, but must be the name of a config file or preset")
    base = path.parent / base if is_file(path.parent / base) else find(base)
    seen = (*_seen, path.resolve())
    if base.resolve() in seen:
        raise UserError(f"{path}: its base leads back to itself: name another file or preset")
    return merge(read(base, seen), raw)


def load(*names: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Make a config from files or presets, later ones laid over earlier ones, then overrides.

    >>> load("lm/150m", overrides=["model.layers=2"]).model.layers
    2
    """
    raw: dict = {}
    for name in names:
        raw = merge(raw, read(name))
    return build(Config, override(raw, overrides))
