"""The certificate of a growth: how far logits and loss moved on samples, by which rule, and which tokens can learn.

Unusual: the model is not trained. Two steps are tried on copies of the new parameters alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from tokenformer.growth.plan import Plan
from tokenformer.models import LanguageModel
from tokenformer.models.caption import SWITCH as IMAGE
from tokenformer.models.names import parse


@dataclass(frozen=True)
class Alive:
    """How many of the new rows (keys and values apart) have a gradient at the first step, and within two."""

    rows: int
    at_once: int
    within_two: int


@dataclass(frozen=True)
class Certificate:
    exact: bool  # the rule promises that nothing changes but rounding
    logit_absolute: float  # largest change of a logit
    logit_relative: float  # the same over the largest logit
    loss_before: float
    loss_after: float
    rule: dict[str, str]
    gradient: dict[str, Alive]  # such as `ffn: key tokens` → how many learn
    same: bool  # logits differ by rounding at most


def verify(old: LanguageModel, new: LanguageModel, ids: Tensor, plan: Plan) -> Certificate:
    """Run both on ids (B, T) or pixels (B, C, H, W) and compare; then see which new tokens learn within two steps.

    What is called logits here are the features of a pair's images or texts.
    """
    absolute, largest = change(old, new, ids)
    relative = absolute / max(largest, 1e-30)
    coarsest = max(torch.finfo(parameter.dtype).eps for parameter in new.parameters())
    return Certificate(
        exact=plan.exact,
        logit_absolute=absolute,
        logit_relative=relative,
        loss_before=loss(old, ids),
        loss_after=loss(new, ids),
        rule=plan.event["rule"],
        # a few rows show which tokens learn, at little memory
        gradient=gradient(new, _with_new_ids(ids[:1, :129], old, new) if _reads_text(new, ids) else ids[:1], plan),
        same=relative <= min(0.05, 1000 * coarsest),
    )


@torch.no_grad()
def change(old: LanguageModel, new: LanguageModel, ids: Tensor) -> tuple[float, float]:
    """Largest change of a logit, and the largest logit; one sample at a time, so that few logits are held."""
    moved, largest = 0.0, 0.0
    for row in ids:
        before, after = (_logits(model, {}, row[None]) for model in (old, new))
        after = after[..., : before.shape[-1]]  # new ids were not there before
        moved, largest = max(moved, (after - before).abs().max().item()), max(largest, before.abs().max().item())
    return moved, largest


def _logits(model: Any, parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
    """With some other parameters."""
    if model.config.of == "pair":
        pixels, texts = (ids, None) if ids.is_floating_point() else (None, ids)
        image, text = functional_call(model, parameters, (pixels, texts))
        logits = text if image is None else image
    elif model.config.of == "caption" and ids.is_floating_point():
        nothing = torch.zeros(len(ids), 1, dtype=torch.long, device=ids.device)
        logits = functional_call(model, parameters, (nothing, ids)).logits[:, 0]
    else:
        found = functional_call(model, parameters, (ids,))
        logits = found if model.config.of == "image" else found.logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def loss(model: LanguageModel, ids: Tensor) -> float:
    """Nats per token, each predicted from those before it."""
    return sum(_mean_loss(model, {}, row[None]).item() for row in ids) / len(ids)


def _mean_loss(model: Any, parameters: dict[str, Tensor], ids: Tensor, switch: str = "") -> Tensor:
    """With some other parameters, and a switch on.

    What an image shows is not known here: it stands for the first class.
    """
    if model.config.of == "caption" and _reads_text(model, ids) and switch in ("", IMAGE):
        image = model.config.trunks["image"]
        sides = [side * image.patch for side in image.grid]
        pixels = torch.zeros(len(ids), image.channels, *sides, device=ids.device) if switch else None
        output = functional_call(model, parameters, (ids[:, :-1], pixels), {"labels": ids[:, 1:]})
        return output.loss_sum / output.count
    if not _reads_text(model, ids):
        logits = _logits(model, parameters, ids)
        return F.cross_entropy(logits, logits.new_zeros(len(ids), dtype=torch.long))
    switches = {switch: torch.ones(len(ids), device=ids.device)} if switch else None
    output = functional_call(model, parameters, (ids[:, :-1],), {"labels": ids[:, 1:], "switches": switches})
    return output.loss_sum / output.count


def _reads_text(model: Any, ids: Tensor) -> bool:
    """Whether these are ids of a language model, which may be that of a model that reads images."""
    return model.config.language_prefix is not None and not ids.is_floating_point()


def _with_new_ids(ids: Tensor, old: LanguageModel, new: LanguageModel) -> Tensor:
    """Replace every second id by one that the growth added, if it did."""
    first, last = (
        c.vocab + c.added_vocab for c in (m.config.trunk(m.config.language_prefix or "") for m in (old, new))
    )
    if first == last:
        return ids
    place = torch.arange(ids.shape[1], device=ids.device)
    return torch.where(place % 2 == 1, first + place // 2 % (last - first), ids)


def gradient(model: LanguageModel, ids: Tensor, plan: Plan, rate: float = 1e-3) -> dict[str, Alive]:
    """Count the new rows that learn: with a gradient at the first step, and after a small step along it."""
    fresh = {name: recipe for name, recipe in plan.recipes.items() if recipe.new_rows}
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if n in fresh}
    seen: list[dict[str, Tensor]] = []
    for _ in range(2):
        loss = _mean_loss(model, parameters, ids, plan.event.get("switch", ""))
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        pairs = zip(parameters.items(), grads, strict=True)
        moved = {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}
        seen.append({n: _new_rows(g, fresh[n].new_rows).flatten(1).any(1) for n, g in moved.items()})
        steps = {n: rate * g / g.square().mean().sqrt().clamp_min(1e-30) for n, g in moved.items()}
        parameters = {n: (p.detach() - steps[n]).requires_grad_() for n, p in parameters.items()}
    counts: dict[str, list[int]] = {}
    for name in parameters:
        first, second = seen[0][name], seen[1][name]
        count = counts.setdefault(_label(name, plan), [0, 0, 0])
        for i, number in enumerate((first.numel(), first.sum().item(), (first | second).sum().item())):
            count[i] += int(number)
    return {label: Alive(*count) for label, count in counts.items()}


def _new_rows(grad: Tensor, rows: int) -> Tensor:
    grad = grad if rows < 0 else grad[len(grad) - rows :]
    return grad[:, None] if grad.ndim == 1 else grad


def _label(name: str, plan: Plan) -> str:
    """What the certificate calls the rows of a parameter, such as `proj: key tokens` or `ffn.up.weight`."""
    found = parse(name, plan.ends)
    return f"{found.projection}: {found.role.kind} tokens" if found.token else f"{found.part}.{found.leaf}"
