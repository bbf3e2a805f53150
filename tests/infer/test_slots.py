"""Texts that join and leave between steps have the tokens of `Engine.generate`, whatever runs beside them."""

import random

import pytest
import torch
from small_models import make

from tokenformer.infer import Engine, Sampling
from tokenformer.infer.sampling import choose, choose_each, uniform
from tokenformer.infer.slots import Slots, Text, Token

HOWS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.0, top_k=9, top_p=0.5),
]


def run(slots: Slots, wanted: list[tuple[Text, int]], seed: int, lag: int = 0) -> dict[Text, list[Token]]:
    """Run texts to their numbers of tokens; they come in groups of random sizes. With `lag`, as on a GPU, results of a
    step are looked at only after the next one began.
    """
    draw, waiting, left = random.Random(seed), list(wanted), dict(wanted)
    out: dict[Text, list[Token]] = {text: [] for text, _ in wanted}
    under_way: list = []
    while waiting or slots.texts or slots.entering:
        if waiting and slots.free and draw.random() < 0.6:
            group = waiting[: draw.randint(1, slots.free)]
            waiting = waiting[len(group) :]
            slots.enter([text for text, _ in group])
        under_way.append(slots.launch())
        if len(under_way) > lag:
            for made in under_way.pop(0):
                for text, token in made:
                    if not text.gone:
                        out[text].append(token)
                        if len(out[text]) == left[text]:
                            slots.leave(text)
    assert all(len(out[text]) == n for text, n in wanted)
    return out


@pytest.mark.parametrize(
    ("kind", "rounded", "lag", "chunk"),
    [("tokenformer", False, 0, 1024), ("llama", True, 1, 16), ("overrides", True, 0, 8)],
)
def test_texts_that_come_and_go_have_the_tokens_of_generate(kind, rounded, lag, chunk):
    draw = random.Random(3)
    wanted = []
    for i in range(16):
        prompt = [draw.randrange(64) for _ in range(draw.choice([1, 2, 9, 31, 60]))]
        wanted.append((Text(prompt, seed=i, sampling=draw.choice(HOWS)), draw.randint(1, 12)))
    engine = Engine(make(kind), chunk=chunk)
    found = run(Slots(engine, 5, rounded), wanted, seed=4, lag=lag)
    for text, n in wanted:
        (alone,) = engine.generate([text.ids], n, text.sampling, seeds=[text.seed])
        assert [token.id for token in found[text]] == alone.ids
    assert len({tuple(t.id for t in tokens) for tokens in found.values()}) > 8  # a test that can fail


def test_a_text_may_fill_the_context_while_its_neighbours_leave(tokenformer_model):
    engine = Engine(tokenformer_model)
    context = tokenformer_model.config.context
    wanted = [(Text([5] * (context - 4)), 4), (Text([6]), context - 1), (Text([7, 8]), 2)]
    found = run(Slots(engine, 2, True), wanted, seed=0, lag=1)
    for text, n in wanted:
        assert [t.id for t in found[text]] == engine.generate([text.ids], n)[0].ids


def test_a_captured_step_is_replayed_for_every_token_and_capturing_makes_none(monkeypatch, tokenformer_model):
    """CUDA graphs, for which plain calls stand here: a warm-up that computes, then a capture that computes nothing."""
    engine = Engine(tokenformer_model)
    slots, captured = Slots(engine, 3, True), []
    monkeypatch.setattr("tokenformer.infer.slots.warm_up", lambda work: [work() for _ in range(3)])
    monkeypatch.setattr("tokenformer.infer.slots.capture", lambda work, pool: captured.append(work) or work)
    monkeypatch.setattr(engine, "graph", True)
    wanted = [(Text([i + 1, 7], seed=i, sampling=how), 5 + i) for i, how in enumerate(HOWS)]
    found = run(slots, wanted, seed=4, lag=1)
    monkeypatch.setattr(engine, "graph", False)
    for text, n in wanted:
        assert [t.id for t in found[text]] == engine.generate([text.ids], n, text.sampling, seeds=[text.seed])[0].ids
    assert 1 < len(captured) == len(slots._replays) < sum(n for _, n in wanted)


