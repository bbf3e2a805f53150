"""Classification of images: soft targets, drop path, top-1 and top-5. The task of image models.

Unusual: nothing random is drawn on the device. Augmentation comes with the batch, and drop path belongs to (seed, step,
layer, position in the step), so that ranks, micro-batches and a resume change no bit.
"""

import functools
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenformer.config import Config
from tokenformer.data.images.opening import open_parts, some_of
from tokenformer.data.images.samples import image_loader
from tokenformer.data.loader import Batch
from tokenformer.errors import UserError
from tokenformer.ops.augment import augment
from tokenformer.parallel.mesh import Place
from tokenformer.parallel.parallelize import before_backward
from tokenformer.train.images import ImageTask


class ClassifyTask(ImageTask):
    """Images and their classes; the loss is the cross entropy with targets that may be mixed and smoothed."""

    unit = "images"

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        super().__init__(config, place, device)
        c = config
        images, held = open_parts(c.data)
        self.classes = list(images.classes)
        if len(self.classes) > c.model.classes:
            raise UserError(
                f"the data have {len(self.classes):,} classes but model.classes is {c.model.classes}: "
                f"set model.classes={len(self.classes)}"
            )
        if spare := c.model.classes - len(self.classes):
            rows = f"{spare:,} rows of the head are" if spare > 1 else "1 row of the head is"
            warnings.warn(
                f"model.classes is {c.model.classes:,}, but the data have {len(self.classes):,} classes: {rows} never "
                "right",
                stacklevel=2,
            )
        load = functools.partial(image_loader, c.data, size=self.size, seed=c.seed, **self.cut)
        self.loader = load(images, training=True, batch=self.batch)
        self.say_unseen(held)
        held = some_of(held, self.held_out_samples)
        if len(held):
            self.held_out = load(held, training=False, batch=len(held))

    def flops(self, cost: Any) -> float:
        return 3 * cost.sample_flops(self.length)

    def logits(self, model: Any, batch: Mapping[str, Any], drop: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits (B, classes) in fp32 and soft targets, which are 0 in rows that hold no image."""
        pixels, targets = augment(batch, self.settings, self.config.model.classes)
        logits = model(pixels, drop=drop)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), targets

    def loss(self, model: Any, batch: Mapping[str, Any], drop: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits, targets = self.logits(model, batch, drop)
        return -(targets * logits.log_softmax(-1)).sum(), (batch["label"] >= 0).sum()

    def gradients(
        self, model: Any, batches: Iterator[Batch], scale: Tensor, pipeline: Any = None
    ) -> tuple[Tensor, Tensor]:
        total = count = torch.zeros((), device=self.device)
        for micro in range(self.loader.micro_batches):
            batch = next(batches)
            start = batch.samples_seen - self.batch * batch.last
            drop = self.drop(model.config.layers, start, micro)
            loss_sum, losses = self.loss(model, self.on_device(batch), drop)
            before_backward(model, self.place, last=micro == self.loader.micro_batches - 1)
            (loss_sum * scale).backward()
            total, count = total + loss_sum.detach(), count + losses
        return total, count

    def drop(self, layers: int, start: int, micro: int) -> Tensor | None:
        """Return the factors of a micro-batch's branches (layers, 2, B): 0, or 1 / the probability to stay.

        The probability to be dropped grows by layer, from 0 to `train.drop_path` in the last one.
        """
        rate = self.config.train.drop_path
        if not rate:
            return None
        rows = self.loader.positions(start, micro) - start
        stay = 1 - np.linspace(0, rate, layers)[:, None, None]
        drawn = np.zeros((layers, 2, self.loader.micro_batch))  # rows that hold no image stay 0
        for layer in range(layers):
            random = np.random.default_rng([self.config.seed, start, layer])
            drawn[layer, :, : len(rows)] = random.random((2, self.batch))[:, rows]
        return torch.from_numpy(((drawn < stay) / stay).astype(np.float32)).to(self.device)

    def measures(self, model: Any) -> dict[str, float]:
        """Return the loss, and the shares of held-out images whose class is the likeliest (top1), or among five.

        Where damaged images are skipped, `damaged` says how many were.
        """
        if self.held_out is None:
            return {}
        trained, self.damaged = self.damaged, 0
        sums = torch.zeros(4, device=self.device)
        self.held_out.samples_seen = 0
        for batch in self.held_out:
            fields = self.on_device(batch)
            logits, targets = self.logits(model, fields)
            best = logits.topk(min(5, logits.shape[1])).indices == fields["label"][:, None]
            loss = -(targets * logits.log_softmax(-1)).sum()
            sums += torch.stack([loss, best[:, 0].sum(), best.sum(), (fields["label"] >= 0).sum()])
            if batch.last:
                break
        loss, top1, top5, count = self.place.sum(sums).tolist()
        skipped, self.damaged = self.logged(), trained
        if not count:
            return {"loss": math.nan, **skipped}
        return {"loss": loss / count, "top1": top1 / count, "top5": top5 / count, **skipped}

    def files(self) -> dict[str, str]:
        return {"images.json": json.dumps({"classes": self.classes, **self.about_images()}, indent=1) + "\n"}
