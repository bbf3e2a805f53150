"""Chooses the next token from logits, on the device alone.

Unusual: randomness is a hash of (seed of the row, step), so a row's text does not depend on the rows beside it.
Legend: B batch, W vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenformer.strict import Section, key, need

_MASK = {30: (1 << 34) - 1, 27: (1 << 37) - 1, 31: (1 << 33) - 1, 11: (1 << 53) - 1}


@dataclass(frozen=True)
class Sampling(Section):
    """How the next token is chosen, in this order: penalty, temperature, top-k, top-p, min-p.

    >>> Sampling(temperature=0.8, top_p=0.9).greedy
    False
    """

    temperature: float = key("0 takes the most likely token; else logits are divided by it", 0.0, least=0)
    top_k: int = key("only the k most likely tokens; 0 = all", 0, least=0)
    top_p: float = key("only the most likely tokens of this probability in total; 0 = all", 0.0, least=0, most=1)
    min_p: float = key("only tokens of at least this share of the highest probability; 0 = all", 0.0, least=0, most=1)
    repetition_penalty: float = key("weakens tokens that were there before by this factor; 1 = none", 1.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("top_k", "top_p", "min_p"):  # at 0 and 1 each keeps all, or the most likely token
            value, why = getattr(self, name), "temperature 0 takes the most likely token"
            need(not self.greedy or value in (0, 1), f"{name} is {value}, but {why}: give a temperature, or {name} 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def penalise(logits_BW: Tensor, seen_BW: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of tokens that were there before by the penalty, and multiply negative ones."""
    return torch.where(seen_BW, torch.where(logits_BW > 0, logits_BW / penalty, logits_BW * penalty), logits_BW)


def keep(logits_BW: Tensor, how: Sampling) -> Tensor:
    """Return logits divided by the temperature, -inf where a token may not be chosen.

    >>> keep(torch.tensor([[1.0, 2.0, 3.0]]), Sampling(temperature=1.0, top_k=2))
    tensor([[-inf, 2., 3.]])
    """
    logits_BW = logits_BW / how.temperature
    if 0 < how.top_k < logits_BW.shape[-1]:
        least_B1 = logits_BW.topk(how.top_k).values[:, -1:]
        logits_BW = logits_BW.masked_fill(logits_BW < least_B1, -torch.inf)
    if 0 < how.top_p < 1:
        ordered_BW, order_BW = logits_BW.sort(-1, descending=True)
        chance_BW = ordered_BW.softmax(-1)
        before_BW = chance_BW.cumsum(-1) - chance_BW  # the token that crosses the threshold is kept
        out_BW = torch.zeros_like(before_BW, dtype=torch.bool).scatter(1, order_BW, before_BW >= how.top_p)
        logits_BW = logits_BW.masked_fill(out_BW, -torch.inf)
    if how.min_p > 0:
        chance_BW = logits_BW.softmax(-1)
        logits_BW = logits_BW.masked_fill(chance_BW < how.min_p * chance_BW.amax(-1, keepdim=True), -torch.inf)
    return logits_BW


def choose(logits_BW: Tensor, how: Sampling, uniform_B: Tensor) -> Tensor:
    """Choose a token per row: the most likely, or by the inverse of the distribution function at `uniform`."""
    return logits_BW.argmax(-1) if how.greedy else _draw(keep(logits_BW, how), uniform_B)


def choose_each(
    logits_BW: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, uniform_B: Tensor, cuts: bool
) -> Tensor:
    """Choose as `choose` does, each row by its own temperature, top-k and top-p, which count only with `cuts`.

    >>> logits, half = torch.tensor([[1.0, 2.0, 3.0]] * 2), torch.tensor([0.5, 0.5])
    >>> choose_each(logits, torch.tensor([0.0, 9.0]), torch.tensor([0, 2]), torch.zeros(2), half, cuts=True)
    tensor([2, 2])
    """
    greedy_B1 = temperature_B[:, None] == 0
    scaled_BW = logits_BW / torch.where(greedy_B1, 1.0, temperature_B[:, None]).to(logits_BW.dtype)
    if cuts:
        ordered_BW, order_BW = scaled_BW.sort(-1, descending=True)
        last_B1 = torch.where(top_k_B > 0, top_k_B - 1, len(logits_BW[0]) - 1).clamp(max=len(logits_BW[0]) - 1)[:, None]
        ordered_BW = ordered_BW.masked_fill(ordered_BW < ordered_BW.gather(1, last_B1), -torch.inf)
        chance_BW = ordered_BW.softmax(-1)
        most_B1 = torch.where((top_p_B > 0) & (top_p_B < 1), top_p_B, torch.inf).to(chance_BW.dtype)[:, None]
        out_BW = chance_BW.cumsum(-1) - chance_BW >= most_B1
        scaled_BW = scaled_BW.scatter(1, order_BW, ordered_BW.masked_fill(out_BW, -torch.inf))
    return torch.where(greedy_B1[:, 0], logits_BW.argmax(-1), _draw(scaled_BW, uniform_B))


def _draw(logits_BW: Tensor, uniform_B: Tensor) -> Tensor:
    cumulative_BW = logits_BW.double().softmax(-1).cumsum(-1)
    target_B1 = uniform_B[:, None] * cumulative_BW[:, -1:]
    return torch.searchsorted(cumulative_BW, target_B1, right=True)[:, 0].clamp(max=logits_BW.shape[-1] - 1)


def uniform(seed_B: Tensor, step: Tensor) -> Tensor:
    """Return a float64 in [0, 1) for each seed that depends on (seed, step) alone.

    >>> uniform(torch.tensor([7, 8]), torch.tensor(0))
    tensor([0.7215, 0.2666], dtype=torch.float64)
    """
    bits_B = _mix(_mix(seed_B) + step)
    return ((bits_B >> 11) & _MASK[11]).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64: int64 products wrap, and a mask makes shifts logical."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64))):
        x = (x ^ ((x >> shift) & _MASK[shift])) * factor
    return x ^ ((x >> 31) & _MASK[31])
