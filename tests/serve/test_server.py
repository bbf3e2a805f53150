"""The server through the official client: its texts are those of `generate`, its errors have the protocol's form."""

import asyncio
import itertools
import json
import math
import queue
import random
import threading
import time
from collections import deque
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch
from serving import BYTES, make_model

from tokenformer.data.text.tokenizer import FileTokenizer
from tokenformer.infer import Engine, Sampling, write_texts
from tokenformer.infer.slots import Text
from tokenformer.infer.text import Piecewise
from tokenformer.serve.app import Service
from tokenformer.serve.batching import Answer, Batcher
from tokenformer.serve.protocol import Refused


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def alone(engine, prompt: str, n: int, how: Sampling | None = None, seed: int = 0, stops=()):
    (result,) = write_texts(engine, BYTES, [prompt], n, how, seeds=[seed], stops=stops, logprobs=True)
    return result


def test_completions_are_those_of_generate(client, engine):
    greedy = client.completions.create(model="small", prompt="Once", max_tokens=20, temperature=0)
    assert greedy.choices[0].text == alone(engine, "Once", 20).text != ""
    assert greedy.choices[0].finish_reason == "length"
    assert (greedy.usage.prompt_tokens, greedy.usage.completion_tokens, greedy.usage.total_tokens) == (4, 20, 24)
    narrow = client.completions.create(model="small", prompt="Once", max_tokens=20, top_p=0)
    assert narrow.choices[0].text == greedy.choices[0].text
    for words, how in (
        ({"temperature": 0.8, "seed": 7}, Sampling(temperature=0.8)),
        ({"temperature": 1.2, "seed": 8, "top_p": 0.7}, Sampling(temperature=1.2, top_p=0.7)),
        ({"seed": 9, "extra_body": {"top_k": 4}}, Sampling(temperature=1.0, top_k=4)),
    ):
        drawn = client.completions.create(model="small", prompt="Once", max_tokens=30, **words)
        assert drawn.choices[0].text == alone(engine, "Once", 30, how, words["seed"]).text


def test_prompts_may_be_strings_ids_or_lists_of_them_and_choices_have_seeds_of_their_own(client, engine):
    how, ids = Sampling(temperature=0.9), [BYTES.encode("Up"), BYTES.encode("Down")]
    expected = [alone(engine, prompt, 12, how, 3 + i).text for i, prompt in enumerate(["Up", "Up", "Down", "Down"])]
    for prompt in (["Up", "Down"], ids):
        found = client.completions.create(model="small", prompt=prompt, n=2, max_tokens=12, temperature=0.9, seed=3)
        assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in found.choices] == expected
    one = client.completions.create(model="small", prompt=ids[0], max_tokens=12, temperature=0.9, seed=3)
    assert one.choices[0].text == expected[0]


