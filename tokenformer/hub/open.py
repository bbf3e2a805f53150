"""The one door to weights and configs: what a user names → model, tokenizer, config, and where they came from.

Unusual: nothing of a model is read before it is asked for. The tokenizer that belongs to weights is the one named, else
the one beside them, else the official config's vocab-file, else the one whose padded size is the model's vocabulary.
"""

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenformer import config as native
from tokenformer.data.text.tokenizer import (
    BUNDLED,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
    padded_vocab,
    same_tokenizer,
)
from tokenformer.errors import UserError
from tokenformer.files import MANIFEST, WEIGHTS, check_manifest
from tokenformer.hub import official_config
from tokenformer.parsing import is_file, is_folder, read_json, read_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tokenformer.config import Config, ModelConfig
    from tokenformer.models import LanguageModel

DTYPES = ("float32", "bfloat16", "float16")
HUB_NAME = re.compile(r"(\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?)(?:@([\w./-]+))?")  # owner/model[@revision]


class HubName(NamedTuple):
    """A model of the Hugging Face hub; nothing was asked for yet."""

    name: str
    revision: str | None


def look(name: str | Path) -> Path | HubName:
    """What a name means, the same in every verb: a file or folder that exists; a preset; a path that is missing, where
    it looks like one; `hub:NAME[@REVISION]` or exactly `owner/model[@REVISION]`.
    """
    text, path = str(name), Path(name)
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
        close = difflib.get_close_matches(path.name, [p.name for p in _beside(path)], n=1)
        hint = f"did you mean {path.with_name(close[0])}?" if close else "check it, or give owner/model of the hub"
        raise UserError(f"there is nothing at {text[:200]}: {hint}")
    return HubName(match[1], match[2])


def _beside(path: Path) -> list[Path]:
    return sorted(path.parent.iterdir())[:1000] if is_folder(path.parent) else []


class Located(NamedTuple):
    """Weights that were found: `kind` is ours, checkpoint, hf or official; a checkpoint's path is its `model`."""

    kind: str
    path: Path

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent


def locate(source: str | Path) -> Located:
    """Find the weights at a path or behind a hub name. A run stands for its newest whole checkpoint."""
    from tokenformer.hub import official
    from tokenformer.hub.run_folder import newest_whole

    path = look(source)
    if isinstance(path, HubName):
        from tokenformer.hub.download import snapshot

        path = snapshot(*path)
    if str(source) in native.presets() and not Path(source).exists():
        raise UserError(f"{source} is a preset, a config without weights: give weights, or train it first")
    if (path / "config.yml").is_file() and any(path.glob("model*.safetensors")):
        return Located("ours", path)
    newest = newest_whole(path)
    path = newest or path
    if (path / "state.json").is_file() and (path / "model" / "config.yml").is_file():
        if newest is None:
            check_manifest(path)
        return Located("checkpoint", path / "model")
    about = path / "config.json"
    if is_file(about) and read_json(about).get("model_type") == "tokenformer":
        return Located("hf", path)
    weights = official.find(path)
    if weights is None:
        raise UserError(
            f"{source} holds no weights that we know: expected a folder of ours, of Hugging Face or official"
        )
    located = Located("official", weights)
    if is_file(located.folder / MANIFEST):
        check_manifest(located.folder, edited=True)
    return located


