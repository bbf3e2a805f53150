"""A server with everything: a key, a chat template, adapters, a short queue; ended by signals and started again."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from serving import BYTES, Server, make_model
from starlette.requests import Request

from tokenformer import hub
from tokenformer.adapters import attach
from tokenformer.cli.main import main
from tokenformer.errors import UserError
from tokenformer.infer import Engine, write_texts
from tokenformer.serve.app import Service
from tokenformer.serve.chat import read_template
from tokenformer.serve.protocol import Refused
from tokenformer.serve.run import Address

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Hugging Face folder with a chat template, and an adapter of it."""
    place = tmp_path_factory.mktemp("options")
    (place / "text.txt").write_text("To be, or not to be, that is the question. " * 40)
    hub.save(make_model(), place / "base", format="hf", tokenizer_json=BYTES.to_json())
    (place / "base" / "chat_template.jinja").write_text(TEMPLATE)
    words = ["prepare", str(place / "text.txt"), "--tokenizer", "byte", "--out", str(place), "--name", "text"]
    assert main(words) == 0
    train = f"train {place}/base data.path={place}/text adapter.ffn_tokens=4 steps=6 batch=2 optimizer.rate=0.1".split()
    assert main([*train, "--out", str(place / "run")]) == 0
    assert main(["adapter", "add", str(place / "run"), "--out", str(place / "poems")]) == 0
    return place


@pytest.fixture(scope="module")
def guarded(base):
    words = [str(base / "base"), "--adapter", str(base / "poems"), "--rows", "1", "--queue", "1", "--name", "mine"]
    running = Server(*words, TOKENFORMER_API_KEY="secret")
    yield running
    running.process.kill()


