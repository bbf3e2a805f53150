"""Image sets as a source of samples: decoded in worker processes, every random choice drawn here.

Unusual: sample i of an epoch with its crop, its augmentation and what replaces it where it is damaged is a function of
(data, seed, epoch, i), so neither workers nor ranks nor a resume change a bit of it.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenformer.config_data import IGNORED, DataConfig, ImagesConfig
from tokenformer.data.images import drawing
from tokenformer.data.images.decode import Cropping, Damaged
from tokenformer.data.images.stored import Images
from tokenformer.data.loader import Loader
from tokenformer.data.permutation import EpochOrder
from tokenformer.data.source import Field
from tokenformer.errors import UserError

TRIES = 100  # images in a row that may be damaged
IN_PROCESS = 256  # fewer images are decoded before worker processes have started
_OTHERS = (
    *("format", "validation", "hold_back", "classes", "labels", "image_column", "label_column", "caption_column"),
    *("damaged", "size"),
)
_LATER = ("mean", "std", "smoothing")  # what ops/augment.py is told by the config and not by the draws


class ImageSource:
    """The samples of an image set (data/source.py); `training` crops at random and draws what augmentation applies."""

    processes = True

    def __init__(self, images: Images, settings: ImagesConfig, *, size: int, seed: int, training: bool) -> None:
        self.images, self.settings, self.seed, self.training = images, settings, seed, training
        self.crop = Cropping(size, settings)
        self.repeats = settings.repeats if training else 1
        self.shuffled = training and self.repeats == 1
        self.identity = {"data": images.fingerprint, "size": str(size)}
        self.fields = {
            "pixels": Field((size, size, 3), np.uint8),
            "label": Field((), np.int64, IGNORED),
            "damaged": Field((), np.int32),
        }
        if training:
            self.fields["draws"] = Field((drawing.width(settings),), np.float32, -1)  # -1 does nothing
            self.identity["images"] = _changed(settings)

    def __len__(self) -> int:
        return len(self.images) * self.repeats

    def read(self, indices: np.ndarray, epochs: np.ndarray, out: dict[str, np.ndarray]) -> None:
        for row, (index, epoch) in enumerate(zip(indices.tolist(), epochs.tolist(), strict=True)):
            fields = {name: array[row : row + 1] for name, array in out.items()}
            fields["damaged"][:] = 0
            if self.training:
                self._read_training(*self._repeated(index, epoch), epoch, fields)
            else:
                self._read_evaluation(index, fields)

    def _read_training(self, index: int, copy: int, epoch: int, out: dict[str, np.ndarray]) -> None:
        random = drawing.generator("images", self.seed, epoch, index, copy)
        crop, out["draws"][0] = drawing.draw(self.settings, self.crop.size, random)
        for _ in range(TRIES):
            try:
                out["pixels"][0] = self.crop.training(self.images.item(index), crop)
                out["label"][0] = self.images.labels[index]
                return
            except Damaged as damage:
                self._refuse(index, damage)
                out["damaged"][0] = 1
                index = int(random.integers(len(self.images)))
        raise UserError(f"{TRIES} images in a row are damaged, the last is {self.images.name(index)}: check the data")

    def _read_evaluation(self, index: int, out: dict[str, np.ndarray]) -> None:
        try:
            out["pixels"][0] = self.crop.evaluation(self.images.item(index))
            out["label"][0] = self.images.labels[index]
        except Damaged as damage:
            self._refuse(index, damage)
            out["pixels"][0], out["label"][0], out["damaged"][0] = 0, IGNORED, 1

    def _refuse(self, index: int, damage: Damaged) -> None:
        if self.settings.damaged == "refuse":
            raise UserError(
                f"{self.images.name(index)} is damaged ({damage}): mend or remove it, or set data.images.damaged=skip"
            ) from None

    def _repeated(self, index: int, epoch: int) -> tuple[int, int]:
        """Return image and copy at a place of an epoch: A B A B A B C D …, so that partners are different images."""
        if self.repeats == 1:
            return index, 0
        count = len(self.images)
        first, place = divmod(index, 2 * self.repeats)
        group = min(2, count - 2 * first)
        copy, member = divmod(place, group)
        places = np.array([epoch * count + 2 * first + member])
        return int(_order(count, self.images.fingerprint, self.seed)(places)[0][0]), copy


@functools.lru_cache(maxsize=8)
def _order(count: int, name: str, seed: int) -> EpochOrder:
    return EpochOrder(count, name, seed)


def _changed(settings: ImagesConfig) -> str:
    """Return the settings that change a sample, where they are not the default."""
    default = ImagesConfig()
    names = [f.name for f in dataclasses.fields(settings) if f.name not in (*_OTHERS, *_LATER)]
    told = [f"{name}={getattr(settings, name)}" for name in names if getattr(settings, name) != getattr(default, name)]
    return " ".join(told) or "default"


def image_loader(
    data: DataConfig, images: Images, *, size: int, seed: int, training: bool, batch: int, **cut: Any
) -> Loader:
    """Return batches of images; in evaluation each image once, in order. `cut` is what else `Loader` takes."""
    settings = data.images or ImagesConfig()
    if training and settings.mixes:
        check_even(batch, cut.get("micro_batch"), cut.get("world", 1))
    return source_loader(data, ImageSource(images, settings, size=size, seed=seed, training=training), batch, **cut)


def source_loader(data: DataConfig, source: Any, batch: int, **cut: Any) -> Loader:
    """Return batches of an `ImageSource`, or of one that is made like it."""
    usual: dict[str, Any] = {"workers": data.workers, "prefetch": data.prefetch}
    usual["epochs"] = None if source.training else 1
    return Loader(source, batch=batch, seed=source.seed, **{**usual, **cut})


def batches(
    images: Images, settings: ImagesConfig, size: int, batch: int, workers: int = 4
) -> Iterator[tuple[int, np.ndarray, np.ndarray, dict[int, str]]]:
    """Yield all images in order: number of the first, pixels, labels, and by row why an image could not be decoded."""
    if not len(images):
        return
    data = DataConfig(images=settings, workers=0 if len(images) < IN_PROCESS else workers)
    crop, first = Cropping(size, settings), 0
    for read in image_loader(data, images, size=size, seed=0, training=False, batch=min(batch, len(images))):
        rows = min(len(read.fields["label"]), len(images) - first)
        damage = {}
        for row in np.nonzero(read.fields["damaged"][:rows])[0].tolist():
            try:
                crop.evaluation(images.item(first + row))
            except Damaged as why:
                damage[row] = str(why)
        yield first, read.fields["pixels"][:rows], read.fields["label"][:rows], damage
        first += rows


def check_even(batch: int, micro_batch: int | None, world: int) -> None:
    """Refuse sizes that would tear a pair of mixed images apart."""
    share = -(-batch // world)
    micro = min(micro_batch or share, share)
    for name, odd in (
        (f"batch {batch}", batch % 2),
        (f"batch {batch} over {world} ranks", any(rank * batch // world % 2 for rank in range(world))),
        (f"micro_batch {micro}", micro % 2 and micro < share),
    ):
        if odd:
            raise UserError(
                f"{name} splits a pair of images that mixup or cutmix mix: give an even number for each rank"
            )
