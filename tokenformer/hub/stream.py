"""Our folder, one tensor at a time: what growing and converting a model larger than memory needs.

Unusual: every read opens the file anew, so that pages of the last tensor leave memory with it; the writer knows all
shapes before it has any tensor, which is all that the header of a safetensors file asks for.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokenformer import config as native
from tokenformer.config import ModelConfig, ModelFile
from tokenformer.errors import UserError
from tokenformer.files import atomic_folder, check_manifest
from tokenformer.hub.fill import check_names
from tokenformer.models import build

SHARD = 5 * 10**9  # bytes
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Stored(Mapping[str, Tensor]):
    """The tensors of a folder by name, read when they are asked for, each checked then."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        check_manifest(self.folder)
        self.config = native.load(self.folder / "config.yml").model
        history = self.folder / "history.json"
        self.history: list[dict] = json.loads(history.read_text(encoding="utf-8")) if history.is_file() else []
        with torch.device("meta"):
            model = build(self.config)
        self.ends = model.ends
        expected = {name: p.shape for name, p in model.named_parameters()}
        self.files: dict[str, Path] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for path in sorted(self.folder.glob("model*.safetensors")):
            for name, (shape, dtype) in _header(path).items():
                if name in expected and shape != list(expected[name]):
                    raise UserError(f"{path}: '{name}' has shape {shape}, but the config says {list(expected[name])}")
                self.files[name], self.dtypes[name] = path, dtype
        check_names(expected, self.files, str(folder))

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.isfinite().all():
            raise UserError(f"{self.folder}: '{name}' holds values that are not finite: get other weights")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def _header(path: Path) -> dict[str, tuple[list[int], torch.dtype]]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: (part.get_shape(), DTYPES[part.get_dtype()]) for name, part in slices.items()}
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(f"{path} is not a whole file of floating point tensors ({error}): get it anew") from None


def write_stream(
    folder: str | Path,
    config: ModelConfig,
    history: list[dict],
    tensors: Iterable[tuple[str, Tensor]],
    dtypes: Mapping[str, torch.dtype],
    tokenizer_json: str | None = None,
    shard_bytes: int = SHARD,
) -> None:
    """A folder as `save` makes it, from tensors that come one by one, in the order and types of `dtypes`."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in build(config).named_parameters()}
    check_names(shapes, dict(dtypes), "what is to be written")
    shards: list[dict[str, int]] = [{}]
    for name, dtype in dtypes.items():
        size = shapes[name].numel() * dtype.itemsize
        if shards[-1] and sum(shards[-1].values()) + size > shard_bytes:
            shards.append({})
        shards[-1][name] = size
    coming = iter(tensors)
    with atomic_folder(folder) as beside:
        (beside / "config.yml").write_text(native.to_yaml(ModelFile(config)), encoding="utf-8")
        (beside / "history.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
        if tokenizer_json is not None:
            (beside / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        for i, shard in enumerate(shards):
            name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            _write(beside / name, shard, shapes, dtypes, coming)


def _write(
    path: Path,
    shard: dict[str, int],
    shapes: Mapping[str, torch.Size],
    dtypes: Mapping[str, torch.dtype],
    coming: Iterator[tuple[str, Tensor]],
) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, size in shard.items():
        offsets = [start, start + size]
        header[name] = {"dtype": names[dtypes[name]], "shape": list(shapes[name]), "data_offsets": offsets}
        start += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shard:
            came, tensor = next(coming)
            if (came, tensor.shape, tensor.dtype) != (name, shapes[name], dtypes[name]):
                raise RuntimeError(f"'{came}' {tuple(tensor.shape)} came where '{name}' {tuple(shapes[name])} was due")
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
            del tensor
