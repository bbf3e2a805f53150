"""The plan of a growth by parameter tokens and by blocks: which rule, what is appended to what, which τ.

The laws (which rule preserves the function, for which Θ) are in docs/growth.md; each is a test.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from tokenformer.config import PROJECTIONS, ModelConfig
from tokenformer.errors import UserError
from tokenformer.growth.depth import places
from tokenformer.growth.plan import ALL, Fill, Plan, Recipe
from tokenformer.growth.shape import Segments, Table, sizes, table, total, with_table
from tokenformer.strict import need

RULES: dict[str, tuple[Fill, Fill]] = {  # the new tokens' keys and values
    "segment": ("matched", "zero"),
    "zero_key": ("zero", "matched"),
    "zero_value": ("matched", "zero"),
    "random": ("official", "official"),
}
KINDS = {"query": "qkv", "key": "qkv", "value": "qkv", "proj": "proj", "ffn": "ffn"}
_BLOCK = re.compile(r"(.*\bblocks\.)(\d+)\.(.+)")
_TOKENS = re.compile(r"((?:.*\.)?(query|key|value|proj|ffn))\.segments\.(\d+)\.(key|value)_tokens")


def plan(
    config: ModelConfig,
    names: Iterable[str],
    *,
    qkv_tokens: int | None = None,
    proj_tokens: int | None = None,
    ffn_tokens: int | None = None,
    layers: int | None = None,
    positions: str | Sequence[int] = "even",
    new_tokens: str | Mapping[str, str] = "segment",
    tau: str | Mapping[str, str] | None = None,
    seed: int = 0,
    number: int = 0,
) -> Plan:
    """How a model with these parameter names becomes one with so many tokens and layers in total.

    `number` is how many growths came before. `tau` (appended rows; a segment always has its own √m) is `hold` or
    `sqrt_n`; absent, `zero_key` holds it and the others take √n.

    >>> tiny = ModelConfig(layers=1, dim=32, heads=2, qkv_tokens=9, proj_tokens=4, ffn_tokens=4)
    >>> plan(tiny, [], ffn_tokens=20).config.ffn_tokens
    [4, 16]
    """
    config = config.resolved()
    targets = {"qkv": qkv_tokens, "proj": proj_tokens, "ffn": ffn_tokens}
    targets = {which: n for which, n in targets.items() if n is not None}
    for which, n in targets.items():
        need(isinstance(n, int), f"{which}_tokens is {n}: give one number, the total afterwards")
    where = places(config.layers, layers, positions)
    need(bool(targets) or len(where) > config.layers, "nothing to grow: give more parameter tokens or more layers")
    need(config.kind == "tokenformer" or not targets, f"kind {config.kind} has no parameter tokens: give layers or dim")
    rules = {which: rule for which, rule in rules_of(config, new_tokens).items() if which in targets}
    scales = tau_of(rules, tau)
    old = table(config)
    grown = {
        which: [_grow(which, layer, s, targets.get(which), rules, scales) for layer, s in enumerate(of_layers)]
        for which, of_layers in old.items()
    }
    new: Table = {which: [of_layers[source] for source, _ in where] for which, of_layers in grown.items()}
    need(new != old or len(where) > config.layers, f"every layer has {targets} parameter tokens already: give more")
    final = with_table(config, new) if old else _deeper(config, len(where))
    event = {
        "what": "grow",
        "number": number,
        "rule": rules,
        "tau": scales,
        "seed": seed,
        "new_layers": [layer for layer, (_, fresh) in enumerate(where) if fresh],
        "before": sizes(config),
        "after": sizes(final),
    }
    exact = all(rule == "segment" or (rule == "zero_key" and scales[which] == "hold") for which, rule in rules.items())
    return Plan(final, recipes(list(names), where, old, new, rules), event, exact)


def rules_of(config: ModelConfig, new_tokens: str | Mapping[str, str]) -> dict[str, str]:
    """One rule a projection kind, each checked."""
    given = dict.fromkeys(PROJECTIONS, new_tokens) if isinstance(new_tokens, str) else dict(new_tokens)
    for which, rule in given.items():
        need(which in PROJECTIONS, f"new_tokens names '{which}': its keys are {', '.join(PROJECTIONS)}")
        if rule in ("zero", "zero_key+zero_value"):
            raise UserError(
                "new tokens with zero keys and zero values would be dead, both their gradients being exactly 0: "
                "choose segment, zero_key or zero_value"
            )
        need(rule in RULES, f"new_tokens is '{rule}', but must be one of {', '.join(RULES)}")
        need(
            rule != "zero_key" or config.theta != "softmax",
            "zero keys would take their share of a softmax (exp 0 = 1) and disturb what was learned: choose segment",
        )
    return {which: given.get(which, "segment") for which in PROJECTIONS}


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


def _grow(which: str, layer: int, old: Segments, target: int | None, rules: dict, scales: dict) -> Segments:
    """One layer's segments after it got what it lacks."""
    lacks = 0 if target is None else target - total(old)
    need(
        lacks >= 0,
        f"{which}_tokens is {target}, but layer {layer} has {total(old)} already: give the total afterwards, or shrink",
    )
    if not lacks:
        return old
    if rules[which] == "segment":
        return [*old, (lacks, math.sqrt(lacks))]
    size, tau = old[-1]
    return [*old[:-1], (size + lacks, tau if scales[which] == "hold" else math.sqrt(size + lacks))]


