"""Which parameter tokens wrote a logit. What proj and ffn tokens add to the stream reaches the head directly, and
through later blocks; the direct effects add up to the logit exactly, if the scale of the final norm is held.

Legend: T positions, D dim, N parameter tokens of one segment, W vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.growth.measure import Where, layers
from tokenformer.inside.ablation import Token, ablate, check_model, refuse_switches
from tokenformer.models.layers import Norm


class Effects(NamedTuple):
    """The direct effects on the logits of one id per position (T,); `tokens` per segment of proj and ffn, (T, N)."""

    logit_T: Tensor
    loss_T: Tensor
    embedding_T: Tensor
    bias_T: Tensor
    tokens: dict[Where, Tensor]

    def total(self) -> Tensor:
        return self.embedding_T + self.bias_T + sum(effect.sum(-1) for effect in self.tokens.values())


def through_norm(norm: Norm, written: Tensor) -> Tensor:
    """What a vector of the stream becomes in the final norm, but for the norm's scale and bias."""
    centred = written - written.mean(-1, keepdim=True)
    return centred if norm.weight is None else centred * norm.weight


@torch.no_grad()
def direct_effects(model: Any, ids_T: Tensor, wanted_T: Tensor) -> Effects:
    """Return the direct effects on the logits of `wanted` at each position of a text that fits into the context."""
    check_model(model)
    refuse_switches(model)
    active: dict[Where, Tensor] = {}
    stream: list[Tensor] = []

    def hook(layer: int, name: str, module: Any, _module: Any, inputs: tuple) -> None:
        for i, (_, active_TN) in enumerate(module.activations(inputs[0].flatten(0, -2))):
            active[layer, name, i] = active_TN

    writers = [(layer, name, module) for layer, name, module in layers(model) if name in ("proj", "ffn")]
    hooks = [m.register_forward_pre_hook(functools.partial(hook, layer, name, m)) for layer, name, m in writers]
    hooks.append(model.norm.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0][0])))
    try:
        logits_TW = model(ids_T[None]).logits[0].float()
    finally:
        for handle in hooks:
            handle.remove()
    scale_T = (stream[0].float().var(-1, unbiased=False) + model.norm.eps).rsqrt()
    heads_TD = model.head_rows(stream[0])[wanted_T].float() * scale_T[:, None]
    tokens = {}
    for layer, name, module in writers:
        for i, segment in enumerate(module.segments):
            written_ND = through_norm(model.norm, segment(torch.float32)[1])
            tokens[layer, name, i] = active[layer, name, i].float() * (heads_TD @ written_ND.T)
    first_TD = through_norm(model.norm, model.look_up(ids_T[None], None)[0].float())
    bias_D = torch.zeros_like(first_TD[0]) if model.norm.bias is None else model.norm.bias.float()
    return Effects(
        logits_TW.gather(1, wanted_T[:, None])[:, 0],
        F.cross_entropy(logits_TW, wanted_T, reduction="none"),
        (first_TD * heads_TD).sum(-1),
        (heads_TD / scale_T[:, None]) @ bias_D,
        tokens,
    )


@torch.no_grad()
def real_effects(
    model: Any,
    ids_T: Tensor,
    wanted_T: Tensor,
    asked: Sequence[tuple[Token, int]],
    how: str = "value",
    advance: Callable[[float], object] = lambda passes: None,
) -> list[float]:
    """Return, for each token and position asked for, what the logit loses when the token is switched off everywhere."""
    whole_T = model(ids_T[None]).logits[0].gather(1, wanted_T[:, None])[:, 0]
    lost: dict[Token, Tensor] = {}
    for token in dict.fromkeys(token for token, _ in asked):
        with ablate(model, [token], how):
            lost[token] = whole_T - model(ids_T[None]).logits[0].gather(1, wanted_T[:, None])[:, 0]
        advance(1)
    return [lost[token][position].item() for token, position in asked]


@torch.no_grad()
def vocabulary_effects(model: Any, count: int, vocab: int) -> Iterator[tuple[Where, Tensor, Tensor]]:
    """Yield, for each segment of proj and ffn, the ids (N, count) below `vocab` that it raises and lowers most; −1
    where a token raises all ids alike, as one does whose values are zero.
    """
    for layer, name, module in layers(model):
        if name not in ("proj", "ffn"):
            continue
        for i, segment in enumerate(module.segments):
            written_ND = through_norm(model.norm, segment(torch.float32)[1])
            ids = []
            for part_ND in written_ND.split(512):
                score_NW = part_ND @ model.head_rows(part_ND)[:vocab].T
                alike_N1 = (score_NW.amax(-1) == score_NW.amin(-1))[:, None]
                both = torch.stack([score_NW.topk(count).indices, (-score_NW).topk(count).indices])
                ids.append(both.masked_fill(alike_N1, -1))
            both = torch.cat(ids, 1)
            yield (layer, name, i), both[0], both[1]


@torch.no_grad()
def twins(segment: Any, close: float = 0.98) -> Tensor:
    """Return for each token of a segment the first other one with nearly the same key and value, -1 where none is (N,).
    Both are compared by direction and length.
    """
    found = torch.full((len(segment.key_tokens),), -1)
    both = [t.detach().float() for t in (segment.key_tokens, segment.value_tokens)]
    pairs = [(F.normalize(t), t.norm(dim=1).clamp_min(1e-30)) for t in both]
    for start in range(0, len(found), 1024):
        rows = slice(start, start + 1024)
        alike = torch.ones(len(found[rows]), len(found), dtype=torch.bool, device=both[0].device)
        for unit, length_N in pairs:
            ratio = length_N[rows, None] / length_N
            alike &= (unit[rows] @ unit.T > close) & (ratio > close) & (ratio < 1 / close)
        alike[torch.arange(len(alike)), torch.arange(start, start + len(alike))] = False
        some = alike.any(-1)
        found[rows][some] = alike[some].int().argmax(-1).to(found.device)
    return found
