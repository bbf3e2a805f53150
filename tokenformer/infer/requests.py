"""Reads prompts (lines of a text, pieces between another separator, or JSON lines) and gives results the official form:
context, text, length, finished, message, duration_seconds.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tokenformer.errors import UserError
from tokenformer.infer.cache import StaticCache
from tokenformer.infer.engine import Engine
from tokenformer.infer.sampling import Sampling
from tokenformer.infer.text import AnyTokenizer, TextResult, to_ids
from tokenformer.parsing import parse_json, shown
from tokenformer.strict import key, need

FIELDS = ("prompt", "context", "text")


class Prompt(NamedTuple):
    """A text, what messages call it, and the adapters that it is continued with: a name with the weight that the
    command gave it, weights, or None for those of the command.
    """

    text: str
    name: str
    adapters: dict[str, float] | str | None = None

    def switches(self, engine: Engine) -> dict[str, float] | None:
        """Return the weights of its adapters in an engine that has those of the command."""
        if isinstance(self.adapters, str):
            return {self.adapters: engine.active.get(self.adapters, 1.0)}
        return self.adapters


@dataclass(frozen=True, kw_only=True)
class Request(Sampling):
    """What to write and how to sample it, in the words of the official generation files."""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] = key("where prompts come from")
    maximum_tokens: int = key("new tokens of a text, at most", 64, above=0)
    prompt_end: str = key("the text between two prompts of a file, which also ends one in conversation", "\n")
    sample_input_file: str | None = key("input-file: the prompts", None)
    sample_output_file: str | None = key("where the JSON lines go; absent = shown", None)
    num_samples: int = key("unconditional: how many texts", 1, above=0)
    recompute: bool = key("without a cache; the tokens are the same, so there is nothing to do", False)
    return_logits: bool = key("the logits of every new token in the result", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.prompt_end != "", "prompt_end is empty: give the text between two prompts")
        if self.text_gen_type == "input-file":
            need(self.sample_input_file is not None, "input-file needs prompts: set sample_input_file")

    def prompts(self) -> list[Prompt]:
        """Return the prompts of the file, or empty ones."""
        if self.sample_input_file is not None and self.text_gen_type == "input-file":
            return read_prompts(self.sample_input_file, self.prompt_end)
        return [Prompt("", f"text {i}") for i in range(1, self.num_samples + 1)]


MOST = 1 << 26  # a file may be a device without an end


def read_prompts(path: str | Path, separator: str = "\n") -> list[Prompt]:
    """Read the prompts of a file (or of standard input: -), stripped, without empty ones; of a .jsonl file the strings,
    or their `prompt`, `context` or `text`, as they are, and their `adapter`. Messages call them by their first line.
    """
    pipe, lines = str(path) == "-", Path(path).suffix == ".jsonl"
    where = "standard input" if pipe else str(path)
    try:
        with open(0 if pipe else path, encoding="utf-8-sig", closefd=not pipe) as file:
            text = file.read(MOST + 1)
    except UnicodeDecodeError:
        raise UserError(f"the prompts of {where} are not UTF-8 text: convert them") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"the prompts {shown(str(path))} cannot be read ({why}): check the name") from None
    if len(text) > MOST:
        raise UserError(f"{where} holds more than the {MOST:,} characters that prompts may have: give fewer at a time")
    prompts, line, between = [], 1, "\n" if lines else separator
    for piece in text.split(between):
        space = len(piece) - len(piece.lstrip())
        name = f"{where}, line {line + piece[:space].count(chr(10))}"
        if piece.strip():
            prompts.append(_prompt(piece, name) if lines else Prompt(piece.strip(), name))
        line += (piece + between).count("\n")
    if not prompts:
        raise UserError(f"{where} holds no prompt: write one per line")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    value, adapters = parse_json(line, where), None
    if isinstance(value, dict):
        adapters = value.get("adapter")
        for name in value:  # a row may have keys of its own, but one of these was to choose adapters
            if name != "adapter" and difflib.get_close_matches(name.lower(), ["adapter"], cutoff=0.8):
                raise UserError(f"{where} has '{name[:80]}', which is not read: write \"adapter\"")
        value = next((value[name] for name in FIELDS if name in value), None)
    if not isinstance(value, str):
        raise UserError(f"{where} holds no prompt: write a string, or an object with {', '.join(FIELDS)}")
    weights = list(adapters.values()) if isinstance(adapters, dict) else []
    kind = isinstance(adapters, str | dict | None)
    if not kind or not all(type(weight) in (int, float) and abs(weight) < math.inf for weight in weights):
        raise UserError(f'{where}: write "adapter": "NAME", or {{"NAME": 0.5, ...}} with a weight for each')
    return Prompt(value, where, adapters)


def record(result: TextResult) -> dict[str, Any]:
    """Return a result in the official form.

    >>> record(TextResult("Hi", "", [], [], True, 0.5))["message"]
    'no text was made: the document ended, or a stop came, at once'
    """
    none, message = not result.ids, None
    if none:
        message = "no text was made: the document ended, or a stop came, at once"
    elif result.full:
        message = f"the model's context is full: no more than {len(result.ids):,} new tokens fit behind this prompt"
    return {
        "context": result.context,
        "text": None if none else result.text,
        "length": len(result.ids),
        "finished": result.finished,
        "message": message,
        "duration_seconds": result.seconds,
    }


def stop_token(tokenizer: AnyTokenizer, word: str) -> int:
    """Return the id that a number, or the text of one token, names.

    >>> from tokenformer.data.text.tokenizer import load_tokenizer
    >>> stop_token(load_tokenizer("byte"), "12"), stop_token(load_tokenizer("byte"), "A")
    (12, 66)
    """
    if word.isdecimal():
        need(int(word) < tokenizer.vocab_size, f"--stop-token {word} is no id: give 0 to {tokenizer.vocab_size - 1:,}")
        return int(word)
    ids = to_ids(tokenizer, word, "--stop-token")
    one = word != "" and len(ids) == 1
    need(one, f"--stop-token {word!r} is not one token: give an id or the text of one, or --stop for any text")
    return ids[0]


def token_logits(
    engine: Engine, tokenizer: AnyTokenizer, result: TextResult, switches: Mapping[str, float] | None = None
) -> list[list[float]]:
    """Return the logits that every new token was chosen from, by a full pass over the text with its `switches`, behind
    what the engine reads before it.
    """
    weights = {name: torch.tensor(row) for name, row in engine.check_switches([switches], 1).items()}
    prompt = to_ids(tokenizer, result.context)
    packed, ids = engine.packed, torch.tensor([prompt + result.ids], device=engine.packed.device)
    before, stop = engine.before, engine.before + ids.shape[1]
    with torch.no_grad():
        cache = StaticCache(packed.config, 1, stop, packed.device, packed.dtype)
        weights = {name: row.to(packed.device) for name, row in weights.items()}
        if engine.prefix is not None:
            packed.read(engine.prefix[None], cache, weights)
        hidden = packed.hidden(ids, torch.arange(before, stop, device=packed.device), cache, before, weights)
        return packed.logits(hidden[0, len(prompt) - 1 : -1], weights).tolist()
