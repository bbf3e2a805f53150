"""The engine against the reference: the same greedy tokens cached, batched, chunked and uncached."""

import pytest
import torch
from small_models import make

from tokenformer.errors import UserError
from tokenformer.infer import Engine, Sampling
from tokenformer.infer.cache import StaticCache
from tokenformer.infer.packed import Packed
from tokenformer.models import LanguageModel

NEW = 20


def reference(model: LanguageModel, prompt: list[int], n: int = NEW) -> list[int]:
    return model.generate(torch.tensor([prompt]), n)[0, len(prompt) :].tolist()


def uncached(model: LanguageModel, prompt: list[int], n: int = NEW) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[len(prompt) :]


def test_the_packed_forward_is_the_models_for_every_kind_and_theta(model, relative):
    ids = torch.randint(64, (3, 11), generator=torch.Generator().manual_seed(0))
    packed = Packed(model)
    with torch.no_grad():
        expected = model(ids).logits
        for parts in ([11], [4, 6, 1]):  # at once, and in chunks
            cache = StaticCache(model.config, 3, 16, "cpu", torch.float32)
            start, seen = 0, []
            for size in parts:
                places = torch.arange(start, start + size)
                seen.append(packed.hidden(ids[:, start : start + size], places, cache, start))
                start += size
            assert relative(packed.logits(torch.cat(seen, 1)), expected) < 2e-5
        cache = StaticCache(model.config, 3, 16, "cpu", torch.float32)
        places = torch.arange(11).expand(3, 11)
        assert relative(packed.logits(packed.hidden(ids, places, cache)), expected) < 2e-5


@pytest.mark.parametrize("chunk", [1, 5, 1024])
def test_greedy_tokens_are_those_of_the_reference_cached_batched_chunked_and_uncached(model, prompts, chunk):
    expected = [reference(model, p) for p in prompts]
    assert expected == [uncached(model, p) for p in prompts]
    assert len({tuple(e) for e in expected}) > 1  # a test that can fail
    engine = Engine(model, chunk=chunk, every=3)
    assert engine.backend == "torch"
    assert [row.ids for row in engine.generate(prompts, NEW)] == expected  # one batch of four lengths
    assert [engine.generate([p], NEW)[0].ids for p in prompts] == expected  # one by one
    assert engine.generate(prompts[::-1], NEW)[0].ids == expected[-1]


def test_log_probabilities_are_those_of_a_full_forward(tokenformer_model, prompts):
    rows = Engine(tokenformer_model).generate(prompts, NEW, logprobs=True)
    for prompt, row in zip(prompts, rows, strict=True):
        with torch.no_grad():
            logits = tokenformer_model(torch.tensor([prompt + row.ids])).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(row.ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(row.logprobs), expected, atol=1e-4)


def test_a_stop_token_ends_its_row_alone_and_is_not_given_out(tokenformer_model, prompts):
    expected = [reference(tokenformer_model, p) for p in prompts]
    stop = expected[0][4]
    rows = Engine(tokenformer_model, every=7).generate(prompts, NEW, stop_ids=[stop, 63])
    for row, full in zip(rows, expected, strict=True):
        ends = [i for i, t in enumerate(full) if t in (stop, 63)]
        assert row.ids == full[: ends[0] if ends else NEW]
        assert row.finished == bool(ends)
    assert rows[0].finished


def test_the_context_ends_a_row_and_a_prompt_that_fills_it_is_refused(tokenformer_model):
    long, short = [1] * 90, [2, 3]
    rows = Engine(tokenformer_model).generate([long, short], 30)
    assert [len(r.ids) for r in rows] == [6, 30]
    assert not rows[0].finished
    assert rows[1].ids == reference(tokenformer_model, short, 30)
    with pytest.raises(UserError, match=r"prompts\[0\] has 96 tokens, the model's context is 96"):
        Engine(tokenformer_model).generate([[1] * 96], 1)
    with pytest.raises(UserError, match=r"prompts\[1\] has no tokens"):
        Engine(tokenformer_model).generate([[1], []], 1)


