"""The clients of a server that a case has started: they send the requests of a file, then tell it to end."""

import contextlib
import http.client
import json
import os
import signal
import threading
import time

REQUESTS = [
    {"prompt": "The Rabbit", "max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True},
    {"prompt": ["Alice", "“Ah!”"], "max_tokens": 3, "seed": 1, "n": 2, "top_p": 0.9, "top_k": 5, "stop": ["e", "\n"]},
    {"prompt": [66, 67, 68], "max_tokens": 5, "model": "adapter", "temperature": 0, "ignore_eos": True, "stream": True},
    {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 4, "seed": 2, "logprobs": True},
]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}bot:"


def ask_later(port: int, file: str) -> None:
    """Ask as soon as something listens at the port, from a thread of its own; then SIGTERM."""
    requests = b""
    with contextlib.suppress(OSError), open(file, "rb") as stream:
        requests = stream.read(1 << 20)
    threading.Thread(target=_ask, args=(port, requests), daemon=True).start()


def _ask(port: int, requests: bytes) -> None:
    while not _status(port, "GET", "/health").startswith("200"):
        time.sleep(0.02)
    for line in requests.split(b"\n"):
        address = "/v1/chat/completions" if b"messages" in line else "/v1/completions"
        print(_status(port, "POST", address, line), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _status(port: int, method: str, address: str, body: bytes = b"") -> str:
    """What is answered, without what differs from call to call."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, address, body)
        answer = connection.getresponse()
        text = answer.read().decode()
    except ConnectionError:
        return ""
    finally:
        connection.close()
    if answer.status != 200 or not text.startswith("{"):
        events = [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]
        return f"{answer.status} {json.dumps([event.get('choices') for event in events]) if events else text}"
    return f"200 {json.dumps(json.loads(text).get('choices'))}"
