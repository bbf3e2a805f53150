"""How well a model that reads images says what is on them: exact names, words, and the right name among others."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tokenformer.config_data import ImagesConfig
from tokenformer.data.images.captions import encode_captions
from tokenformer.data.images.pairs import pairs_of
from tokenformer.data.images.samples import batches
from tokenformer.data.images.stored import Images, Some
from tokenformer.data.text.tokenizer import Tokenizer
from tokenformer.errors import UserError
from tokenformer.eval.ranks import spread
from tokenformer.infer.captions import as_input, captions, word_f1, words
from tokenformer.models.caption import shifted

OTHERS = 99  # names that the right one is compared with
FIGURES = ("exact", "word_f1", "first", "first_five")


def captioning(
    model: Any,
    images: Images,
    tokenizer: Tokenizer,
    settings: ImagesConfig,
    size: int,
    batch: int,
    advance: Callable[[float], None],
) -> tuple[dict[str, Any], dict[int, str]]:
    """Return shares over all images, and which images are damaged (they count in no figure).

    `exact`: what is written, to its end, is one of an image's captions, letter case and punctuation aside. `word_f1`:
    with the caption that it shares most words with. `first`, `first_five`: the image's first caption is the likeliest,
    or among five, beside those of 99 other images, which a fixed seed draws. Under torchrun each process takes its
    share.
    """
    pairs = pairs_of(images)
    names = [pairs.captions(int(label))[0] for label in images.labels]
    room = model.text.config.context - model.image.config.length
    longest = max(len(tokenizer.encode(one)) for label in images.labels for one in pairs.captions(int(label))) + 1

    def look(indices: Sequence[int]) -> list[tuple[list[float], str, str]]:
        found: list[tuple[list[float], str, str]] = []
        for first, pixels, labels, damage in batches(Some(images, np.array(indices)), settings, size, batch):
            x = as_input(model, pixels, settings)
            said = captions(model, x, tokenizer, longest)
            for row, (label, (text, ended)) in enumerate(zip(labels.tolist(), said, strict=True)):
                if row in damage:
                    found.append(([], "", damage[row]))
                    continue
                right, number = pairs.captions(label), indices[first + row]
                place = rank_of(model, x[row : row + 1], names, number, tokenizer, room)
                exact = ended and any(words(text) == words(one) for one in right)
                f1 = max(word_f1(text, one) for one in right)
                found.append(([float(exact), f1, float(place == 0), float(place < 5)], text, ""))
            advance(len(labels))
        return found

    seen = spread(range(len(images)), look)
    good = [figures for figures, _, damage in seen if not damage]
    if not good:
        raise UserError("no image could be decoded, so there is nothing to measure: check the images")
    means = dict(zip(FIGURES, np.mean(good, 0).tolist(), strict=True))
    damaged = {index: damage for index, (_, _, damage) in enumerate(seen) if damage}
    facts = {"images": len(good), "damaged": len(damaged), "among": min(OTHERS, len(set(names)) - 1) + 1}
    return {**facts, **means, "captions": [text for _, text, _ in seen]}, damaged


def rank_of(model: Any, x: torch.Tensor, names: Sequence[str], number: int, tokenizer: Tokenizer, room: int) -> int:
    """Return how many of up to 99 other names are at least as likely as the right one, `names[number]`."""
    others = sorted({name for name in names if words(name) != words(names[number])})
    drawn = np.random.default_rng([20241118, number]).permutation(len(others))[:OTHERS]
    ids, lengths = encode_captions(tokenizer, [names[number], *(others[i] for i in drawn)], room)
    cut = torch.from_numpy(ids[:, : lengths.max()]).to(x.device), torch.from_numpy(lengths).to(x.device)
    likely = model.likelihoods(x, *shifted(*cut, tokenizer.end_of_document))[0]
    return int((~(likely[1:] < likely[0])).sum())  # so that NaN, which is not below anything, is never the likeliest
