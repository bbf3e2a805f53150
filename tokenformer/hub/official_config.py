"""Translates official YAML (a GPT-NeoX dialect) to our keys, and refuses what would make it another model.

Unusual: `-` and `_` mean the same there, several files merge, and a key that nobody knows is refused by its name. All
keys that are known stand in official_keys.json.
"""

import dataclasses
import difflib
from pathlib import Path
from typing import NamedTuple

from tokenformer import config as native
from tokenformer.errors import UserError
from tokenformer.hub.official_recipe import KEYS, recipe

MODEL: dict[str, str] = KEYS["model"]  # official key → ours
REQUIRED = tuple(MODEL)[:6]
FIXED: dict = KEYS["fixed"]  # keys that change the function, and the one value that a released TokenFormer has
GENERATION = set(KEYS["generation"])  # the last two are ours
IRRELEVANT = set(KEYS["irrelevant"])  # how to train, log or launch: they change nothing about the model
KNOWN = {*MODEL, *FIXED, *GENERATION, *IRRELEVANT, "attention_config"}
SECTIONS = {field.name for field in dataclasses.fields(native.Config)}


def is_official(raw: dict) -> bool:
    """Tell whether a mapping is official: its keys are flat, without our sections (`seed` is in both)."""
    return "model" not in raw and any(_plain(name) in KNOWN and name not in SECTIONS for name in raw)


def _plain(name: object) -> str:
    return str(name).replace("-", "_")


def _read_plain(name: str | Path) -> dict:
    return {_plain(key): value for key, value in native.read(name).items()}


def translate(raw: dict, where: str) -> tuple[dict, str]:
    """Return our raw mapping, and a line about what was ignored."""
    raw = {_plain(name): value for name, value in raw.items()}
    if not any(name in raw for name in REQUIRED):
        what = "generation settings" if GENERATION & set(raw) else "settings"
        raise UserError(f"{where} has {what} but no model: give a model config beside it, such as 150M_eval.yml")
    _refuse_unknown(raw, where)
    for name, value in raw.items():
        if name in FIXED and value != FIXED[name]:
            raise UserError(f"{where}: {name} is {value!r}, but only {FIXED[name]!r} is a TokenFormer as released")
    for name in REQUIRED:
        if name not in raw:
            raise UserError(f"{where}: the official key '{name}' is missing: add it, or the config file that has it")
    _check_attention(raw, where)
    if raw.get("norm_activation_type") == "l1_norm_gelu":
        raise UserError(f"{where}: norm_activation_type l1_norm_gelu does not exist officially: write a config of ours")
    model = {"kind": "tokenformer", **{ours: raw[name] for name, ours in MODEL.items() if name in raw}}
    ignored = sorted(set(raw) & IRRELEVANT)
    return {"model": model}, f"{where}: {len(ignored)} official keys that do not change the model were ignored"


def _refuse_unknown(raw: dict, where: str) -> None:
    for name in raw:
        if name not in KNOWN:
            close = difflib.get_close_matches(name, sorted(KNOWN), n=1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            raise UserError(
                f"{where}: the official key '{name}' is not one that we know{hint}, and it may change the model or "
                "its texts: remove it if it does not"
            )


def _check_attention(raw: dict, where: str) -> None:
    """Refuse layers that are no TokenFormer: `[[["tokenformer"], 12]]` or `["tokenformer", …]` is expected."""
    names, stack = set(), [raw.get("attention_config", ["tokenformer"])]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, str):
            names.add(item)
    if names != {"tokenformer"}:
        found = ", ".join(sorted(names)) or "nothing"
        raise UserError(f"{where}: attention_config names {found}, not tokenformer alone")


def translate_all(raws: dict, training: bool) -> tuple[dict, list[str]]:
    """Return our raw mapping from files, ours or official, later ones laid over earlier ones, and notes for the user.

    With `training`, what official files say about training is translated too, or refused.
    """
    ours: dict = {}
    official: dict = {}
    sources = []
    for name, raw in raws.items():
        if is_official(raw) or not SECTIONS & raw.keys():
            official.update({_plain(key): value for key, value in raw.items()})
            sources.append(Path(name).name)
        else:
            ours = native.merge(ours, raw)
    where = " + ".join(sources)
    translated, note = translate(official, where)
    if not training:
        return native.merge(translated, ours), [note]
    sections, notes = recipe(official, where)
    return native.merge(translated | sections, ours), notes


def launch_of(*names: str | Path) -> tuple[int | None, int | None]:
    """Return the nodes, and the GPUs per node, that official files ask for (`num_nodes`, `num_gpus`)."""
    raw = {key: value for name in names for key, value in _read_plain(name).items()}
    return raw.get("num_nodes"), raw.get("num_gpus")


class Generation(NamedTuple):
    """What official files say about generation: its settings, the paths of weights and tokenizer, whether a model."""

    settings: dict
    weights: str | None
    vocab_file: str | None
    has_model: bool


def read_generation(*names: str | Path) -> Generation:
    """Read official files, later ones laid over earlier ones; `eval_ckpt` is preferred to `load`."""
    raw: dict = {}
    for name in names:
        read = _read_plain(name)
        if not SECTIONS & read.keys() - KNOWN:  # not a config of ours
            _refuse_unknown(read, Path(name).name)
        raw.update(read)
    settings = {name: value for name, value in raw.items() if name in GENERATION}
    return Generation(
        settings,
        raw.get("eval_ckpt") or raw.get("load"),
        raw.get("vocab_file"),
        any(name in raw for name in (*REQUIRED, "model")),
    )


def to_official(config: native.ModelConfig) -> dict:
    """Return the official keys of a model that the official format can hold."""
    keys = {name: getattr(config, ours) for name, ours in MODEL.items()}
    fixed = {name: FIXED[name] for name in tuple(FIXED)[:5]}
    return {**keys, "max_position_embeddings": config.context, "hidden_dropout": 0, "attention_dropout": 0,
            **fixed, "use_bias_in_attn_linear": False, "attention_config": [[["tokenformer"], config.layers]],
            "init_method": "normal", "output_layer_init_method": "wang_init"}  # fmt: skip
