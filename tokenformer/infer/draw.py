"""Pictures from texts, by a language model that was trained to draw (task draw): the engine writes their codes.

It may be that of a model that reads images, too.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tokenformer.errors import UserError
from tokenformer.infer.engine import Engine
from tokenformer.infer.sampling import Sampling
from tokenformer.infer.text import AnyTokenizer
from tokenformer.models.draw import SWITCH
from tokenformer.ops.palette import colours


class Drawer:
    """A model that draws, ready to be asked."""

    def __init__(self, model: Any, tokenizer: AnyTokenizer, **engine: Any) -> None:
        if getattr(model, "codes", None) is None:
            raise UserError("the model has no codes.safetensors beside it, so it cannot draw: train it with task draw")
        language = model.get_submodule((model.config.language_prefix or "").removesuffix("."))
        self.codes, self.tokenizer, self.first = model.codes, tokenizer, language.config.vocab
        self.engine = Engine(language, vocab=tokenizer.vocab_size, **engine)
        self.switches = {**language.active, SWITCH: 1.0} if SWITCH in self.engine.names else None

    def prompt(self, text: str) -> list[int]:
        """Return the ids before a picture: the end token, the text, and the id that begins one."""
        ids, count = self.tokenizer.encode(text), self.codes.side**2
        most = self.engine.context - 2 - count
        if len(ids) > most:
            raise UserError(f"the text has {len(ids)} tokens, and {most} fit before a picture: shorten it")
        return [self.tokenizer.end_of_document, *ids, self.first]

    def draw(
        self,
        texts: Sequence[str],
        sampling: Sampling | None = None,
        *,
        guidance: float = 1.0,
        seeds: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Return a picture (B, side, side, 3) of bytes for each text. `guidance` above 1 follows texts more closely."""
        if not math.isfinite(guidance):
            raise UserError(f"guidance is {guidance}: give a number, such as 2")
        prompts, count = [self.prompt(text) for text in texts], self.codes.side**2
        how: dict[str, Any] = {"choices": range(self.first + 1, self.first + 1 + len(self.codes.palette))}
        if guidance != 1:
            how |= {"against": [self.prompt("")] * len(texts), "guidance": guidance}
        rows = self.engine.generate(prompts, count, sampling, seeds=seeds, switches=[self.switches] * len(texts), **how)
        drawn_BN = torch.tensor([row.ids for row in rows]) - self.first - 1
        return colours(drawn_BN, self.codes).numpy()


def grid(pictures: np.ndarray, columns: int, scale: int, gap: int = 4) -> np.ndarray:
    """Return pictures (B, side, side, 3) in rows of so many, on white, each pixel a square of `scale` pixels.

    >>> grid(np.zeros((3, 2, 2, 3), np.uint8), columns=2, scale=3, gap=1).shape
    (13, 13, 3)
    """
    large = pictures.repeat(scale, 1).repeat(scale, 2)
    rows, side = -(-len(large) // columns), large.shape[1]
    sheet = np.full((rows * (side + gap) - gap, columns * (side + gap) - gap, 3), 255, np.uint8)
    for number, picture in enumerate(large):
        top, left = (side + gap) * (number // columns), (side + gap) * (number % columns)
        sheet[top : top + side, left : left + side] = picture
    return sheet