def test_a_stream_has_the_same_text_stops_and_probabilities(client, engine):
    whole = alone(engine, "Once", 60)
    stop = whole.text[7:10]
    expected = alone(engine, "Once", 60, stops=[stop, "nowhere"])
    words = {"model": "small", "prompt": "Once", "max_tokens": 60, "temperature": 0, "stop": [stop, "nowhere"]}
    at_once = client.completions.create(**words, logprobs=3)
    parts = list(client.completions.create(**words, logprobs=3, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].choices == [] and parts[-1].usage == at_once.usage
    pieces = [part.choices[0] for part in parts[:-1]]
    assert len(pieces) > 2 and all(piece.finish_reason is None for piece in pieces[:-1])
    assert "".join(p.text for p in pieces) == at_once.choices[0].text == expected.text != whole.text
    assert pieces[-1].finish_reason == at_once.choices[0].finish_reason == "stop"
    one = at_once.choices[0].logprobs
    assert one.token_logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert [x for p in pieces if p.logprobs for x in p.logprobs.token_logprobs] == one.token_logprobs
    assert "".join(one.tokens) == expected.text and one.text_offset == list(range(len(expected.ids)))
    for token, logprob, top in zip(one.tokens, one.token_logprobs, one.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values()) and len(top) == 3


def test_the_tokens_of_a_stream_come_with_their_text_not_behind_it(client):
    words = {"model": "small", "prompt": "Once", "max_tokens": 20, "temperature": 0, "logprobs": 0}
    pieces = [part.choices[0] for part in client.completions.create(**words, stream=True)]
    assert len(pieces) > 2 and all("".join(piece.logprobs.tokens) == piece.text for piece in pieces)


def test_the_parts_of_a_stream_have_a_usage_of_nothing_only_if_usage_was_asked_for(server):
    for more, asked in (({}, False), ({"stream_options": {"include_usage": True}}, True)):
        body = {"prompt": "Once", "max_tokens": 3, "stream": True, **more}
        lines = httpx.post(f"{server.url}/v1/completions", json=body).text.split("\n\n")
        parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert all(("usage" in part) == asked for part in parts) and parts[0].get("usage") is None
        assert (parts[-1].get("usage") is not None) == asked


def test_echo_gives_the_prompt_with_its_probabilities(client, engine, model):
    prompt, ids = "Zwölf €", BYTES.encode("Zwölf €")
    found = client.completions.create(model="small", prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    choice = found.choices[0]
    assert choice.text == prompt and found.usage.completion_tokens == 0
    with torch.no_grad():
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [table[i, id].item() for i, id in enumerate(ids[1:])]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert choice.logprobs.tokens[2:5] == ["bytes:\\xc3", "bytes:\\xb6", "l"]
    assert choice.logprobs.text_offset == [0, 1, 2, 2, 3, 4, 5, 6, 6, 6]  # in the text, not in the names of bytes
    words = {"model": "small", "prompt": prompt, "max_tokens": 5, "echo": True, "logprobs": 1, "temperature": 0}
    whole, parts = client.completions.create(**words), client.completions.create(**words, stream=True)
    offsets = whole.choices[0].logprobs.text_offset
    assert offsets[:11] == [*choice.logprobs.text_offset, len(prompt)]
    assert [at for part in parts if part.choices[0].logprobs for at in part.choices[0].logprobs.text_offset] == offsets
    more = client.completions.create(model="small", prompt=prompt, max_tokens=5, echo=True, temperature=0)
    assert more.choices[0].text == prompt + alone(engine, prompt, 5).text


def test_each_of_several_choices_has_the_scored_tokens_of_its_own_prompt(client):
    words = {"model": "small", "prompt": ["Up", "Down"], "n": 2, "echo": True, "logprobs": 0, "temperature": 0}
    choices = client.completions.create(**words, max_tokens=1, extra_body={"return_token_ids": True}).choices
    assert [choice.logprobs.tokens[:-1] for choice in choices] == [["U", "p"]] * 2 + [["D", "o", "w", "n"]] * 2
    assert [choice.prompt_token_ids for choice in choices] == [BYTES.encode(p) for p in ("Up", "Up", "Down", "Down")]


def test_a_prompt_of_the_whole_context_can_be_scored(client, engine):
    words = {"model": "small", "prompt": [66] * engine.context, "echo": True, "logprobs": 0}
    assert len(client.completions.create(**words, max_tokens=0).choices[0].logprobs.tokens) == engine.context
    with pytest.raises(openai.BadRequestError, match="shorten it"):
        client.completions.create(**words)


def test_a_prompt_of_8_megabytes_holds_up_nobody(server):
    found: list[httpx.Response] = []
    body = {"prompt": "word " * 1_600_000}
    asking = threading.Thread(target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", json=body)))
    asking.start()
    worst = 0.0
    while asking.is_alive():
        begun = time.monotonic()
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        worst = max(worst, time.monotonic() - begun)
    error = found[0].json()["error"]
    assert found[0].status_code == 400 and error["code"] == "context_length_exceeded" and worst < 2, worst
    assert error["message"].startswith("the prompt has 8,000,000 characters")


def test_offsets_are_places_in_the_text_whatever_bytes_come(client):
    """At this temperature the model writes parts of characters, whole ones and bytes that belong to none."""
    for seed in range(8):
        words = {"model": "small", "prompt": "€", "max_tokens": 120, "temperature": 4, "seed": seed, "logprobs": 0}
        choice = client.completions.create(**words, extra_body={"return_token_ids": True}).choices[0]
        text, offsets = choice.text, choice.logprobs.text_offset
        assert offsets[0] == 0 and all(a <= b <= a + 1 for a, b in itertools.pairwise(offsets))
        for id, at in zip(choice.token_ids, offsets, strict=True):  # the id of a byte is one more than the byte
            found = text[at : at + 1]
            assert found == chr(id - 1) if 0 < id <= 128 else not found.isascii() or not id, (seed, at, text)


def test_the_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("large")


def test_errors_have_the_form_of_the_protocol(client):
    words = {"model": "small", "prompt": "x", "max_tokens": 2}
    for change, kind, param in (
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"best_of": 2}, openai.BadRequestError, "best_of"),
        ({"suffix": "end"}, openai.BadRequestError, "suffix"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"min_p": 0.1}}, openai.BadRequestError, "min_p"),
        ({"extra_body": {"repetition_penalty": 1.2}}, openai.BadRequestError, "repetition_penalty"),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "presence_penalty"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 1000}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "x" * 300}, openai.BadRequestError, "prompt"),
        ({"n": 1000}, openai.BadRequestError, "n"),
    ):
        with pytest.raises(kind) as caught:
            client.completions.create(**{**words, **change})
        assert caught.value.body["param"] == param and len(caught.value.body["message"]) > 20
        assert caught.value.body["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="small", messages=[{"role": "user", "content": "Hi"}])
    plain = client.completions.create(**words, presence_penalty=0, user="me", extra_body={"unknown": [1]})
    assert plain.choices[0].finish_reason == "length"


def test_ids_that_no_text_may_hold_are_refused_whatever_else_is_asked():
    """Those of a drawing model's pictures, which count under a switch alone, and those of no token."""
    tokenizer = FileTokenizer(BYTES.to_json(), "bytes")
    for model, strange in ((make_model(added_vocab=5, added_switch="draw"), 386), (make_model(), -1)):
        service = Service(Engine(model, vocab=257), tokenizer, {"small": {}}, rows=1)
        try:
            for ids in ([strange], [[1, 2], [3, strange]], [10**30]):
                body = {"prompt": ids, "max_tokens": 2, "echo": True}
                with pytest.raises(Refused, match="the prompt holds the id"):
                    service._read(json.dumps(body).encode(), chat=False)
        finally:
            service.batcher.close()


def test_64_requests_at_once_have_the_answers_of_one_at_a_time(server, engine, model):
    """Greedy, fp32, 16 rows: equal wherever the two best logits differ by more than 1e-4."""
    draw = random.Random(1)
    asked = []
    for i in range(64):
        asked.append((f"{i} " + "".join(chr(draw.randint(97, 122)) for _ in range(draw.randint(0, 60))), 2 + i % 23))

    async def ask() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def one(prompt: str, n: int) -> list[int]:
                body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "return_token_ids": True}
                return (await client.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"]

            return list(await asyncio.gather(*(one(*each) for each in asked)))

    found, close = asyncio.run(ask()), 0
    for (prompt, n), ids in zip(asked, found, strict=True):
        expected = alone(engine, prompt, n).ids
        if ids != expected:
            at = next(i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b)
            with torch.no_grad():
                logits = model(torch.tensor([BYTES.encode(prompt) + expected[:at]])).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] <= 1e-4, (prompt, at)
            close += 1
    assert close == 0  # how many differed where they may


