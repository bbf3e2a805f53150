"""Reads and writes weights: our folders, official files, Hugging Face. Every verb opens them through `open.py`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenformer.errors import UserError

if TYPE_CHECKING:
    import torch

    from tokenformer.config import ModelConfig
    from tokenformer.models import ImageModel, LanguageModel

FORMATS = ("ours", "hf", "official")


def load(
    source: str | Path,
    *,
    config: "ModelConfig | None" = None,
    device: "str | torch.device" = "cpu",
    dtype: "torch.dtype | None" = None,
) -> Any:
    """Load a model from our folder, a run or checkpoint, a Hugging Face folder, official weights, or a hub name such as
    `Haiyang-W/TokenFormer-150M`. `config` is for official weights that have none beside them.
    """
    from tokenformer.hub.open import open_model

    return open_model(source, config=config).model.to(device=device, dtype=dtype)


def save(
    model: "LanguageModel | ImageModel",
    folder: str | Path,
    *,
    format: str = "ours",
    tokenizer_json: str | None = None,
    force: bool = False,
    max_shard_size: int | str | None = None,
) -> None:
    """Write a model as `ours`, `hf` (loads with transformers) or `official`. Only `force` replaces a folder.

    `tokenizer_json` is written beside it; absent: the tokenizer that lay beside the weights that were loaded.
    Weights go into files of at most `max_shard_size` bytes (such as "500MB"; 5 GB) each; `official` is one file always.
    """
    if not hasattr(type(model), "trunks"):  # a wrapper's instances may pass the attributes of the model on
        inside = [name for name, m in getattr(model, "named_modules", {}.items)() if hasattr(type(m), "trunks")]
        do = f"it wraps one: save its .{inside[0]}" if inside else "give a LanguageModel or an ImageModel"
        raise UserError(f"{type(model).__name__} is not a model of this package: {do}")
    from tokenformer.models.names import refuse_foreign

    refuse_foreign(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta or hasattr(parameter, "device_mesh"):
            why = "it is sharded over ranks, offloaded or on the meta device"
            raise UserError(f"'{name}' is not whole in memory ({why}): gather or load its values first, then save")
    own = getattr(model, "tokenizer_json", None)
    more: dict[str, Any] = {"tokenizer_json": own if tokenizer_json is None else tokenizer_json, "force": force}
    if getattr(model, "adapters", None):
        names = ", ".join(model.adapters)  # pyrefly: ignore
        raise UserError(f"adapters are attached ({names}): save tokenformer.adapters.merged(model), or the base alone")
    if format == "ours":
        from tokenformer.hub.folder import save_folder as write
    elif format == "hf":
        from tokenformer.hub.hf_folder import save_hf as write
    elif format == "official":
        from tokenformer.hub.official import save_official as write
    else:
        raise UserError(f"format is '{format}', but must be one of {', '.join(FORMATS)}")
    if max_shard_size is not None and format != "official":
        more["max_shard_size"] = _bytes(max_shard_size)
    write(cast(Any, model), folder, **more)


def _bytes(size: int | str) -> int:
    found = re.fullmatch(r"(\d+) ?([KMGT]?)B?", str(size))
    if found is None or int(found[1]) == 0:
        raise UserError(f"max_shard_size is {size}: give a number of bytes, or such as '500MB' or '5GB'")
    return int(found[1]) * 1000 ** " KMGT".index(found[2] or " ")
