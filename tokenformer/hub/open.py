"""Opens weights and configs for every verb: what a user names → model, tokenizer, config, and where they came from.

Unusual: nothing of a model is read before it is asked for. The tokenizer that belongs to weights is the one named, else
the one beside them, else the official config's vocab-file, else, of official weights with the vocabulary of the
released models, theirs. Of other weights a size says nothing: 384 rows may be bytes, or any tokenizer of 384 ids.
"""

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenformer import config as native
from tokenformer.data.text.tokenizer import (
    BUNDLED,
    FileTokenizer,
    load_tokenizer,
    padded_vocab,
    same_tokenizer,
    with_end,
)
from tokenformer.errors import UserError
from tokenformer.files import MANIFEST, WEIGHTS, check_manifest
from tokenformer.hub import official_config
from tokenformer.hub.sidecars import read_config as read_model_config
from tokenformer.parsing import is_file, is_folder, read_json, read_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tokenformer.config import Config, ModelConfig
    from tokenformer.data.text.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")
VERBS = {  # what a model of each kind is for
    "language": "`tokenformer generate` writes with it, and `tokenformer eval --text` measures it",
    "image": "`tokenformer predict` classifies images with it, and `tokenformer eval --images` measures it",
    "caption": "`tokenformer generate --image` writes with it, and `tokenformer eval --pairs` measures it",
    "pair": "`tokenformer match` finds images by texts with it, and `tokenformer eval --pairs` measures it",
}
MODEL_TYPES = ("tokenformer", "tokenformer_image", "tokenformer_pair")  # of transformers
HUB_NAME = re.compile(r"(\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?)(?:@([\w./-]+))?")  # owner/model[@revision]


class HubName(NamedTuple):
    """A model of the Hugging Face hub; nothing was downloaded yet."""

    name: str
    revision: str | None


def find_source(name: str | Path) -> Path | HubName:
    """Return what a name means, the same in every verb: a file or folder that exists; a preset; a path that is missing,
    where it looks like one; `hub:NAME[@REVISION]` or exactly `owner/model[@REVISION]`.
    """
    text, path = str(name), Path(name)
    if path.name == "model" and is_file(path / "config.yml") and is_file(path.parent / "state.json"):
        return path.parent  # the checkpoint whose model this is
    if is_file(path) or is_folder(path):
        return path
    if os.path.lexists(path):
        raise UserError(f"{text} is neither a file nor a folder: give one of them")
    if text in native.presets():
        return native.find(text)
    match = HUB_NAME.fullmatch(text.removeprefix("hub:"))
    if match and text.startswith("hub:"):
        return HubName(match[1], match[2])
    first, slash, _ = text.partition("/")
    if slash and first in {preset.split("/")[0] for preset in native.presets()}:
        native.find(text)  # says which presets there are
    if match is None or text[0] in "./~" or text.count("/") > 1 or is_folder(first):
        beside = sorted(os.listdir(path.parent))[:1000] if is_folder(path.parent) else []
        close = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.7)
        hint = f"did you mean {path.with_name(close[0])}?" if close else "check it, or give owner/model of the hub"
        raise UserError(f"there is nothing at {text[:200]}: {hint}")
    return HubName(match[1], match[2])


class Located(NamedTuple):
    """Weights that were found: `kind` is ours, checkpoint, hf or official; a checkpoint's path is its `model`."""

    kind: str
    path: Path


def locate(source: str | Path, values: bool = True) -> Located:
    """Find the weights at a path or behind a hub name. Of a run they are those of its newest whole checkpoint.

    Without `values` weights are compared with their manifest by their size alone, which is quick.
    """
    from tokenformer.hub.run_folder import newest_whole

    path = find_source(source)
    if isinstance(path, HubName):
        from tokenformer.hub.download import snapshot

        path = snapshot(*path)
    if is_file(path) and path.suffix == ".yml":
        raise UserError(f"{source} is a config without weights: give weights, or train it first")
    if is_file(path / "adapter.yml"):
        raise UserError(f"{source} is an adapter, not a model: give its base, and --adapter {source}")
    if is_file(path / "config.yml") and any(path.glob("model*.safetensors")):
        if not values:  # otherwise the reader of the weights checks all of it
            check_manifest(path, values)
        return Located("ours", path)
    newest = newest_whole(path, values)
    path = newest or path
    if is_file(path / "state.json") and is_file(path / "model" / "config.yml"):
        if newest is None:
            check_manifest(path, values)
        if is_file(path / "model" / "adapter.yml"):
            raise UserError(f"{source} trains an adapter, not a model: give its base, and --adapter {source}")
        return Located("checkpoint", path / "model")
    about = path / "config.json"
    if is_file(about) and read_json(about).get("model_type") in MODEL_TYPES:
        if not values and is_file(path / MANIFEST):
            check_manifest(path, values, edited=True)
        return Located("hf", path)
    from tokenformer.hub import official  # the only kind whose search needs torch

    weights = official.find(path)
    if weights is None:
        if is_file(path / "config.yml") and is_file(path / ".lock"):
            raise UserError(f"the run {source} has no checkpoint yet: wait for its first one (checkpoint.every)")
        known = "expected a folder of ours, of Hugging Face or official"
        raise UserError(f"{source} holds no weights that we know: {known}")
    folder = weights if is_folder(weights) else weights.parent
    if is_file(folder / MANIFEST):
        check_manifest(folder, values, edited=True)
    return Located("official", weights)


