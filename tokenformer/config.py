"""The config of runs: each key with its type, default and meaning. Config files and presets are read here."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from tokenformer import strict
from tokenformer.config_data import DataConfig
from tokenformer.config_growth import GrowthStage, ProgressiveGrowth
from tokenformer.config_model import OF_KIND, ModelConfig, meaningless
from tokenformer.config_model import OF_TOKENS as OF_TOKENS
from tokenformer.config_model import PROJECTION_OF as PROJECTION_OF
from tokenformer.config_model import PROJECTIONS as PROJECTIONS
from tokenformer.config_model import LayerOverride as LayerOverride
from tokenformer.config_train import (
    AdapterConfig,
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
from tokenformer.strict import Section, build, key, need
from tokenformer.strict import to_dict as to_dict
from tokenformer.strict import to_yaml as to_yaml


@dataclass(frozen=True)
class Config(Section):
    """A whole configuration file."""

    familiar: ClassVar[dict[str, str]] = {  # what other programs call our keys
        **dict.fromkeys(("lr", "learning_rate", "max_lr"), "optimizer.rate"),
        **dict.fromkeys(("batch_size", "train_batch_size"), "batch"),
        **dict.fromkeys(("epochs", "num_epochs", "max_steps", "train_iters", "iterations"), "steps"),
        **dict.fromkeys(("dataset", "train_file"), "data.path"),
        "warmup_steps": "schedule.warmup",
    }
    model: ModelConfig = key("the model")
    task: str | None = key(
        "what is learned: language, classify (images), pair, caption, draw; absent = as model.of says", None
    )
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
    adapter: AdapterConfig | None = key(
        "train new parameter tokens beside the weights of `start`, which stay as they are; the model is theirs", None
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
        if self.adapter is not None:
            self._check_adapter(self.adapter)

    def _check_adapter(self, adapter: AdapterConfig) -> None:
        need(self.start is not None, "adapter needs the weights that it is trained on: give start=FOLDER")
        need(self.growth == [], "adapter and growth are both given, but an adapter does not grow: leave one out")
        kind = f"kind {self.model.kind}" if self.model.kind != "tokenformer" else "several trunks"
        need(
            self.model.kind == "tokenformer" and not self.model.trunks,
            f"adapter needs a base with parameter tokens, and {self.start} is of {kind}: choose a language or an image "
            "model of kind tokenformer",
        )
        for layer in adapter.layers:
            need(
                layer < self.model.layers,
                f"adapter.layers names layer {layer}, but those of {self.start} go from 0 to {self.model.layers - 1}",
            )
        need(
            adapter.name not in self.model.switch_names(),
            f"adapter.name is '{adapter.name}', a switch that {self.start} has already: give another name",
        )
        need(
            adapter.hold == "fp32" or self.parallel.shard == 1,
            "adapter.hold is bf16 and parallel.shard above 1, but FSDP shards parameters of one type: leave one out",
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


def run_name(source: str | Path) -> str:
    """Return what a run of a config file or preset is called.

    >>> run_name("lm/1.5b"), run_name("here/books.yml")
    ('1.5b', 'books')
    """
    path = Path(source)
    return path.stem if path.suffix in (".yml", ".yaml") else path.name


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
    """Lay one raw config over another. If this changes `model.kind`, keys below that mean nothing there are dropped; so
    it is with the kind of one of `model.trunks`.

    >>> merge({"model": {"dim": 64, "ffn_tokens": 8}, "growth": "progressive"}, {"model": {"kind": "transformer"}})
    {'model': {'dim': 64, 'kind': 'transformer'}}
    """
    model = _without_meaningless(below.get("model"), above.get("model"))
    if model != below.get("model"):
        below = {**below, "model": model}
        if any(word in str(below.get("growth")) for word in ("_tokens", "progressive")):
            del below["growth"]
    return strict.merge(below, above)


def _without_meaningless(was: Any, now: Any) -> Any:
    """Return the raw keys of a model without those that have no meaning for its new kind."""
    if not isinstance(was, dict) or not isinstance(now, dict):
        return was
    kind = now.get("kind")
    if kind in OF_KIND and kind != was.get("kind", "tokenformer"):
        was = {name: value for name, value in was.items() if name not in meaningless(kind)}
    old, new = was.get("trunks"), now.get("trunks")
    if isinstance(old, dict) and isinstance(new, dict):
        was = {**was, "trunks": {name: _without_meaningless(trunk, new.get(name)) for name, trunk in old.items()}}
    return was


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
