"""Tensors by name → a model, with everything checked first: names, shapes, finite values. Every reader ends here."""

import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.models import LanguageModel


def fill(config: ModelConfig, tensors: dict[str, Tensor], where: str) -> LanguageModel:
    """A model that holds these tensors themselves (no copy)."""
    with torch.device("meta"):
        model = LanguageModel(config)
    expected = {name: p.shape for name, p in model.named_parameters()}
    check_names(expected, tensors, where)
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            raise UserError(
                f"{where}: '{name}' has shape {list(tensor.shape)}, but the config says {list(expected[name])}: "
                "give the config that belongs to these weights"
            )
        if not tensor.is_floating_point():
            raise UserError(f"{where}: '{name}' holds {tensor.dtype}, not floating point numbers: get the file anew")
        if not tensor.isfinite().all():
            raise UserError(f"{where}: '{name}' holds values that are not finite: these weights are broken, get others")
    model.load_state_dict(tensors, assign=True)
    return model


def check_names(expected: dict, tensors: dict, where: str) -> None:
    missing, extra = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or extra:
        wrong = [f"lacks '{min(missing)}'" + _more(missing)] if missing else []
        wrong += [f"has '{min(extra)}' too many" + _more(extra)] if extra else []
        raise UserError(f"{where} {' and '.join(wrong)}: give the config that belongs to these weights")


def _more(names: set) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