def test_tensors_are_prompts_too_and_what_is_none_is_one_sentence(tokenformer_model):
    engine = Engine(tokenformer_model, vocab=60)
    rows = engine.generate([[1, 2, 3], [4, 5, 6]], 5)
    for same in (torch.tensor([[1, 2, 3], [4, 5, 6]]), [torch.tensor([1, 2, 3], dtype=torch.int32), (4, 5, 6)]):
        assert engine.generate(same, 5) == rows
    for wrong, sentence in (
        ([[1], [99999]], r"prompts\[1\] holds the id 99999: give ids from 0 to 59"),
        ([[-3]], r"prompts\[0\] holds the id -3"),
        ([1, 2, 3], r"prompts\[0\] is no row of ids"),
        (torch.tensor([1, 2]), r"prompts\[0\] is no row of ids"),
        ([torch.tensor([[1, 2]])], r"prompts\[0\] is no row of ids"),
        ([torch.tensor([0.5])], r"prompts\[0\] is no row of ids"),
        (["text"], r"prompts\[0\] is no row of ids"),
        ([torch.tensor([], dtype=torch.long)], r"prompts\[0\] has no tokens"),
        ([], "nothing to generate"),
    ):
        with pytest.raises(UserError, match=sentence):
            engine.generate(wrong, 5)
    for seeds, sentence in (([7], "1 seeds for 2 prompts"), ([7, 8, 9], "3 seeds for 2"), ([7, 1 << 63], "too large")):
        with pytest.raises(UserError, match=sentence):
            engine.generate([[1], [2]], 5, seeds=seeds)


def test_asking_for_more_tokens_than_the_context_costs_no_memory(tokenformer_model):
    (row,) = Engine(tokenformer_model).generate([[2, 3]], 10**12)
    assert len(row.ids) == 94 and not row.finished


def test_a_seed_gives_the_same_text_whoever_is_beside_it(tokenformer_model, prompts):
    engine = Engine(tokenformer_model, every=4)
    how = Sampling(temperature=1.0, top_p=0.95, min_p=0.01, top_k=40)
    rows = engine.generate(prompts, NEW, how, seeds=[3, 4, 5, 6])
    assert engine.generate(prompts, NEW, how, seeds=[3, 4, 5, 6]) == rows
    assert [engine.generate([p], NEW, how, seeds=[s])[0] for p, s in zip(prompts, [3, 4, 5, 6], strict=True)] == rows
    other = engine.generate(prompts, NEW, how, seeds=[7, 8, 9, 10])
    assert all(a.ids != b.ids for a, b in zip(rows, other, strict=True))


def test_ids_of_the_padded_vocabulary_are_never_chosen(tokenformer_model):
    with torch.no_grad():
        tokenformer_model.embedding.weight[60:] *= 100  # such a model would choose nothing else
    assert max(reference(tokenformer_model, [5, 6])) >= 60
    for how in (Sampling(), Sampling(temperature=2.0)):
        assert max(Engine(tokenformer_model, vocab=60).generate([[5, 6]], 40, how)[0].ids) < 60


def test_a_repetition_penalty_counts_the_prompt_and_what_was_made(tokenformer_model):
    ids = list(range(10))
    with torch.no_grad():
        for _ in range(25):
            logits = tokenformer_model(torch.tensor([ids])).logits[0, -1]
            fair = [x if i not in ids else x / 1.7 if x > 0 else x * 1.7 for i, x in enumerate(logits.tolist())]
            ids.append(max(range(64), key=fair.__getitem__))
    row = Engine(tokenformer_model).generate([list(range(10))], 25, Sampling(repetition_penalty=1.7))[0]
    assert row.ids == ids[10:]
    assert row.ids != reference(tokenformer_model, list(range(10)), 25)


