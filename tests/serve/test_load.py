"""Many clients at once, some of which go away, and requests that are no requests."""

import asyncio
import json
import random
import socket
import time
from collections import Counter

import httpx
import pytest
from serving import BYTES, Server

NUMBERS = 40  # different prompts


async def ask(port: int, body: dict, stay: float | None) -> tuple[str, dict | str | None]:
    """Return what came: whole and the answer; gone, if this client hung up after `stay` seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        text = json.dumps(body).encode()
        lines = [
            "POST /v1/completions HTTP/1.1",
            "Host: 127.0.0.1",
            "Connection: close",
            f"Content-Length: {len(text)}",
        ]
        head = "".join(f"{line}\r\n" for line in [*lines, ""])
        writer.write(head.encode() + text)
        answer = await asyncio.wait_for(reader.read(), stay)
        status, _, rest = answer.partition(b"\r\n")
        content = rest.partition(b"\r\n\r\n")[2]
        if b" 429 " in status:
            return "busy", None
        assert b" 200 " in status, answer
        return "whole", content.decode() if body.get("stream") else json.loads(content)
    except TimeoutError:
        return "gone", None
    finally:
        writer.close()


def new_text(answer: dict | str) -> list[int]:
    """Return the new ids of an answer, or of the chunks of a stream."""
    if isinstance(answer, dict):
        return answer["choices"][0]["token_ids"]
    # pieces come in chunks of HTTP: the lines between them are lengths
    lines = [line for line in answer.splitlines() if line.startswith("data: {")]
    assert "data: [DONE]" in answer
    return [id for line in lines for id in json.loads(line[6:])["choices"][0]["token_ids"]]


async def load(port: int, clients: int, seconds: float, expected: list[list[int]], each_second) -> Counter:
    """Let clients ask until the time is over. Every answer must be the one that belongs to its prompt."""
    end, counts = time.monotonic() + seconds, Counter()

    async def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            which = draw.randrange(NUMBERS)
            body = {"prompt": f"number {which}:", "max_tokens": len(expected[which]), "temperature": 0}
            body |= {"return_token_ids": True, "stream": draw.random() < 0.5}
            what, answer = await ask(port, body, draw.choice([None, None, None, 0.02, 0.2]))
            counts[what] += 1
            if answer is not None and new_text(answer) != expected[which]:
                counts["mixed"] += 1

    async def watch() -> None:
        while time.monotonic() < end:
            each_second()
            await asyncio.sleep(1)

    await asyncio.gather(watch(), *(client(i) for i in range(clients)))
    return counts


def check_load(folder, engine, clients: int, seconds: float) -> tuple[Counter, list[int]]:
    prompts = [BYTES.encode(f"number {i}:") for i in range(NUMBERS)]
    rows = engine.generate(prompts, 24, stop_ids=[BYTES.end_of_document])
    expected = [row.ids[: 4 + i % 20] for i, row in enumerate(rows)]
    assert len({tuple(ids[:4]) for ids in expected}) > NUMBERS // 4  # answers tell prompts apart
    memory: list[int] = []
    with Server(str(folder)) as server:
        counts = asyncio.run(load(server.port, clients, seconds, expected, lambda: memory.append(server.resident())))
        until = time.monotonic() + 30
        while server.metric("running") or server.metric("waiting"):
            assert time.monotonic() < until
            time.sleep(0.05)
        memory.append(server.resident())
        print(dict(counts), [m >> 20 for m in memory])
        assert server.metric("cancelled_total") > 0
        assert server.end() == 0 and "Traceback" not in server.log, server.log
    return counts, memory


def test_no_answer_is_lost_or_mixed_under_load(folder, engine):
    counts, _ = check_load(folder, engine, clients=20, seconds=5)
    assert counts["mixed"] == 0 and counts["whole"] > 20 and counts["gone"] > 0 and counts["busy"] == 0


@pytest.mark.slow
def test_200_clients_for_a_minute(folder, engine):
    counts, memory = check_load(folder, engine, clients=200, seconds=60)
    assert counts["mixed"] == 0 and counts["whole"] > 500 and counts["gone"] > 50 and counts["busy"] == 0
    assert memory[-1] - memory[10] < 20 << 20


def malformed(draw: random.Random) -> tuple[str, str, bytes, int]:
    """Return method, path, body and the status that it must get."""
    good: dict = {"model": "small", "prompt": "Hi", "max_tokens": 2}
    strange = [None, True, -1, 1.5, 10**30, "x", "", [], {}, [[]], [True], {"a": 1}, float("nan"), "\ud800", 2**63]
    kind = draw.randrange(9)
    if kind == 0:  # no JSON
        text = json.dumps(good).encode()
        at = draw.randrange(1, len(text) - 1)
        return "POST", "/v1/completions", text[:at] + draw.choice([b"", b"\xff", b"}", b"\x00"]), 400
    if kind == 1:
        return (
            "POST",
            "/v1/completions",
            draw.choice([b"", b"[]", b"3", b'"x"', b"null", b"[" * 9000, b"\xff\xfe"]),
            400,
        )
    if kind == 2:
        return draw.choice(["GET", "PUT", "DELETE", "PATCH"]), "/v1/completions", b"{}", 405
    if kind == 3:
        return "POST", draw.choice(["/v1", "/v2/completions", "/v1/completion", "/v1/completions/x"]), b"{}", 404
    if kind == 4:
        return "POST", "/v1/completions", json.dumps({**good, "model": draw.choice(["", "big", "../x"])}).encode(), 404
    if kind == 5:
        ids = draw.choice([[-1], [257], [10**30], [1] * 256, [[1], [2.5]], [[1], []], [1, "a"], [None], [1] * 5000])
        return "POST", "/v1/completions", json.dumps({**good, "prompt": ids}).encode(), 400
    if kind == 6:
        name = draw.choice(["best_of", "suffix", "logit_bias", "presence_penalty", "frequency_penalty"])
        value = draw.choice([2, "x", [1], True, 0.5])
        return "POST", "/v1/completions", json.dumps({**good, name: value}).encode(), 400
    if kind == 7:
        messages = draw.choice(strange)
        return "POST", "/v1/chat/completions", json.dumps({"model": "small", "messages": messages}).encode(), 400
    wrong = {
        "prompt": [None, True, -1, 1.5, [], {}, [[]], [True], "\ud800"],
        "max_tokens": [True, -1, 0, 1.5, 10**30, "x", [], 255],
        "temperature": [True, -1, 101, 1e-9, 10**400, "x", [], float("nan"), float("inf")],
        "top_p": [True, -1, 1.01, "x", float("nan")],
        "top_k": [True, -2, 1.5, "x", 10**30],
        "n": [True, 0, -1, 129, 1.5, "x", 10**30],
        "seed": [True, 1.5, "x", 2**63, -(2**80)],
        "stop": [3, True, {}, [1], [""], "", ["x"] * 17],
        "logprobs": [True, -1, 21, "x", 1.5],
        "echo": [1, "x", []],
        "stream": [1, "true", []],
        "stream_options": [1, {"include_usage": True}, []],
        "return_token_ids": ["x", 1],
        "model": [1, [], True],
    }
    name = draw.choice(list(wrong))
    return "POST", "/v1/completions", json.dumps({**good, name: draw.choice(wrong[name])}).encode(), 400


def test_a_thousand_malformed_requests_get_the_right_status(server):
    draw = random.Random(6)
    with httpx.Client(base_url=server.url) as client:
        for _ in range(1000):
            method, path, body, status = malformed(draw)
            answer = client.request(method, path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == status, (method, path, body[:200], answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) > 10
        large = client.post("/v1/completions", content=b" " * ((1 << 23) + 1))
        assert large.status_code == 413
        assert client.post("/v1/completions", content=(b" " * (1 << 20) for _ in range(9))).status_code == 413
    for raw in (
        b"HELLO\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(raw)
            assert b" 400 " in connection.recv(100)
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
    assert "Traceback" not in server.log, server.log
