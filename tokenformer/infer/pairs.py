"""Features of images and texts by a pair, and a pair as a classifier of images by the names of classes (zero-shot)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tokenformer.config_data import ImagesConfig
from tokenformer.models.pair import unit
from tokenformer.ops.augment import normalise
from tokenformer.ops.retrieval import FIRST as FIRST
from tokenformer.ops.retrieval import recalls as recalls

Encode = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]  # texts → ids (B, T) and lengths (B,)


@torch.no_grad()
def image_features(model: Any, pixels: np.ndarray, settings: ImagesConfig) -> Tensor:
    """Return the features (B, E) of bytes (B, size, size, 3), in the host's memory."""
    x = torch.from_numpy(pixels).to(model.scale.device).permute(0, 3, 1, 2)
    return model.encode_image(normalise(x, settings)).cpu()


@torch.no_grad()
def text_features(
    model: Any, texts: Sequence[str], encode: Encode, batch: int = 64, advance: Callable[[float], None] | None = None
) -> Tensor:
    """Return the features (B, E) of texts, in the host's memory; `advance` is told of each batch that is done."""
    found = [torch.empty(0, model.config.embed)]
    for start in range(0, len(texts), batch):
        some = texts[start : start + batch]
        ids, lengths = (torch.from_numpy(part).to(model.scale.device) for part in encode(some))
        found.append(model.encode_text(ids[:, : int(lengths.max())], lengths).cpu())
        if advance:
            advance(len(some))
    return torch.cat(found)


class ZeroShot(nn.Module):
    """A pair that classifies images: `classes` (N, E) are features of what each class is called.

    A class is called what templates make of its name (`a photo of a {}.`): the features are averaged and made a unit.
    """

    def __init__(self, model: Any, names: Sequence[str], templates: Sequence[str], encode: Encode) -> None:
        super().__init__()
        self.model = model
        plain = [name.replace("_", " ") for name in names]  # CIFAR-100's aquarium_fish
        texts = [template.replace("{c}", "{}").replace("{}", name) for name in plain for template in templates]
        features_NME = text_features(model, texts, encode).unflatten(0, (len(names), len(templates)))
        self.register_buffer("classes", unit(features_NME.mean(1)).to(model.scale.device), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """`pixels` (B, C, height, width), normalised → logits (B, N)."""
        return self.model.logits(self.model.encode_image(pixels), self.classes)
