"""Reads and writes weights: our folders, official files, Hugging Face. Every verb opens them through `open.py`."""

from pathlib import Path
from typing import TYPE_CHECKING

from tokenformer.errors import UserError

if TYPE_CHECKING:
    import torch

    from tokenformer.config import ModelConfig
    from tokenformer.models import LanguageModel

FORMATS = ("ours", "hf", "official")


def load(
    source: str | Path,
    *,
    config: "ModelConfig | None" = None,
    device: "str | torch.device" = "cpu",
    dtype: "torch.dtype | None" = None,
) -> "LanguageModel":
    """Load a model from our folder, a run or checkpoint, a Hugging Face folder, official weights, or a hub name such as
    `Haiyang-W/TokenFormer-150M`. `config` is for official weights that have none beside them.
    """
    from tokenformer.hub.open import open_model

    return open_model(source, config=config).model.to(device=device, dtype=dtype)


def save(
    model: "LanguageModel",
    folder: str | Path,
    *,
    format: str = "ours",
    tokenizer_json: str | None = None,
    force: bool = False,
) -> None:
    """Write a model as `ours`, `hf` (loads with transformers) or `official`. Only `force` replaces a folder."""
    if format == "ours":
        from tokenformer.hub.folder import save_folder as write
    elif format == "hf":
        from tokenformer.hub.hf_folder import save_hf as write
    elif format == "official":
        from tokenformer.hub.official import save_official as write
    else:
        raise UserError(f"format is '{format}', but must be one of {', '.join(FORMATS)}")
    write(model, folder, tokenizer_json=tokenizer_json, force=force)