@dataclasses.dataclass
class Opened:
    """Weights and what belongs to them. `config`, `tokenizer` and `model` are read when they are first asked for.

    `given` is the config, and `vocab_file` the tokenizer, of official weights; `named` is the tokenizer that was asked
    for. The model is moved to `device` and `dtype`.
    """

    source: str | Path
    located: Located
    given: "ModelConfig | None" = None
    named: "Tokenizer | None" = None
    vocab_file: str | None = None
    device: "torch.device | str" = "cpu"
    dtype: "torch.dtype | None" = None
    raw: bool = False  # not the averaged weights of a run
    prepare: Callable[[Any], Any] = lambda model: model  # what is done to the model before it is moved and cast

    @property
    def _readers(self) -> tuple[Callable[[Path], "ModelConfig"], Callable[[Path], Any]]:
        """The functions that read the config and the model of weights of this kind."""
        if self.located.kind == "hf":
            from tokenformer.hub import hf_folder

            return hf_folder.read_config, hf_folder.load_hf
        if self.located.kind == "official":
            from tokenformer.hub import official

            return official.read_config, partial(official.load_official, config=self.given)
        from tokenformer.hub import folder

        if self.located.kind == "ours":
            return folder.read_config, folder.load_folder
        return folder.read_config, partial(folder.load_checkpoint, raw=self.raw)

    @cached_property
    def config(self) -> "ModelConfig":
        if self.located.kind in ("ours", "checkpoint"):  # without torch
            return read_model_config(self.located.path)
        return self.given or self._readers[0](self.located.path)

    @cached_property
    def model(self) -> Any:
        model = self._readers[1](self.located.path)
        if self.config.of in ("language", "pair", "caption"):
            model.tokenizer_json = self.tokenizer_json
        return self.prepare(model).to(device=self.device, dtype=self.dtype)

    def tensors(self, stream: bool) -> tuple[Mapping[str, "Tensor"], Mapping[str, "torch.dtype"], list[dict]]:
        """Return tensors by name, their types and the growths. With `stream` one tensor of our folder is in memory."""
        if stream and self.located.kind == "ours":
            from tokenformer.hub.folder import Stored

            stored = Stored(self.located.path)
            return stored, stored.dtypes, stored.history
        named = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return named, {name: tensor.dtype for name, tensor in named.items()}, self.model.history

    def need(self, *of: str) -> None:
        """Refuse a model of another kind than these, and say what can be done with it."""
        if self.config.of not in of:
            does = VERBS.get(self.config.of, f"give one of {of[0]}")
            raise UserError(
                f"{self.source} is a model of {self.config.of}, but one of {' or '.join(of)} is needed here: {does}"
            )

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        self.need("language", "caption")
        return self.text_tokenizer

    @property
    def language(self) -> Any:
        """The language model, which may be that of a model that reads images; ready to be asked."""
        self.need("language", "caption")
        return getattr(self.model.eval(), "text", self.model)

    @cached_property
    def text_tokenizer(self) -> "Tokenizer":
        """The tokenizer of a language model, or of a pair."""
        found = self.named or self._own_tokenizer()
        if found.vocab_size > self.config.vocabulary:
            raise UserError(
                f"tokenizer {found.name} has {found.vocab_size:,} ids but the model {self.source} knows "
                f"{self.config.vocabulary:,}: give its own with --tokenizer"
            )
        return found

    def _own_tokenizer(self) -> "Tokenizer":
        if self._beside is not None:
            return FileTokenizer(self._beside, f"of {self.source}")
        if self.vocab_file is not None and is_file(self.vocab_file):
            return load_tokenizer(self.vocab_file)
        if self._released:
            return load_tokenizer(BUNDLED)
        known = "byte, gpt-neox-20b, or a tokenizer.json"
        raise UserError(
            f"{self.source} has no tokenizer beside it: name the one it was trained with, --tokenizer {known}"
        )

    @cached_property
    def folder(self) -> Path:
        return self.located.path if self.located.path.is_dir() else self.located.path.parent

    @cached_property
    def _beside(self) -> str | None:
        """The text of the tokenizer.json beside the weights, if there is one."""
        path = self.folder / "tokenizer.json"
        return read_text(path) if is_file(path) else None

    def replaces_own(self, named: "Tokenizer") -> bool:
        """Tell whether a tokenizer will be used although another lies beside the weights."""
        if self._beside is None or named.vocab_size > self.config.vocabulary:  # the latter is refused when it is used
            return False
        return not same_tokenizer(FileTokenizer(self._beside, "of the model", 0), named)

    def check_tokenizer(self, data: str | None) -> None:
        """Refuse data whose tokenizer (its JSON) is not the one beside these weights."""
        if data is None or self._beside is None:
            return
        if not same_tokenizer(FileTokenizer(data, "of the data", 0), FileTokenizer(self._beside, "of the model", 0)):
            raise UserError(
                f"the data was prepared with another tokenizer than that of {self.source}: prepare it with "
                f"--tokenizer {self.folder}, or begin from scratch (start=null)"
            )

    @cached_property
    def images(self) -> dict[str, Any]:
        """What an image model knows of its images."""
        from tokenformer.hub.folder import read_images

        return read_images(self.located.path) if self.located.kind in ("ours", "checkpoint") else self.model.images

    @property
    def tokenizer_json(self) -> str | None:
        """What goes beside these weights where they are written: never a guess, but released models have one."""
        if self.named is not None:
            return with_end(self.named)
        return load_tokenizer(BUNDLED).to_json() if self._beside is None and self._released else self._beside

    @property
    def _released(self) -> bool:
        return self.located.kind == "official" and self.config.vocab == padded_vocab(50277)

    @property
    def run(self) -> Path | None:
        """The run folder that the weights are a checkpoint of, if they are one."""
        run = self.located.path.parent.parent.parent  # RUN/checkpoints/STEP/model
        return run if self.located.kind == "checkpoint" and is_file(run / "config.yml") else None


