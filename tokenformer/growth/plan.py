"""The plan of a growth: from a config, parameter names and a `Growth` to the new config and a recipe per parameter,
which says what is appended to what, by which rule and with which τ.

Unusual: a plan needs no torch, no memory and no time; make.py makes tensors by it, one at a time, and state.py what an
optimizer keeps. New blocks are the identity until they learn, because their proj and ffn values begin at zero.
Which rule preserves the function, and for which Θ, is in docs/growth.md; each row of that table is a test.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenformer.config import PROJECTION_OF, PROJECTIONS, ModelConfig
from tokenformer.config_growth import Growth
from tokenformer.errors import UserError
from tokenformer.growth.shape import Segments, Table, sizes, table, total, trunk_of, with_table
from tokenformer.models.names import Name, Role, parse
from tokenformer.strict import need

Fill = Literal["zero", "one", "matched", "official"]
ALL = -1  # new_rows: all rows are new, as many as the parameter `like` has
RULES: dict[str, tuple[Fill, Fill]] = {  # how the new tokens' keys and values are filled
    "segment": ("matched", "zero"),
    "zero_key": ("zero", "matched"),
    "zero_value": ("matched", "zero"),
    "random": ("official", "official"),
}
Blocks = list[tuple[int, bool]]  # per block of the grown model: the old block that it is or is shaped like; is it new


@dataclass(frozen=True)
class Recipe:
    """The rows of an old parameter, then new rows."""

    old: str | None  # the old parameter whose rows come first; None: all rows are new
    new_rows: int = 0
    fill: Fill = "zero"  # matched: random with the RMS of `like`; official: the initialisation of a new model
    like: tuple[str, ...] = ()  # old parameters whose width, type and RMS the new rows take

    @property
    def source(self) -> str:
        """The old parameter whose type, and whose place in an optimizer, this one takes."""
        return self.old or self.like[0]


@dataclass(frozen=True)
class Plan:
    """What a growth will do. `event` is what the model's history keeps of it."""

    config: ModelConfig
    recipes: Mapping[str, Recipe]
    event: dict
    exact: bool  # the rule changes no output beyond rounding
    noise: Mapping[str, float]  # parameter → noise on its old rows, by their RMS
    ends: Mapping[str, Role]  # roles of the parameters outside the blocks
    seed: int
    number: int  # of growths that came before

    @property
    def kept(self) -> set[str]:
        """Parameters of the grown model that were there before."""
        return {name for name, recipe in self.recipes.items() if recipe.old}


def plan_growth(
    config: ModelConfig,
    names: Iterable[str],
    growth: Growth,
    *,
    ends: Mapping[str, Role] | None = None,
    seed: int = 0,
    number: int = 0,
) -> Plan:
    """Plan how a model with these parameters becomes the one that a `Growth` asks for, in its trunk `growth.on`.

    `ends`: the parameters that the model declares outside its blocks. Without names the plan has no recipes, but a
    config, and it refuses what cannot be. New values depend on `seed`, `number` (of growths before) and the name.

    >>> tiny = ModelConfig(layers=1, dim=32, heads=2, qkv_tokens=9, proj_tokens=4, ffn_tokens=4)
    >>> plan_growth(tiny, [], Growth(ffn_tokens=20)).config.ffn_tokens
    [4, 16]
    """
    config, on = config.resolved(), growth.on
    trunk, parsed = trunk_of(config, on), [parse(name, ends or {}) for name in names]
    targets = {which: n for which in PROJECTIONS if (n := getattr(growth, f"{which}_tokens")) is not None}
    blocks = place_blocks(trunk.layers, growth.layers, growth.positions or "even")
    more = grow_vocab(trunk, growth)
    deeper = len(blocks) > trunk.layers
    need(bool(targets) or deeper or bool(more), "nothing to grow: give more parameter tokens, more layers or more ids")
    need(trunk.kind == "tokenformer" or not targets, f"kind {trunk.kind} has no parameter tokens: give layers")
    rules = choose_rules(trunk, growth.new_tokens or "segment", targets)
    need(
        not growth.switch or (not deeper and set(rules.values()) <= {"segment"}),
        f"switch is '{growth.switch}', but only new segments and ids can have one: leave it out, or choose segment",
    )
    taus = choose_tau(rules, growth.tau)
    old = table(trunk)
    grown: Table = {}
    for which, of_layers in old.items():
        target, rule, tau = targets.get(which), rules.get(which, "segment"), taus.get(which, "")
        start = f"{which}_tokens is {target}, but layer"
        grown[which] = [
            grow_segments(s, target, rule, tau, f"{start} {i} has", growth.switch) for i, s in enumerate(of_layers)
        ]
    new: Table = {which: [of_layers[source] for source, _ in blocks] for which, of_layers in grown.items()}
    need(new != old or deeper or bool(more), f"every layer has {targets} parameter tokens already: give more")
    final = with_table(trunk, new) if old else dataclasses.replace(trunk, layers=len(blocks))
    if more:
        final = dataclasses.replace(final, added_vocab=trunk.added_vocab + more, added_switch=growth.switch)
    event: dict = {"what": "grow", "number": number, **({"on": on} if on else {}), "seed": seed}
    event |= {"rule": rules, "tau": taus, "new_layers": [i for i, (_, is_new) in enumerate(blocks) if is_new]}
    event |= {"before": sizes(trunk), "after": sizes(final), **({"switch": growth.switch} if growth.switch else {})}
    exact = all(rule == "segment" or (rule == "zero_key" and taus[which] == "hold") for which, rule in rules.items())
    made, old_tokens = recipes(parsed, on, blocks, old, new, rules), {name.text for name in parsed if name.token}
    made |= _added(made, on, more) if more and made else {}
    noise = {name: growth.noise for name, recipe in made.items() if growth.noise and recipe.old in old_tokens}
    return Plan(config.with_trunk(on, final), made, event, exact, noise, ends or {}, seed, number)