class Opened:
    """Weights and what belongs to them. `config`, `tokenizer` and `model` are read when they are first asked for."""

    def __init__(
        self,
        source: str | Path,
        located: Located,
        *,
        config: "ModelConfig | None" = None,
        tokenizer: Tokenizer | None = None,
        vocab_file: str | None = None,
        device: "torch.device | str" = "cpu",
        dtype: "torch.dtype | None" = None,
    ) -> None:
        self.source, self.kind, self.path = source, located.kind, located.path
        self._located, self._given, self._named, self._vocab_file = located, config, tokenizer, vocab_file
        self._device, self._dtype = device, dtype

    @cached_property
    def config(self) -> "ModelConfig":
        if self.kind in ("ours", "checkpoint"):
            from tokenformer.hub.folder import read_config as read
        elif self.kind == "hf":
            from tokenformer.hub.hf_folder import read_config as read
        else:
            from tokenformer.hub.official import read_config as read
        return self._given or read(self.path)

    @cached_property
    def model(self) -> "LanguageModel":
        if self.kind == "official":
            from tokenformer.hub.official import load_official

            model = load_official(self.path, self._given)
        else:
            from tokenformer.hub.folder import load_checkpoint, load_folder
            from tokenformer.hub.hf_folder import load_hf

            model = {"ours": load_folder, "checkpoint": load_checkpoint, "hf": load_hf}[self.kind](self.path)
        return model.to(device=self._device, dtype=self._dtype)

    def tensors(self, stream: bool) -> tuple[Mapping[str, "Tensor"], Mapping[str, "torch.dtype"], list[dict]]:
        """Tensors by name, their types, the growth history. `stream`: of our folder one tensor is held at a time."""
        if stream and self.kind == "ours":
            from tokenformer.hub.folder import Stored

            stored = Stored(self.path)
            return stored, stored.dtypes, stored.history
        named = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return named, {name: tensor.dtype for name, tensor in named.items()}, self.model.history

    @cached_property
    def tokenizer(self) -> Tokenizer:
        found = self._named or self._tokenizer()
        if found.vocab_size > self.config.vocab:
            raise UserError(
                f"tokenizer {found.name} has {found.vocab_size:,} ids but the model {self.source} knows "
                f"{self.config.vocab:,}: give its own with --tokenizer"
            )
        return found

    def _tokenizer(self) -> Tokenizer:
        beside = self._located.folder / "tokenizer.json"
        if beside.is_file():
            return FileTokenizer(read_text(beside), f"of {self.source}")
        if self._vocab_file is not None and Path(self._vocab_file).is_file():
            return load_tokenizer(self._vocab_file)
        for name, size in ((BUNDLED, 50277), ("byte", 257)):
            if padded_vocab(size) == self.config.vocab:
                return load_tokenizer(name)
        raise UserError(f"{self.source} has no tokenizer beside it: name one with --tokenizer")

    def check_tokenizer(self, data: str | None) -> None:
        """Refuse data whose tokenizer (its JSON) is not the one that stands beside these weights."""
        beside = self._located.folder / "tokenizer.json"
        if data is None or not is_file(beside):
            return
        theirs, own = FileTokenizer(data, "of the data", 0), FileTokenizer(read_text(beside), f"of {self.source}", 0)
        if not same_tokenizer(theirs, own):
            raise UserError(
                f"the data was prepared with another tokenizer than that of {self.source}: prepare it with "
                f"--tokenizer {self._located.folder}, or begin from scratch (start=null)"
            )

    @property
    def tokenizer_json(self) -> str | None:
        """What goes beside these weights where they are written: never a guess, but released models have one."""
        beside = self._located.folder / "tokenizer.json"
        if self._named is not None:
            return self._named.to_json()
        if beside.is_file():
            return read_text(beside)
        released = self.kind == "official" and self.config.vocab == padded_vocab(50277)
        return load_tokenizer(BUNDLED).to_json() if released else None

    @property
    def run(self) -> Path | None:
        """The run folder that the weights are a checkpoint of, if they are one."""
        run = self.path.parent.parent.parent  # RUN/checkpoints/STEP/model
        return run if self.kind == "checkpoint" and (run / "config.yml").is_file() else None


