"""Gathers the fp32 weights of a DeepSpeed ZeRO-1 folder, as the official trainer and GPT-NeoX write it.

Unusual: the layout decides, not the stage a file claims; the result must round to the half weights saved beside it.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch

from tokenformer.errors import UserError
from tokenformer.hub import unpickle
from tokenformer.parsing import read_text

_FILES = "*mp_rank_*_states.pt"
_MODEL = "mp_rank_00_model_states.pt"
_SHARD = re.compile(r"((?:bf16_|fp16_)?zero_pp_rank_)(\d{1,6})(_mp_rank_00_optim_states\.pt)")
_PARTS = "single_partition_of_fp32_groups"
_ELSE = "convert it with DeepSpeed's zero_to_fp32.py and read its result instead"


def is_zero(folder: str | Path) -> bool:
    """Tell whether a folder is a DeepSpeed checkpoint: a `global_stepN` folder, or one that holds such."""
    return any(Path(folder).glob(_FILES)) or any(Path(folder).glob(f"*/{_FILES}"))


def consolidate(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return the fp32 weights by name, each in memory of its own."""
    step = _step(Path(folder))
    model, *shards = [unpickle.read(file, foreign="ignore") for file in _files(step)]
    try:
        return _join(step, model, [shard["optimizer_state_dict"] for shard in shards])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:  # files are not ours
        raise UserError(f"{step} has a layout that is not known here ({type(error).__name__}); {_ELSE}") from error


def _step(folder: Path) -> Path:
    """Return the folder that has the files: the given one, or the one that `latest` names."""
    if any(folder.glob(_FILES)):
        return folder
    found = ", ".join(sorted({file.parent.name for file in folder.glob(f"*/{_FILES}")})) or "none"
    if not (folder / "latest").is_file():
        raise UserError(f"{folder} has no file 'latest'; give the folder of one step instead (found: {found})")
    tag = read_text(folder / "latest", 1000).strip()
    if tag != Path(tag).name or not any((folder / tag).glob(_FILES)):
        raise UserError(f"{folder} has no step {tag[:99]!r}, which its 'latest' names; give one (found: {found})")
    return folder / tag


def _files(step: Path) -> list[Path]:
    """Return the model file, then the optimizer files by rank."""
    names = sorted(file.name for file in step.glob(_FILES))
    for name in names:
        if "mp_rank_00" not in name:
            raise UserError(f"{step / name} is of model parallelism, which is not read here; {_ELSE}")
        if "zero" in name and "model_states" in name:
            raise UserError(f"{step / name} is of ZeRO stage 3, which is not read here; {_ELSE}")
    found = {int(match[2]): match for name in names if (match := _SHARD.fullmatch(name))}
    if len(found) != sum("optim_states" in name for name in names):
        raise UserError(f"{step} has shards of two precisions or unknown names; keep only those of one save")
    prefix, suffix = found[max(found)].group(1, 3) if found else ("zero_pp_rank_", "_mp_rank_00_optim_states.pt")
    files = [step / _MODEL, *(step / f"{prefix}{rank}{suffix}" for rank in range(max(found, default=0) + 1))]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing; copy the whole checkpoint")
    return files


def _join(step: Path, model: dict[str, Any], shards: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Cut the weights out of each group's flat vector, of which every rank holds a part."""
    if any(_PARTS not in shard for shard in shards) or "param_shapes" not in model:
        raise UserError(f"{step} lacks {_PARTS} or param_shapes, so it is not of ZeRO stage 1; {_ELSE}")
    counts = shards[0].get("partition_count", len(shards))
    if (count := max(counts) if isinstance(counts, list) else counts) != len(shards):
        raise UserError(f"{step} has {len(shards)} optimizer shards, not zero_pp_rank_0 to {count - 1}; copy those")
    groups = [model["param_shapes"]] if isinstance(model["param_shapes"], dict) else model["param_shapes"]
    if any(len(shard[_PARTS]) != len(groups) for shard in shards):
        raise UserError(f"{step} has shards with other parameter groups than {_MODEL}; copy the checkpoint again")
    weights: dict[str, torch.Tensor] = {}
    for index, shapes in enumerate(groups):
        parts = [shard[_PARTS][index].float() for shard in shards]
        gaps = (shards[0].get("param_alignment_paddings") or [[0] * len(shapes) for _ in groups])[index]
        start, total = 0, sum(part.numel() for part in parts)
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            end = start + math.prod(shape)
            if end > total:
                raise UserError(f"{step} has too few values for {name} of shape {tuple(shape)}; copy it again")
            weights[name] = _slice(parts, start, end).reshape(tuple(shape))
            start = end + gap
        # DeepSpeed's bf16 class saves the padding of the last ranks, its fp16 one does not; both say how much there is.
        padding = sum(shard["group_paddings"][index] if "group_paddings" in shard else 2 for shard in shards)
        if total - start > padding or _slice(parts, start, total).any():
            raise UserError(f"{step} has {total - start} values beyond those of {_MODEL}; copy the checkpoint again")
    for name, half in (model.get("module") or {}).items():
        if name not in weights:  # a buffer or a frozen weight; a tied one has the value of its twin
            twin = str((model.get("shared_params") or {}).get(name))
            weights[name] = weights.get(twin, half).to(torch.float32, copy=True)
        elif not torch.equal(weights[name].to(half.dtype), half):  # also tells files of different steps
            raise UserError(f"{step} has an fp32 {name} that differs from that of {_MODEL}; copy the checkpoint again")
    return weights


def _slice(parts: list[torch.Tensor], start: int, end: int) -> torch.Tensor:
    """Return a copy of [start, end) of what the parts would be concatenated."""
    pieces = []
    for part in parts:
        pieces.append(part[max(start, 0) : max(end, 0)])
        start, end = start - part.numel(), end - part.numel()
    return torch.cat(pieces)