def test_a_reader_that_goes_away_frees_its_row(server):
    def gone() -> int:
        return int(server.metric('requests_total{path="/v1/completions",status="499"}', 0))

    before, before_gone = server.metric("cancelled_total"), gone()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 240, "stream": True}
    ) as r:
        next(r.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 240, "n": 60}, timeout=0.2)
    end = time.monotonic() + 20
    while server.metric("cancelled_total") < before + 50 or server.metric("running"):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert server.metric("waiting") == 0
    assert gone() == before_gone + 2 and 'status="500"' not in httpx.get(f"{server.url}/metrics").text


def test_a_reader_that_goes_away_while_its_prompt_is_read_holds_up_nobody(model):
    """It was alone, so no step comes after it that could drop its prompt."""
    pieces: queue.Queue = queue.Queue()
    batcher = Batcher(Engine(model, chunk=1), BYTES, rows=2, queue=2)
    try:
        first, second = (
            Answer(i, Text([66] * length), 1, Piecewise(BYTES.decode, []), None, pieces.put)
            for i, length in enumerate((250, 2))
        )
        batcher.submit([first])
        while not batcher.slots.entering:
            time.sleep(0.001)
        batcher.cancel([first])
        while first.reason is None:
            time.sleep(0.001)
        batcher.submit([second])
        assert pieces.get(timeout=20).index == 1
    finally:
        batcher.close()


def test_prompts_that_fit_into_one_chunk_enter_together_and_requests_take_turns():
    def request(*lengths: int) -> deque:
        return deque(Answer(0, Text([1] * n), 1, Piecewise(BYTES.decode, []), None, print) for n in lengths)

    waiting = deque([request(4, 4, 4), request(3), request(20), request(2)])
    batcher = SimpleNamespace(slots=SimpleNamespace(free=9), _waiting=waiting)
    groups = []
    while waiting:
        groups.append([len(answer.text.ids) for answer in Batcher._next_group(batcher, 8)])
    assert groups == [[4, 3], [20], [2, 4], [4]]


@pytest.mark.parametrize(
    ("waiting", "free", "chunks"), [(0, 64, 1), (1, 64, 1), (16, 64, 2), (300, 64, 8), (300, 4, 1)]
)
def test_prompts_enter_in_more_chunks_at_once_where_many_rows_can_be_filled(waiting, free, chunks):
    slots, engine = SimpleNamespace(free=free, rows=64), SimpleNamespace(chunk=10)
    batcher = SimpleNamespace(slots=slots, engine=engine, waiting=waiting, lag=True)
    assert Batcher._room(batcher) == 10 * chunks
    batcher.lag = False  # a CPU gains nothing by that
    assert Batcher._room(batcher) == 10


def test_pages_of_other_sites_are_refused(server):
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        found = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, headers=headers)
        assert found.status_code == 403 and "error" in found.json()
    wrong = httpx.get(f"{server.url}/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["Allow"] == "POST"
    assert wrong.json()["error"]["message"] == "this address takes POST, not GET"
    broken = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"').json()["error"]["message"]
    assert broken.startswith("the body is not JSON (") and broken.endswith("): send one JSON object")
    own = httpx.get(f"{server.url}/v1/models", headers={"Origin": server.url})
    assert own.status_code == 200


def test_the_log_probability_of_the_end_is_there_too(server, engine):
    """lm-evaluation-harness counts on one token where one was asked for, even if it ends the document."""
    body = {"prompt": "Once", "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    choice = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 5
    assert all(x is None or (math.isfinite(x) and x <= 0) for x in choice["logprobs"]["token_logprobs"])
