"""What is on an image, in words: the task of a language model that reads images.

A text begins and ends with the end token, as documents do: `generate --image` without a prompt writes a caption.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.config_data import IGNORED
from tokenformer.data.loader import Batch
from tokenformer.errors import UserError
from tokenformer.models.caption import SWITCH, shifted
from tokenformer.ops.augment import augment_pixels
from tokenformer.train.images import TextsTask
from tokenformer.train.task import check_switches

SHOWN = 4  # held-out images whose captions are a sample
ROUND = 8  # texts are cut to a multiple of this: fewer shapes to compile


class CaptionTask(TextsTask):
    """Images, each with a text or several; the loss is over the tokens of the text and its end."""

    unit = "captions"

    def find_size(self, model: ModelConfig) -> int:
        if self.config.model.of != "caption":
            raise UserError(f"task is caption, but the model is of {self.config.model.of}: begin with caption/icons")
        check_switches(self.config, SWITCH, "text.")
        return super().find_size(model)

    def find_context(self) -> int:
        return self.config.model.trunks["text"].context - self.length

    def on_device(self, batch: Batch) -> dict[str, Any]:
        longest = -(-max(1, int(batch.fields["length"].max())) // ROUND) * ROUND
        cut = {**batch.fields, "ids": batch.fields["ids"][:, :longest].copy()}
        return super().on_device(batch._replace(fields=cut))

    def loss(self, model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        ids, labels = shifted(batch["ids"], batch["length"], self.tokenizer.end_of_document)
        found = model(ids, augment_pixels(batch, self.settings)[0], labels=labels)
        return found.loss_sum, found.count

    def measures(self, model: Any) -> dict[str, float]:
        trained, self.damaged = self.damaged, 0
        found = super().measures(model)
        skipped, self.damaged = self.logged(), trained
        return {**found, **skipped} if found else {}

    def sample(self, model: Any) -> dict[str, str | bytes]:
        """Return captions of the first held-out images, beside their own."""
        wanted = self.config.validation.generate
        if self.held_out is None or not wanted:
            return {}
        fields = self.first_held_out()
        labels, end = fields["label"][:SHOWN], self.tokenizer.end_of_document
        first = torch.full((len(labels), 1), end, device=self.device)
        room = self.config.model.trunks["text"].context - self.length - 1
        with torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
            pixels = augment_pixels({name: fields[name] for name in ("pixels", "label")}, self.settings)[0]
            made = model.generate(pixels[:SHOWN], first, min(wanted, room))[:, 1:].tolist()
        said = [self.tokenizer.decode(row[: row.index(end)] if end in row else row) for row in made]
        rows = [pair for pair in zip(labels.tolist(), said, strict=True) if pair[0] != IGNORED]
        return {"text": "\n".join(f"{self.held_pairs.captions(number)[0]}: {text}" for number, text in rows)}
