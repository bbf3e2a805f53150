"""Remove the parameter tokens that do least on given text, or the newest, and adapt τ to those that are left.

The importance of token j is the energy of what it adds to the output, Σ over rows of ‖S_j·v_j‖², summed in float64
over all of the text. q, k and v keep equally many tokens, each its own.
"""

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from tokenformer.config import PROJECTION_OF, PROJECTIONS, ModelConfig
from tokenformer.errors import UserError
from tokenformer.growth.measure import Where, each_activation, mass, segments
from tokenformer.growth.model import Model, with_tensors
from tokenformer.growth.shape import Table, sizes, table, total, trunk_of, with_table
from tokenformer.growth.verify import loss
from tokenformer.models import LanguageModel
from tokenformer.models.names import parse, refuse_foreign
from tokenformer.strict import need


def energy(model: LanguageModel, ids: Tensor) -> dict[Where, Tensor]:
    """Σ over rows of ‖S_j·v_j‖² for each token j of each segment, in float64."""
    sums: dict[Where, Tensor] = {}

    def visit(where: Where, _score_TN: Tensor, active_TN: Tensor) -> None:
        sums[where] = sums.get(where, 0) + active_TN.square().sum(0)

    each_activation(model, ids, visit)
    return {w: (sums[w] * s.value_tokens.detach().double().square().sum(1)).cpu() for w, s in segments(model)}


def shrink(
    model: Model,
    ids: Tensor | None = None,
    *,
    on: str = "",
    qkv_tokens: int | None = None,
    proj_tokens: int | None = None,
    ffn_tokens: int | None = None,
    ratio: float | None = None,
    by: str = "energy",
    across: str = "layer",
    tau: str | None = None,
) -> Model:
    """Return a smaller model. Sizes are totals afterwards, per layer; or give `ratio`, the share of tokens to keep.

    `by`: `energy` (needs ids (B, T) of real text, or pixels) or `newest` (the last rows of the last segments go first).
    `across`: every layer keeps equally many (`layer`), or all layers together keep so many, the strongest (`model`).
    `tau`: `match` (Θ of the kept tokens is as large as before, in the mean over the ids; the default with ids, measured
    best), `sqrt_n` (times the root of the share of tokens kept; the default without ids) or `hold`. With ids the
    history says how the loss changed. `on`: which trunk of a model that has several (by newest alone).

    >>> from tokenformer.config import ModelConfig
    >>> from tokenformer.models import build
    >>> config = ModelConfig(layers=1, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=64, vocab=128)
    >>> smaller = shrink(build(config), torch.arange(64).view(2, 32), ratio=0.5)
    >>> smaller.config.ffn_tokens, smaller.config.qkv_tokens
    (32, 8)
    """
    refuse_foreign(model)
    targets = {"qkv": qkv_tokens, "proj": proj_tokens, "ffn": ffn_tokens}
    trunk = trunk_of(model.config, on)
    old = table(trunk)
    budget = _budget(trunk, {w: n for w, n in targets.items() if n is not None}, ratio)
    need(by in ("energy", "newest"), f"by is '{by}', but must be energy or newest")
    need(across in ("layer", "model"), f"across is '{across}', but must be layer or model")
    tau = tau or ("sqrt_n" if ids is None else "match")
    need(tau in ("match", "hold", "sqrt_n"), f"tau is '{tau}', but must be match, hold or sqrt_n")
    if ids is None and (by == "energy" or tau == "match"):
        raise UserError(f"shrinking by {by} with tau={tau} measures on text: give ids, or by=newest with another tau")
    need(ids is None or not on, "only language models can be measured on text: leave the ids out, with by=newest")
    need(
        ids is None or not trunk.switch_names(),
        "measuring on text runs no switched segments, so it says nothing of them: give by=newest and no ids",
    )
    need(by == "energy" or across == "layer", "the newest tokens are removed from every layer: leave across out")
    if by == "newest":
        kept = _keep_oldest(old, budget)
    else:
        assert ids is not None
        kept = _keep_strongest(energy(model, ids), old, budget, across)
    taus = _new_taus(model, on, ids, kept, tau)
    return _keep_rows(model, on, kept, taus, ids, {"by": by, "across": across, "tau": tau})


