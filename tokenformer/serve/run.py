"""Starts a server: opens the model, listens, and ends when it is told to, after what it has begun."""

import argparse
import gc
import ipaddress
import socket
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tokenformer.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
# The engine's thread takes Python's lock again after each operation that it gives to the device, and a busy event loop
# may keep it for so many seconds: with Python's own 0.005 a step of 0.004 would wait longer than it computes.
SWITCH = 0.0002


class Address(NamedTuple):
    """Where to listen, and who may ask."""

    host: str
    port: int
    key: str | None
    open: bool

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def listen(self) -> socket.socket:
        """Open the socket; who listens on a network must say who may ask."""
        if not self.loopback and self.key is None and not self.open:
            raise UserError(
                f"{self.host} can be reached from other machines: give --api-key KEY, or --no-auth if all may use it"
            )
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"--port is {self.port}: give a number from 0 to 65,535")
        try:
            kind, _, protocol, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            found = socket.socket(
                kind, socket.SOCK_STREAM, protocol
            )  # asyncio sets TCP_NODELAY if it knows that it is TCP
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(where)
            found.listen(2048)
        except OSError as error:
            raise UserError(
                f"{self.host}, port {self.port}, is not to be had ({error.strerror}): give another --host or --port"
            ) from None
        return found


def open_service(args: argparse.Namespace, address: Address) -> Any:
    """Open the model and put it behind addresses; the socket is the last thing, so that who connects is answered."""
    for library in ("jinja2", "starlette", "uvicorn"):
        if find_spec(library) is None:
            raise UserError(f"serve needs {library}: pip install 'tokenformer[serve]'")
    from tokenformer.adapters import attach_all, split_weight
    from tokenformer.hub.open import open_model, split_words
    from tokenformer.infer.engine import Engine
    from tokenformer.serve.app import Service
    from tokenformer.serve.chat import read_template

    address.listen().close()  # what is wrong with it is said before the model is read
    source, configs, _ = split_words(args.source)
    opened = open_model(source, configs, tokenizer=args.tokenizer, device=args.device, dtype=args.dtype)
    opened.need("language", "caption")
    opened.prepare = partial(attach_all, words=args.adapter)
    tokenizer, template = opened.tokenizer, read_template(opened.folder)
    model = opened.language
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":  # a view of a mapped file: who writes into that would change answers
            tensor.data = tensor.data.clone()
    moved = [name for name, tensors in getattr(model, "adapters", {}).items() if tensors]
    if moved:
        raise UserError(
            f"adapter '{moved[0]}' moves parameters of its base, so it cannot be chosen by request: merge it "
            "(tokenformer adapter merge) and serve the result"
        )
    model.active = {}
    name = args.name or Path(source).resolve().name or "model"
    weights = [split_weight(word) for word in args.adapter]
    models = {name: {}, **{Path(folder).resolve().name: {Path(folder).resolve().name: w} for folder, w in weights}}
    if len(models) <= len(weights):
        raise UserError(f"the model and an adapter are both called '{name}': give the model another --name")
    engine = Engine(model, vocab=tokenizer.vocab_size, weights=args.weights)
    for sentence in engine.said:
        print(sentence, file=sys.stderr)
    rows = args.rows or (64 if engine.packed.device.type == "cuda" else 16)
    return Service(
        engine,
        tokenizer,
        models,
        rows=rows,
        queue=args.queue,
        most=args.max_tokens,
        template=template,
        key=address.key,
        hosts=(*LOOPBACK, address.host) if address.loopback and address.key is None else None,
    )


def serve(service: Any, address: Address) -> int:
    """Answer until SIGTERM or Ctrl-C; what has begun is finished. Return the exit code."""
    from tokenformer.serve.ending import Server

    sys.setswitchinterval(SWITCH)
    gc.freeze()  # what is there now stays: a search through all of it would hold up every text for a tenth of a second
    listening = address.listen()
    host, port = listening.getsockname()[:2]
    server = Server(service)

    def stop() -> None:
        server.should_exit = True

    service.on_failure = stop
    cache = service.batcher.slots.cache
    size = 2 * cache.k.numel() * cache.k.element_size()
    everywhere = ipaddress.ip_address(host).is_unspecified
    host = host if not everywhere else "::1" if ":" in host else "127.0.0.1"
    here = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(
        f"{', '.join(service.models)}: {f'port {port} of every address of this machine; ' if everywhere else ''}"
        f"{here}/ is a page, {here}/v1 the API; "
        f"{cache.batch} texts at a time, {size / 1e9:.2f} GB of cache on {cache.k.device}; Ctrl-C ends",
        flush=True,
    )
    server.run(sockets=[listening])
    failed = service.batcher.failure is not None
    service.batcher.close()
    if failed:
        print("tokenformer: the engine failed, and the server has ended", file=sys.stderr)
    return int(failed)
