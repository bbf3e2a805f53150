"""What tasks share that look at images, and at images with texts: their size, damaged ones, tokenizer and loaders, and
what is written of them beside the weights.
"""

import functools
import json
import warnings
from typing import Any

import torch

from tokenformer.config import Config, ModelConfig
from tokenformer.config_data import ImagesConfig
from tokenformer.data.images.captions import PairSource
from tokenformer.data.images.opening import some_of
from tokenformer.data.images.pairs import open_pair_parts, pairs_of
from tokenformer.data.images.samples import source_loader
from tokenformer.data.images.stored import Images
from tokenformer.data.loader import Batch
from tokenformer.data.text.tokenizer import load_tokenizer, padded_vocab, with_end
from tokenformer.errors import UserError
from tokenformer.parallel.mesh import Place
from tokenformer.train.task import Task

MOST_MEASURED = 256  # texts whose lengths are looked at, at first


class ImageTask(Task):
    """A task whose batches hold images."""

    damaged = 0  # images that could not be decoded, on this rank since the last log line

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        super().__init__(config, place, device)
        self.settings = config.data.images or ImagesConfig()
        self.size = self.find_size(config.model.trunks.get("image", config.model))

    def find_size(self, model: ModelConfig) -> int:
        """Return the side of the square that the model sees."""
        rows, columns = model.grid
        size = self.settings.size or rows * model.patch
        if size % model.patch or (self.settings.size is None and rows != columns):
            raise UserError(
                f"model.image_size is {model.image_size} and data.images.size {self.settings.size}, but images are "
                f"squares here, of a multiple of the patch {model.patch}: set data.images.size to one"
            )
        self.length = (size // model.patch) ** 2 + model.length - rows * columns  # positions of an image
        return size

    def say_unseen(self, held: Images) -> None:
        """Say if nothing is there to validate on."""
        if not len(held):
            do = "set data.images.hold_back, or name some with data.images.validation"
            warnings.warn(f"there are no images to validate on: {do}", stacklevel=2)

    def on_device(self, batch: Batch) -> dict[str, Any]:
        """Return the fields of a micro-batch; `draws` stays on the host, where augmentation decides by it.

        Damaged images are counted here.
        """
        self.damaged += int(batch.fields["damaged"].sum())
        draws = {"draws": batch.fields["draws"]} if "draws" in batch.fields else {}
        fields = {name: array for name, array in batch.fields.items() if name not in ("draws", "damaged")}
        return super().on_device(batch._replace(fields=fields)) | draws

    def logged(self) -> dict[str, int]:
        if self.settings.damaged == "refuse":
            return {}
        found = self.place.sum(torch.tensor(self.damaged, device=self.device))
        self.damaged = 0
        return {"damaged": int(found)}

    def about_images(self) -> dict[str, Any]:
        """Return how pixels are made, for images.json."""
        s = self.settings
        said = {"size": self.size, "mean": s.mean, "std": s.std, "crop_pct": s.crop_pct}
        return {**said, "interpolation": s.interpolation}


class TextsTask(ImageTask):
    """A task whose images have texts, one or several each."""

    drop = 0.0  # the share of texts that are left out in training

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        super().__init__(config, place, device)
        c, s = config, self.settings
        for name, value in (
            ("data.images.mixup", s.mixup),
            ("data.images.cutmix", s.cutmix),
            ("data.images.smoothing", s.smoothing),
            ("train.drop_path", c.train.drop_path),
        ):
            if value:
                raise UserError(f"{name} is {value}, but that is for images with classes, not for pairs: remove it")
        if c.data.tokenizer is None:
            raise UserError("data.tokenizer is missing: name byte, gpt-neox-20b, or a tokenizer.json for the texts")
        self.tokenizer, self.context = load_tokenizer(c.data.tokenizer), self.find_context()
        if self.tokenizer.vocab_size > c.model.vocabulary:
            where = "model.trunks.text.vocab" if c.model.trunks else "model.vocab"
            raise UserError(
                f"the tokenizer {c.data.tokenizer} has {self.tokenizer.vocab_size} ids but {where} is "
                f"{c.model.vocabulary}: set it to {padded_vocab(self.tokenizer.vocab_size)}, or name another tokenizer"
            )
        source = functools.partial(PairSource, tokenizer=self.tokenizer, context=self.context, settings=s)
        source = functools.partial(source, size=self.size, seed=c.seed, drop=self.drop)
        self.pairs, held = open_pair_parts(c.data)
        self.loader = source_loader(c.data, source(self.pairs, training=True), self.batch, **self.cut)
        self.check_lengths()
        self.say_unseen(held)
        held = some_of(held, self.held_out_samples)
        if len(held):
            self.held_out = source_loader(c.data, source(held, training=False), len(held), **self.cut)
            self.held_pairs = pairs_of(held)

    def check_lengths(self) -> None:
        """Say if some of the first texts are cut, as they are longer than their place."""
        whole = pairs_of(self.pairs)
        texts = [text for i in range(min(len(whole), MOST_MEASURED)) for text in whole.captions(i)[:1]]
        cut = sum(len(self.tokenizer.encode(text)) >= self.context for text in texts)
        if cut:
            warnings.warn(
                f"{cut:,} of the first {len(texts):,} captions are longer than the {self.context - 1} tokens that they "
                "have room for, and are cut: give a longer context",
                stacklevel=2,
            )

    def first_held_out(self) -> dict[str, Any]:
        """Return the first held-out micro-batch, on the device; what is damaged in it counts in no figure."""
        assert self.held_out is not None
        self.held_out.samples_seen, trained = 0, self.damaged
        fields, self.damaged = self.on_device(next(iter(self.held_out))), trained
        return fields

    def find_context(self) -> int:
        """Return the most tokens of a text, its end token included."""
        return self.config.model.trunks["text"].context

    def files(self) -> dict[str, Any]:
        about = json.dumps(self.about_images(), indent=1) + "\n"
        return {"images.json": about, "tokenizer.json": with_end(self.tokenizer)}
