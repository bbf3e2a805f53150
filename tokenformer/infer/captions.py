"""Texts about images, by a language model that reads them: what the engine needs, and words against words."""

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenformer.config_data import ImagesConfig
from tokenformer.infer.engine import Engine
from tokenformer.infer.text import AnyTokenizer
from tokenformer.models.caption import SWITCH
from tokenformer.ops.augment import normalise


class Beginning:
    """A tokenizer whose texts begin with the end token, as those about images do in training."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.end_of_document, self.decode = tokenizer.end_of_document, tokenizer.decode

    def encode(self, text: str) -> list[int]:
        return [self.end_of_document, *self.tokenizer.encode(text)]


@torch.no_grad()
def look_at(engine: Engine, model: Any, pixels: np.ndarray, settings: ImagesConfig) -> None:
    """Let the engine of a model's language model write about an image, bytes (size, size, 3)."""
    engine.read(model.encode_image(as_input(model, pixels[None], settings))[0])
    if SWITCH in engine.names:
        engine.active = {**model.text.active, SWITCH: 1.0}


def as_input(model: Any, pixels: np.ndarray, settings: ImagesConfig) -> Tensor:
    """Return bytes (B, size, size, 3) as the model reads them."""
    return normalise(torch.from_numpy(pixels).to(model.projection.weight.device).permute(0, 3, 1, 2), settings)


def captions(model: Any, x: Tensor, tokenizer: AnyTokenizer, tokens: int) -> list[tuple[str, bool]]:
    """Return the likeliest text about each image, token by token, of at most so many tokens, and whether it ended."""
    end, room = tokenizer.end_of_document, model.text.config.context - model.image.config.length - 1
    first = torch.full((len(x), 1), end, device=x.device)
    rows = model.generate(x, first, min(tokens, room))[:, 1:].tolist()
    return [(tokenizer.decode(row[: row.index(end)] if end in row else row).strip(), end in row) for row in rows]


def words(text: str) -> list[str]:
    """Return the words of a text, in small letters and without what stands between them.

    >>> words("Flag: Côte d’Ivoire")
    ['flag', 'côte', 'd', 'ivoire']
    """
    return "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()


def word_f1(said: str, right: str) -> float:
    """Return the harmonic mean of the shares of words that two texts have in common.

    >>> word_f1("red car", "a red fire engine")
    0.3333333333333333
    """
    mine, theirs = Counter(words(said)), Counter(words(right))
    common, total = (mine & theirs).total(), mine.total() + theirs.total()
    return 2 * common / total if total else 0.0
