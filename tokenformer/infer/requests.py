"""Prompts in and texts out as files, in the official form: JSON lines of context, text, length, finished, message,
duration_seconds. Prompts are lines of a text (or pieces between another separator), or JSON lines.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tokenformer.errors import UserError
from tokenformer.files import write_text
from tokenformer.infer.cache import StaticCache
from tokenformer.infer.engine import Engine
from tokenformer.infer.sampling import Sampling
from tokenformer.infer.text import AnyTokenizer, TextResult
from tokenformer.strict import key, need

FIELDS = ("prompt", "context", "text")


@dataclass(frozen=True)
class Request:
    """What to write, in the words of the official generation files."""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] = key("where prompts come from")
    maximum_tokens: int = key("new tokens of a text, at most", 64)
    temperature: float = key("as in Sampling", 0.0)
    top_k: int = key("as in Sampling", 0)
    top_p: float = key("as in Sampling", 0.0)
    min_p: float = key("as in Sampling (ours)", 0.0)
    repetition_penalty: float = key("as in Sampling (ours)", 1.0)
    prompt_end: str = key("what stands between two prompts of a file, and ends one in conversation", "\n")
    sample_input_file: str | None = key("input-file: the prompts", None)
    sample_output_file: str | None = key("where the JSON lines go; absent = shown", None)
    num_samples: int = key("unconditional: how many texts", 1)
    recompute: bool = key("without a cache; the tokens are the same, so there is nothing to do", False)
    return_logits: bool = key("the logits of every new token in the result", False)

    def __post_init__(self) -> None:
        need(self.maximum_tokens > 0, f"maximum_tokens is {self.maximum_tokens}: give a number above 0")
        need(self.num_samples > 0, f"num_samples is {self.num_samples}: give a number above 0")
        need(self.prompt_end != "", "prompt_end is empty: give what stands between two prompts")
        if self.text_gen_type == "input-file":
            need(self.sample_input_file is not None, "input-file needs prompts: set sample_input_file")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)

    def prompts(self) -> list[str]:
        """Read from the file, or empty ones."""
        if self.sample_input_file is not None and self.text_gen_type == "input-file":
            return read_prompts(self.sample_input_file, self.prompt_end)
        return [""] * self.num_samples


def read_prompts(path: str | Path, separator: str = "\n") -> list[str]:
    """Prompts of a file, stripped, empty ones left out; of a .jsonl file the strings, or their `prompt`, `context` or
    `text`, as they are.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the prompts {path} cannot be read ({error.strerror}): check the name") from None
    except UnicodeDecodeError:
        raise UserError(f"the prompts {path} are not UTF-8 text: convert the file") from None
    if Path(path).suffix == ".jsonl":
        prompts = [_prompt(line, f"{path}, line {i}") for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        prompts = [piece.strip() for piece in text.split(separator) if piece.strip()]
    if not prompts:
        raise UserError(f"{path} holds no prompt: write one a line")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}): write a string or an object with a prompt") from None
    if isinstance(value, dict):
        value = next((value[name] for name in FIELDS if name in value), None)
    if not isinstance(value, str):
        raise UserError(f"{where} holds no prompt: write a string, or an object with {', '.join(FIELDS)}")
    return value


def record(result: TextResult) -> dict[str, Any]:
    """One result in the official form.

    >>> record(TextResult("Hi", "", [], [], True, 0.5))["message"]
    'no text was made: the document ended, or a stop string came, at once'
    """
    none = not result.ids
    return {
        "context": result.context,
        "text": None if none else result.text,
        "length": len(result.ids),
        "finished": result.finished,
        "message": "no text was made: the document ended, or a stop string came, at once" if none else None,
        "duration_seconds": result.seconds,
    }


def write_records(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def token_logits(engine: Engine, tokenizer: AnyTokenizer, result: TextResult) -> list[list[float]]:
    """The logits that every new token was chosen from: one full pass over the text."""
    prompt = tokenizer.encode(result.context) or [tokenizer.end_of_document]
    packed, ids = engine.packed, torch.tensor([prompt + result.ids], device=engine.packed.device)
    with torch.no_grad():
        cache = StaticCache(packed.config, 1, ids.shape[1], packed.device, packed.dtype)
        hidden = packed.hidden(ids, torch.arange(ids.shape[1], device=packed.device), cache, 0)
        return packed.logits(hidden[0, len(prompt) - 1 : -1]).tolist()