def open_model(
    source: str | Path,
    configs: Sequence[str | Path] = (),
    *,
    config: "ModelConfig | None" = None,
    tokenizer: str | Path | None = None,
    device: "torch.device | str | None" = "cpu",
    dtype: "torch.dtype | str | None" = None,
    weights: str | None = None,
) -> Opened:
    """Open our folder, a run or checkpoint, a Hugging Face folder, official weights, or a hub name such as
    `Haiyang-W/TokenFormer-150M`. `configs` (files) or `config` describe official weights that have none beside them.
    `device` None: a GPU where there is one; `dtype` None: as stored, on a GPU bfloat16. `weights` "raw": of a run that
    averages its weights (train.ema), not the averaged ones.
    """
    import torch

    official = official_config.read_generation(*configs)
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UserError(f"dtype is '{dtype}', but must be one of {', '.join(DTYPES)}")
    place = pick_device(device)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    kind = torch.bfloat16 if kind is None and place.type == "cuda" else kind
    named = load_tokenizer(tokenizer) if tokenizer else None
    located = locate(source)
    if config is None and official.has_model:
        config = read_config(*configs).model
    given = config if located.kind == "official" else None
    opened = Opened(source, located, given, named, official.vocab_file, place, kind, weights == "raw")
    if given is None and config is not None:
        own = opened.config.resolved()
        if dataclasses.replace(config, vocab=own.vocab).resolved() != own:
            raise UserError(f"{source} carries its own config, and the other one differs: leave the other one out")
    if named is not None and opened.replaces_own(named) and os.environ.get("RANK", "0") == "0":
        print(f"the tokenizer {tokenizer} is used instead of {source}'s own, which is another", file=sys.stderr)
    return opened


def split_words(words: Sequence[str]) -> tuple[str, list[str], official_config.Generation]:
    """Sort the words of a command line into weights (or those that official files name) and config files. Return these,
    and what the config files say about generation.
    """
    configs = [word for word in words if Path(word).suffix in (".yml", ".yaml")]
    weights = [word for word in words if word not in configs]
    official = official_config.read_generation(*configs)
    if len(weights) > 1:
        raise UserError(
            f"{weights[1]} is one model too many: give one, and config files that end in .yml; a text goes "
            "behind --prompt or --text"
        )
    source = weights[0] if weights else official.weights
    if source is None:
        raise UserError(f"{' + '.join(configs)} names no weights: set eval_ckpt or load, or give a model first")
    return source, configs, official