def test_the_key_the_chat_and_the_adapter_are_used(guarded, base):
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        client.models.list()
    assert httpx.get(f"{guarded.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{guarded.url}/metrics").status_code == 401
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="secret", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["mine", "poems"]
        plain, model = Engine(make_model(), vocab=257), make_model()
        changed = Engine(attach(model, base / "poems", "poems"), vocab=257)
        texts = {}
        for name, engine in (("mine", plain), ("poems", changed)):
            (expected,) = write_texts(engine, BYTES, ["Once upon a time"], 12)
            found = client.completions.create(model=name, prompt="Once upon a time", max_tokens=12, temperature=0)
            texts[name] = found.choices[0].text
            assert texts[name] == expected.text
        assert texts["mine"] != texts["poems"]
        messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        words = {"model": "mine", "messages": messages, "max_completion_tokens": 9, "temperature": 0}
        said = client.chat.completions.create(**words, logprobs=True, top_logprobs=2)
        (expected,) = write_texts(plain, BYTES, ["system: Be\nuser: Hi\nbot:"], 9, logprobs=True)
        assert said.choices[0].message.content == expected.text and said.choices[0].message.role == "assistant"
        assert [e.logprob for e in said.choices[0].logprobs.content] == pytest.approx(expected.logprobs, abs=1e-5)
        assert all(len(e.top_logprobs) == 2 for e in said.choices[0].logprobs.content)
        parts = list(client.chat.completions.create(**words, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
        assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="no tools"):
            client.chat.completions.create(**words, tools=[{"type": "function", "function": {"name": "f"}}])
        with pytest.raises(openai.BadRequestError, match="role"):
            client.chat.completions.create(model="mine", messages=[{"role": "king", "content": "x"}])


def test_a_host_that_older_starlette_takes_into_the_address_needs_the_key_too(monkeypatch):
    """There, Host: x/health? makes http://x/health?/v1/completions of the address."""
    service = Service(Engine(make_model(), vocab=257), BYTES, {"small": {}}, rows=1, key="secret")
    monkeypatch.setattr(Request, "url", SimpleNamespace(path="/health"))
    scope = {"type": "http", "path": "/v1/completions", "headers": [(b"host", b"x/health?")]}
    try:
        with pytest.raises(Refused, match="the API key is missing"):
            service._check(Request(scope))
        service._check(Request({**scope, "path": "/health"}))
    finally:
        service.batcher.close()


def test_a_key_may_have_letters_of_any_alphabet():
    service = Service(Engine(make_model(), vocab=257), BYTES, {"small": {}}, rows=1, key="schlüssel à")
    try:
        for key, right in (("schlüssel à", True), ("schlüssel", False)):
            headers = [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]
            with contextlib.nullcontext() if right else pytest.raises(Refused, match="missing or wrong"):
                service._check(Request({"type": "http", "path": "/v1/models", "headers": headers}))
    finally:
        service.batcher.close()


def test_a_full_queue_is_429_and_sigterm_finishes_what_runs(guarded):
    headers, body = {"Authorization": "bearer secret"}, {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
    never = httpx.post(f"{guarded.url}/v1/completions", json={**body, "n": 3}, headers=headers)
    assert never.status_code == 400 and "from 1 to 2" in never.json()["error"]["message"]
    found: list[httpx.Response] = []

    def ask() -> None:
        found.append(httpx.post(f"{guarded.url}/v1/completions", json=body, headers=headers, timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    while len(found) < 6:  # one runs, one waits
        assert time.monotonic() < end
        time.sleep(0.01)
    assert {answer.status_code for answer in found} == {429}
    assert found[0].json()["error"]["type"] == "rate_limit_error" and found[0].headers["Retry-After"] == "1"
    guarded.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert [answer.json()["usage"]["completion_tokens"] for answer in found if answer.status_code == 200] == [250, 250]
    assert guarded.process.wait(30) == 0 and "Traceback" not in guarded.log


def half_sent(port: int) -> socket.socket:
    """Return a connection on which one byte of a request's thousand has come."""
    connection = socket.create_connection(("127.0.0.1", port))
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 1000", "", "{"]
    connection.sendall("\r\n".join(lines).encode())
    return connection


def test_ctrl_c_says_what_is_left_and_a_second_one_stops_it(folder):
    with Server(str(folder), "--rows", "1", "--host", "0.0.0.0", "--no-auth") as server:
        assert f"port {server.port} of every address of this machine; http://127.0.0.1:{server.port}/ is" in server.log
        found, body = [], {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "n": 128}

        def ask() -> None:
            found.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: server.metric("running"))
        with half_sent(server.port) as half:
            time.sleep(0.2)
            server.process.send_signal(signal.SIGINT)
            assert b" 503 " in half.recv(1000)  # at once
        wait_for(lambda: re.search(r"finishing \d+ texts; Ctrl-C again stops at once", server.log))
        assert server.end(signal.SIGINT, 10) == 0
        asking.join()
        assert found[0].status_code == 503 and "was stopped" in found[0].json()["error"]["message"]
        assert "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_a_client_that_does_not_read_ends_with_the_server(folder):
    with Server(str(folder)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "n": 32, "logprobs": 20, "stream": True}
        text = json.dumps(body)
        lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(text)}", "", text]
        client.sendall("\r\n".join(lines).encode())
        wait_for(lambda: server.metric("running"))
        begun = time.monotonic()
        assert server.end(seconds=30) == 0 and time.monotonic() - begun > 5
        assert "Traceback" not in server.log, server.log


def wait_for(condition, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_mistakes_are_refused_in_a_sentence(folder, capsys, monkeypatch):
    monkeypatch.delenv("TOKENFORMER_API_KEY", raising=False)
    with Server(str(folder)) as busy:
        for words, sentence in (
            (["--host", "0.0.0.0"], "give --api-key KEY, or --no-auth"),
            (["--port", str(busy.port)], "is not to be had"),
            (["--port", "70000"], "give a number from 0 to 65,535"),
            (["--rows", "0"], "--rows is 0"),
            (["--queue", "-1"], "--queue is -1"),
            (["--api-key", ""], "the API key is empty"),
        ):
            assert main(["serve", str(folder), *words]) == 2
            assert sentence in capsys.readouterr().err
        assert main(["serve", ""]) == 2
        assert "the name of the model is empty" in capsys.readouterr().err
        # kill -9, and there it is again
        busy.process.send_signal(signal.SIGKILL)
        busy.process.wait()
        again = Server(str(folder), port=busy.port)
    with again:
        answer = httpx.post(f"{again.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2 and again.port == busy.port


def test_who_listens_on_a_network_says_who_may_ask():
    for host, key, everyone in (("0.0.0.0", "secret", False), ("0.0.0.0", None, True), ("127.0.0.1", None, False)):
        Address(host, 0, key, everyone).listen().close()
    with pytest.raises(UserError, match="give --api-key KEY, or --no-auth"):
        Address("0.0.0.0", 0, None, False).listen()


def test_who_writes_into_the_file_of_the_weights_changes_no_answer(tmp_path):
    """As opened they are mapped: zeros in the file would be zeros in the model, and a shorter file the end of it."""
    hub.save(make_model(), tmp_path / "small", tokenizer_json=BYTES.to_json())
    weights, body = tmp_path / "small" / "model.safetensors", {"prompt": "Once", "max_tokens": 20, "temperature": 0}
    with Server(str(tmp_path / "small"), "--host", "127.0.0.2") as server:  # it may be called by its own address

        def ask() -> str:
            return httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]

        before = ask()
        with open(weights, "r+b") as file:
            file.write(bytes(weights.stat().st_size))
        assert ask() == before
        os.truncate(weights, 0)
        assert ask() == before


def test_what_is_no_language_model_is_refused(tmp_path, capsys):
    from tokenformer import models
    from tokenformer.config import ModelConfig

    shape = {"layers": 1, "dim": 32, "heads": 2, "qkv_tokens": 4, "proj_tokens": 4, "ffn_tokens": 4}
    config = ModelConfig(of="image", **shape, patch=8, image_size=16, classes=2)
    image = models.build(config)
    image.images = {"classes": ["a", "b"], "mean": [0.5] * 3, "std": [0.5] * 3}
    hub.save(image, tmp_path / "image")
    assert main(["serve", str(tmp_path / "image"), "--port", "0"]) == 2
    assert "is a model of image, but one of language or caption is needed" in capsys.readouterr().err


def test_a_chat_template_cannot_leave_its_sandbox(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    render = read_template(tmp_path)
    assert render is not None
    with pytest.raises(Refused, match="cannot read these messages"):
        render([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="is not valid"):
        read_template(tmp_path)
    os.remove(tmp_path / "chat_template.jinja")
    assert read_template(tmp_path) is None
