"""Switch single parameter tokens off: their values count as zero, or their rows are as if they were not there.

Unusual: values are switched off in place, so all who use the model see it, but for an engine that was made before: it
has packed the weights. A token may be switched off by several with blocks; the last one that ends gives it back.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenformer.config import PROJECTION_OF
from tokenformer.errors import UserError
from tokenformer.growth.measure import layers


class Token(NamedTuple):
    """A parameter token; `row` counts through the segments of its projection."""

    layer: int
    projection: str  # query, key, value, proj, ffn
    row: int

    def __str__(self) -> str:
        return f"{self.layer}:{self.projection}:{self.row}"


def parse_token(text: str) -> Token:
    """Read a token as users write it.

    >>> parse_token("3:ffn:120")
    Token(layer=3, projection='ffn', row=120)
    """
    found = re.fullmatch(rf"(\d{{1,9}}):({'|'.join(PROJECTION_OF)}):(\d{{1,9}})", text)
    if not found:
        raise UserError(f"'{text[:80]}' names no parameter token: write layer:projection:token, such as 3:ffn:120")
    return Token(int(found[1]), found[2], int(found[3]))


def find(model: Any, token: Token | str) -> tuple[Any, int, int]:
    """Return the layer of a token, its segment and its row there."""
    check_model(model)
    token = parse_token(token if isinstance(token, str) else ":".join(map(str, token)))
    for layer, name, module in layers(model):
        if (layer, name) == token[:2]:
            row = token.row
            for number, segment in enumerate(module.segments):
                if row < len(segment.key_tokens):
                    return module, number, row
                row -= len(segment.key_tokens)
            raise UserError(f"{token} is not there: layer {layer}'s {name} has {token.row - row} tokens, from 0 on")
    raise UserError(f"{token} is not there: the model has {model.config.layers} layers, from 0 on")


def check_model(model: Any) -> None:
    """Refuse what is not a language model of parameter tokens."""
    c = model.config
    of, kind = getattr(c, "of", None), getattr(c, "kind", None)
    if of is None:
        raise UserError(f"this is a {type(model).__name__}, not a model of this package: take tokenformer.load(FOLDER)")
    if of != "language" or kind != "tokenformer":
        what = f"{of} of kind {kind}"
        raise UserError(f"this is a model of {what}, but only a TokenFormer for language can be explored: give one")


def refuse_switches(model: Any) -> None:
    """Refuse a model whose segments do not all count in a text: what is measured would count those under a switch."""
    names = sorted({name for _, _, layer in layers(model) for name in layer.switch if name})
    if names:
        raise UserError(
            f"the model has segments under a switch ({', '.join(names)[:80]}), which cannot be looked into: merge "
            "adapters, or take the model that was there before (tokenformer.slice)"
        )


_OFF = threading.Lock()


@contextlib.contextmanager
def ablate(model: Any, tokens: Iterable[Token | str] | str, how: str = "value") -> Iterator[None]:
    """Switch tokens off, inside of the with block: `value` (they add nothing, the norm of the others stays) or `mask`
    (as if their rows were not there, so the others are normalised without them).

    >>> from tokenformer import ModelConfig, models
    >>> tiny = models.build(ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=4, proj_tokens=4, ffn_tokens=9, vocab=64))
    >>> with ablate(tiny, ["0:ffn:3"]):
    ...     tiny.blocks[0].ffn.segments[0].value_tokens[3].abs().sum().item()
    0.0
    """
    if how not in ("value", "mask"):
        raise UserError(f"how is '{how}': give value or mask")
    found = [find(model, token) for token in ([tokens] if isinstance(tokens, str) else tokens)]
    with contextlib.ExitStack() as held:
        if how == "value":
            for module, segment, row in found:
                held.enter_context(_without_value(module.segments[segment], row))
            yield
            return
        refuse_switches(model)
        for module in {id(module): module for module, _, _ in found}.values():
            masks = [torch.ones(len(s.key_tokens), dtype=torch.bool) for s in module.segments]
            for other, segment, row in found:
                if other is module:
                    masks[segment][row] = False
            hook = functools.partial(_masked, torch.cat(masks))
            held.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


@contextlib.contextmanager
def _without_value(segment: Any, row: int) -> Iterator[None]:
    """Set a value to zero until all who did so have ended."""
    values = segment.value_tokens
    with _OFF, torch.no_grad():
        off = vars(segment).setdefault("_off", {})  # row -> its value, and how many hold it off
        value, count = off.get(row) or (values[row].clone(), 0)
        off[row] = value, count + 1
        values[row] = 0
    try:
        yield
    finally:
        with _OFF, torch.no_grad():
            value, count = off[row]
            off[row] = value, count - 1
            if count == 1:
                values[row] = value
                del off[row]


def _masked(mask: Tensor, _module: Any, inputs: tuple, words: dict) -> tuple[tuple, dict]:
    mask, other = mask.to(inputs[0].device), words.get("mask")
    return inputs, {**words, "mask": mask if other is None else mask & other}
