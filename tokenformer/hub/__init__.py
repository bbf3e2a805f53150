"""Weights in and out: our folders, official files, Hugging Face. `load` decides by what is there."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tokenformer.errors import UserError

if TYPE_CHECKING:
    import torch

    from tokenformer.config import ModelConfig
    from tokenformer.models import LanguageModel

FORMATS = ("ours", "hf", "official")
HUB_NAME = r"\w([\w.-]*\w)?/\w([\w.-]*\w)?"  # owner/model; ../model and ./model are paths


def locate(source: str | Path, checksums: bool = False) -> tuple[str, Path]:
    """What stands at a path, or behind a hub name: (ours | checkpoint | hf | official, where). A run is its newest

    whole checkpoint, and a checkpoint its folder `model`. With `checksums` every byte of it is checked.
    """
    from tokenformer.files import check_manifest
    from tokenformer.hub import official
    from tokenformer.hub.run_folder import newest_whole

    path = Path(source)
    if not path.exists():
        if not re.fullmatch(HUB_NAME, str(source)):
            raise UserError(f"there is nothing at {source}: give a folder, a weight file or a hub name (owner/model)")
        from tokenformer.hub.download import snapshot

        path = snapshot(str(source))
    if (path / "config.yml").is_file() and any(path.glob("model*.safetensors")):
        return "ours", path
    newest = newest_whole(path, checksums)
    path = newest or path
    if (path / "state.json").is_file() and (path / "model" / "config.yml").is_file():
        if checksums and newest is None:
            check_manifest(path)
        return "checkpoint", path / "model"
    if (path / "config.json").is_file() and '"model_type": "tokenformer"' in (path / "config.json").read_text():
        return "hf", path
    weights = official.find(path)
    if weights is None:
        raise UserError(
            f"{source} holds no weights that we know: expected a folder of ours, of Hugging Face or official"
        )
    return "official", weights


def load(
    source: str | Path,
    *,
    config: "ModelConfig | None" = None,
    device: "str | torch.device" = "cpu",
    dtype: "torch.dtype | None" = None,
) -> "LanguageModel":
    """A model from our folder, a run or checkpoint, a Hugging Face folder, official weights, or a hub name such as
    `Haiyang-W/TokenFormer-150M`. `config` is for official weights that have none beside them.
    """
    kind, path = locate(source, checksums=True)
    if kind == "official":
        from tokenformer.hub.official import load_official

        model = load_official(path, config)
    elif config is not None:
        raise UserError(f"{source} carries its own config: leave the other one out")
    elif kind == "ours":
        from tokenformer.hub.folder import load_folder

        model = load_folder(path)
    elif kind == "checkpoint":
        from tokenformer.hub.folder import load_checkpoint

        model = load_checkpoint(path)
    else:
        from tokenformer.hub.hf_folder import load_hf

        model = load_hf(path)
    return model.to(device=device, dtype=dtype)


def save(
    model: "LanguageModel", folder: str | Path, *, format: str = "ours", tokenizer_json: str | None = None
) -> None:
    """Write a model as `ours`, `hf` (loads with transformers) or `official`. Never overwrites."""
    if format == "ours":
        from tokenformer.hub.folder import save_folder as write
    elif format == "hf":
        from tokenformer.hub.hf_folder import save_hf as write
    elif format == "official":
        from tokenformer.hub.official import save_official as write
    else:
        raise UserError(f"format is '{format}', but must be one of {', '.join(FORMATS)}")
    write(model, folder, tokenizer_json=tokenizer_json)


def read_config(source: str | Path) -> "ModelConfig":
    """The model at a path or behind a hub name, without its weights where the format allows that."""
    kind, path = locate(source)
    if kind in ("ours", "checkpoint"):
        from tokenformer.hub.folder import read_config as read
    elif kind == "hf":
        from tokenformer.hub.hf_folder import read_config as read
    else:
        from tokenformer.hub.official import read_config as read
    return read(path)


def tokenizer_json(source: str | Path) -> str | None:
    """The tokenizer that stands beside the weights, if one does."""
    _, path = locate(source)
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    return file.read_text(encoding="utf-8") if file.is_file() else None
