"""Our folder, weights to hand on: config.yml, model*.safetensors, tokenizer.json, history.json; the manifest last."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenformer import config as native
from tokenformer.config import ModelConfig, ModelFile
from tokenformer.errors import UserError
from tokenformer.files import atomic_folder, check_manifest
from tokenformer.hub.fill import fill
from tokenformer.models import LanguageModel

SHARD = 5 * 10**9  # bytes


def save_folder(
    model: LanguageModel, folder: str | Path, tokenizer_json: str | None = None, shard_bytes: int = SHARD
) -> None:
    """Written beside and renamed: the folder is there whole or not at all."""
    with atomic_folder(folder) as beside:
        (beside / "config.yml").write_text(native.to_yaml(ModelFile(model.config)), encoding="utf-8")
        (beside / "history.json").write_text(json.dumps(model.history, indent=1) + "\n", encoding="utf-8")
        if tokenizer_json is not None:
            (beside / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        shards = list(_shards(dict(model.named_parameters()), shard_bytes))
        for i, shard in enumerate(shards):
            name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, beside / name, metadata={"format": "pt"})


def _shards(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in order, cut into files of at most `limit` bytes (one tensor at least)."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > limit:
            yield shard
            shard = {}
        shard[name] = tensor.detach().cpu().contiguous()
    yield shard


def read_config(folder: Path) -> ModelConfig:
    return native.load(folder / "config.yml").model


def load_folder(folder: Path) -> LanguageModel:
    check_manifest(folder)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors.update(read_safetensors(path))
    return _filled(folder, tensors)


def load_checkpoint(folder: Path) -> LanguageModel:
    """The `model` folder of a checkpoint that was found whole: its files hold slices, so DCP reads them."""
    from tokenformer.hub.dcp import read_tensors  # importing DCP takes a while

    return _filled(folder, read_tensors(folder))


def _filled(folder: Path, tensors: dict[str, Tensor]) -> LanguageModel:
    model = fill(read_config(folder), tensors, str(folder))
    history = folder / "history.json"
    model.history = json.loads(history.read_text(encoding="utf-8")) if history.is_file() else []
    return model


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}): get it anew") from None
