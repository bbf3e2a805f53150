"""Samples of pairs: an image as classification sees it, and the ids of one of its captions.

Unusual: the caption is that of the image that is really there, also where a damaged image was replaced by another one.
"""

from collections.abc import Sequence

import numpy as np

from tokenformer.config_data import ImagesConfig
from tokenformer.data.images import drawing
from tokenformer.data.images.pairs import pairs_of
from tokenformer.data.images.samples import ImageSource
from tokenformer.data.images.stored import Images
from tokenformer.data.source import Field
from tokenformer.data.text.tokenizer import Tokenizer, fingerprint


def encode_captions(tokenizer: Tokenizer, texts: Sequence[str], context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids (B, context) and lengths (B,): each text, cut where it is too long, and the end token.

    >>> from tokenformer.data.text.tokenizer import ByteTokenizer
    >>> [part.tolist() for part in encode_captions(ByteTokenizer(), ["A", "ABCD"], 4)]
    [[[66, 0, 0, 0], [66, 67, 68, 0]], [2, 4]]
    """
    ids = np.full((len(texts), context), tokenizer.end_of_document, np.int64)
    lengths = np.zeros(len(texts), np.int64)
    for row, text in enumerate(texts):
        found = tokenizer.encode(text)[: context - 1]
        ids[row, : len(found)], lengths[row] = found, len(found) + 1
    return ids, lengths


def distinct(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the texts without repetition, and for each text its place among these.

    Equal texts then have equal features: computed in other batches they would differ by a rounding.

    >>> distinct(["a fox", "an owl", "a fox"])
    (['a fox', 'an owl'], [0, 1, 0])
    """
    place = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return list(place), [place[text] for text in texts]


class PairSource:
    """The samples of pairs (data/source.py): in training one caption drawn for each, in evaluation the first."""

    processes = True

    def __init__(
        self,
        images: Images,
        tokenizer: Tokenizer,
        context: int,
        settings: ImagesConfig,
        *,
        size: int,
        seed: int,
        training: bool,
        drop: float = 0.0,
    ) -> None:
        """`drop`: the share of captions that are left out in training."""
        self.drop = drop
        self.inner = ImageSource(images, settings, size=size, seed=seed, training=training)
        self.pairs, self.tokenizer, self.context = pairs_of(images), tokenizer, context
        self.seed, self.training, self.shuffled = seed, training, self.inner.shuffled
        self.identity = {**self.inner.identity, "tokenizer": fingerprint(tokenizer)[:16], "length": str(context)}
        self.fields = {**self.inner.fields, "ids": Field((context,), np.int64), "length": Field((), np.int64)}

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, indices: np.ndarray, epochs: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Fill rows; where there is no image (a damaged one, in evaluation) the text has the length 0."""
        self.inner.read(indices, epochs, {name: out[name] for name in self.inner.fields})
        there = out["label"][: len(indices)] >= 0
        rows = zip(out["label"][: len(indices)][there].tolist(), epochs[there].tolist(), strict=True)
        out["ids"][:], out["length"][:] = 0, 0
        if there.any():
            texts = [self.caption(number, epoch) for number, epoch in rows]
            out["ids"][there], out["length"][there] = encode_captions(self.tokenizer, texts, self.context)

    def caption(self, number: int, epoch: int) -> str:
        left_out = drawing.generator("no caption", self.seed, epoch, number).random() if self.drop else 1.0
        if self.training and left_out < self.drop:
            return ""
        captions = self.pairs.captions(number)
        if not self.training or len(captions) == 1:
            return captions[0]
        return captions[drawing.generator("caption", self.seed, epoch, number).integers(len(captions))]