def pick_device(name: "torch.device | str | None", setting: str = "--device ") -> "torch.device":
    """Return the device of a name; auto or None is a GPU where there is one. Messages name the `setting` to change."""
    import torch

    if name in (None, "auto"):
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"the device is '{name}': give {setting}cpu, cuda, or cuda:1 and so on") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"the device is {name}, but PyTorch sees no GPU: give {setting}cpu, or mend the driver")
    return device


def means_weights(name: str | Path) -> bool:
    """Tell whether a name means weights: a folder or run that has some, a weight file, or a model of the hub."""
    found = find_source(name)
    if isinstance(found, HubName) or not is_folder(found):
        return isinstance(found, HubName) or found.suffix in WEIGHTS
    held = ("model*.safetensors", "shard-*.safetensors", "checkpoints/step-*", "pytorch_model.bin", "latest")
    return not is_file(found / "config.yml") or any(any(found.glob(pattern)) for pattern in held)


def read_config(*names: str | Path, overrides: Sequence[str] = (), training: bool = False) -> "Config":
    """Make a config from files or presets, ours or official, later ones laid over earlier ones, then `a.b=c`.

    A name that means weights gives their model and sets `start` to them; a run also gives its other settings, without
    the growth that it has behind it. With `start` among the overrides (null: from scratch) it gives what its config
    file says. With `training`, what official files say about training is translated too, or refused.

    >>> read_config("lm/150m", overrides=["model.layers=2"]).model.layers
    2
    """
    asked = native.override({}, overrides)
    raws = {name: _raw(name, scratch="start" in asked) for name in names}
    ours: dict = {}
    notes: list[str] = []
    if any(map(official_config.is_official, raws.values())):
        ours, notes = official_config.translate_all(raws, training)
        if os.environ.get("RANK", "0") == "0":
            print(*notes, sep="\n", file=sys.stderr)
    else:
        weights = None
        for name, raw in raws.items():
            if weights is not None and "model" in raw:
                raise UserError(
                    f"{name} has a model of its own, but stands behind {weights}, whose weights need theirs: give it "
                    f"first ({name} {weights}), and it is the recipe"
                )
            weights = name if means_weights(name) and "start" not in asked else weights
            if ours.get("growth") and weights == name and "growth" not in asked:
                notes.append(f"the growth of the config is left out, since the weights of {name} stand behind it")
            ours = native.merge(ours, raw)
        if os.environ.get("RANK", "0") == "0":
            print(*[f"tokenformer: {note}" for note in notes], sep="\n", end="\n" * bool(notes), file=sys.stderr)
    ours = native.override(ours, overrides)
    if "precision" in asked.get("train", {}) and "fp8" not in asked["train"] and ours["train"]["precision"] != "fp8":
        ours["train"].pop("fp8", None)  # what a run in fp8 chose
    if ours.get("adapter"):
        given = "model" in asked or any("model" in raw and not means_weights(name) for name, raw in raws.items())
        ours = _with_model_of_base(ours, given)
    return native.build(native.Config, ours)


def _with_model_of_base(raw: dict, given: bool) -> dict:
    """Return the config of an adapter with the model of the weights that it starts with."""
    if isinstance(raw["adapter"], dict) and raw["adapter"].get("base"):
        return raw  # the config of a run, which names the digest of its base and that one's model
    start = raw.get("start")
    if not isinstance(start, str):
        raise UserError("adapter needs the weights that it is trained on: give start=FOLDER")
    if given:
        raise UserError(f"adapter trains beside the model of {start}, but there is a section model: leave it out")
    return {**raw, "model": native.to_dict(open_model(start).config)}


def _raw(name: str | Path, scratch: bool) -> dict:
    """Return the raw mapping of a config file or preset, or of weights; from `scratch` these do not set `start`."""
    if not means_weights(name) or (scratch and is_file(Path(name) / "config.yml")):
        return native.read(name)
    opened = Opened(name, locate(name, values=False))  # who reads the weights compares their checksums
    settings = native.read(opened.run) if opened.run else {}
    own = {"model": native.to_dict(opened.config), "growth": [], "out": None, "start": None if scratch else str(name)}
    if "fp8" in settings.get("train", {}):  # the shapes that it chose, those of smaller models before it too
        own["train"] = {key: value for key, value in settings["train"].items() if key != "fp8"}
    return {**settings, **own}