def _deeper(config: ModelConfig, layers: int) -> ModelConfig:
    return dataclasses.replace(config, layers=layers)


def recipes(names: list[str], where: list, old: Table, new: Table, rules: Mapping[str, str]) -> dict[str, Recipe]:
    """A recipe for each parameter of the grown model, layer by layer."""
    blocks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        if match := _BLOCK.fullmatch(name):
            blocks.setdefault(match[1], {}).setdefault(int(match[2]), []).append(match[3])
    found: dict[str, Recipe] = {}
    for name in names:
        match = _BLOCK.fullmatch(name)
        if match is None:
            found[name] = Recipe(old=name)
        elif match[1] in blocks:  # all blocks stand where the first one stood
            stack = blocks.pop(match[1])
            for layer, (source, fresh) in enumerate(where):
                at, of = f"{match[1]}{layer}.", f"{match[1]}{source}."
                parts = {w: (s[source], new[w][layer]) for w, s in old.items()}
                found.update(_block(at, of, stack[source], fresh, parts, rules))
    return found


def _block(at: str, of: str, rests: list[str], fresh: bool, parts: dict, rules: Mapping[str, str]) -> dict[str, Recipe]:
    """The recipes of one block: `at` in the grown model, `of` the old one it comes from or is shaped like."""
    found: dict[str, Recipe] = {}
    for rest in rests:
        match = _TOKENS.fullmatch(rest)
        if match is None:
            found[at + rest] = _new_matrix(of + rest) if fresh else Recipe(old=of + rest)
            continue
        path, projection, number, half = match[1], match[2], int(match[3]), match[4]
        old, new = parts[KINDS[projection]]
        like = tuple(f"{of}{path}.segments.{i}.{half}_tokens" for i in range(len(old)))
        rule: tuple[Fill, Fill] = RULES[rules.get(KINDS[projection], "segment")]
        fill = cast(Fill, rule[half == "value"])
        if fresh:
            fill = "zero" if half == "value" and projection in ("proj", "ffn") else "matched"
        elif number < len(new):
            found[at + rest] = Recipe(old=of + rest, rows=new[number][0] - old[number][0], fill=fill, like=like)
        if number == len(old) - 1:  # what comes after the old segments, or instead of them
            for i in range(0 if fresh else len(old), len(new)):
                found[f"{at}{path}.segments.{i}.{half}_tokens"] = Recipe(None, new[i][0], fill, like)
    return found


def _new_matrix(like: str) -> Recipe:
    """A parameter of a new block of a baseline: zero where it leads back into the stream."""
    if like.endswith(("proj.weight", "down.weight")):
        return Recipe(None, ALL, "zero", (like,))
    return Recipe(None, ALL, "one" if like.endswith("norm.weight") else "matched", (like,))
