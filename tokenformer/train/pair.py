"""Images and texts that belong together: the task of pairs.

Unusual: the loss is over the whole batch of all ranks. Where that is cut into micro-batches, all features are computed
first, without gradients; then each micro-batch again, which is differentiated by the gradients of its features.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tokenformer.config import Config
from tokenformer.data.images.captions import distinct, encode_captions
from tokenformer.data.loader import Batch
from tokenformer.models.pair import LARGEST
from tokenformer.ops.augment import augment_pixels
from tokenformer.ops.contrastive import Result, gathered, sigmoid_loss, softmax_loss
from tokenformer.ops.retrieval import recalls
from tokenformer.parallel.mesh import Place
from tokenformer.parallel.parallelize import before_backward
from tokenformer.train.images import TextsTask


class PairTask(TextsTask):
    """Images, each with a caption or several; the model says which text belongs to which image."""

    unit = "pairs"

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        super().__init__(config, place, device)
        if self.batch > len(self.pairs):
            what = f"batch is {self.batch:,}, but there are {len(self.pairs):,} pairs to train on"
            warnings.warn(f"{what}: the same pair is several times in a batch, as a wrong one too", stacklevel=2)

    def flops(self, cost: Any) -> float:
        return 3 * cost.sample_flops(0)

    def features(self, model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return model(augment_pixels(batch, self.settings)[0], batch["ids"], batch["length"])

    def pair_loss(self, model: Any, image: Tensor, text: Tensor, everybody: bool) -> Result:
        """Return the loss of features and its gradients, over all ranks if these are those of `everybody`."""
        group = self.place.groups["data"] if everybody and not self.place.alone else None
        if model.bias is None:
            return softmax_loss(image, text, model.scale, group)
        return sigmoid_loss(image, text, model.scale, model.bias, group)

    def gradients(
        self, model: Any, batches: Iterator[Batch], scale: Tensor, pipeline: Any = None
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            model.scale.clamp_(max=LARGEST)
        fields = [self.on_device(next(batches)) for _ in range(self.loader.micro_batches)]
        with torch.set_grad_enabled(len(fields) == 1):
            made = [self.features(model, batch) for batch in fields]
        found = self.pair_loss(model, *(torch.cat(part).detach() for part in zip(*made, strict=True)), everybody=True)
        size = len(fields[0]["ids"])
        slopes = zip((found.image * scale).split(size), (found.text * scale).split(size), strict=True)
        for number, slope in enumerate(slopes):
            features = made[0] if len(fields) == 1 else self.features(model, fields[number])
            before_backward(model, self.place, last=number == len(fields) - 1)
            torch.autograd.backward(features, slope)
        for number, slope in ((model.scale, found.scale), (model.bias, found.bias)):
            if slope is not None and number.requires_grad:
                number.grad = (slope * scale).to(number.dtype)
        return found.total, torch.full_like(found.total, len(found.image))

    def measures(self, model: Any) -> dict[str, float]:
        """Return the loss of all held-out pairs at once, and the shares of images and texts that are found.

        An image has found its text if one of its captions is among the first 1, 5 or 10 of all captions.
        """
        if self.held_out is None:
            return {}
        trained, self.damaged = self.damaged, 0
        images, labels = self.held_out_images(model)
        captions = [(row, text) for row, number in enumerate(labels) for text in self.held_pairs.captions(number)]
        different, places = distinct([text for _, text in captions])
        texts = self.encode(model, different)[places]
        owners = torch.tensor([row for row, _ in captions], device=self.device)
        skipped, self.damaged = self.logged(), trained
        if not labels:
            return {"loss": float("nan"), **skipped}
        firsts = torch.searchsorted(owners, torch.arange(len(labels), device=self.device))
        loss = self.pair_loss(model, images, texts[firsts], everybody=False).total / len(labels)
        return {"loss": loss.item(), **recalls(images @ texts.T, owners), **skipped}

    def held_out_images(self, model: Any) -> tuple[Tensor, list[int]]:
        """Return the features of all held-out images, the same on every rank, and their numbers."""
        assert self.held_out is not None
        self.held_out.samples_seen, features, labels = 0, [], []
        for batch in self.held_out:
            fields = self.on_device(batch)
            features.append(model.encode_image(augment_pixels(fields, self.settings)[0]))
            labels.append(fields["label"])
            if batch.last:
                break
        features, labels = self.everybodys(torch.cat(features)), self.everybodys(torch.cat(labels))
        return features[labels >= 0], labels[labels >= 0].tolist()

    def encode(self, model: Any, texts: list[str]) -> Tensor:
        """Return features of texts; each rank computes equally many, so that all of them call the model as often."""
        rows, (rank, world) = self.loader.micro_batch, (self.place.data_rank, self.place.data_world)
        share = -(-len(texts) // (rows * world)) * rows
        mine, features = texts[rank * share : (rank + 1) * share], []
        for start in range(0, share, rows):
            some = mine[start : start + rows]
            ids, lengths = encode_captions(self.tokenizer, some + [""] * (rows - len(some)), self.context)
            features.append(model.encode_text(*(torch.from_numpy(part).to(self.device) for part in (ids, lengths))))
        return self.everybodys(torch.cat(features))[: len(texts)]

    def everybodys(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, in their order."""
        return gathered(rows, None if self.place.alone else self.place.groups["data"])
