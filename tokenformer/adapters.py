"""Adapters: segments of parameter tokens that were trained beside a frozen base, and are attached to it by name.

Unusual: an attached adapter is a switch. Without it the model computes the base, bit for bit; several add up, because
segments do. A base is known by its digest, so an adapter never meets another model.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokenformer.config import PROJECTION_OF, ModelConfig, to_dict
from tokenformer.errors import UserError
from tokenformer.growth.model import with_tensors
from tokenformer.growth.shape import Table, table, with_table
from tokenformer.hub.adapter_folder import Adapter, read_adapter
from tokenformer.hub.fill import empty
from tokenformer.models.layers import Pattention, Segment
from tokenformer.models.names import parse, refuse_foreign
from tokenformer.strict import need


def digest(config: ModelConfig, tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of a model: of its config, and of the names, shapes and fp32 bytes of its tensors.

    It is the same whatever kind of folder the model lies in.
    """
    config = with_table(config.resolved(), table(config))  # one way of writing each shape
    found = hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().float().cpu().contiguous()
        found.update(f"\n{name} {list(tensor.shape)}\n".encode())
        found.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def base_of(model: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the config and the tensors of a model without the adapters that are attached to it."""
    _check_kind(model)
    attached, config = getattr(model, "adapters", {}), model.config
    need(
        config.kind == "tokenformer" and not config.trunks,
        f"a model of {config.of} ({config.kind}) has no adapters: language and image models of kind tokenformer do",
    )
    rows = {w: [[s for s in own if s[2] not in attached] for own in layers] for w, layers in table(config).items()}
    config = with_table(config, rows)
    own = {name for name, _ in empty(config).named_parameters()}  # adapters come behind the base's segments
    values = getattr(model, "base_values", {})
    return config, {n: values.get(n, p.detach()) for n, p in parameters_of(model).items() if n in own}


def _check_kind(model: Any) -> None:
    known = isinstance(getattr(model, "config", None), ModelConfig)
    need(known, f"a {type(model).__name__} is no model of tokenformer: give one, of a model of transformers its .model")


def parameters_of(model: Any) -> dict[str, nn.Parameter]:
    """Return parameters by the names that they have without peft, which puts its wrappers between them and the model.

    Those that peft added have names that no model of ours has.
    """
    return {_plain(name): parameter for name, parameter in model.named_parameters()}


def _plain(name: str) -> str:
    return re.sub(r"\b(base_layer|original_module)\.", "", name)


def refuse_copied(model: Any, names: Iterable[str]) -> None:
    """Refuse parameters of which peft computes with a copy, which an adapter of ours would not reach."""
    copied = {_plain(name) for name, _ in model.named_parameters() if "original_module." in name}
    for name in names:
        need(
            name not in copied,
            f"'{name}' is an adapter's, but peft computes with a copy of it (modules_to_save): merge or take away "
            "peft's first",
        )


def _with_moves(model: Any, name: str, weights: Mapping[str, float]) -> Tensor:
    """Return a parameter of the base as it is with adapters of these weights, in the wider type."""
    moves = [(weights[a], moved[name]) for a, moved in model.adapters.items() if a in weights and name in moved]
    total = sum((weight * move for weight, move in moves), torch.zeros(())) if moves else None
    return model.base_values[name] if total is None else model.base_values[name] + total


def _changing(model: Any, weights: Mapping[str, float]) -> list[str]:
    """Return the parameters of the base that other weights than the present ones move elsewhere."""
    there = getattr(model, "adapters", {})
    others = [a for a in there if weights.get(a) != model.active.get(a)]
    return [name for name in getattr(model, "base_values", {}) if any(name in there[a] for a in others)]


@torch.no_grad()
def _check_held(model: Any, names: Iterable[str]) -> None:
    """Refuse parameters that no longer hold what `active` wrote: to replace them would undo what was done since."""
    names = list(names)
    held = parameters_of(model) if names else {}
    refuse_copied(model, names)
    for name in names:
        wanted = _with_moves(model, name, model.active)
        found = held[name].detach().to(wanted.device) if name in held else torch.zeros(0)
        # a model that was cast holds rounded values, also after a cast back
        types = (found.dtype, torch.bfloat16, torch.float16)
        adapters = ", ".join(adapter for adapter, moved in model.adapters.items() if name in moved)
        need(
            any(torch.equal(wanted.to(kind).to(found), found) for kind in types),
            f"'{name}' was changed (trained, resized or merged into) since adapter {adapters} moved it, and would be "
            "set back: keep both by tokenformer.adapters.merged(model), or load the base anew",
        )


def check_active(model: Any, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights that `active` would set. Refuse what it cannot set, before anything is changed."""
    _check_kind(model)
    checked = model.config.checked_weights(weights, getattr(model, "adapters", {}))
    names = _changing(model, checked)
    _check_held(model, names)
    held = parameters_of(model) if names else {}
    for name in names:
        fits = bool(torch.isfinite(_with_moves(model, name, checked).to(held[name].dtype)).all())
        need(fits, f"with these weights of adapters '{name}' is not finite: give smaller ones")
    return checked


def with_segments(config: ModelConfig, new: Mapping[tuple[str, int], Sequence[int]], name: str) -> ModelConfig:
    """Return the config with new segments of these sizes, by projection (qkv, proj, ffn) and layer, under a switch."""
    rows: Table = table(config)
    for (which, layer), sizes in new.items():
        rows[which][layer] = [*rows[which][layer], *((n, math.sqrt(n), name) for n in sizes)]
    return with_table(config, rows)


def sizes_of(adapter: Adapter, config: ModelConfig, ends: Any) -> dict[tuple[str, int], list[int]]:
    """Return the sizes of an adapter's segments by projection and layer. Refuse tensors that do not fit the base."""
    found: dict[tuple[str, int], dict[int, int]] = {}
    where, own = adapter.source, {n: list(p.shape) for n, p in empty(config).named_parameters()}
    for text, tensor in adapter.tensors.items():
        try:
            name = parse(text, ends)
        except ValueError:
            raise UserError(f"{where} holds '{text[:80]}', which is no part of an adapter: get it anew") from None
        if text not in own and name.segment is not None and name.layer is not None:
            fits = name.layer < config.layers and name.segment < 1000 and tensor.ndim == 2
            need(
                fits, f"{where} holds '{text[:80]}' {list(tensor.shape)}, for which its base has no place: get it anew"
            )
            found.setdefault((PROJECTION_OF[name.projection], name.layer), {})[name.segment] = len(tensor)
    sizes = {at: [size for _, size in sorted(segments.items())] for at, segments in found.items()}
    expected = {n: list(p.shape) for n, p in empty(with_segments(config, sizes, "adapter")).named_parameters()}
    shapes = {name: list(tensor.shape) for name, tensor in adapter.tensors.items()}
    for name in sorted((expected.keys() - own.keys()) | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            has = f"has shape {shapes[name]}" if name in shapes else "is missing"
            wanted = f"{expected[name]} is needed" if name in expected else "there is no place for it"
            raise UserError(f"{where}: '{name[:80]}' {has}, but {wanted}: get the adapter anew")
    return sizes


def attach(model: Any, folder: str | Path, name: str, *, average: bool = True) -> Any:
    """Attach an adapter to its base, in place, and return the model. It counts with weight 1 until `active` says else.

    All is checked before the model is touched. Give the model as it is stored: after a cast it is no longer known.
    `average`: of a run with train.ema, the average of its weights, not the last ones.
    """
    known = isinstance(name, str) and name != ""
    need(known, f"an adapter needs a name, and {str(name)[:80]!r} is none: give a word (a str)")
    need(isinstance(folder, str | Path), f"{str(folder)[:80]} is no folder of an adapter: give its path or hub name")
    config, base = base_of(model)
    taken = name in model.config.switch_names() or name in getattr(model, "adapters", {})
    need(not taken, f"the model has a switch '{name}' already: give the adapter another name")
    _check_held(model, getattr(model, "base_values", {}))  # of which the digest below says nothing
    adapter = read_adapter(folder, average)
    if digest(config, base) != adapter.about.sha256:
        raise UserError(
            f"{folder} is an adapter of {adapter.about.base[:200]} with digest {adapter.about.sha256[:12]}, and these "
            "are other weights: attach it to its own base, before that is cast to another type"
        )
    sizes = sizes_of(adapter, config, model.ends)
    new, held = [parse(text, model.ends) for text in adapter.tensors if text not in base], parameters_of(model)
    refuse_copied(model, (n if n in base else parse(n, model.ends)._replace(segment=0).text for n in adapter.tensors))
    for at in sorted((n for n in new if n.role.kind == "key"), key=lambda n: n.segment or 0):
        layer, like = model.blocks[at.layer].get_submodule(at.part), held[at._replace(segment=0).text]
        _append(layer, like, adapter.tensors[at.text], adapter.tensors[at._replace(leaf="value_tokens").text], name)
    model.config = with_segments(model.config, sizes, name)
    moved = {n: t.to(base[n].device) - base[n] for n, t in adapter.tensors.items() if n in base}  # in the wider type
    model.adapters = {**getattr(model, "adapters", {}), name: moved}
    model.base_values = {**getattr(model, "base_values", {}), **{n: base[n].clone() for n in moved}}
    active(model, {**model.active, name: 1.0})
    return model


def _append(layer: Any, like: Tensor, key: Tensor, value: Tensor, name: str) -> None:
    with torch.device("meta"):
        segment = Segment(key.shape[1], value.shape[1], len(key), math.sqrt(len(key)))
    segment.key_tokens, segment.value_tokens = (
        nn.Parameter(t.to(like, copy=True), requires_grad=like.requires_grad) for t in (key, value)
    )
    layer.segments.append(segment)
    layer.switch = (*layer.switch, name)


def split_weight(word: str) -> tuple[str, float]:
    """Split what a command line says of an adapter: FOLDER or FOLDER=WEIGHT.

    >>> split_weight("books=0.5"), split_weight("books")
    (('books', 0.5), ('books', 1.0))
    """
    source, equals, weight = word.rpartition("=")
    if not equals or Path(word).exists():
        return word, 1.0
    try:
        return source, float(weight)
    except ValueError:
        raise UserError(f"{word} is no adapter with a weight: write FOLDER or FOLDER=0.5") from None


def attach_all(model: Any, words: Sequence[str], *, average: bool = True) -> Any:
    """Attach the adapters that a command line names, each under its folder's name; return the model."""
    weights = {}
    for word in words:
        source, weight = split_weight(word)
        name = Path(source).resolve().name
        need(
            name not in getattr(model, "adapters", {}) and name not in model.config.switch_names(),
            f"the model has a switch '{name}' already, and an adapter is called as its folder: rename or copy {source}",
        )
        attach(model, source, name, average=average)
        weights[name] = weight
    active(model, {**model.active, **weights})
    return model


@torch.no_grad()
def active(model: Any, weights: Mapping[str, float]) -> None:
    """Set which adapters count, and with which weight, in calls that give no `switches`; the others do not count.

    A call may give weights of its own, one per sample: `model(ids, switches={"books": torch.tensor([1.0, 0.0])})`.
    """
    weights = check_active(model, weights)
    names = _changing(model, weights)
    held = parameters_of(model) if names else {}
    for name in names:
        held[name].copy_(_with_moves(model, name, weights))
    model.active = weights


@contextlib.contextmanager
def detached(model: Any, *names: str) -> Iterator[Any]:
    """Let the model compute without these adapters meanwhile; without names, without all of them."""
    _check_kind(model)
    model.config.check_switches(names, getattr(model, "adapters", {}))
    before = model.active
    active(model, {name: weight for name, weight in before.items() if names and name not in names})
    try:
        yield model
    finally:
        active(model, before)


def remove(model: Any, name: str) -> None:
    """Take an attached adapter out of the model, in place."""
    _check_kind(model)
    there = getattr(model, "adapters", {})
    need(name in there, f"the model has no adapter '{str(name)[:80]}': there are {', '.join(there) or 'none'}")
    active(model, {other: weight for other, weight in model.active.items() if other != name})
    for layer in model.modules():
        if isinstance(layer, Pattention) and name in layer.switch:
            kept = [pair for pair in zip(layer.segments, layer.switch, strict=True) if pair[1] != name]
            layer.segments = cast(Any, nn.ModuleList(segment for segment, _ in kept))
            layer.switch = tuple(switch for _, switch in kept)
    rows = {w: [[s for s in own if s[2] != name] for own in layers] for w, layers in table(model.config).items()}
    model.config = with_table(model.config, rows)
    model.adapters = {other: moved for other, moved in model.adapters.items() if other != name}
    moved = {text for tensors in model.adapters.values() for text in tensors}
    model.base_values = {text: value for text, value in model.base_values.items() if text in moved}


@torch.no_grad()
def merged(model: Any) -> Any:
    """Return a plain model that computes what the model does with its active adapters; the others are left out."""
    refuse_foreign(model)
    weights, rows = model.active, table(model.config)
    left_out = set(getattr(model, "adapters", {})) - set(weights)
    tensors: dict[str, Tensor] = {}
    for text, parameter in model.named_parameters():
        name, tensor = parse(text, model.ends), parameter.detach()
        if name.segment is not None and name.layer is not None:
            switches = [switch for *_, switch in rows[PROJECTION_OF[name.projection]][name.layer]]
            switch = switches[name.segment]
            if switch in left_out:
                continue
            if switch in weights and name.role.kind == "value":
                tensor = _finite(tensor * weights[switch], weights[switch], switch, text)
            before = sum(switch in left_out for switch in switches[: name.segment])
            text = name._replace(segment=name.segment - before).text
        tensors[text] = tensor.clone()
    kept = {
        which: [[(n, tau, "" if s in weights else s) for n, tau, s in own if s not in left_out] for own in layers]
        for which, layers in rows.items()
    }
    config = with_table(model.config, kept)
    if config.added_switch in weights:
        config = dataclasses.replace(config, added_switch="")
    event = {"what": "merge_adapters", "number": len(model.history), "weights": dict(weights)}
    return with_tensors(model, config, tensors, event)


def added(weighted: Sequence[tuple[Adapter, float]]) -> Adapter:
    """Return one adapter that is the weighted sum of several adapters of one base: all their segments, side by side.
    One alone with weight 1 stays as it is, with what it moves of its base and its history.
    """
    first, taken = weighted[0][0], Counter[str]()  # segments that stand at a place already
    tensors: dict[str, Tensor] = {}
    for adapter, weight in weighted:
        need(
            adapter.about.sha256 == first.about.sha256,
            f"{first.source} and {adapter.source} are adapters of two bases ({first.about.base[:200]}, "
            f"{adapter.about.base[:200]}): only those of one base can be added",
        )
        need(math.isfinite(weight), f"the weight of {adapter.source} is {weight}: give a finite number")
        if len(weighted) == 1 and weight == 1:
            return adapter
        here = Counter[str]()
        for text, tensor in adapter.tensors.items():
            name = segment_name(text)
            need(
                name is not None,
                f"{adapter.source} also moves '{text[:80]}' of its base, which a sum cannot hold: merge it instead",
            )
            place = name._replace(segment=0).text
            here[place] += 1
            scale = weight if name.role.kind == "value" else 1.0
            text = name._replace(segment=name.segment + taken[place]).text
            tensors[text] = _finite(tensor * scale, weight, adapter.source, text)
        taken += here
    history = [{"what": "add", "of": [[a.source, weight] for a, weight in weighted]}]
    return Adapter("the sum", first.about, tensors, history)


def _finite(tensor: Tensor, weight: float, adapter: str, name: str) -> Tensor:
    fits = bool(torch.isfinite(tensor).all())
    need(fits, f"with weight {weight:g} of {adapter} '{name}' is not finite: give a smaller weight")
    return tensor


def segment_name(text: str) -> Any:
    """Return the parsed name of a segment's tensor; None if it is another parameter."""
    with contextlib.suppress(ValueError):
        name = parse(text, {})
        return name if name.segment is not None else None
    return None
