"""Reads released weights (`pytorch_model.bin`, ZeRO folders of the official trainer) safely, and writes `.bin` files.

The one place where a pickle is written, since that is what the official format is.
"""

import dataclasses
import glob
import math
import re
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from tokenformer import config as native
from tokenformer.config import PROJECTIONS, ModelConfig
from tokenformer.errors import UserError
from tokenformer.files import atomic_folder
from tokenformer.hub import unpickle, zero
from tokenformer.hub.fill import fill
from tokenformer.hub.official_config import is_official, translate_all
from tokenformer.hub.official_config import to_official as official_keys
from tokenformer.models import LanguageModel

HEADS = {(12, 768): 12, (24, 1024): 16, (32, 1280): 16, (40, 1536): 16}  # of the released models, by (layers, dim)
WEIGHTS = "pytorch_model.bin"
_TOKENS = re.compile(r"sequential\.(\d+)\.(?:attention\.(query|key|value|proj)|(mlp))\.(key|value)_param_tokens")


def find(path: Path) -> Path | None:
    """Return the official weights at a path, if any: a `.bin` file, or the folder of a ZeRO checkpoint."""
    if path.is_file() and path.suffix in (".bin", ".pt", ".pth"):
        return path
    if (path / WEIGHTS).is_file():
        return path / WEIGHTS
    if zero.is_zero(path):
        return path
    for below in ("*/latest", "*/*/latest"):  # no deeper: the path may be the root of a disk
        folders = [path / Path(name).parent for name in sorted(glob.glob(below, root_dir=path))]
        if found := next(filter(zero.is_zero, folders), None):
            return found
    return None


def read_config(weights: Path) -> ModelConfig:
    return config_beside(weights, infer_shape(read_tensors(weights), weights))


def read_tensors(weights: Path) -> dict[str, Tensor]:
    tensors = zero.consolidate(weights) if weights.is_dir() else unpickle.read(weights)
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{weights} holds something else than tensors by name: it is not an official weight file")
    return tensors


def load_official(weights: Path, config: ModelConfig | None = None) -> LanguageModel:
    """Load official weights; without a config, by the one beside them or by the tensors' shapes."""
    tensors = read_tensors(weights)
    config = config or config_beside(weights, infer_shape(tensors, weights))
    ours = {to_ours(name, config.layers): tensor.clone() for name, tensor in tensors.items()}  # they share storage
    return fill(config, ours, str(weights))


def infer_shape(tensors: dict[str, Tensor], where: Path) -> dict:
    """Return what the tensors' shapes say about the model."""
    try:
        vocab, dim = tensors["sequential.0.word_embeddings.weight"].shape
        places = {"qkv": "attention.query", "proj": "attention.proj", "ffn": "mlp"}
        counts = {w: len(tensors[f"sequential.2.{place}.key_param_tokens"]) for w, place in places.items()}
    except KeyError as missing:
        raise UserError(f"{where} lacks {missing}: it is not an official TokenFormer weight file") from None
    except (ValueError, TypeError):  # another number of dimensions
        raise UserError(f"{where} has tensors of other shapes: it is not an official TokenFormer weight file") from None
    layers = sum(name.endswith(".mlp.key_param_tokens") for name in tensors)
    return {"layers": layers, "dim": dim, "vocab": vocab, **{f"{w}_tokens": n for w, n in counts.items()}}


def config_beside(weights: Path, shape: dict) -> ModelConfig:
    """Return the config in the weights' folder; where it has none, that of the released model of this shape."""
    folder = weights if weights.is_dir() else weights.parent
    for path in sorted(
        [*folder.glob("*.yml"), *folder.glob("config.json"), *folder.glob("global_step*/configs/*.yml")]
    ):
        raw = native.read(path)
        if is_official(raw) and "num_layers" in {str(k).replace("-", "_") for k in raw}:
            found = native.build(native.Config, translate_all({path: raw}, training=False)[0]).model
            return found if "padded_vocab_size" in raw else dataclasses.replace(found, vocab=shape["vocab"])
    heads = HEADS.get((shape["layers"], shape["dim"]))
    if heads is None:
        raise UserError(f"{weights} has no config beside it and is none of the released shapes: give its config file")
    return ModelConfig(heads=heads, **shape)


def refusal(config: ModelConfig) -> str | None:
    """Return why the official format cannot hold a model, or None if it can."""
    if config.of != "language" or config.kind != "tokenformer":
        return f"it is a {config.kind} of {config.of}"
    if config.added_vocab:
        return f"a growth added {config.added_vocab} ids to its vocabulary"
    if not config.tied:
        return "its output head is not tied to the embedding"
    if config.theta == "l1_norm_gelu":
        return "theta l1_norm_gelu does not exist there"
    if config.layer_overrides:
        return "its layers differ"
    if names := config.switch_names():
        return f"segments count only with the switch {', '.join(sorted(names))}"
    for which in PROJECTIONS:
        segments = config.segments(which)
        if len(segments) > 1:
            return f"its {which} projections have {len(segments)} segments, which --merge-segments makes one"
        tokens, tau = segments[0]
        if not math.isclose(tau, math.sqrt(tokens), rel_tol=1e-12):
            return f"τ of its {which} projections is {tau:g}, not √{tokens}"
    return None


def save_official(
    model: LanguageModel, folder: str | Path, tokenizer_json: str | None = None, force: bool = False
) -> None:
    """Write `pytorch_model.bin` and an official `config.yml`; refuse a model that this format cannot hold."""
    import yaml

    reason = refusal(model.config)
    if reason:
        raise UserError(f"the official format cannot hold this model: {reason}; write it --to ours or --to hf")
    named, layers = model.named_parameters(), model.config.layers
    tensors = OrderedDict((to_official(name, layers), p.detach().float().clone()) for name, p in named)
    with atomic_folder(folder, force) as beside:
        torch.save(tensors, beside / WEIGHTS)
        text = yaml.safe_dump(official_keys(model.config), sort_keys=False, default_flow_style=None)
        (beside / "config.yml").write_text(text, encoding="utf-8")
        if tokenizer_json is not None:
            (beside / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")


# Names of tensors: ours have a segment number, official ones a pipeline index


def to_ours(name: str, layers: int) -> str:
    """
    >>> to_ours("sequential.2.mlp.key_param_tokens", layers=3)
    'blocks.0.ffn.segments.0.key_tokens'
    """
    if name == "sequential.0.word_embeddings.weight":
        return "embedding.weight"
    if name in (f"sequential.{layers + 3}.norm.weight", f"sequential.{layers + 3}.norm.bias"):
        return name.split(".", 2)[2]
    match = _TOKENS.fullmatch(name)
    if not match or not 0 <= int(match[1]) - 2 < layers:
        raise UserError(f"tensor '{name}' is not one of an official TokenFormer of {layers} layers: check the config")
    projection = "ffn" if match[3] else f"attention.{match[2]}"
    return f"blocks.{int(match[1]) - 2}.{projection}.segments.0.{match[4]}_tokens"


def to_official(name: str, layers: int) -> str:
    """
    >>> to_official("blocks.0.attention.proj.segments.0.value_tokens", layers=3)
    'sequential.2.attention.proj.value_param_tokens'
    """
    if name == "embedding.weight":
        return "sequential.0.word_embeddings.weight"
    if name.startswith("norm."):
        return f"sequential.{layers + 3}.{name}"
    _, layer, *projection, _, _, tokens = name.split(".")
    where = "mlp" if projection == ["ffn"] else ".".join(projection)
    return f"sequential.{int(layer) + 2}.{where}.{tokens.removesuffix('_tokens')}_param_tokens"
