"""Reads and writes our folders and checkpoints as numpy arrays, without torch; what PyTorch reads, this writes.

Unusual: the files of a checkpoint hold slices under a tensor's full name, as PyTorch's DCP writes them from many ranks;
here they are put together by the places that their headers name, and whole tensors are written in the same form.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.files import TENSORS, atomic_folder, check_manifest
from tokenformer.hub.open import locate
from tokenformer.hub.sidecars import read_config, read_history, sidecars
from tokenformer.parsing import is_file, parse_json, read_text
from tokenformer_jax.model import check, shapes

Arrays = dict[str, np.ndarray]
FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
PLACES = "DCP_SHARDING_INFO"  # of a header: where each slice begins in the whole tensor


class Model(NamedTuple):
    """Weights, and what stands beside them."""

    params: Arrays
    config: ModelConfig
    history: list[dict]
    tokenizer_json: str | None = None


def load(source: str | Path) -> Model:
    """Read our folder, or the newest checkpoint of a run; whether PyTorch or JAX wrote it."""
    kind, path = locate(source)
    if kind not in ("ours", "checkpoint"):
        make = f"make a folder of it first, tokenformer convert --to ours {source} --out FOLDER"
        raise UserError(f"{source} holds {kind} weights, which JAX does not read: {make}")
    if kind == "ours":
        check_manifest(path)
    held = path.parent / "average"  # a run that averages its weights means these
    held = held if kind == "checkpoint" and held.is_dir() else path
    config, beside = check(read_config(path)), path / "tokenizer.json"
    params = read_tensors(held, "model*.safetensors" if kind == "ours" else "*.safetensors")
    check_params(config, params, str(held))
    return Model(params, config, read_history(path), read_text(beside) if is_file(beside) else None)


def save(model: Model, folder: str | Path, force: bool = False) -> None:
    """Write our folder, the manifest last. Only `force` replaces one.

    >>> import tempfile
    >>> from tokenformer_jax.values import initial_params
    >>> tiny = ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=8, vocab=16).resolved()
    >>> with tempfile.TemporaryDirectory() as place:
    ...     save(Model(initial_params(tiny, seed=0), tiny, []), f"{place}/tiny")
    ...     load(f"{place}/tiny").config.dim
    16
    """
    params, config = {name: np.ascontiguousarray(array) for name, array in model.params.items()}, model.config
    check_params(config, params, "what is to be written")
    with atomic_folder(folder, force) as beside:
        for name, text in sidecars(config, model.history, model.tokenizer_json).items():
            (beside / name).write_text(text, encoding="utf-8")
        save_file(params, beside / "model.safetensors", {"format": "pt"})
        digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in params.items()}
        (beside / TENSORS).write_text(json.dumps({"model.safetensors": digests}, indent=1) + "\n", encoding="utf-8")


def check_params(config: ModelConfig, params: Mapping[str, np.ndarray], where: str) -> None:
    """Refuse arrays that are not those of the config's model, and values that are not finite."""
    expected = shapes(config)
    for name in sorted(expected.keys() ^ params.keys()):
        wrong = f"lacks '{name}'" if name in expected else f"has '{name}' too many"
        raise UserError(f"{where} {wrong}: give the config that belongs to these weights")
    for name, array in params.items():
        if array.shape != expected[name]:
            own = f"shape {list(array.shape)}, but the config says {list(expected[name])}"
            raise UserError(f"{where}: '{name}' has {own}: give the config that belongs to these weights")
        if array.dtype not in FLOATS or not np.isfinite(array).all():
            raise UserError(f"{where}: '{name}' holds values that are not finite: these weights are broken, get others")


def read_tensors(folder: Path, pattern: str = "*.safetensors") -> Arrays:
    """Read all tensors of a folder's safetensors files; slices are put together."""
    parts: dict[str, list[tuple[list[int], np.ndarray]]] = {}
    for path in sorted(folder.glob(pattern)):
        try:
            with safe_open(path, framework="np") as file:
                about = (file.metadata() or {}).get(PLACES)
                places = parse_json(about, f"the header of {path}") if about else {}
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    array = file.get_tensor(name)
                    begin = places.get(name, {}).get("saved_offsets", [0] * array.ndim)
                    parts.setdefault(name, []).append((begin, array))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a whole safetensors file ({error}): get it anew") from None
    found = {name: pieces[0][1] for name, pieces in parts.items()}
    for name, pieces in parts.items():
        shape = [int(max(ends)) for ends in zip(*(np.add(begin, piece.shape) for begin, piece in pieces), strict=True)]
        if sum(piece.size for _, piece in pieces) != math.prod(shape):
            raise UserError(f"{folder}: the parts of '{name}' do not make one tensor of {shape}: get it anew")
        if len(pieces) > 1:
            found[name] = np.empty(shape, pieces[0][1].dtype)
            for begin, piece in pieces:
                found[name][tuple(slice(b, b + n) for b, n in zip(begin, piece.shape, strict=True))] = piece
    return found


def write_tensors(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write whole tensors in the form of a checkpoint, as one rank of PyTorch's would."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.require(array, requirements="C") for name, array in sorted(tensors.items())}
    places = {name: {"saved_offsets": [0] * array.ndim} for name, array in arrays.items()}
    about = {"format": "pt", PLACES: json.dumps(places), "DCP_VERSION": "1.0"}
    save_file(arrays, folder / "shard-00001-model-00001-of-00001.safetensors", about)
