"""What tasks share that look at images: their size, damaged ones, and what is written of them beside the weights."""

from typing import Any

import torch

from tokenformer.config import Config
from tokenformer.config_data import ImagesConfig
from tokenformer.data.loader import Batch
from tokenformer.errors import UserError
from tokenformer.parallel.mesh import Place
from tokenformer.train.task import Task


class ImageTask(Task):
    """A task whose batches hold images."""

    damaged = 0  # images that could not be decoded, on this rank since the last log line

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        super().__init__(config, place, device)
        model, self.settings = config.model.trunks.get("image", config.model), config.data.images or ImagesConfig()
        rows, columns = model.grid
        self.size = size = self.settings.size or rows * model.patch
        if size % model.patch or (self.settings.size is None and rows != columns):
            raise UserError(
                f"model.image_size is {model.image_size} and data.images.size {self.settings.size}, but images are "
                f"squares here, of a multiple of the patch {model.patch}: set data.images.size to one"
            )
        self.length = (size // model.patch) ** 2 + model.length - rows * columns  # positions of an image

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
