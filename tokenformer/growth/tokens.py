"""The plan of a growth by parameter tokens and by blocks: which rule, what is appended to what, which τ.

The laws (which rule preserves the function, for which Θ) are in docs/growth.md; each is a test.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from tokenformer.config import PROJECTION_OF, PROJECTIONS, ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.errors import UserError
from tokenformer.growth.depth import Places, places
from tokenformer.growth.recipes import ALL, Appended, Fill, Plan
from tokenformer.growth.shape import Segments, Table, sizes, table, total, with_table
from tokenformer.models.names import Name
from tokenformer.strict import need

RULES: dict[str, tuple[Fill, Fill]] = {  # the new tokens' keys and values
    "segment": ("matched", "zero"),
    "zero_key": ("zero", "matched"),
    "zero_value": ("matched", "zero"),
    "random": ("official", "official"),
}


def by_tokens(config: ModelConfig, names: Sequence[Name], growth: Growth) -> Plan:
    """How one trunk, of this config, gets so many tokens and layers in total. `names` are those of the whole model.

    `tau` (of appended rows; a segment always has its own √m) is `hold` or `sqrt_n`; absent, `zero_key` holds it and
    the others take √n.
    """
    targets = {which: n for which in PROJECTIONS if (n := getattr(growth, f"{which}_tokens")) is not None}
    where = places(config.layers, growth.layers, growth.positions or "even")
    need(bool(targets) or len(where) > config.layers, "nothing to grow: give more parameter tokens or more layers")
    need(config.kind == "tokenformer" or not targets, f"kind {config.kind} has no parameter tokens: give layers or dim")
    chosen = rules_of(config, growth.new_tokens or "segment")
    rules = {which: rule for which, rule in chosen.items() if which in targets}
    scales = tau_of(rules, growth.tau)
    old = table(config)
    grown: Table = {}
    for which, of_layers in old.items():
        target, rule, scale = targets.get(which), rules.get(which, "segment"), scales.get(which, "")
        said = f"{which}_tokens is {target}, but layer"
        grown[which] = [more_segments(s, target, rule, scale, f"{said} {i} has") for i, s in enumerate(of_layers)]
    new: Table = {which: [of_layers[source] for source, _ in where] for which, of_layers in grown.items()}
    need(new != old or len(where) > config.layers, f"every layer has {targets} parameter tokens already: give more")
    final = with_table(config, new) if old else dataclasses.replace(config, layers=len(where))
    event = {
        "what": "grow",
        "rule": rules,
        "tau": scales,
        "new_layers": [layer for layer, (_, fresh) in enumerate(where) if fresh],
        "before": sizes(config),
        "after": sizes(final),
    }
    exact = all(rule == "segment" or (rule == "zero_key" and scales[which] == "hold") for which, rule in rules.items())
    return Plan(final, recipes(names, growth.on, where, old, new, rules), event, exact)


def rules_of(config: ModelConfig, new_tokens: str | Mapping[str, str]) -> dict[str, str]:
    """One rule per projection kind, each checked."""
    given = dict.fromkeys(PROJECTIONS, new_tokens) if isinstance(new_tokens, str) else dict(new_tokens)
    for which, rule in given.items():
        need(which in PROJECTIONS, f"new_tokens names '{which}': its keys are {', '.join(PROJECTIONS)}")
        check_rule(rule, config.theta)
    return {which: given.get(which, "segment") for which in PROJECTIONS}


def check_rule(rule: str, theta: str) -> None:
    """Refuse a rule that is none, or whose tokens would be dead or disturb what was learned."""
    if rule in ("zero", "zero_key+zero_value"):
        raise UserError(
            "new tokens with zero keys and zero values would be dead, both their gradients being exactly 0: "
            "choose segment, zero_key or zero_value"
        )
    need(rule in RULES, f"new_tokens is '{rule}', but must be one of {', '.join(RULES)}")
    need(
        rule != "zero_key" or theta != "softmax",
        "zero keys would take their share of a softmax (exp 0 = 1) and disturb what was learned: choose segment",
    )


def tau_of(rules: Mapping[str, str], tau: str | Mapping[str, str] | None) -> dict[str, str]:
    """`hold` or `sqrt_n` for each projection kind whose old segment gets rows."""
    need(tau in ("hold", "sqrt_n", None) or isinstance(tau, Mapping), f"tau is '{tau}', but must be hold or sqrt_n")
    appended = [which for which, rule in rules.items() if rule != "segment"]
    given: dict[str, str | None] = dict(tau) if isinstance(tau, Mapping) else dict.fromkeys(appended, tau)
    for which, choice in given.items():
        need(which in PROJECTIONS, f"tau names '{which}': its keys are {', '.join(PROJECTIONS)}")
        need(choice in ("hold", "sqrt_n", None), f"tau is '{choice}', but must be hold or sqrt_n")
        need(which in appended, f"tau of {which} is given, but no rows are appended there: leave it out")
    need(
        tau != "sqrt_n" or bool(appended),
        "tau is 'sqrt_n', but a new segment has its own √n and old ones hold theirs: leave it out",
    )
    return {w: given.get(w) or ("hold" if rules[w] == "zero_key" else "sqrt_n") for w in appended}


def more_segments(old: Segments, target: int | None, rule: str, scale: str, what: str) -> Segments:
    """One layer's segments after it got the parameter tokens that it lacks; `scale` is that of appended rows."""
    lacks = 0 if target is None else target - total(old)
    need(lacks >= 0, f"{what} {total(old)} already: give the total afterwards, or shrink")
    if not lacks:
        return old
    if rule == "segment":
        return [*old, (lacks, math.sqrt(lacks), "")]
    size, tau, switch = old[-1]
    return [*old[:-1], (size + lacks, tau if scale == "hold" else math.sqrt(size + lacks), switch)]