def test_a_prompt_that_is_given_up_leaves_its_row_to_others(tokenformer_model):
    engine = Engine(tokenformer_model, chunk=4)
    slots = Slots(engine, 2)
    slots.enter([Text([1] * 20)])
    slots.launch()
    slots.leave(slots.entering[0])
    assert slots.free == 2 and slots.launch() == []
    wanted = [(Text([2, 3, 4]), 9)]
    assert [t.id for t in run(slots, wanted, 0)[wanted[0][0]]] == engine.generate([[2, 3, 4]], 9)[0].ids


def test_log_probabilities_and_alternatives_of_text_and_prompt_are_those_of_a_full_pass(tokenformer_model):
    model = tokenformer_model
    prompt, n = [3, 1, 4, 1, 5, 9, 2, 6], 6
    engine = Engine(model, chunk=3)
    text, plain = Text(prompt, tops=True, scored=True), Text([9] * 7)
    found = run(Slots(engine, 3), [(plain, 4), (text, n)], seed=1)
    (expected,) = engine.generate([prompt], n, logprobs=True)
    assert [t.id for t in found[text]] == expected.ids
    assert [t.logprob for t in found[text]] == pytest.approx(expected.logprobs, abs=1e-5)
    with torch.no_grad():
        full = model(torch.tensor([prompt + expected.ids])).logits[0].log_softmax(-1)
    tokens = text.prompt + found[text]
    assert [t.id for t in tokens] == prompt[1:] + expected.ids
    for at, token in enumerate(tokens):
        assert token.logprob == pytest.approx(full[at, token.id].item(), abs=1e-5)
        best = full[at].topk(20)
        assert [x for _, x in token.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert token.top[0][0] == best.indices[0]


def test_ids_under_a_switch_count_in_no_probability(monkeypatch):
    """The decoding kernels compute logits of all ids; here a step does."""
    engine = Engine(make(added_vocab=4, added_switch="draw"))
    (expected,) = engine.generate([[5, 6]], 5, logprobs=True)
    step, text = engine.make_step(1), Text([5, 6], tops=True)

    def of_all_ids(*inputs) -> torch.Tensor:
        return torch.nn.functional.pad(step(*inputs), (0, 4), value=9.0)

    monkeypatch.setattr(engine, "make_step", lambda size: of_all_ids)
    found = run(Slots(engine, 1), [(text, 5)], seed=1)[text]
    assert [t.id for t in found] == expected.ids
    assert [t.logprob for t in found] == pytest.approx(expected.logprobs, abs=1e-5)


def test_each_row_has_its_own_adapters():
    """Also beside rows without any, which have the bits of the base."""
    model = make(
        qkv_tokens=[12, 4],
        proj_tokens=[10, 4],
        ffn_tokens=[16, 4],
        switch={which: ["", "books"] for which in ("qkv", "proj", "ffn")},
    )
    engine = Engine(model)
    wanted = [(Text([i + 1, 7], switches={"books": w} if w else {}), 12) for i, w in enumerate([0, 1.0, 0.3, 0, 1.0])]
    found = run(Slots(engine, 3), wanted, seed=2)
    for text, n in wanted:
        (alone,) = engine.generate([text.ids], n, switches=[text.switches])
        assert [t.id for t in found[text]] == alone.ids
    (other,) = engine.generate([wanted[1][0].ids], 12, switches=[{}])
    assert other.ids != [t.id for t in found[wanted[1][0]]]


def test_rows_are_chosen_for_as_if_each_had_the_batch_to_itself():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(len(HOWS) * 40, 50, generator=draw).mul(3).round(decimals=1)  # with ties
    hows = HOWS * 40
    chance = uniform(torch.arange(len(hows)), torch.tensor(1))
    of_rows = (
        torch.tensor([h.temperature for h in hows]).double(),
        torch.tensor([h.top_k for h in hows]),
        torch.tensor([h.top_p for h in hows]).double(),
    )
    alone = torch.cat([choose(row[None], how, u[None]) for row, how, u in zip(logits, hows, chance, strict=True)])
    assert choose_each(logits, *of_rows, chance, cuts=True).tolist() == alone.tolist()
