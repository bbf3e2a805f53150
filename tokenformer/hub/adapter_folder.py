"""Reads and writes an adapter: adapter.yml (its base and that one's digest), adapter.safetensors, history.json; the
manifest last. A run that trains one keeps the same in the `model` folder of its checkpoints, and is read as well.

Unusual: tensors have the names that they would have if the adapter's segments came right behind the base's own.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.files import atomic_folder, check_manifest
from tokenformer.hub.fill import check_values
from tokenformer.hub.folder import Tensors, write_tensors
from tokenformer.hub.open import HubName, find_source
from tokenformer.hub.run_folder import newest_whole
from tokenformer.hub.sidecars import read_history
from tokenformer.parsing import YAML_BYTES, is_file, parse_yaml, read_text
from tokenformer.strict import build, key, need, to_yaml

ABOUT = "adapter.yml"


@dataclasses.dataclass(frozen=True)
class AdapterFile:
    """What adapter.yml holds."""

    base: str = key("the weights that it was trained on, as they were named then")
    sha256: str = key("the digest of these weights")

    def __post_init__(self) -> None:
        known = re.fullmatch("[0-9a-f]{64}", self.sha256)
        need(bool(known), f"sha256 is {self.sha256[:80]!r}, which is no digest: get the adapter anew")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter that was read: its tensors, of which base it is, and what was done to it."""

    source: str
    about: AdapterFile
    tensors: Mapping[str, Tensor]
    history: list[dict]


def read_adapter(source: str | Path, average: bool = True) -> Adapter:
    """Read an adapter from its folder, from a run that trains one (its newest checkpoint; of a run with train.ema the
    average, unless `average` is false), or from the hub.
    """
    path = find_source(source)
    if isinstance(path, HubName):
        from tokenformer.hub.download import snapshot

        path = snapshot(*path)
    if is_file(path / ABOUT):
        check_manifest(path)
        tensors: Mapping[str, Tensor] = Tensors(sorted(path.glob("adapter*.safetensors")))
    else:
        newest = newest_whole(path)
        path = newest / "model" if newest else path
        if not is_file(path / ABOUT):
            raise UserError(f"{source} holds no adapter: give the folder of one, or a run that trained one")
        from tokenformer.hub.dcp import read_tensors

        smooth = path.parent / "average"
        tensors = read_tensors(smooth if average and smooth.is_dir() else path)
    raw = parse_yaml(read_text(path / ABOUT, YAML_BYTES), str(path / ABOUT))
    try:
        about = build(AdapterFile, raw)
    except UserError as error:
        raise UserError(f"{path / ABOUT}: {error}") from None
    tensors = {name: check_values(name, tensors[name], str(source)) for name in tensors}
    need(bool(tensors), f"{source} holds an adapter without tensors: get it anew")
    return Adapter(str(source), about, tensors, read_history(path))


def write_adapter(
    folder: str | Path, about: AdapterFile, tensors: Mapping[str, Tensor], history: list[dict], force: bool = False
) -> None:
    with atomic_folder(folder, force) as beside:
        (beside / ABOUT).write_text(to_yaml(about), encoding="utf-8")
        (beside / "history.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        write_tensors(beside, tensors.items(), kinds, stem="adapter")
