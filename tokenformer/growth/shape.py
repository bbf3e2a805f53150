"""How many parameter tokens each layer has, as a plain table, and back into a config with as few overrides as possible.

Unusual: growth and shrinking change the table alone; which layers need an override is decided here and nowhere else.
"""

import dataclasses
from collections import Counter
from typing import Any

from tokenformer.config import PROJECTIONS, LayerOverride, ModelConfig
from tokenformer.strict import need

Segments = list[tuple[int, float, str]]  # (parameter tokens, τ, switch) of each segment
Table = dict[str, list[Segments]]  # qkv, proj, ffn → the segments of each layer


def table(config: ModelConfig) -> Table:
    """The segments of every layer; empty for models without parameter tokens.

    >>> tiny = ModelConfig(layers=2, dim=32, heads=2, qkv_tokens=9, proj_tokens=4, ffn_tokens=[4, 16])
    >>> table(tiny)["ffn"]
    [[(4, 2.0, ''), (16, 4.0, '')], [(4, 2.0, ''), (16, 4.0, '')]]
    """
    if config.kind != "tokenformer":
        return {}

    def segments(which: str, layer: int) -> Segments:
        pairs = zip(config.segments(which, layer), config.switches(which, layer), strict=True)
        return [(n, tau, switch) for (n, tau), switch in pairs]

    return {which: [segments(which, layer) for layer in range(config.layers)] for which in PROJECTIONS}


def with_table(config: ModelConfig, segments: Table) -> ModelConfig:
    """The config of a model with these segments: what most layers have, and an override for each layer that differs.

    >>> tiny = ModelConfig(layers=2, dim=32, heads=2, qkv_tokens=9, proj_tokens=4, ffn_tokens=4)
    >>> with_table(tiny, {**table(tiny), "ffn": [[(4, 2.0, "")], [(4, 2.0, ""), (9, 3.0, "")]]}).segments("ffn", 1)
    [(4, 2.0), (9, 3.0)]
    """
    if config.kind != "tokenformer":
        return config
    layers = len(segments[PROJECTIONS[0]])
    most = {w: list(Counter(map(tuple, segments[w])).most_common(1)[0][0]) for w in PROJECTIONS}
    overrides: dict[int, LayerOverride] = {}
    for layer in range(layers):
        own = {w: segments[w][layer] for w in PROJECTIONS if segments[w][layer] != most[w]}
        if own:
            overrides[layer] = LayerOverride(**_keys(own))
    return dataclasses.replace(config, layers=layers, layer_overrides=overrides, **_keys(most)).resolved()


def _keys(projections: dict[str, Segments]) -> dict[str, Any]:
    """The config keys of these segments: `ffn_tokens: 64` for one segment, a list for several, every τ, switches."""
    counts = {w: [n for n, _, _ in s] for w, s in projections.items()}
    switches = {w: [switch for _, _, switch in s] for w, s in projections.items()}
    tokens = {f"{w}_tokens": n if len(n) > 1 else n[0] for w, n in counts.items()}
    scales = {w: [tau for _, tau, _ in s] for w, s in projections.items()}
    return {**tokens, "tau": scales, "switch": {w: names for w, names in switches.items() if any(names)}}


def trunk_of(config: ModelConfig, on: str) -> ModelConfig:
    """The config of the trunk that `on` names: "" is a model of one trunk, "image." one of several."""
    known = [f"{name}." for name in config.trunks]
    if known:
        need(on in known, f"on is '{on}', but the model's trunks are {', '.join(known)}: say which one")
    need(bool(known) or not on, f"on is '{on}', but the model is one trunk: leave it out")
    return config.trunk(on)


def total(segments: Segments) -> int:
    return sum(n for n, _, _ in segments)


def sizes(config: ModelConfig) -> dict:
    """The sizes that a history keeps: layers, and parameter tokens (one number, or one per layer where they differ)."""
    found: dict = {"layers": config.layers}
    if config.added_vocab:
        found["vocab"] = config.vocab + config.added_vocab
    if config.kind != "tokenformer":
        return {**found, "dim": config.dim, "ffn_dim": config.mlp_dim}
    for which, layers in table(config).items():
        counts = [total(s) for s in layers]
        found[f"{which}_tokens"] = counts[0] if len(set(counts)) == 1 else counts
    return found
