"""Merge the segments of every layer into one, so that formats without segments can hold a grown model. Approximate.

One normalisation replaces several, so each segment is rescaled such that, on given text, its normalised scores are as
large as before: through its keys where Θ ignores their common scale (L2 before gelu, L1), else through its values.
"""

import math

import torch
from torch import Tensor

from tokenformer.config import PROJECTIONS
from tokenformer.growth.make import rms
from tokenformer.growth.measure import Where, each_activation, layers, mass
from tokenformer.growth.model import with_tensors
from tokenformer.growth.shape import Segments, sizes, table, total, with_table
from tokenformer.growth.verify import loss
from tokenformer.models import LanguageModel
from tokenformer.models.layers import THETAS
from tokenformer.models.names import parse, refuse_foreign
from tokenformer.strict import need


def merge_segments(model: LanguageModel, ids: Tensor, *, force: bool = False) -> LanguageModel:
    """Make one segment per layer, τ = √(Στ²), which is √n where every segment had √n. Measured on ids (B, T) of text.

    For softmax one sum of exponentials replaces several, which no rescaling of keys can undo: refused unless forced.
    The last entry of the history says how the loss on these ids changed.

    >>> from tokenformer.config import ModelConfig
    >>> from tokenformer.models import build
    >>> config = ModelConfig(layers=1, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=[48, 16], vocab=128)
    >>> merge_segments(build(config), torch.arange(64).view(2, 32)).config.segments("ffn")
    [(64, 8.0)]
    """
    refuse_foreign(model)
    need(
        not model.config.trunks,
        f"a model of {model.config.of} has several trunks, but segments are merged in a model of one: keep them",
    )
    theta = model.config.theta
    need(model.config.kind == "tokenformer", f"kind {model.config.kind} has no segments to merge")
    need(
        theta != "softmax" or force,
        "segments of a softmax cannot be merged faithfully, one sum of exponentials replacing several: "
        "keep the segments, or force it (--merge-softmax) and look at the loss",
    )
    need(not model.config.switch_names(), "segments that have switches cannot be merged: they would count always")
    sums = mean_sums(model, ids)
    merged: dict[tuple[int, str], dict[str, Tensor]] = {}
    for layer, name, module in layers(model):
        keys = [s.key_tokens.detach() for s in module.segments]
        values = [s.value_tokens.detach() for s in module.segments]
        if len(keys) > 1:
            taus = [s.tau for s in module.segments]
            own = [sums[layer, name, i] for i in range(len(keys))]
            keys, values = rescale(keys, values, taus, own, theta)
        merged[layer, name] = {"key": torch.cat(keys), "value": torch.cat(values)}
    tensors = {}
    for text, parameter in model.named_parameters():
        name = parse(text, model.ends)
        if name.layer is None or name.segment is None:
            tensors[text] = parameter.detach()
        elif name.segment == 0:  # which holds all of them now
            tensors[text] = merged[name.layer, name.projection][name.role.kind]
    config = with_table(model.config, {w: [_merged(s) for s in own] for w, own in table(model.config).items()})
    before = {f"{w}_tokens": getattr(model.config, f"{w}_tokens") for w in PROJECTIONS}
    event = {"what": "merge_segments", "number": len(model.history), "before": before, "after": sizes(config)}
    merged_model = with_tensors(model, config, tensors, event)
    event |= {"loss_before": loss(model, ids), "loss_after": loss(merged_model, ids)}
    return merged_model


def mean_sums(model: LanguageModel, ids: Tensor) -> dict[Where, float]:
    """The mean over rows of each segment's normalising sum; for softmax, of its share of all exponentials."""
    found: dict[Where, list[Tensor]] = {}
    theta = model.config.theta

    def visit(where: Where, score_TN: Tensor, _active_TN: Tensor) -> None:
        row_T = score_TN.logsumexp(-1) if theta == "softmax" else mass(score_TN, theta).sum(-1)
        found.setdefault(where, []).append(row_T)

    each_activation(model, ids, visit)
    rows = {where: torch.cat(parts) for where, parts in found.items()}
    if theta != "softmax":
        return {where: row_T.mean().item() for where, row_T in rows.items()}
    shares = {}
    for layer, name, module in layers(model):
        share_IT = torch.stack([rows[layer, name, i] for i in range(len(module.segments))]).softmax(0)
        shares |= {(layer, name, i): s.item() for i, s in enumerate(share_IT.mean(1))}
    return shares


def rescale(
    keys: list[Tensor], values: list[Tensor], taus: list[float], sums: list[float], theta: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Rescale keys or values for one normalisation with τ² = Στ², such that the mean row is as large as before."""
    square, whole = sum(t * t for t in taus), sum(sums)
    power = THETAS[theta].power
    if THETAS[theta].scale_free:
        scales = [(t * t / max(s, 1e-300)) ** power for t, s in zip(taus, sums, strict=True)]
        new = [k * c for k, c in zip(keys, scales, strict=True)]
        common = rms(keys) / max(rms(new), 1e-300)  # the RMS that they had, for the optimizer of a later run
        return [k * common for k in new], values
    ratio = [(t * t * whole / max(s * square, 1e-300)) ** power for t, s in zip(taus, sums, strict=True)]
    return keys, [v * c for v, c in zip(values, ratio, strict=True)]


def _merged(segments: Segments) -> Segments:
    """The one segment in place of these."""
    if len(segments) == 1:
        return segments
    count, square = total(segments), sum(t * t for _, t, _ in segments)
    return [(count, math.sqrt(count if math.isclose(square, count) else square), "")]  # √n to the last bit