def recipes(
    names: Sequence[Name], on: str, where: Places, old: Table, new: Table, rules: Mapping[str, str]
) -> dict[str, Appended]:
    """A recipe for each parameter of the grown model, layer by layer; what is not in the blocks of `on` stays."""
    blocks: dict[int, list[Name]] = {}
    for name in names:
        if name.trunk == on and name.layer is not None:
            blocks.setdefault(name.layer, []).append(name)
    found: dict[str, Appended] = {}
    for name in names:
        if name.trunk != on or name.layer is None:
            found[name.text] = Appended(old=name.text)
        elif blocks:  # all blocks stand where the first one stood
            for layer, (source, fresh) in enumerate(where):
                parts = {which: (of_layers[source], new[which][layer]) for which, of_layers in old.items()}
                found.update(_block(layer, blocks[source], fresh, parts, rules))
            blocks = {}
    return found


def _block(
    layer: int, names: Iterable[Name], fresh: bool, parts: Mapping[str, tuple[Segments, Segments]], rules: Mapping
) -> dict[str, Appended]:
    """The recipes of one block of the grown model, from the names of the old one that it is or is shaped like."""
    found: dict[str, Appended] = {}
    for name in names:
        here = name._replace(layer=layer)
        if name.segment is None:
            found[here.text] = _new_matrix(name) if fresh else Appended(old=name.text)
            continue
        old, new = parts[PROJECTION_OF[name.projection]]
        like = tuple(name._replace(segment=i).text for i in range(len(old)))
        value = name.role.kind == "value"
        fill = RULES[rules.get(PROJECTION_OF[name.projection], "segment")][value]
        if fresh:
            fill = "zero" if value and name.projection in ("proj", "ffn") else "matched"
        elif name.segment < len(new):
            rows = new[name.segment][0] - old[name.segment][0]
            found[here.text] = Appended(name.text, rows, fill, like)
        if name.segment == len(old) - 1:  # what comes after the old segments, or instead of them
            for i in range(0 if fresh else len(old), len(new)):
                found[here._replace(segment=i).text] = Appended(None, new[i][0], fill, like)
    return found


def _new_matrix(like: Name) -> Appended:
    """A parameter of a new block of a baseline: zero where it leads back into the stream."""
    fills: dict[str, Fill] = {"outward": "zero", "zero": "zero", "one": "one"}
    return Appended(None, ALL, fills.get(like.role.kind, "matched"), (like.text,))
