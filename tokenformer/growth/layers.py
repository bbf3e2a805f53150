"""Grow a user's own module, which has no config: every Pattention layer in it gets more parameter tokens."""

import copy
import math
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from tokenformer.errors import UserError
from tokenformer.growth.make import fill_rows
from tokenformer.growth.plan import RULES, Recipe, check_rule, choose_tau, grow_segments
from tokenformer.growth.shape import Segments, total
from tokenformer.models.init import draw
from tokenformer.models.layers import Pattention, Segment
from tokenformer.strict import need

Module = TypeVar("Module", bound=nn.Module)
HALVES = ("key_tokens", "value_tokens")


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a wrapper around the module that can grow, and parameters that are not whole or belong to two layers."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inside = ["module"]
    elif "_orig_mod" in dict(model.named_children()):  # what torch.compile makes
        inside = ["_orig_mod"]
    else:
        inside = [name for name, module in model.named_modules() if hasattr(module, "trunks")]
        inside = [] if "" in inside else inside  # it is a model itself
    if inside:
        raise UserError(
            f"{type(model).__name__} wraps the model that can grow, its '{inside[0]}': grow that one, then put "
            "the result in its place or wrap it again"
        )
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise UserError("the model's parameters are sharded over ranks: grow it before it is sharded")
    for name, parameter in model.named_parameters():
        need(".base_layer." not in name, f"'{name}' has an adapter of peft: merge it (merge_and_unload), then grow")
        if parameter.is_meta:
            raise UserError(
                f"'{name}' is on the meta device or offloaded, so it has no values here: load it, then grow"
            )
    refuse_shared(model)


def refuse_shared(model: nn.Module) -> None:
    """Refuse two layers with one parameter. A user's own module may use a whole layer twice, which grows once."""
    named = model.named_parameters(remove_duplicate=False)
    if not hasattr(model, "trunks"):
        segments = [(name, module) for name, module in model.named_modules() if isinstance(module, Segment)]
        named = ((f"{at}.{name}", p) for at, module in segments for name, p in module.named_parameters())
    first: dict[int, str] = {}
    for name, parameter in named:
        same = first.setdefault(id(parameter), name)
        need(same == name, f"'{name}' is also '{same}', so neither can grow: give each layer parameters of its own")


def plan_layers(
    module: nn.Module, tokens: int | Mapping[str, int], rule: str, tau: str | None
) -> dict[str, tuple[Segments, Segments]]:
    """The segments before and after of each layer that grows: all Pattention layers, or those that `tokens` names."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, Pattention)}
    need(bool(layers), f"{type(module).__name__} holds no Pattention layers: nothing in it can grow")
    targets = dict(tokens) if isinstance(tokens, Mapping) else dict.fromkeys(layers, tokens)
    tau_rule = choose_tau({"ffn": rule}, tau).get("ffn", "")
    found = {}
    for name, target in targets.items():
        need(name in layers, f"tokens names '{name}', but the Pattention layers are {', '.join(layers)}")
        need(type(target) is int and 0 < target <= 1 << 30, f"tokens of '{name}' is {target}: give a whole number")
        check_rule(rule, layers[name].theta)
        segments = zip(layers[name].segments, layers[name].switch, strict=True)
        old: Segments = [(len(s.key_tokens), s.tau, switch) for s, switch in segments]
        new = grow_segments(old, target, rule, tau_rule, f"tokens is {target}, but '{name}' has")
        if new != old:
            found[name] = old, new
    need(bool(found), f"every layer has {tokens} parameter tokens already: give more")
    return found


def recipes_of(module: nn.Module, plans: Mapping[str, tuple[Segments, Segments]], rule: str) -> dict[str, Recipe]:
    """A recipe for each parameter of the grown module."""
    found: dict[str, Recipe] = {name: Recipe(old=name) for name, _ in module.named_parameters()}
    for layer, (old, new) in plans.items():
        at = f"{layer}.segments." if layer else "segments."
        for half, fill in zip(HALVES, RULES[rule], strict=True):
            like, last = tuple(f"{at}{i}.{half}" for i in range(len(old))), f"{at}{len(new) - 1}.{half}"
            rows = total(new) - total(old)
            found[last] = Recipe(None if rule == "segment" else last, rows, fill, like)
    return found


def grow_layers(
    module: Module, plans: Mapping[str, tuple[Segments, Segments]], rule: str, seed: int, in_place: bool
) -> Module:
    """Give a copy of the module, or itself, its new tokens, whose values depend on (seed, tokens before, layer)."""
    grown = module if in_place else copy.deepcopy(module)
    for name, (old, new) in plans.items():
        layer = grown.get_submodule(name)
        assert isinstance(layer, Pattention)
        rows, last = total(new) - total(old), layer.segments[-1]
        made: list[Tensor] = []
        for half, fill in zip(HALVES, RULES[rule], strict=True):
            like, key = [getattr(s, half).detach() for s in layer.segments], f"growth from {total(old)}/{name}.{half}"
            std = 0.02 if half == "key_tokens" else 1 / math.sqrt(new[-1][0])  # as a new layer has them
            made.append(fill_rows(like, rows, fill, seed, key, lambda shape: draw(seed, key, shape) * std))  # noqa: B023
        if rule == "segment":
            with torch.device("meta"):
                last = Segment(made[0].shape[1], made[1].shape[1], rows, new[-1][1])
            layer.segments.append(last)  # pyrefly: ignore
            layer.switch = (*layer.switch, "")
        else:
            made = [torch.cat([getattr(last, half).detach(), m]) for half, m in zip(HALVES, made, strict=True)]
            last.tau = new[-1][1]
        last.key_tokens, last.value_tokens = (nn.Parameter(half) for half in made)
    return grown
