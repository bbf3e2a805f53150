"""Texts of prompts: stop strings, pieces, cut characters."""

import time

import pytest
from small_models import make

from tokenformer.data.text.tokenizer import load_tokenizer
from tokenformer.errors import UserError
from tokenformer.infer import Engine, Sampling, write_texts
from tokenformer.infer.text import Piecewise, Session

BYTES = load_tokenizer("byte")
PROMPTS = ["Once upon", "", "a longer prompt than the others"]
HOW = Sampling(temperature=1.0, top_k=30)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(make(vocab=384, context=128), vocab=257, every=5)


def plain(engine, **keys):
    return list(write_texts(engine, BYTES, PROMPTS, 60, HOW, seeds=[1, 2, 3], **keys))


def test_pieces_join_to_the_text_whatever_the_batch_and_however_often_one_looks(engine):
    expected = plain(engine)
    assert [r.context for r in expected] == PROMPTS
    assert any(r.text for r in expected)
    for batch, every in ((1, 1), (2, 7), (3, 64)):
        heard = ["", "", ""]

        def said(i, piece, heard=heard):
            heard[i] += piece

        results = plain(engine, batch=batch, every=every, on_piece=said)
        assert [r._replace(seconds=0) for r in results] == [r._replace(seconds=0) for r in expected]
        assert heard == [r.text for r in results]


def test_a_stop_string_cuts_its_text_and_the_tokens_with_it(engine):
    full = plain(engine)
    longest = max(full, key=lambda r: len(r.text))
    stop = longest.text[10:12]
    heard = ["", "", ""]

    def said(i, piece):
        heard[i] += piece

    results = plain(engine, stops=["not in any text", stop], on_piece=said, logprobs=True)
    for before, after, pieces in zip(full, results, heard, strict=True):
        at = before.text.find(stop)
        assert after.text == pieces == (before.text if at < 0 else before.text[:at])
        assert after.finished == (before.finished or at >= 0)
        assert len(after.ids) == len(after.logprobs)
        assert BYTES.decode(after.ids) == after.text or "�" in before.text
    assert any(r.text != f.text for r, f in zip(results, full, strict=True))


def test_a_character_of_several_tokens_is_given_out_whole():
    text = Piecewise(BYTES.decode, [])
    pieces = [text.add([i]) for i in BYTES.encode("aé€b")]
    assert pieces == ["a", "", "é", "", "", "€", "b"]
    assert Piecewise(BYTES.decode, []).add(BYTES.encode("é")[:1], last=True) == "�"


def test_a_stop_string_is_found_across_pieces_and_never_shown():
    text = Piecewise(BYTES.decode, ["\n\n", "END"])
    assert [text.add(BYTES.encode(p)) for p in ("one E", "N", "x\n", "two\n", "\nthree")] == [
        "one ",
        "",
        "ENx",
        "\ntwo",
        "",
    ]
    assert text.stopped
    assert text.text == "one ENx\ntwo"


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_the_stop_string_that_ends_first_cuts_however_many_ids_come_at_once(size):
    text, ids = Piecewise(BYTES.decode, ["bcd", "abcde", "abcd"]), BYTES.encode("xabcdefgh")
    assert "".join(text.add(ids[at : at + size]) for at in range(0, len(ids), size)) == text.text == "x"
    text = Piecewise(BYTES.decode, ["bcd", "abcde"])
    assert "".join(text.add(ids[at : at + size]) for at in range(0, len(ids), size)) == text.text == "xa"


def test_long_stop_strings_do_not_slow_down_a_long_text():
    """A server's texts have one thread."""
    text = Piecewise(BYTES.decode, ["x" * 100_000 + str(i) for i in range(16)])
    begun = time.process_time()
    for i in range(2000):
        assert text.add([98 + i % 20])
    assert time.process_time() - begun < 3


def test_all_prompts_are_checked_before_the_first_text(engine):
    for prompts, seeds, sentence in (
        (["a", "x" * 200], None, r"prompts\[1\] has 200 tokens"),
        (["a", "b\udcff"], None, r"prompts\[1\] is not UTF-8 text"),
        (["a", "b"], [1], "1 seeds for 2 prompts"),
    ):
        with pytest.raises(UserError, match=sentence):
            write_texts(engine, BYTES, prompts, 5, seeds=seeds, batch=1)  # nobody asked for a text yet
    with pytest.raises(UserError, match="second has 200 tokens"):
        write_texts(engine, BYTES, ["a", "x" * 200], 5, names=["first", "second"])


def test_a_text_says_whether_the_context_or_a_stop_token_ended_it(engine):
    (short,) = write_texts(engine, BYTES, ["x" * 100], 20, HOW)
    (whole,) = write_texts(engine, BYTES, ["x" * 100], 28, HOW)
    (cut,) = write_texts(engine, BYTES, ["x" * 100], 1000, HOW)
    assert [len(r.ids) for r in (short, whole, cut)] == [20, 28, 28]
    assert [r.full for r in (short, whole, cut)] == [False, False, True]
    (stopped,) = write_texts(engine, BYTES, ["x" * 100], 1000, HOW, stop_ids=[cut.ids[9]])
    assert stopped.ids == cut.ids[: cut.ids.index(cut.ids[9])] and stopped.finished and not stopped.full


def test_a_conversation_that_is_told_enough_keeps_what_was_said(engine):
    heard: list[str] = []
    session = Session(engine, BYTES, 60, HOW, seed=1)
    result = session.say("Once upon", heard.append, enough=lambda: len("".join(heard)) >= 5)
    (whole,) = write_texts(engine, BYTES, ["Once upon"], 60, HOW, seeds=[1])
    assert result.text == "".join(heard) and 0 < len(result.ids) < len(whole.ids)
    assert whole.ids[: len(result.ids)] == result.ids and not result.finished and not result.full
    assert session.history == "Once upon" + result.text


def test_a_conversation_keeps_half_the_context_however_much_is_asked_for(engine):
    session = Session(engine, BYTES, 1000, HOW, seed=1)
    long = "".join(map(chr, range(40, 120)))
    (whole,) = write_texts(engine, BYTES, [long[-64:]], 64, HOW, seeds=[1])
    assert session.say(long).ids == whole.ids
