"""Training of an adapter: which weights it is trained on, what of the model learns, and the first values.

Unusual: what is frozen is decided when the model is built, so it never has gradients or optimizer state; a checkpoint
holds what learns, and the rest comes from the base, which resume knows by its digest.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenformer.adapters import digest, with_segments
from tokenformer.config import PROJECTIONS, Config, ModelConfig
from tokenformer.config_train import AdapterConfig
from tokenformer.errors import UserError
from tokenformer.growth.make import fill_rows
from tokenformer.hub.open import Opened, open_model
from tokenformer.models.init import initial
from tokenformer.models.names import parse
from tokenformer.parallel.parallelize import Build, Values
from tokenformer.strict import need


class Base(NamedTuple):
    """The frozen weights, and the model that is trained: theirs with the adapter's segments."""

    opened: Opened
    tensors: dict[str, Tensor]
    model: ModelConfig
    history: list[dict]  # of the adapter


def find_base(config: Config, adapter: AdapterConfig) -> tuple[Config, Base]:
    """Open the weights of `start`; return them, and the config with their digest. Refuse other ones than before."""
    assert config.start is not None
    opened = open_model(config.start)
    tensors = {name: parameter.detach() for name, parameter in opened.model.named_parameters()}
    found = digest(opened.config, tensors)
    if adapter.base and adapter.base != found:
        raise UserError(
            f"start: {config.start} has the digest {found[:12]}, but the adapter is trained on {adapter.base[:12]}: "
            "say by start=FOLDER where these weights are; of a run that was trained on, name the checkpoint that it "
            "was (start=RUN/checkpoints/step-…)"
        )
    need(
        config.model.resolved() == opened.config.resolved(),
        f"the model of an adapter is that of its base ({config.start}): leave the section model out",
    )
    for wanted in adapter.also:
        need(
            any(_named(name, wanted) for name in tensors),
            f"adapter.also names '{wanted}', but no parameter of {config.start} is called so or begins with it",
        )
    layers = adapter.layers or range(config.model.layers)
    sizes = {which: getattr(adapter, f"{which}_tokens") for which in PROJECTIONS}
    new = {(which, layer): [n] for which, n in sizes.items() if n for layer in layers}
    model = with_segments(config.model, new, adapter.name)
    event: dict = {"what": "adapter", "base": config.start, "sha256": found, "seed": config.seed}
    event |= {f"{which}_tokens": n for which, n in sizes.items() if n}
    if adapter.layers:
        event["layers"] = adapter.layers
    adapter = dataclasses.replace(adapter, base=found)
    return dataclasses.replace(config, adapter=adapter), Base(opened, tensors, model, [event])


def _named(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}.")


def builder(build: Build, base: Base, adapter: AdapterConfig) -> Build:
    """Return a function that builds a model whose base is frozen, and whose adapter counts in every call."""
    names = set(base.tensors)  # not the tensors: they are to leave memory

    def frozen(config: ModelConfig) -> Any:
        model = build(config)
        for name, parameter in model.named_parameters():
            if name in names and not any(_named(name, wanted) for wanted in adapter.also):
                parameter.requires_grad_(False)
                if adapter.hold == "bf16":
                    parameter.data = parameter.data.bfloat16()
        model.active = {adapter.name: 1.0} if config.switch_names() else {}
        return model

    return frozen


def first_values(base: Base, seed: int, ends: Any) -> Values:
    """Return the first values of every parameter: new keys as large as the base's, new values zero (no effect yet)."""

    def values(name: str, shape: tuple[int, ...]) -> Tensor:
        if name in base.tensors:
            return base.tensors[name]
        found = parse(name, ends)
        if found.role.kind == "value":
            return torch.zeros(shape)
        beside = (found._replace(segment=i).text for i in range(found.segment or 0))
        like = [base.tensors[text].float() for text in beside]
        first: Callable = lambda shape: initial(name, shape, base.model, seed, ends)  # noqa: E731
        return fill_rows(like, shape[0], "matched", seed, f"adapter/{name}", first)

    return values