def grow_vocab(trunk: ModelConfig, growth: Growth) -> int:
    """Return how many ids are new. They follow the padded vocabulary, so that no id changes its meaning."""
    if growth.vocab is None:
        return 0
    before, switch = trunk.vocab + trunk.added_vocab, trunk.added_switch
    need(trunk.of == "language", f"vocab is {growth.vocab}, but this is no language model: leave it out")
    need(growth.vocab > before, f"vocab is {growth.vocab}, but the model has {before} ids already: give more")
    need(
        not trunk.added_vocab or switch == growth.switch,
        f"ids were added before with the switch '{switch}': give the same one, or none if it has none",
    )
    return growth.vocab - before


def _added(made: Mapping[str, Recipe], on: str, rows: int) -> dict[str, Recipe]:
    """The recipes of new ids: of an embedding, and of an untied head."""
    found = {}
    for part in ("embedding", "head"):
        like, name = f"{on}{part}.weight", f"{on}added_{part}.weight"
        if like in made:
            found[name] = Recipe(name if name in made else None, rows, "matched", (like,))
    return found


def place_blocks(old: int, layers: int | None, positions: str | Sequence[int] = "even") -> Blocks:
    """Which old block each block of the grown model is, or which one a new block is shaped like (the one before it).

    `positions`: `even` (spread over the depth, the last at the end), `end`, or the new blocks' own layer numbers.

    >>> place_blocks(2, 4)
    [(0, False), (0, True), (1, False), (1, True)]
    >>> place_blocks(2, 3, positions=[0])
    [(0, True), (0, False), (1, False)]
    """
    layers = old if layers is None else layers
    added = layers - old
    need(added >= 0, f"layers is {layers}, but the model has {old} already: give more")
    if positions == "even":
        new = {(i + 1) * layers // added - 1 for i in range(added)}
    elif positions == "end":
        new = set(range(old, layers))
    elif isinstance(positions, str):
        raise UserError(f"positions is '{positions}': give even, end, or the layer numbers of the new blocks")
    else:
        new = set(positions)
        fits = len(new) == len(positions) == added and all(0 <= p < layers for p in new)
        need(fits, f"positions is {list(positions)}: give {added} different numbers from 0 to {layers - 1}")
    blocks, next_old = [], 0
    for layer in range(layers):
        blocks.append((max(next_old - 1, 0), True) if layer in new else (next_old, False))
        next_old += layer not in new
    return blocks


def choose_rules(config: ModelConfig, new_tokens: str | Mapping[str, str], grows: Iterable[str]) -> dict[str, str]:
    """The rule of each projection kind that grows."""
    given = dict.fromkeys(PROJECTIONS, new_tokens) if isinstance(new_tokens, str) else dict(new_tokens)
    for which, rule in given.items():
        need(which in PROJECTIONS, f"new_tokens names '{which}': its keys are {', '.join(PROJECTIONS)}")
        check_rule(rule, config.theta)
    return {which: given.get(which, "segment") for which in grows}


def check_rule(rule: str, theta: str) -> None:
    """Refuse an unknown rule, and one whose tokens would be dead or disturb what was learned."""
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


def choose_tau(rules: Mapping[str, str], tau: str | Mapping[str, str] | None) -> dict[str, str]:
    """`hold` or `sqrt_n` for each projection kind whose old segment gets rows. A new segment always has its own √n.

    Where nothing is given, `zero_key` holds τ and the other rules take √n.
    """
    need(tau in ("hold", "sqrt_n", None) or isinstance(tau, Mapping), f"tau is '{tau}', but must be hold or sqrt_n")
    appended = [which for which, rule in rules.items() if rule != "segment"]
    given: dict[str, str | None] = dict(tau) if isinstance(tau, Mapping) else dict.fromkeys(appended, tau)
    for which, choice in given.items():
        need(which in PROJECTIONS, f"tau names '{which}': its keys are {', '.join(PROJECTIONS)}")
        need(choice in ("hold", "sqrt_n", None), f"tau is '{choice}', but must be hold or sqrt_n")
        need(which in appended, f"tau of {which} is given, but no rows are appended there: leave it out")
    own = "tau is 'sqrt_n', but a new segment has its own √n and old ones hold theirs: leave it out"
    need(tau != "sqrt_n" or bool(appended), own)
    return {w: given.get(w) or ("hold" if rules[w] == "zero_key" else "sqrt_n") for w in appended}


def grow_segments(
    old: Segments, target: int | None, rule: str, tau_rule: str, start: str, switch: str = ""
) -> Segments:
    """One layer's segments with `target` parameter tokens in total. `start` begins the sentence of a refusal."""
    missing = 0 if target is None else target - total(old)
    need(missing >= 0, f"{start} {total(old)} already: give the total afterwards, or shrink")
    if not missing:
        return old
    if rule == "segment":
        return [*old, (missing, math.sqrt(missing), switch)]
    size, tau, switch = old[-1]
    return [*old[:-1], (size + missing, tau if tau_rule == "hold" else math.sqrt(size + missing), switch)]


def recipes(
    names: Sequence[Name], on: str, blocks: Blocks, old: Table, new: Table, rules: Mapping[str, str]
) -> dict[str, Recipe]:
    """A recipe for each parameter of the grown model, layer by layer. What is outside the blocks of `on` is kept."""
    by_layer: dict[int, list[Name]] = {}
    for name in names:
        if name.trunk == on and name.layer is not None:
            by_layer.setdefault(name.layer, []).append(name)
    found: dict[str, Recipe] = {}
    for name in names:
        if name.trunk != on or name.layer is None:
            found[name.text] = Recipe(old=name.text)
        elif by_layer:  # all blocks come where the first one came: parameters keep their order
            for layer, (source, is_new) in enumerate(blocks):
                segments = {which: (of_layers[source], new[which][layer]) for which, of_layers in old.items()}
                found.update(_block(layer, by_layer[source], is_new, segments, rules))
            by_layer = {}
    return found


def _block(
    layer: int, names: Iterable[Name], is_new: bool, segments: Mapping[str, tuple[Segments, Segments]], rules: Mapping
) -> dict[str, Recipe]:
    """The recipes of one block of the grown model. `names`: of the old block that it is, or is shaped like."""
    found: dict[str, Recipe] = {}
    for name in names:
        here = name._replace(layer=layer)
        if name.segment is None:
            found[here.text] = _new_matrix(name) if is_new else Recipe(old=name.text)
            continue
        old, new = segments[PROJECTION_OF[name.projection]]
        like = tuple(name._replace(segment=i).text for i in range(len(old)))
        value = name.role.kind == "value"
        fill = RULES[rules.get(PROJECTION_OF[name.projection], "segment")][value]
        if is_new:
            fill = "zero" if value and name.projection in ("proj", "ffn") else "matched"
        elif name.segment < len(new):
            rows = new[name.segment][0] - old[name.segment][0]
            found[here.text] = Recipe(name.text, rows, fill, like)
        if name.segment == len(old) - 1:  # the new segments come after the last old one; in a new block all are new
            for i in range(0 if is_new else len(old), len(new)):
                found[here._replace(segment=i).text] = Recipe(None, new[i][0], fill, like)
    return found


def _new_matrix(like: Name) -> Recipe:
    """A matrix or norm of a new block: zero where it writes to the residual stream."""
    fills: dict[str, Fill] = {"outward": "zero", "zero": "zero", "one": "one"}
    return Recipe(None, ALL, fills.get(like.role.kind, "matched"), (like.text,))
