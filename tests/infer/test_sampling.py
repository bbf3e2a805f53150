"""Samplers: their distributions against theory, their filters against transformers' own."""

import math

import pytest
import torch

from tokenformer.errors import UserError
from tokenformer.infer.sampling import Sampling, choose, keep, penalise, uniform

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
DRAWS = 40_000


def theory(how: Sampling) -> list[float]:
    """Probabilities by hand: no code shared with the sampler."""
    weights = [math.exp(x / how.temperature) for x in LOGITS.tolist()]
    kept = sorted(range(8), key=lambda i: -weights[i])
    if how.top_k:
        kept = kept[: how.top_k]
    if 0 < how.top_p < 1:
        total, mass, out = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            if mass < how.top_p * total:
                out.append(i)
            mass += weights[i]
        kept = out
    kept = [i for i in kept if weights[i] >= how.min_p * max(weights)]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(8)]


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=3.0),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=2.0, top_k=6, top_p=0.9, min_p=0.1),
    ],
    ids=str,
)
def test_draws_follow_the_distribution_by_a_chi_square_test(how):
    """Both over seeds at one step and over steps of one seed: neither may be worn out."""
    expected = theory(how)
    for seeds, steps in ((torch.arange(DRAWS), torch.tensor(3)), (torch.tensor([11]), torch.arange(DRAWS))):
        numbers = uniform(seeds, steps)
        counts = choose(LOGITS.expand(DRAWS, 8), how, numbers).bincount(minlength=8).tolist()
        assert all(c == 0 for c, p in zip(counts, expected, strict=True) if p == 0)
        kept = [(c, p * DRAWS) for c, p in zip(counts, expected, strict=True) if p > 0]
        statistic = sum((c - e) ** 2 / e for c, e in kept)
        degrees = len(kept) - 1
        # mean + 4 deviations of a chi-square: passed by chance 999 times in 1,000; seeds are fixed
        assert statistic < degrees + 4 * math.sqrt(2 * degrees)
        assert len(kept) > 1


def test_neighbouring_seeds_and_steps_are_not_correlated():
    grid = torch.stack([uniform(torch.arange(400), torch.tensor(i)) for i in range(400)])
    for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1]), (grid[1:, 1:], grid[:-1, :-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.01
    assert grid.min() >= 0 and grid.max() < 1
    assert len(grid.unique()) == grid.numel()


def test_greedy_takes_the_most_likely_and_the_ends_of_the_interval_stay_inside():
    assert choose(LOGITS[None], Sampling(), torch.zeros(1)).tolist() == [0]
    how = Sampling(temperature=1.0, top_k=3)
    for number, token in ((0.0, 0), (1 - 2**-53, 2)):
        assert choose(LOGITS[None], how, torch.tensor([number], dtype=torch.float64)).tolist() == [token]


def test_filters_and_penalty_are_those_of_transformers():
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 200, generator=draw) * 3
    ids = torch.randint(200, (16, 30), generator=draw)
    seen = torch.zeros(16, 200, dtype=torch.bool).scatter(1, ids, True)
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(50),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ]
    )(ids, logits)
    how = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.3)
    ours = keep(penalise(logits, seen, how.repetition_penalty), how)
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert torch.allclose(ours[~ours.isinf()], theirs[~ours.isinf()])
    assert 16 < (~ours.isinf()).sum() < 16 * 50


@pytest.mark.parametrize(
    "keys", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.5}, {"min_p": -0.1}, {"repetition_penalty": 0.0}]
)
def test_impossible_settings_are_refused_by_name(keys):
    with pytest.raises(UserError, match=f"{next(iter(keys))} is .*: give"):
        Sampling(**keys)


def test_a_filter_that_temperature_0_would_ignore_is_refused_and_one_that_is_off_is_not():
    for keys in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(UserError, match=f"{next(iter(keys))} is .*, but temperature 0 .*: give a temperature"):
            Sampling(**keys)
    for keys in ({"top_k": 0, "top_p": 0.0, "min_p": 0.0}, {"top_k": 1}, {"top_p": 1.0}, {"min_p": 1.0}):
        assert Sampling(**keys).greedy


def test_the_ends_of_the_ranges():
    """min_p 1 keeps the most likely token; at 0 a filtered first token is not chosen."""
    assert keep(torch.tensor([[1.0, 2.0]]), Sampling(temperature=1.0, min_p=1.0)).tolist() == [[-math.inf, 2.0]]
    nothing = torch.zeros(1, dtype=torch.float64)
    assert choose(torch.tensor([[-torch.inf, 0.0]]), Sampling(temperature=1.0), nothing).item() == 1
    almost = torch.full((1,), 1 - 2.0**-53, dtype=torch.float64)
    assert choose(torch.tensor([[0.0, 0.0]]), Sampling(temperature=1.0), almost).item() == 1
