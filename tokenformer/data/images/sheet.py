"""Looking at image sets: a contact sheet of what a model sees, and a list of the images that cannot be decoded."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tokenformer.config_data import ImagesConfig
from tokenformer.data.images.decode import png, written
from tokenformer.data.images.folders import find_images
from tokenformer.data.images.samples import ImageSource, batches
from tokenformer.data.images.stored import Images
from tokenformer.data.permutation import EpochOrder
from tokenformer.terminal import progress

EPOCHS, GAP, GREY = 3, 4, 200
Augment = Callable[[dict[str, np.ndarray], ImagesConfig], np.ndarray]


def contact_sheet(
    images: Images, settings: ImagesConfig, size: int, count: int, seed: int, augmented: Augment
) -> bytes:
    """Return a PNG with a column per image: as in evaluation, and below as `augmented` makes it in three epochs."""
    chosen = EpochOrder(len(images), images.fingerprint, seed)(np.arange(count + count % 2))[0]  # pairs are even
    settings, rows = dataclasses.replace(settings, repeats=1), []
    for epoch in range(-1, EPOCHS):
        source = ImageSource(images, settings, size=size, seed=seed, training=epoch >= 0)
        fields = {name: np.empty((len(chosen), *f.shape), f.dtype) for name, f in source.fields.items()}
        source.read(chosen, np.full(len(chosen), epoch), fields)
        rows.append(augmented(fields, settings) if epoch >= 0 else fields["pixels"])
    frame = ((0, 0), (0, GAP), (0, GAP), (0, 0))
    lines = [np.concatenate(np.pad(row[:count], frame, constant_values=GREY), 1) for row in rows]
    return png(np.concatenate(lines)[:-GAP, :-GAP])


def matches_sheet(texts: Sequence[str], files: Sequence[Sequence[str]], settings: ImagesConfig, size: int) -> bytes:
    """Return a PNG with a row for each text: the text, and beside it the images that were found for it."""
    rows = []
    for text, names in zip(texts, files, strict=True):
        images = find_images(names)
        source = ImageSource(images, dataclasses.replace(settings, damaged="skip"), size=size, seed=0, training=False)
        fields = {name: np.empty((len(images), *f.shape), f.dtype) for name, f in source.fields.items()}
        source.read(np.arange(len(images)), np.zeros(len(images), np.int64), fields)
        row = [written(text, 3 * size, size), *fields["pixels"]]
        rows.append(
            np.concatenate([np.pad(part, ((0, GAP), (0, GAP), (0, 0)), constant_values=GREY) for part in row], 1)
        )
    return png(np.concatenate(rows)[:-GAP, :-GAP])


def damaged_images(images: Images, workers: int) -> Iterator[tuple[int, str]]:
    """Decode all images, and yield number and reason of each that is damaged."""
    with progress("decoding", len(images), " images") as advance:
        for first, pixels, _, damage in batches(images, ImagesConfig(damaged="skip"), 32, 64, workers):
            yield from ((first + row, why) for row, why in damage.items())
            advance(len(pixels))
