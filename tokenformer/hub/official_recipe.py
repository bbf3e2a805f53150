"""Translates what official YAML says about training to our keys: batch, optimizer, schedule, precision, ZeRO, data.

Unusual: `gradient_clipping` is silently off in the official trainer and works here; what cannot be followed is refused.
"""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from tokenformer.errors import UserError
from tokenformer.parsing import shown

KEYS = json.loads(Path(__file__).with_name("official_keys.json").read_text(encoding="utf-8"))
PLAIN: dict[str, str] = KEYS["training"]  # official key → the key of ours that takes its value as it is
ALONE = {"pipe_parallel_size": (0, 1), "model_parallel_size": (0, 1), "train_data_paths": (None,),
         "checkpoint_scale": ("linear",), "lr_decay_fraction": (None,)}  # fmt: skip

# what is computed with here must be of its kind; the rest is checked where our config is built
KINDS = {"a section": (dict, ["optimizer", "optimizer.params", "zero_optimization", "fp16", "bf16"]),
         "text": (str, ["save", "load", "precision", "lr_decay_style"]),
         "a number": (int | float, ["min_lr", "gradient_clipping", "optimizer.params.lr", "fp16.loss_scale",
                                    "fp16.initial_scale_power", "fp16.min_loss_scale"])}  # fmt: skip


def recipe(raw: dict, where: str) -> tuple[dict, list[str]]:
    """Return our sections from official keys (with `_`), and notes for the user."""
    flat: dict[str, Any] = {"accumulation": 1, "data.order": "official", "optimizer.kind": "adamw"}
    flat |= {ours: raw[name] for name, ours in PLAIN.items() if raw.get(name) is not None}
    notes: list[str] = []

    def refuse(holds: bool, what: str) -> None:
        if not holds:
            raise UserError(f"{where}: {what}: write a config of ours for it")

    _check_kinds(raw, refuse)
    for name, values in ALONE.items():
        refuse(raw.get(name, values[0]) in values, f"{name} is {raw.get(name)!r}, which is not followed here")
    if "train_batch_size" in raw:
        del flat["accumulation"]
    rate = _optimizer(raw, flat, refuse)
    _schedule(raw, flat, rate, refuse)
    _precision(raw, flat, refuse)
    stage = (raw.get("zero_optimization") or {}).get("stage", 0)
    refuse(stage in (0, 1, 2, 3), f"zero_optimization.stage is {stage!r}, not 0 to 3")
    flat |= {"parallel.shard": -1 if stage else 1, "parallel.reshard_after_forward": stage == 3}
    flat["train.activation_checkpointing"] = "full" if raw.get("checkpoint_activations") else "none"
    if "split" in raw:
        shares = str(raw["split"]).split(",")
        refuse(all(re.fullmatch(r"\s*\d+\.?\d*\s*", share) for share in shares), f"split is {shown(raw['split'])}")
        flat["data.split"] = [float(share) for share in shares]
    if raw.get("save"):
        flat["out"] = str(_run_of(raw["save"]))
    if raw.get("load") and _run_of(raw["load"]) != _run_of(raw.get("save") or ""):
        flat["start"] = raw["load"]
    if raw.get("use_wandb"):
        flat["log.wandb"] = "online"
    if raw.get("tensorboard_dir"):
        flat["log.tensorboard"] = importlib.util.find_spec("tensorboard") is not None
        if not flat["log.tensorboard"]:
            notes.append("tensorboard_dir: TensorBoard is not installed (pip install 'tokenformer[log]'), so only "
                         "metrics.jsonl is written")  # fmt: skip
    if raw.get("launcher") == "slurm" and raw.get("deepspeed_slurm"):
        notes.append("launcher slurm: `tokenformer slurm` with the same files writes that job and submits it")
    if flat.get("train.clip"):
        notes.append(f"gradients are clipped at {flat['train.clip']:g}; the official trainer drops this setting")
    if flat.get("start"):
        notes.append(f"begins with the weights of {flat['start']}, and with fresh optimizer state")
    return _nested(flat), [f"{where}: {note}" for note in notes]


def _check_kinds(raw: dict, refuse: Callable[[bool, str], None]) -> None:
    for words, (kind, names) in KINDS.items():
        for name in names:
            value: Any = raw
            for part in name.split("."):
                value = (value or {}).get(part)
            refuse(value is None or isinstance(value, kind), f"{name} is {shown(value)}, not {words}")


def _optimizer(raw: dict, flat: dict, refuse: Callable[[bool, str], None]) -> float:
    optimizer = raw.get("optimizer") or {}
    kind, params = str(optimizer.get("type", "Adam")), optimizer.get("params") or {}
    refuse(kind.lower() in ("adam", "adamw"), f"optimizer.type is {kind!r}, not Adam")
    rate = float(0.001 if params.get("lr") is None else params["lr"])
    refuse(rate > 0, f"optimizer.params.lr is {rate}, not above 0")
    flat |= {"optimizer.rate": rate}
    flat |= {f"optimizer.{name}": params[name] for name in ("betas", "eps") if name in params}
    return rate


def _schedule(raw: dict, flat: dict, rate: float, refuse: Callable[[bool, str], None]) -> None:
    style, floor = raw.get("lr_decay_style", "linear"), float(raw.get("min_lr") or 0)
    refuse(style in ("cosine", "linear", "constant"), f"lr_decay_style is {style!r}, not cosine, linear or constant")
    refuse(style != "linear" or floor == 0, "lr_decay_style linear is cut off at min_lr there, and ends in it here")
    flat |= {"schedule.kind": style, "schedule.floor": floor / rate}


def _precision(raw: dict, flat: dict, refuse: Callable[[bool, str], None]) -> None:
    half, brain = raw.get("fp16") or {}, raw.get("bf16") or {}
    named = {"fp16": "fp16", "bfloat16": "bf16", "fp32": "fp32", None: None}.get(raw.get("precision"), "unknown")
    refuse(named != "unknown", f"precision is {raw.get('precision')!r}, not fp16, bfloat16 or fp32")
    is_half = bool(half.get("enabled") or half.get("fp16"))
    precision = flat["train.precision"] = named or ("fp16" if is_half else "bf16" if brain.get("enabled") else "fp32")
    if precision == "fp16":
        fixed = float(half.get("loss_scale") or 0)  # 0: dynamic
        power = half.get("initial_scale_power", 32)
        refuse(power is not None and abs(power) <= 64, f"fp16.initial_scale_power is {shown(power)}, not up to 64")
        scale = fixed or 2.0**power
        flat |= {"train.loss_scale": scale, "train.loss_scale_min": fixed or float(half.get("min_loss_scale", 1))}
        flat["train.loss_scale_window"] = 10**12 if fixed else half.get("loss_scale_window", 1000)
        flat["train.loss_scale_hysteresis"] = half.get("hysteresis", 2)


def _run_of(path: str) -> PurePosixPath:
    """Return the run folder of the folder of checkpoints that the official `save` names.

    >>> str(_run_of("./work_dirs/150M/checkpoints"))
    'work_dirs/150M'
    """
    folder = PurePosixPath(path)
    return folder.parent if folder.name == "checkpoints" else folder


def _nested(flat: dict[str, Any]) -> dict:
    tree: dict = {}
    for path, value in flat.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree
