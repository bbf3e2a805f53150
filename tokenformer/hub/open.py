"""The one door to weights and configs: what a user names → model, tokenizer, config, and where they came from.

Unusual: nothing of a model is read before it is asked for. The tokenizer that belongs to weights is the one named, else
the one beside them, else the official config's vocab-file, else the one whose padded size is the model's vocabulary.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenformer import config as native
from tokenformer.data.text.tokenizer import BUNDLED, FileTokenizer, Tokenizer, load_tokenizer, padded_vocab
from tokenformer.errors import UserError
from tokenformer.files import check_manifest
from tokenformer.hub import official_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tokenformer.config import Config, ModelConfig
    from tokenformer.models import LanguageModel

DTYPES = ("float32", "bfloat16", "float16")
HUB_NAME = r"\w([\w.-]*\w)?/\w([\w.-]*\w)?"  # owner/model; ../model and ./model are paths


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

    path = Path(source)
    if not path.exists():
        if not re.fullmatch(HUB_NAME, str(source)):
            raise UserError(f"there is nothing at {source}: give a folder, a weight file or a hub name (owner/model)")
        from tokenformer.hub.download import snapshot

        path = snapshot(str(source))
    if (path / "config.yml").is_file() and any(path.glob("model*.safetensors")):
        return Located("ours", path)
    newest = newest_whole(path)
    path = newest or path
    if (path / "state.json").is_file() and (path / "model" / "config.yml").is_file():
        if newest is None:
            check_manifest(path)
        return Located("checkpoint", path / "model")
    if (path / "config.json").is_file() and '"model_type": "tokenformer"' in (path / "config.json").read_text():
        return Located("hf", path)
    weights = official.find(path)
    if weights is None:
        raise UserError(
            f"{source} holds no weights that we know: expected a folder of ours, of Hugging Face or official"
        )
    return Located("official", weights)


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
            return FileTokenizer(beside.read_text(encoding="utf-8"), f"of {self.source}")
        if self._vocab_file is not None and Path(self._vocab_file).is_file():
            return load_tokenizer(self._vocab_file)
        for name, size in ((BUNDLED, 50277), ("byte", 257)):
            if padded_vocab(size) == self.config.vocab:
                return load_tokenizer(name)
        raise UserError(f"{self.source} has no tokenizer beside it: name one with --tokenizer")

    @property
    def tokenizer_json(self) -> str | None:
        """What goes beside these weights where they are written: never a guess, but released models have one."""
        beside = self._located.folder / "tokenizer.json"
        if self._named is not None:
            return self._named.to_json()
        if beside.is_file():
            return beside.read_text(encoding="utf-8")
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


def read_config(*names: str | Path, overrides: Sequence[str] = (), training: bool = False) -> "Config":
    """A config from files or presets, ours or in the official dialect, later ones laid over earlier ones, then `a.b=c`.

    With `training`, what official files say about it is translated too, or refused.

    >>> read_config("lm/150m", overrides=["model.layers=2"]).model.layers
    2
    """
    raws = {name: native.read(name) for name in names}
    if not any(map(official_config.is_official, raws.values())):
        return native.load(*names, overrides=overrides)
    ours, notes = official_config.translate_all(raws, training)
    if os.environ.get("RANK", "0") == "0":
        print(*notes, sep="\n", file=sys.stderr)
    return native.build(native.Config, native.override(ours, overrides))
