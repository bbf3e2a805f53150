"""Makes a model of tensors, whose names, shapes and values are checked first. Every reader of weights uses it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokenformer.config import PROJECTIONS, ModelConfig
from tokenformer.errors import UserError
from tokenformer.models import LanguageModel, build


def empty(config: ModelConfig) -> LanguageModel:
    """Return the model without values, on the meta device."""
    with torch.device("meta"):
        return build(config)


def fill(config: ModelConfig, tensors: Mapping[str, Tensor], where: str) -> LanguageModel:
    """Return a model that holds these tensors themselves (no copy)."""
    check_shapes(config, getattr(tensors, "shapes", None) or {n: t.shape for n, t in tensors.items()}, where)
    held = {name: check_values(name, tensors[name], where) for name in tensors}
    model = empty(config)
    model.load_state_dict(held, assign=True)
    return model


def check_shapes(config: ModelConfig, shapes: Mapping[str, Sequence[int]], where: str) -> None:
    """Refuse tensors that are not those of the config's model, before any of their values is read."""
    with_tokens = config.kind == "tokenformer" and not config.trunks
    segments = max(len(config.segments(which)) for which in PROJECTIONS) if with_tokens else 1
    if config.layers * segments > len(shapes):  # a huge number would take minutes to build
        raise UserError(
            f"{where} holds {len(shapes):,} tensors, too few for {config.layers:,} layers: "
            "give the config that belongs to these weights"
        )
    expected = {name: list(p.shape) for name, p in empty(config).named_parameters()}
    missing, extra = expected.keys() - shapes.keys(), shapes.keys() - expected.keys()
    if missing or extra:
        wrong = [f"lacks '{min(missing)}'" + _more(missing)] if missing else []
        wrong += [f"has '{min(extra)}' too many" + _more(extra)] if extra else []
        raise UserError(f"{where} {' and '.join(wrong)}: give the config that belongs to these weights")
    for name, shape in shapes.items():
        if list(shape) != expected[name]:
            raise UserError(
                f"{where}: '{name}' has shape {list(shape)}, but the config says {expected[name]}: "
                "give the config that belongs to these weights"
            )


def check_values(name: str, tensor: Tensor, where: str) -> Tensor:
    if not tensor.is_floating_point():
        raise UserError(f"{where}: '{name}' holds {tensor.dtype}, not floating point numbers: get the file anew")
    if not tensor.isfinite().all():
        raise UserError(f"{where}: '{name}' holds values that are not finite: these weights are broken, get others")
    return tensor


def _more(names: set) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