def open_model(
    source: str | Path,
    configs: Sequence[str | Path] = (),
    *,
    config: "ModelConfig | None" = None,
    tokenizer: str | Path | None = None,
    device: "torch.device | str | None" = "cpu",
    dtype: "torch.dtype | str | None" = None,
) -> Opened:
    """Open our folder, a run or checkpoint, a Hugging Face folder, official weights, or a hub name such as
    `Haiyang-W/TokenFormer-150M`. `configs` (files) or `config` describe official weights that have none beside them.
    `device` None: a GPU where there is one; `dtype` None: as stored, on a GPU bfloat16.
    """
    official = official_config.read_generation(*configs)
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UserError(f"dtype is '{dtype}', but must be one of {', '.join(DTYPES)}")
    place = pick_device(device)
    named = load_tokenizer(tokenizer) if tokenizer else None
    located = locate(source)
    if config is None and official.has_model:
        config = read_config(*configs).model
    given = config if located.kind == "official" else None
    more = {"vocab_file": official.vocab_file, "device": place, "dtype": _dtype(dtype, place)}
    opened = Opened(source, located, config=given, tokenizer=named, **more)
    if given is None and config is not None:
        own = opened.config.resolved()
        if dataclasses.replace(config, vocab=own.vocab).resolved() != own:
            raise UserError(f"{source} carries its own config, and the other one differs: leave the other one out")
    return opened


def name_model(words: Sequence[str]) -> tuple[str, list[str], official_config.Generation]:
    """Sort words of a command line: weights (or those that official files name), config files, what these say."""
    configs = [word for word in words if Path(word).suffix in (".yml", ".yaml")]
    weights = [word for word in words if word not in configs]
    official = official_config.read_generation(*configs)
    if len(weights) > 1:
        raise UserError(f"{weights[1]} is one model too many: give one, and config files that end in .yml")
    source = weights[0] if weights else official.weights
    if source is None:
        raise UserError(f"{' + '.join(configs)} names no weights: set eval_ckpt or load, or give a model first")
    return source, configs, official


def pick_device(name: "torch.device | str | None", setting: str = "--device ") -> "torch.device":
    """The device of a name; auto or None is a GPU where there is one. `setting` is what a message tells to change."""
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


def _dtype(name: "torch.dtype | str | None", device: "torch.device") -> "torch.dtype | None":
    import torch

    if name is None:
        return torch.bfloat16 if device.type == "cuda" else None
    return getattr(torch, name) if isinstance(name, str) else name


def means_weights(name: str | Path) -> bool:
    """Whether a name means weights: a folder or run that has some, a weight file, or a model of the hub."""
    found = look(name)
    if isinstance(found, HubName) or not is_folder(found):
        return isinstance(found, HubName) or found.suffix in WEIGHTS
    held = ("model*.safetensors", "checkpoints/step-*", "pytorch_model.bin", "latest")
    return not is_file(found / "config.yml") or any(any(found.glob(pattern)) for pattern in held)


def read_config(*names: str | Path, overrides: Sequence[str] = (), training: bool = False) -> "Config":
    """A config from files or presets, ours or in the official dialect, later ones laid over earlier ones, then `a.b=c`.

    A name that means weights gives its model and `start`, which begins with them; of a run all its other settings but
    the growth that it has behind it. With `start` among the overrides (null: from scratch) it gives what its config
    file says. With `training`, what official files say about it is translated too, or refused.

    >>> read_config("lm/150m", overrides=["model.layers=2"]).model.layers
    2
    """
    asked = native.override({}, overrides)
    raws = {name: _raw(name, scratch="start" in asked) for name in names}
    ours: dict = {}
    if any(map(official_config.is_official, raws.values())):
        ours, notes = official_config.translate_all(raws, training)
        if os.environ.get("RANK", "0") == "0":
            print(*notes, sep="\n", file=sys.stderr)
    else:
        for raw in raws.values():
            ours = native.merge(ours, raw)
    return native.build(native.Config, native.override(ours, overrides))


def _raw(name: str | Path, scratch: bool) -> dict:
    found = look(name)
    if not means_weights(name) or (scratch and not isinstance(found, HubName) and is_file(found / "config.yml")):
        return native.read(name)
    opened = open_model(name)
    settings = native.read(opened.run) if opened.run else {}
    own = {"model": native.to_dict(opened.config), "growth": [], "out": None, "start": None if scratch else str(name)}
    return {**settings, **own}
