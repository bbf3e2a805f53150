"""What stands beside a model's tensors, in our folders and in checkpoints: config.yml, history.json and other texts.

Imports without torch, so that programs that read weights by themselves can use it.
"""

import json
from pathlib import Path
from typing import Any

from tokenformer import config as native
from tokenformer.config import ModelConfig, ModelFile
from tokenformer.errors import UserError
from tokenformer.parsing import parse_json, read_text, shown


def read_config(folder: Path) -> ModelConfig:
    return native.load(folder / "config.yml").model


def read_history(folder: Path) -> list[dict]:
    """Return the growths of the model, oldest first."""
    path = folder / "history.json"
    history = parse_json(read_text(path), str(path)) if path.exists() else []
    if not isinstance(history, list) or not all(isinstance(event, dict) for event in history):
        raise UserError(f"{path} should hold a list of growths, not {shown(history)}: get it anew")
    return history


def sidecars(
    config: ModelConfig, history: list[dict], tokenizer_json: str | None = None, images: dict[str, Any] | None = None
) -> dict[str, str]:
    """Return what stands beside a model's tensors, in our folders and in checkpoints: text by file name."""
    files = {"config.yml": native.to_yaml(ModelFile(config)), "history.json": json.dumps(history, indent=1) + "\n"}
    if images:
        files["images.json"] = json.dumps(images, indent=1) + "\n"
    return files if tokenizer_json is None else {**files, "tokenizer.json": tokenizer_json}
