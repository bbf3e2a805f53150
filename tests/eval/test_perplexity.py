"""Perplexity: every target once, exact windows, bytes of the text alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.text.writing import write_set
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.errors import UserError
from tokenformer.eval.perplexity import Document, open_documents, perplexity, windows


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12))
def test_every_target_counts_once_with_as_much_before_it_as_fits(targets, context, stride):
    if stride > context:
        with pytest.raises(UserError, match="stride"):
            list(windows(targets, context, stride))
        return
    counted = []
    for w in windows(targets, context, stride):
        assert w.start >= 0 and w.stop <= targets and 0 < w.stop - w.start <= context
        for target in range(w.first + 1, w.stop + 1):
            counted.append(target)
            seen = target - w.start  # inputs up to and with the one before it
            assert seen >= min(target, context - stride + 1)
    assert counted == list(range(1, targets + 1))


def test_windows_of_full_stride_are_those_of_the_harness():
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for n in (1, 7, 8, 9, 30):
        ids = list(range(100, 100 + n))
        theirs = [
            make_disjoint_window(pair)
            for pair in get_rolling_token_windows(ids, prefix_token=0, max_seq_len=8, context_len=1)
        ]
        whole = [0, *ids]
        ours = [(whole[w.start : w.first + 1], whole[w.first + 1 : w.stop + 1]) for w in windows(n, 8, 8)]
        assert ours == theirs


def nats(measured: dict) -> float:
    return measured["loss"] * measured["tokens"]


def by_hand(model, ids: list[int], context: int, stride: int) -> float:
    """One full forward for every single target: no batching, no windows shared."""
    total, done, whole = 0.0, 0, [0, *ids]
    while done < len(ids):
        stop = min(context if done == 0 else done + stride, len(ids))
        start = max(0, stop - context)
        with torch.no_grad():
            logits = model(torch.tensor([whole[start:stop]])).logits[0].double().log_softmax(-1)
        total -= sum(logits[t - 1 - start, whole[t]].item() for t in range(done + 1, stop + 1))
        done = stop
    return total


@pytest.mark.parametrize("stride", [1, 7, 16])
def test_nats_are_exact_for_any_stride_and_batch(model, stride):
    draw = torch.Generator().manual_seed(0)
    documents = [Document(torch.randint(1, 600, (n,), generator=draw).tolist(), n) for n in (40, 3, 16, 17, 1)]
    expected = sum(by_hand(model, list(d.ids), 16, stride) for d in documents)
    for batch in (1, 3, 100):
        measured = perplexity(model, documents, 0, context=16, stride=stride, batch=batch)
        assert math.isclose(nats(measured), expected, rel_tol=1e-5)
        assert [measured[name] for name in ("tokens", "bytes", "documents")] == [77, 77, 5]


def test_a_set_and_its_text_agree_and_end_tokens_are_never_counted(model, tokenizer, tmp_path):
    texts = ["Alice was beginning to get very tired", "of sitting by her sister — on the bank", "é"]
    ids = [tokenizer.encode(t) for t in texts]
    write_set(tmp_path / "set_text_document", [[[*row, tokenizer.end_of_document]] for row in ids])
    import json

    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    results = [
        perplexity(model, open_documents(tmp_path / name, tokenizer), tokenizer.end_of_document, context=64)
        for name in ("set", "texts.jsonl")
    ]
    for measured in results:
        assert measured["documents"] == 3
        assert measured["bytes"] == sum(len(t.encode()) for t in texts)
        assert measured["tokens"] == sum(map(len, ids))
        expected = sum(by_hand(model, row, 64, 32) for row in ids)
        assert math.isclose(measured["bits_per_byte"], expected / math.log(2) / measured["bytes"], rel_tol=1e-5)
        assert math.isclose(measured["perplexity"], math.exp(expected / measured["tokens"]), rel_tol=1e-5)
    limited = perplexity(model, open_documents(tmp_path / "set", tokenizer, limit=1), 0, context=64)
    assert limited["documents"] == 1


def test_an_end_token_that_a_text_names_is_left_out_as_in_the_prepared_set(model, tokenizer, tmp_path):
    from tokenformer.data.text.prepare import prepare

    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    (tmp_path / "named.txt").write_text("ROMEO: hello<|endoftext|>JULIET: hi")
    prepared = prepare(
        [str(tmp_path / "named.txt")], tmp_path, "set", tokenizer=str(tmp_path / "tokenizer.json"), workers=1
    )
    end = tokenizer.end_of_document
    text, held = (perplexity(model, open_documents(p, tokenizer), end) for p in (tmp_path / "named.txt", prepared))
    assert text["bytes"] == held["bytes"] == len("ROMEO: helloJULIET: hi")
    tokens = len(tokenizer.encode("ROMEO: hello")) + len(tokenizer.encode("JULIET: hi"))
    assert text["tokens"] == held["tokens"] == tokens
    assert text["loss"] == held["loss"] and text["documents"] == held["documents"] == 1


@pytest.mark.parametrize("documents", [40, 2])
def test_a_part_of_a_set_is_what_data_split_writes(tokenizer, tmp_path, documents):
    """Also where documents are too few, so that parts are cut by tokens."""
    from tokenformer.data.text.sets import split

    rows = [[[*range(1 + i, 30 + 2 * i), tokenizer.end_of_document]] for i in range(documents)]
    write_set(tmp_path / "set_text_document", rows)
    shares = [80.0, 15.0, 5.0]
    written = split(tmp_path / "set", shares, tmp_path / "parts")
    assert len(written) == 3
    total = 0
    for part, prefix in written.items():
        mine = list(open_documents(tmp_path / "set", tokenizer, part=part, shares=shares))
        alone = list(open_documents(prefix, tokenizer))
        assert [list(d.ids) for d in mine] == [list(d.ids) for d in alone]
        total += sum(len(d.ids) for d in mine)
    assert total == sum(len(d.ids) for d in open_documents(tmp_path / "set", tokenizer))
    with pytest.raises(UserError, match=r"nothing in its part test, cut by \[95.0, 5.0, 0.0\]"):
        list(open_documents(tmp_path / "set", tokenizer, part="test", shares=[95.0, 5.0, 0.0]))


def test_a_uniform_model_has_eight_bits_a_byte_and_a_little(model):
    """A byte tokenizer and a head that prefers nothing: log2 of the vocabulary for every byte."""
    import copy

    flat = copy.deepcopy(model)
    with torch.no_grad():
        flat.embedding.weight.zero_()
    text = "any text — at all"
    ids = ByteTokenizer().encode(text)
    measured = perplexity(flat, [Document(ids, len(text.encode()))], 0)
    assert math.isclose(measured["bits_per_byte"], math.log2(640), rel_tol=1e-6)


def test_nothing_to_measure_and_a_window_beyond_the_context_are_refused(model):
    with pytest.raises(UserError, match="there is no text to measure"):
        perplexity(model, [], 0)
    with pytest.raises(UserError, match="the window is 999"):
        perplexity(model, [Document([1], 1)], 0, context=999)
    with pytest.raises(UserError, match="the window is 0, but must be 1 to 128"):
        perplexity(model, [Document([1], 1)], 0, context=0)
    with pytest.raises(UserError, match="stride is 0"):
        perplexity(model, [Document([1], 1)], 0, stride=0)


def test_many_documents_count_all_whatever_the_batch(model):
    """More windows than are held back at once (128 batches)."""
    documents = [Document([1 + i % 5, 7, 3], 3) for i in range(130)]
    one, many = (perplexity(model, documents, 0, context=16, batch=batch) for batch in (1, 100))
    assert nats(one) == pytest.approx(nats(many)) and nats(one) == pytest.approx(
        sum(by_hand(model, document.ids, 16, 16) for document in documents[:5]) * 26
    )


def test_progress_is_made_inside_of_a_long_document(model):
    seen: list[float] = []
    document = Document(list(range(1, 40)) * 3, 117)
    found = perplexity(model, [document], 0, context=8, stride=4, batch=2, advance=seen.append)
    assert sum(seen) == found["tokens"] == 117 and len(seen) > 10
