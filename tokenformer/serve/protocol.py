"""What the OpenAI protocol says, in and out: a JSON body → a checked `Asked`; pieces of answers → JSON objects.

Unusual: a field that the protocol has and this server has not is refused in a sentence unless it asks for nothing;
fields that the protocol does not know are ignored. `top_k`, `ignore_eos` and `return_token_ids` are additions.
"""

import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenformer.infer.sampling import Sampling
from tokenformer.infer.slots import ALTERNATIVES, Token
from tokenformer.infer.text import Piecewise, token_start
from tokenformer.parsing import shown
from tokenformer.serve.batching import Piece, Placed

CHOICES = 128  # texts of one request, at most; fewer where the server's queue is shorter
STOPS = 16
# what a field may be that we have not: with these values it asks for nothing
MISSING: dict[str, tuple] = {
    "min_p": (None, 0),  # other servers and `generate` have these two
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
OF_CHAT = list(MISSING)[7:]  # completions do not have them


class Refused(Exception):
    """A request that is answered by an error of the protocol's form."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """A request for texts; its prompts are ids."""

    chat: bool
    model: str
    prompts: list[list[int]]
    texts: list[str | None]  # the prompts as they came; None: as ids
    n: int
    most: int  # new tokens
    sampling: Sampling
    seed: int
    stops: list[str]
    logprobs: int | None  # alternatives of each token; None: no log-probabilities
    echo: bool
    stream: bool
    usage: bool  # in a stream
    ends: bool  # at the end of a document
    with_ids: bool


class Reader:
    """Reads the fields of a body."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise Refused(f"the body is {shown(body)}, but must be a JSON object: send one")
        self.body = body

    def number(self, name: str, default: Any, least: float, most: float, kind: type = int) -> Any:
        value = self.body.get(name)
        if value is None:
            return default
        what = "a whole number" if kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            raise Refused(f"{name} is {shown(value)}, but must be {what}", name)
        if not least <= value <= most:
            raise Refused(f"{name} is {shown(value)}: give {what} from {least:,} to {most:,}", name)
        return kind(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise Refused(f"{name} is {shown(value)}, but must be true or false", name)
        return default if value is None else value

    def missing(self, chat: bool) -> None:
        for name, neutral in MISSING.items():
            value = self.body.get(name)
            asks = isinstance(value, bool) or value not in neutral
            if asks and (chat or name not in OF_CHAT):
                raise Refused(f"this server has no {name}: leave it out", name, "unsupported_parameter")

    def stops(self) -> list[str]:
        value = self.body.get("stop")
        found = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(stop, str) for stop in found):
            raise Refused(f"stop is {shown(value)}, but must be a string or a list of strings", "stop")
        if len(found) > STOPS:
            raise Refused(f"stop has {len(found)} strings: give at most {STOPS}", "stop")
        if "" in found:
            raise Refused("stop holds an empty string, which would end every text at once: leave it out", "stop")
        return found

    def sampling(self) -> Sampling:
        temperature = self.number("temperature", 1.0, 0, 100, float)
        if 0 < temperature < 0.01:
            raise Refused(
                f"temperature is {temperature}: give 0 for the most likely token, or at least 0.01", "temperature"
            )
        top_p = self.number("top_p", 1.0, 0, 1, float)
        top_k = max(0, self.number("top_k", 0, -1, 1 << 31))
        if temperature == 0 or top_p == 0:  # both leave the most likely token alone
            return Sampling()
        return Sampling(temperature=temperature, top_k=top_k, top_p=top_p if top_p < 1 else 0.0)

    def stream(self) -> tuple[bool, bool]:
        """Return whether a stream is wanted, and whether usage in it."""
        stream, options = self.flag("stream"), self.body.get("stream_options")
        if options is None:
            return stream, False
        if not isinstance(options, dict):
            raise Refused(f"stream_options is {shown(options)}, but must be an object", "stream_options")
        if not stream:
            raise Refused("stream_options are for streams: leave them out, or set stream to true", "stream_options")
        return stream, Reader(options).flag("include_usage")

    def prompts(self) -> list[str | list[int]]:
        value = self.body.get("prompt")
        if value is None:
            raise Refused("prompt is missing: give a string, strings, ids or lists of ids", "prompt")
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(isinstance(part, str) for part in value):
                return value
            if _ids(value):
                return [value]
            if all(isinstance(part, list) and part and _ids(part) for part in value):
                return value
        raise Refused(f"prompt is {shown(value)}, but must be a string, strings, ids or lists of ids", "prompt")


def _ids(value: list) -> bool:
    return all(isinstance(part, int) and not isinstance(part, bool) for part in value)


def read_request(
    body: Any,
    *,
    chat: bool,
    models: Sequence[str],
    encode: Callable[[str], list[int]],
    template: Callable[[Any], list[int]],
    context: int,
    most: int,
    texts: int,
    draw_seed: Callable[[], int],
) -> Asked:
    """Check a request. `encode` and `template` turn a text or messages into ids, `most` is the limit of new tokens and
    `texts` that of texts.
    """
    read = Reader(body)
    model = body.get("model", models[0])
    if not isinstance(model, str):
        raise Refused(f"model is {shown(model)}, but must be a string", "model")
    if model not in models:
        raise Refused(
            f"there is no model {shown(model)}: give one of {', '.join(models)}", "model", "model_not_found", 404
        )
    read.missing(chat)
    logprobs = _logprobs(read, chat)
    texts = min(texts, CHOICES)
    n, echo = read.number("n", 1, 1, texts), read.flag("echo") and not chat
    given = read.prompts() if not chat else [template(body.get("messages"))]
    if len(given) * n > texts:
        raise Refused(
            f"{len(given)} prompts with n = {n} are too many: ask for at most {texts} texts at once", "prompt"
        )
    name = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    asked = read.number(name, None, 0 if echo else 1, 1 << 31)
    prompts, longest = [], 0
    for prompt in given:
        prompts.append(encode(prompt) if isinstance(prompt, str) else prompt)
        longest = max(longest, len(prompts[-1]))
        if longest + (asked != 0) > context:
            raise Refused(
                f"the prompt has {longest:,} tokens, and the model's context is {context:,}, with the new ones: "
                "shorten it",
                "messages" if chat else "prompt",
                "context_length_exceeded",
            )
    room = min(most, context - longest)
    if asked is not None and asked > most:
        raise Refused(f"{name} is {asked:,}, and this server writes at most {most:,} tokens: give fewer", name)
    if asked is not None and asked > room:
        raise Refused(
            f"the prompt has {longest:,} tokens and {name} is {asked:,}, more than the model's context of {context:,} "
            "together: shorten the prompt, or ask for fewer",
            name,
            "context_length_exceeded",
        )
    stream, usage = read.stream()
    return Asked(
        chat=chat,
        model=model,
        prompts=prompts,
        texts=[p if isinstance(p, str) else None for p in given],
        n=n,
        most=asked if asked is not None else room if chat else min(16, room),
        sampling=read.sampling(),
        seed=read.number("seed", None, -(1 << 62), 1 << 62) if body.get("seed") is not None else draw_seed(),
        stops=read.stops(),
        logprobs=logprobs,
        echo=echo,
        stream=stream,
        usage=usage,
        ends=not read.flag("ignore_eos"),
        with_ids=read.flag("return_token_ids"),
    )


def _logprobs(read: Reader, chat: bool) -> int | None:
    if not chat:
        return read.number("logprobs", None, 0, ALTERNATIVES)
    top = read.number("top_logprobs", None, 0, ALTERNATIVES)
    if not read.flag("logprobs"):
        if top:
            raise Refused("top_logprobs needs logprobs: set it to true", "top_logprobs")
        return None
    return top or 0


class Written(NamedTuple):
    """What has come of one answer."""

    text: str
    tokens: list[Placed]
    reason: str | None


def joined(pieces: Sequence[Piece]) -> Written:
    tokens = [token for piece in pieces for token in piece.tokens]
    return Written("".join(piece.text for piece in pieces), tokens, pieces[-1].reason)


class Writer:
    """Makes the objects that a request is answered with; `name` gives the text of a token by its id, and its bytes."""

    def __init__(
        self, asked: Asked, name: Callable[[int], tuple[str, bytes]], decode: Callable[[list[int]], str]
    ) -> None:
        self.asked, self.name, self.decode = asked, name, decode
        echoed = zip(asked.prompts, asked.texts, strict=True) if asked.echo else ()
        self.echoed = [decode(ids) if text is None else text for ids, text in echoed]
        kind = "chatcmpl" if asked.chat else "cmpl"
        self.id, self.created = f"{kind}-{uuid.uuid4().hex}", int(time.time())

    def whole(self, answers: Sequence[Written], prompts: Sequence[Sequence[Token]], count: int) -> dict[str, Any]:
        """Return the answer to a request that is no stream; `prompts` are the scored tokens of echoed ones."""
        choices = [self._choice(i, answer, prompts[i]) for i, answer in enumerate(answers)]
        return {**self._head(""), "choices": choices, "usage": self.usage(count)}

    def chunk(self, index: int, written: Written, prompt: Sequence[Token] | None = None) -> dict[str, Any]:
        """Return a part of a stream; `prompt` is given with the first part of an answer."""
        return {
            **self._head(".chunk"),
            "choices": [self._choice(index, written, prompt, part=True)],
            **self._no_usage(),
        }

    def last_chunk(self, count: int) -> dict[str, Any]:
        return {**self._head(".chunk"), "choices": [], "usage": self.usage(count)}

    def usage(self, count: int) -> dict[str, int]:
        prompt = sum(map(len, self.asked.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    def _no_usage(self) -> dict[str, None]:
        return {"usage": None} if self.asked.usage else {}

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self.asked.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}

    def _choice(
        self, index: int, written: Written, prompt: Sequence[Token] | None, part: bool = False
    ) -> dict[str, Any]:
        asked, text, first = self.asked, written.text, prompt is not None
        ids = {"token_ids": [placed.token.id for placed in written.tokens]} if asked.with_ids else {}
        if asked.with_ids and first:
            ids["prompt_token_ids"] = asked.prompts[index // asked.n]
        if asked.chat:
            message = {**({"role": "assistant"} if first else {}), "content": text}
            logprobs = None if asked.logprobs is None else {"content": [self._entry(p.token) for p in written.tokens]}
            body: dict[str, Any] = {"delta" if part else "message": message}
        else:
            echoed = asked.echo and first
            shown = self.echoed[index // asked.n] if asked.echo else ""
            logprobs = None
            if asked.logprobs is not None:
                before = self._prompt(index, prompt or ()) if echoed else []
                new = [Placed(placed.token, placed.offset + len(shown)) for placed in written.tokens]
                logprobs = self._lists([*before, *new])
            body = {"text": shown + text if echoed else text}
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": written.reason, **ids}

    def _prompt(self, index: int, scored: Sequence[Token]) -> list[Placed]:
        """Return the tokens of a prompt; the first has no probability."""
        tokens = [Token(self.asked.prompts[index // self.asked.n][0]), *scored]
        return list(map(Placed, tokens, self._starts([token.id for token in tokens])))

    def _starts(self, ids: list[int]) -> list[int]:
        """Return where the text of each token begins."""
        starts, at, characters = [], 0, getincrementaldecoder("utf-8")("replace")
        for id in ids:
            starts.append(at)
            at += len(characters.decode(self.name(id)[1]))
        whole = self.decode(ids)
        if at == len(whole) and "�" not in whole:
            return starts
        # slower: for bytes that are no characters, and for a decoder that treats the first token otherwise
        text, starts = Piecewise(self.decode, []), []
        for id in ids:
            before = text.text
            text.add([id])
            starts.append(token_start(before, text.text))
        return starts

    def _top(self, token: Token) -> dict[int, float]:
        """Return the alternatives that were asked for, and the token itself."""
        top = dict(token.top[: self.asked.logprobs])
        return {**top, token.id: token.logprob} if token.logprob is not None else top

    def _lists(self, tokens: Sequence[Placed]) -> dict[str, Any]:
        tops = [self._top(placed.token) for placed in tokens]
        ids = {}
        if self.asked.with_ids:  # a name may belong to several ids, and an object of JSON has no order
            ids["alternatives"] = [[[id, self.name(id)[0], logprob] for id, logprob in top.items()] for top in tops]
        named = [{self.name(id)[0]: logprob for id, logprob in top.items()} or None for top in tops]
        return {
            "tokens": [self.name(placed.token.id)[0] for placed in tokens],
            "token_logprobs": [placed.token.logprob for placed in tokens],
            "top_logprobs": named if self.asked.logprobs else None,
            "text_offset": [placed.offset for placed in tokens],
            **ids,
        }

    def _entry(self, token: Token) -> dict[str, Any]:
        def one(id: int, logprob: float | None) -> dict[str, Any]:
            text, raw = self.name(id)
            return {"token": text, "logprob": logprob, "bytes": list(raw)}

        top = token.top[: self.asked.logprobs]
        return {**one(token.id, token.logprob), "top_logprobs": [one(*pair) for pair in top]}