def remove_dead(model: Model, dead: Mapping[Where, Tensor]) -> Model:
    """Return the model without tokens that were in no sum: τ is held, so it computes the same. `dead` (N,) per segment.

    q, k and v of a layer keep equally many tokens, so as many go as each of the three can spare; no layer is emptied.
    """
    refuse_foreign(model)
    need(model.config.kind == "tokenformer", f"kind {model.config.kind} has no parameter tokens to remove")
    whole = dict(segments(model))
    gone: dict[Where, int] = {}
    for layer, name, i in whole:
        alike = [(layer, other, i) for other, kind in PROJECTION_OF.items() if kind == PROJECTION_OF[name]]
        gone[layer, name, i] = min(int(dead[where].sum()) for where in alike)
    for layer, name, i in whole:  # a projection of dead tokens alone keeps one
        parts = [where for where in whole if where[:2] == (layer, name)]
        if sum(gone[where] for where in parts) == sum(len(whole[where].key_tokens) for where in parts) and i == 0:
            gone[layer, name, 0] -= 1
    need(any(gone.values()), "no token can be removed: none is dead, or not as many of q, k and v")
    kept = {}
    for where, segment in whole.items():
        rows = torch.arange(len(segment.key_tokens))
        kept[where] = rows[~torch.isin(rows, rows[dead[where]][: gone[where]])]
    taus = {where: segment.tau for where, segment in whole.items()}
    return _keep_rows(model, "", kept, taus, None, {"by": "explored", "tau": "hold"})


def _budget(config: ModelConfig, targets: Mapping[str, int], ratio: float | None) -> dict[str, list[int]]:
    """How many tokens of each kind each layer keeps; across the model, only their sum counts."""
    need(config.kind == "tokenformer", f"kind {config.kind} has no parameter tokens to remove")
    need(bool(targets) != (ratio is not None), "give how many tokens stay (qkv, proj, ffn), or a ratio, and not both")
    need(ratio is None or 0 < ratio < 1, f"ratio is {ratio}: it is the share that stays, between 0 and 1")
    found = {}
    for which in PROJECTIONS:
        counts = [total(s) for s in table(config)[which]]
        target = targets.get(which)
        if ratio is not None:
            found[which] = [max(1, round(ratio * n)) for n in counts]
        elif target is not None:
            most = max(counts)
            need(0 < target < most, f"{which}_tokens is {target}, but a layer has at most {most}: give fewer, above 0")
            found[which] = [min(target, n) for n in counts]
        else:
            found[which] = counts
    return found


def _keep_oldest(old: Table, budget: dict[str, list[int]]) -> dict[Where, Tensor]:
    """The rows to keep where the newest are removed: the first ones."""
    kept: dict[Where, Tensor] = {}
    for name, which in PROJECTION_OF.items():
        for layer, of_layer in enumerate(old[which]):
            left = budget[which][layer]
            for i, (n, _, _) in enumerate(of_layer):
                kept[layer, name, i] = torch.arange(min(n, left))
                left -= min(n, left)
    return kept


