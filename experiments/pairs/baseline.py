"""The simplest baseline: a held-out icon is described by the words of the training icons that look most like it.

An image is its pixels at 8 × 8; a text is the set of its words, each weighted by how rare it is in training. The words
of the nearest training images, averaged, are compared with each held-out text by their cosine. Nothing is learned.
"""

import re
from typing import Any

import numpy as np
import torch
from icons import Icons
from PIL import Image

from tokenformer.eval.pairs import chance
from tokenformer.ops.retrieval import recalls

SIDE, NEAREST = 8, (1, 3, 5, 10, 20)


def chosen(icons: Icons) -> dict[str, Any]:
    """Choose the number of neighbours on the validation icons; return what it gives on the test icons, and chance."""
    train, validation, test = (icons.rows(part) for part in ("train", "validation", "test"))
    nearest = max(NEAREST, key=lambda k: measure(icons, train, validation, k)["mean_recall"])
    found = measure(icons, np.concatenate([train, validation]), test, nearest)
    return {"nearest": nearest, **found, "chance": chance(torch.arange(len(test))), "held_out": len(test)}


def measure(icons: Icons, train: np.ndarray, held: np.ndarray, nearest: int) -> dict[str, float]:
    words = sorted({word for row in train for word in _words(icons.captions[row][0])})
    known, wanted = (_bags(icons, rows, words) for rows in (train, held))
    rare = np.log(len(train) / known.sum(0))
    x, y = (_small(icons.pixels[rows]) for rows in (train, held))
    distance = (y**2).sum(1)[:, None] - 2 * y @ x.T + (x**2).sum(1)
    said = np.stack([known[row].mean(0) for row in np.argsort(distance, 1, kind="stable")[:, :nearest]])
    said, wanted = (m * rare / np.linalg.norm(m * rare, axis=1, keepdims=True).clip(1e-9) for m in (said, wanted))
    found = recalls(torch.from_numpy(said @ wanted.T), torch.arange(len(held)))
    return {**found, "mean_recall": sum(found.values()) / len(found)}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _bags(icons: Icons, rows: np.ndarray, words: list[str]) -> np.ndarray:
    number, found = {word: i for i, word in enumerate(words)}, np.zeros((len(rows), len(words)))
    for place, row in enumerate(rows):
        found[place, [number[word] for word in set(_words(icons.captions[row][0])) if word in number]] = 1
    return found


def _small(pixels: np.ndarray) -> np.ndarray:
    small = [np.asarray(Image.fromarray(p).resize((SIDE, SIDE), Image.Resampling.BOX)) for p in pixels]
    return np.stack(small).reshape(len(pixels), -1) / 255.0
