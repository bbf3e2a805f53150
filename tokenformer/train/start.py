"""The first values of a run's parameters: the initialisation, or other weights."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer.config import OF_TOKENS, Config, ModelConfig
from tokenformer.config_model import unlike
from tokenformer.data.images.stored import alike
from tokenformer.errors import UserError
from tokenformer.growth.shape import table, with_table
from tokenformer.models import build as build_model
from tokenformer.models.caption import SWITCH
from tokenformer.models.image import fit_tensors
from tokenformer.models.init import initial
from tokenformer.models.names import parse
from tokenformer.parallel.parallelize import Build, Values
from tokenformer.parsing import shown
from tokenformer.strict import need


def first_values(config: Config, build: Build, files: dict[str, str]) -> tuple[Values, list[dict], list[str]]:
    """Return a function from a whole parameter's name and shape to its first values, the growths behind them, and a
    sentence about where they come from.

    Parameter tokens of a smaller model (`start`) fill the first rows, the rest keeps its initial values and τ follows
    the new number: the official `pretrain_partial_init`, which does not compute the same as the smaller model. `files`
    belong to the task's data, whose tokenizer must be that of `start`. A model that reads images may begin with a
    language model, which may draw, and of which nothing may differ but more segments for images behind its own.
    """
    from tokenformer.hub.dcp import read_tensors
    from tokenformer.hub.open import Opened, locate, open_model
    from tokenformer.hub.sidecars import read_history

    model_config, start = config.model.resolved(), config.start
    with torch.device("meta"):
        model = build(model_config)
    mine, given, history, said, prefix = dict(model.named_parameters()), {}, [], [], ""
    if start:
        try:
            opened = open_model(start)
            opened.check_tokenizer(files.get("tokenizer.json"))
            said = [f"a new run begins with the weights of {opened.located.path}"]
            if "tokenizer.json" in files and opened.tokenizer_json is None:
                said.append("no tokenizer lies beside these weights: the data must be prepared with their own")
            if model_config.of == "caption" and opened.config.of == "language":
                prefix = check_language(opened.config, model_config.trunks["text"], start)
            elif opened.located.kind != "official":  # these are language models
                opened.need(model_config.of)
            said += [] if prefix else _differences(config, opened, files)
            if opened.run:
                newest = Opened(start, locate(start, values=False))  # whose config `train RUN` took
                if newest.config != opened.config:
                    before = f"the whole one before it has another model: give that one, {opened.located.path.parent}"
                    raise UserError(f"the checkpoint {newest.located.path.parent} is damaged, and {before}")
            if (
                opened.located.kind == "checkpoint" and build is not build_model and not prefix
            ):  # the package cannot make this model
                given, history = read_tensors(opened.located.path), read_history(opened.located.path)
            else:
                given = {f"{prefix}{name}": tensor.detach() for name, tensor in opened.model.named_parameters()}
                history = opened.model.history
            if model_config.of == opened.config.of == "image":
                given = fit_tensors(given, opened.config, model_config)
        except UserError as error:
            raise UserError(f"start: {error}") from None
    for name, tensor in given.items():
        own = mine.get(name)
        fits = own is not None and own.shape == tensor.shape
        if own is not None and parse(name, model.ends).token:  # the rows of a smaller model are the first ones
            fits = own.shape[1:] == tensor.shape[1:] and len(own) >= len(tensor)
        if not fits:
            raise UserError(
                f"start: {name} of {start} is {list(tensor.shape)}, which does not fit into this model's "
                f"{'missing one' if own is None else list(own.shape)}: only the number of parameter tokens may differ"
            )
    if absent := [name for name in mine if given and not prefix and name not in given]:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        said.append(f"parameters that {start} does not give begin as in a new model: {absent[0]}{others}")

    def values(name: str, shape: tuple[int, ...]) -> Tensor:
        made, own = initial(name, shape, model_config, config.seed, model.ends), parse(name, model.ends)
        if prefix and own.trunk == prefix and own.role.kind == "value":  # new segments do nothing yet
            made.zero_()
        if name in given:
            made[tuple(slice(n) for n in given[name].shape)] = given[name]
        return made

    return values, history, said


def inherit_files(task: Any, checkpoint: Path | None, config: Config) -> None:
    """Let a task keep what lies beside the weights that a run goes on with, or begins with."""
    from tokenformer.hub.open import locate

    path = checkpoint and checkpoint / "model"
    if path is None and config.start and config.adapter is None:
        path = locate(config.start, values=False).path
    if path is not None:
        task.inherit(path if path.is_dir() else path.parent)


def _differences(config: Config, opened: Any, files: dict[str, str]) -> list[str]:
    """Return sentences about what the weights cannot show: they are of a model, or of pixels, that differ from here.

    Where rows are added, τ follows their number, as documented.
    """
    mine, theirs, start = config.model.resolved(), opened.config.resolved(), config.start
    sizes = [[getattr(c, key) for c in (*m.trunks.values(), m) for key in OF_TOKENS[:3]] for m in (mine, theirs)]
    skipped = ("tau", "switch", "layer_overrides") if sizes[0] != sizes[1] else ()
    said = [
        f"model.{name} is {here}, but {there} in {start}: the same weights compute something else"
        for name, here, there in unlike(mine, theirs)
        if name.rpartition(".")[2] not in skipped
    ]
    if "images.json" in files:
        now = json.loads(files["images.json"])
        for name in ("mean", "std"):
            if (before := opened.images.get(name, now[name])) != now[name]:
                said.append(f"data.images.{name} is {now[name]}, but {before} in {start}")
        names = [[alike(str(name)) for name in about.get("classes") or []] for about in (opened.images, now)]
        numbers = any(all(name.isdecimal() for name in of) for of in names)  # of tars, which have no names
        if mine.classes == theirs.classes and names[0] != names[1] and not numbers:
            called = f"whose classes were called {shown(names[0])}, not {shown(names[1])}"
            said.append(f"the head is that of {start}, {called}")
    return said


def check_language(own: ModelConfig, text: ModelConfig, start: str) -> str:
    """Refuse a language model that is not the first segments of the trunk `text`, before those for images; return the
    prefix there.
    """
    bare, own = text, own.resolved()
    if text.kind == "tokenformer":
        images = {which: [[s for s in layer if s[2] != SWITCH] for layer in of] for which, of in table(text).items()}
        bare = with_table(text, images)
        for which, layers in table(text).items():
            for layer, kept in zip(layers, images[which], strict=True):
                need(
                    layer[: len(kept)] == kept,
                    f"model.trunks.text.switch.{which} has a segment before others that are not for images: put those "
                    f"with `switch: {SWITCH}` last, so that the others have the places that they have in {start}",
                )
        own = with_table(own, table(own)) if own.kind == "tokenformer" else own  # one way of writing each shape
    bare = dataclasses.replace(bare, **{name: getattr(own, name) for name in ("context", "init")})
    for field in dataclasses.fields(own):
        mine, theirs = getattr(bare, field.name), getattr(own, field.name)
        if mine != theirs:
            raise UserError(
                f"model.trunks.text is not the model of {start}: {field.name} is {mine} without segments for "
                f"images, and {theirs} there: write what is there, and new segments with `switch: {SWITCH}`"
            )
    return "text."