def _keep_strongest(
    energies: dict[Where, Tensor], old: Table, budget: dict[str, list[int]], across: str
) -> dict[Where, Tensor]:
    """The rows to keep where the weakest are removed. The r-th strongest of q, k and v are kept or removed together.

    Across layers a token's share of its layer's energy is compared, since the activations of layers differ in size.
    """
    kept: dict[Where, Tensor] = {}
    for which in PROJECTIONS:
        names = [name for name, kind in PROJECTION_OF.items() if kind == which]
        pool: list[tuple[float, int, int]] = []  # (share of energy, layer, segment) of each rank, q, k and v added
        for layer, of_layer in enumerate(old[which]):
            parts = {name: [energies[layer, name, i] for i in range(len(of_layer))] for name in names}
            whole = {name: max(sum(e.sum().item() for e in part), 1e-300) for name, part in parts.items()}
            for i, (n, _, _) in enumerate(of_layer):
                sorted_shares = (parts[name][i].sort(descending=True).values / whole[name] for name in names)
                ranks = sum(sorted_shares, torch.zeros(n))
                pool += [(share, layer, i) for share in ranks.tolist()]
        pool.sort(key=lambda entry: -entry[0])
        counts: Counter[tuple[int, int]] = Counter()
        every = range(len(old[which]))
        groups = [(every, sum(budget[which]))] if across == "model" else [([k], budget[which][k]) for k in every]
        for group, keep in groups:
            among = [(layer, i) for _, layer, i in pool if layer in group]
            first = [next(entry for entry in among if entry[0] == layer) for layer in group]  # no layer is left empty
            for entry in first:
                among.remove(entry)
            counts.update([*first, *among][:keep])
        for layer, name, i in energies:
            if name in names:
                order = energies[layer, name, i].argsort(descending=True, stable=True)
                kept[layer, name, i] = order[: counts[layer, i]].sort().values
    return kept


def _new_taus(
    model: LanguageModel, on: str, ids: Tensor | None, kept: dict[Where, Tensor], tau: str
) -> dict[Where, float]:
    """τ of the kept part of each segment."""
    whole = {where: s.tau for where, s in segments(model, on)}
    if tau == "hold":
        return whole
    if tau == "sqrt_n":
        return {where: s.tau * math.sqrt(len(kept[where]) / len(s.key_tokens)) for where, s in segments(model, on)}
    assert ids is not None
    shares: dict[Where, list[Tensor]] = {}

    def visit(where: Where, score_TN: Tensor, _active_TN: Tensor) -> None:
        layer, name, i = where
        mass_TN = mass(score_TN, model.config.theta)
        all_T, part_T = mass_TN.sum(-1), mass_TN[:, kept[where].to(mass_TN.device)].sum(-1)
        one_tau = layer, PROJECTION_OF[name], i  # q, k and v have the same
        shares.setdefault(one_tau, []).append((part_T / all_T)[all_T > 0])

    each_activation(model, ids, visit)
    mean = {where: torch.cat(parts).mean().item() for where, parts in shares.items()}
    return {(k, name, i): t * math.sqrt(mean[k, PROJECTION_OF[name], i]) for (k, name, i), t in whole.items()}


def _keep_rows(
    model: Model, on: str, kept: dict[Where, Tensor], taus: dict[Where, float], ids: Tensor | None, how: dict
) -> Model:
    """Build the model of the kept rows. A segment without any is removed."""
    trunk = trunk_of(model.config, on)
    first = {kind: name for name, kind in reversed(PROJECTION_OF.items())}  # q, k and v keep equally many
    new: Table = {
        which: [
            [
                (len(kept[at]), taus[at], switch)
                for i, (_, _, switch) in enumerate(of_layer)
                if len(kept[at := (layer, first[which], i)])
            ]
            for layer, of_layer in enumerate(of_layers)
        ]
        for which, of_layers in table(trunk).items()
    }
    tensors, numbers = {}, Counter[str]()
    for text, parameter in model.named_parameters():
        name = parse(text, model.ends)
        if name.layer is None or name.segment is None or name.trunk != on:
            tensors[text] = parameter.detach().clone()
        elif len(rows := kept[name.layer, name.projection, name.segment]):  # segments that are left are numbered anew
            path = name._replace(segment=0).text
            tensors[name._replace(segment=numbers[path]).text] = parameter.detach()[rows.to(parameter.device)]
            numbers[path] += 1
    config = with_table(trunk, new)
    event = {"what": "shrink", "number": len(model.history), **({"on": on} if on else {}), **how}
    event |= {"before": sizes(trunk), "after": sizes(config)}
    smaller = with_tensors(model, model.config.with_trunk(on, config), tensors, event)
    if ids is not None and model.config.of == "language":
        event |= {"loss_before": loss(model, ids), "loss_after": loss(smaller, ids)}
    return smaller
