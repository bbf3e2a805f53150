"""The HTTP side: addresses, keys, streams and errors. Requests become answers of the `Batcher`, pieces become events.

Unusual: pieces of one step reach the event loop in one call. Beside more than CROWD texts streams put several pieces
into one event, so that all together they send at most EVENTS per second: with one per token, Python would be busier
than the GPU. A reader that goes away frees its
rows before the next step. A page of another site cannot use a server on loopback: its Origin, or a Host that is not
ours, is refused.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tokenformer.data.text.token_names import token_names
from tokenformer.errors import UserError
from tokenformer.infer.engine import Engine
from tokenformer.infer.slots import Text
from tokenformer.infer.text import Piecewise, to_ids
from tokenformer.parsing import parse_json
from tokenformer.serve.batching import Answer, Batcher, Busy, Piece
from tokenformer.serve.metrics import Metrics
from tokenformer.serve.protocol import Asked, Refused, Writer, joined, read_request

BODY = 1 << 23  # bytes of a request, at most
LARGE = 1 << 13  # bytes from which on a body is read beside the event loop
CROWD, EVENTS, PAUSE = 8, 1600, 0.1  # PAUSE: seconds between two events of a stream, at most
GONE = 499  # counted for a client that went away before its answer was sent
OPEN = ("/", "/health")  # what needs no key
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Events(StreamingResponse):
    """A stream of server-sent events; `close` is called when it ends, in whatever way."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], object]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.close = close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()