def test_an_engine_serves_batches_one_after_another(tokenformer_model, prompts):
    engine = Engine(tokenformer_model)
    expected = [reference(tokenformer_model, p) for p in prompts]
    for _ in range(2):  # the second finds the buffers of the first
        assert [row.ids for row in engine.generate(prompts, NEW)] == expected
    assert engine.generate(prompts[:2], NEW)[1].ids == expected[1]


def test_half_precision_decodes_as_the_reference_does(prompts):
    from small_models import make

    model = make(dim=64, heads=4).to(torch.bfloat16)
    logits = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        cache = StaticCache(model.config, 1, 32, "cpu", torch.bfloat16)
        packed = Packed(model)
        assert packed.dtype == torch.bfloat16
        with torch.no_grad():
            ours = packed.logits(packed.hidden(ids, torch.arange(len(prompt)), cache, 0))
            logits.append((ours - model(ids).logits.float()).abs().max() / ours.abs().max())
    assert max(logits) < 0.03


SWITCHED = {"ffn_tokens": [16, 6, 5], "switch": {"ffn": ["", "a", "b"], "qkv": ["", "b"]}}
ROWS = [{"a": 1.0}, {"b": -0.5, "a": 2.0}, {}, {"b": 3.0}]


def test_each_row_of_a_batch_has_its_own_adapters():
    """As one at a time: the same tokens, log-probabilities within 1e-6 of the largest logit, since one row rounds in
    another order than four; without adapters the base, bit for bit.
    """
    model, prompts = make(**SWITCHED), [[5, 6, 7], [1], [9, 9], [3, 2, 1, 0]]
    plain = make(ffn_tokens=16, qkv_tokens=12)
    plain.load_state_dict({n: p for n, p in model.state_dict().items() if n in plain.state_dict()}, strict=True)
    engine = Engine(model)
    together = engine.generate(prompts, 9, logprobs=True, switches=ROWS)
    largest = model(torch.tensor(prompts[0])[None]).logits.abs().max().item()
    for row, prompt, switches in zip(together, prompts, ROWS, strict=True):
        (alone,) = engine.generate([prompt], 9, logprobs=True, switches=[switches])
        assert alone.ids == row.ids
        error = max(abs(a - b) for a, b in zip(alone.logprobs, row.logprobs, strict=True))
        assert error < 1e-6 * largest
        model.active = switches
        assert model.generate(torch.tensor([prompt]), 9)[0, len(prompt) :].tolist() == row.ids
        assert Engine(model).generate([prompt], 9)[0].ids == row.ids
        assert engine.generate([prompt], 9)[0].ids == row.ids  # an engine follows what is active in its model
    model.active = {}
    assert engine.generate(prompts, 9, logprobs=True) == Engine(plain).generate(prompts, 9, logprobs=True)
    assert len({tuple(row.ids) for row in engine.generate([[5, 6, 7]] * 4, 9, switches=ROWS)}) > 1


def test_adapters_that_a_batch_cannot_have():
    model = make(**SWITCHED)
    for switches, said in (
        ([{"c": 1.0}], "no adapter or switch 'c': there are a, b"),
        ([{}, {}], "for 2 of 1 prompts"),
        ([{"a": float("nan")}], "the weight of 'a' is nan: give a finite number"),
        (["a"], "'a' gives no weights"),
    ):
        with pytest.raises(UserError, match=said):
            Engine(model).generate([[1]], 3, switches=switches)
    model.adapters = {"a": {"norm.bias": torch.zeros(32)}}
    with pytest.raises(UserError, match="adapter 'a' moves parameters of its base"):
        Engine(model).generate([[1], [2]], 3, switches=[{"a": 1.0}, {}])
    engine = Engine(model)
    model.active = {"a": 1.0}
    with pytest.raises(UserError, match="adapters changed after this engine was made"):
        engine.generate([[1]], 3)
    model.active, model.adapters = {}, {}
    with pytest.raises(UserError, match="adapters changed after this engine was made"):
        engine.generate([[1]], 3)