class Service:
    """A model behind addresses; `app` is the ASGI application."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        models: Mapping[str, Mapping[str, float]],
        *,
        rows: int,
        queue: int = 512,
        most: int | None = None,
        template: Callable[[Any], str] | None = None,
        key: str | None = None,
        hosts: Sequence[str] | None = None,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        """`models`: the switches of each name; the first is the model itself. `most`: new tokens of an answer. `key`:
        what clients must send; `hosts`: the names by which the server may be called (None: any).
        """
        self.engine, self.tokenizer, self.models, self.template = engine, tokenizer, models, template
        self.most, self.key, self.hosts, self.on_failure = most or engine.context, key, hosts, on_failure
        self.name, self.metrics, self.begun = token_names(tokenizer), Metrics(), int(time.time())
        self.loop: asyncio.AbstractEventLoop | None = None
        # characters of a prompt, at most: a longer one has more tokens than the context even if all are the longest
        self.characters = engine.context * max(len(self.name(id)[1]) for id in range(tokenizer.vocab_size))
        self._reading: set[asyncio.Timeout] = set()  # one per request whose body is on its way
        self._ending = False
        self._outbox: list[tuple[asyncio.Queue, Piece]] = []
        self.batcher = Batcher(engine, tokenizer, rows, queue, self._flush)
        self.page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        routes = [
            Route("/", self.front),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/completions", partial(self.write, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.write, chat=True), methods=["POST"]),
        ]
        handlers = {Refused: self._refused, HTTPException: self._http_error, Exception: self._failed}
        self._inner = Starlette(routes=routes, exception_handlers=handlers)  # pyrefly: ignore

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Check who asks, count what is answered."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        self.loop = asyncio.get_running_loop()
        path = scope["path"] if any(scope["path"] == getattr(r, "path", "") for r in self._inner.routes) else "other"

        status, whole = GONE, False

        async def counted(message: Any) -> None:
            nonlocal status, whole
            status, whole = message.get("status", status), "body" in message and not message.get("more_body")
            if whole:
                self.metrics.requests[path, status] += 1
            await send(message)

        try:
            self._check(Request(scope))
            await self._inner(scope, receive, counted)
        except Refused as error:
            await self._error(error)(scope, receive, counted)
        except ClientDisconnect:
            pass  # of a stream
        finally:
            if not whole:
                self.metrics.requests[path, GONE] += 1

    def _check(self, request: Request) -> None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if self.hosts is not None and name.strip("[]") not in self.hosts:
            raise Refused("this server is for its own machine: call it by localhost", code="wrong_host", status=403)
        if origin is not None and origin.partition("://")[2] != host:
            raise Refused("pages of other sites may not use this server", code="wrong_origin", status=403)
        if self.key is None or request.scope["path"] in OPEN:  # url.path holds what older starlette finds in Host
            return
        given = request.headers.get("authorization", "")
        given = given[7:].strip(" ") if given[:7].lower() == "bearer " else given
        if not hmac.compare_digest(given.encode("latin-1"), self.key.encode()):  # the bytes that came
            raise Refused("the API key is missing or wrong", code="invalid_api_key", status=401)

    def _flush(self) -> None:
        """Hand over what the engine's thread has collected."""
        items, self._outbox = self._outbox, []
        with suppress(RuntimeError):  # the loop is closed: nobody reads any more
            if items and self.loop is not None:
                self.loop.call_soon_threadsafe(_deliver, items)
        if self.batcher.failure is not None:
            self.on_failure()

    # requests for texts

    async def write(self, request: Request, chat: bool) -> Response:
        try:
            return await self._write(request, chat)
        except ClientDisconnect:
            return Response(status_code=GONE)  # nobody reads it

    async def _write(self, request: Request, chat: bool) -> Response:
        begun = time.perf_counter()
        raw = await self._body(request)
        asked = await asyncio.to_thread(self._read, raw, chat) if len(raw) > LARGE else self._read(raw, chat)
        events: asyncio.Queue = asyncio.Queue()
        answers = self._answers(asked, events)
        try:
            self.batcher.submit(answers)
        except Busy:
            raise Refused("the queue of this server is full: try again later", code="queue_full", status=429) from None
        except RuntimeError as error:
            raise Refused(f"{error}: start the server again", code="stopped", status=503) from None
        give_up = partial(self.batcher.cancel, answers)
        if asked.stream:
            return Events(self._stream(asked, answers, events, begun), give_up)
        watch = asyncio.create_task(_watch(request, events))
        try:
            return await self._whole(asked, answers, events, begun)
        finally:
            watch.cancel()
            give_up()

    async def _body(self, request: Request) -> bytes:
        too_large = Refused(f"the body has more than {BODY:,} bytes: send less at a time", code="too_large", status=413)
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > BODY:
            raise too_large
        raw, limit = bytearray(), asyncio.timeout(0 if self._ending else None)
        self._reading.add(limit)
        try:
            async with limit:
                async for part in request.stream():
                    raw += part
                    if len(raw) > BODY:
                        raise too_large
        except TimeoutError:
            raise Refused("the server ends, and the request has not come whole", code="stopped", status=503) from None
        finally:
            self._reading.discard(limit)
        return bytes(raw)

    def end(self) -> None:
        """Refuse requests that have not come whole; the others are answered."""
        self._ending = True
        for limit in self._reading:
            limit.reschedule(0)

    def _read(self, raw: bytes, chat: bool) -> Asked:
        try:
            asked = read_request(
                parse_json(raw.decode(), "the body", "send one JSON object"),
                chat=chat,
                models=list(self.models),
                encode=self._ids,
                template=self._chat_ids,
                context=self.engine.context,
                most=self.most,
                texts=self.batcher.queue + self.batcher.slots.rows,
                draw_seed=lambda: secrets.randbits(62),
            )
            names, adds = ["the prompt"] * len(asked.prompts), not self.engine.packed.config.added_switch
            self.engine.check(asked.prompts, names=names, new=min(1, asked.most), adds=adds)
        except UnicodeDecodeError:
            raise Refused("the body is not UTF-8 text: send JSON") from None
        except UserError as error:
            raise Refused(str(error)) from None
        return asked

    def _chat_ids(self, messages: Any) -> list[int]:
        if self.template is None:
            raise Refused("this model has no chat template: use /v1/completions", code="no_chat_template")
        return self._ids(self.template(messages), "messages")

    def _ids(self, text: str, field: str = "prompt") -> list[int]:
        if len(text) > self.characters:
            raise Refused(
                f"the prompt has {len(text):,} characters, more than a context of {self.engine.context:,} tokens can "
                "hold: shorten it",
                field,
                "context_length_exceeded",
            )
        if len(text) > LARGE:  # many at once are encoded without Python's lock, so that others are answered meanwhile
            return self.tokenizer.encode_batch([text])[0].tolist()
        return to_ids(self.tokenizer, text)

    def _answers(self, asked: Asked, events: asyncio.Queue) -> list[Answer]:
        out = []
        for i in range(len(asked.prompts) * asked.n):
            text = Text(
                asked.prompts[i // asked.n],
                seed=asked.seed + i,
                sampling=asked.sampling,
                switches=self.models[asked.model],
                tops=asked.logprobs is not None and asked.most > 0,
                scored=asked.echo and asked.logprobs is not None,
            )
            written = Piecewise(self.tokenizer.decode, asked.stops)
            end = self.tokenizer.end_of_document if asked.ends else None
            send = partial(self._outbox_add, events)
            out.append(Answer(i, text, asked.most, written, end, send))
        return out

    def _outbox_add(self, events: asyncio.Queue, piece: Piece) -> None:
        self._outbox.append((events, piece))

    async def _pieces(
        self, count: int, events: asyncio.Queue, begun: float, stream: bool
    ) -> AsyncIterator[list[Piece]]:
        """Yield what has come until all answers have ended; a stream beside others waits between two events."""
        first = True
        while count:
            pieces = [await events.get()]
            crowded = stream and self.batcher.running > CROWD
            while crowded and not events.empty():
                pieces.append(events.get_nowait())
            if None in pieces:
                raise ClientDisconnect
            failed = any(piece.reason == "failed" for piece in pieces)
            if failed and self.batcher.failure is None:
                raise Refused("the server was stopped before the text was written", code="stopped", status=503)
            if failed:
                raise Refused("the engine failed; the server's log says why", code="engine_failed", status=500)
            if first:
                self.metrics.first_token.add(time.perf_counter() - begun)
                first = False
            count -= sum(piece.reason is not None for piece in pieces)
            yield pieces
            if count and crowded:
                await asyncio.sleep(min(PAUSE, self.batcher.running / EVENTS))
        self.metrics.whole.add(time.perf_counter() - begun)

    async def _whole(self, asked: Asked, answers: list[Answer], events: asyncio.Queue, begun: float) -> Response:
        found: list[list[Piece]] = [[] for _ in answers]
        async for pieces in self._pieces(len(answers), events, begun, stream=False):
            for piece in pieces:
                found[piece.index].append(piece)
        prompts, count = [answer.text.prompt for answer in answers], sum(len(answer.tokens) for answer in answers)
        body = Writer(asked, self.name, self.tokenizer.decode).whole([joined(each) for each in found], prompts, count)
        return JSONResponse(body)

    async def _stream(
        self, asked: Asked, answers: list[Answer], events: asyncio.Queue, begun: float
    ) -> AsyncIterator[str]:
        writer, begun_answers = Writer(asked, self.name, self.tokenizer.decode), set()
        try:
            async for pieces in self._pieces(len(answers), events, begun, stream=True):
                for index in dict.fromkeys(piece.index for piece in pieces):
                    prompt = None if index in begun_answers else answers[index].text.prompt
                    begun_answers.add(index)
                    new = joined([piece for piece in pieces if piece.index == index])
                    yield _event(writer.chunk(index, new, prompt))
            if asked.usage:
                yield _event(writer.last_chunk(sum(len(answer.tokens) for answer in answers)))
        except Refused as error:  # the status was sent long ago
            yield _event(error.body())
        yield "data: [DONE]\n\n"

    # the rest

    async def front(self, request: Request) -> Response:
        return HTMLResponse(self.page, headers={"Content-Security-Policy": POLICY})

    async def health(self, request: Request) -> Response:
        stopped = self.batcher.failure is not None
        return JSONResponse({"status": "failed" if stopped else "ok"}, 503 if stopped else 200)

    async def show_metrics(self, request: Request) -> Response:
        b, c = self.batcher, self.batcher.counts
        values = {
            "tokenformer_running": ("gauge", "Texts that are being written.", b.running),
            "tokenformer_waiting": ("gauge", "Texts that wait for a row.", b.waiting),
            "tokenformer_rows": ("gauge", "Texts that can be written at a time.", b.slots.rows),
            "tokenformer_steps_total": ("counter", "Steps of the engine.", c.steps),
            "tokenformer_step_seconds_total": ("counter", "Time in them.", c.step_seconds),
            "tokenformer_prompt_tokens_total": ("counter", "Tokens of prompts.", c.prompt_tokens),
            "tokenformer_new_tokens_total": ("counter", "Tokens that were written.", c.new_tokens),
            "tokenformer_cancelled_total": ("counter", "Texts whose reader went away.", c.cancelled),
        }
        return PlainTextResponse(self.metrics.text(values), media_type="text/plain; version=0.0.4")

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.begun,
            "owned_by": "tokenformer",
            "max_model_len": self.engine.context,
        }

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.models]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.models:
            known = ", ".join(self.models)
            raise Refused(f"there is no model '{name[:100]}': give one of {known}", "model", "model_not_found", 404)
        return JSONResponse(self._model(name))

    def _error(self, error: Refused, headers: Mapping[str, str] | None = None) -> Response:
        return JSONResponse(error.body(), error.status, {"Retry-After": "1"} if error.status == 429 else headers)

    async def _refused(self, request: Request, error: Refused) -> Response:
        return self._error(error)

    async def _http_error(self, request: Request, error: HTTPException) -> Response:
        allowed = (error.headers or {}).get("Allow", "")
        what = {404: "there is nothing at this address", 405: f"this address takes {allowed}, not {request.method}"}
        return self._error(Refused(what.get(error.status_code, error.detail), status=error.status_code), error.headers)

    async def _failed(self, request: Request, error: Exception) -> Response:
        return self._error(Refused("the server made a mistake; its log says which", status=500))


def _deliver(items: Sequence[tuple[asyncio.Queue, Piece]]) -> None:
    for events, piece in items:
        events.put_nowait(piece)


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _watch(request: Request, events: asyncio.Queue) -> None:
    """Say in the queue that the client went away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    events.put_nowait(None)
