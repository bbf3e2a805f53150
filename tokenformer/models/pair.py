"""Images and texts that find each other: a trunk for each, and a space in which both are compared (CLIP, SigLIP).

Unusual: a text ends at `lengths`, whatever stands behind it; with `pool: end` its last token must be the end token.
Legend: B batch, T positions, D dim of a trunk, E width of the shared space.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.models.cost import Cost, cost
from tokenformer.models.image import ImageModel
from tokenformer.models.init import init_weights
from tokenformer.models.layers import Linear, look_up
from tokenformer.models.names import POSITION, TABLE, Role, own
from tokenformer.models.trunk import Trunk, View

SCALE = {"softmax": math.log(1 / 0.07), "sigmoid": math.log(10)}  # of CLIP and SigLIP, at the beginning
LARGEST = math.log(100)  # a larger scale makes training unstable (CLIP)
BIAS = -10.0  # nearly all pairs of a batch do not belong together


class TextTrunk(Trunk):
    """The trunk of texts: from ids to one vector per text."""

    ends: ClassVar[Mapping[str, Role]] = {"embedding.weight": TABLE, "positions": POSITION, **Trunk.ends}
    embedding: nn.Embedding

    def __init__(self, config: ModelConfig) -> None:
        table = torch.empty(config.vocab, config.dim)
        super().__init__(config, embedding=nn.Embedding(config.vocab, config.dim, _weight=table))
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.context, config.dim)) if learned else None

    def forward(self, ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
        length = ids_BT.shape[-1]
        if length > self.config.context:
            raise UserError(f"a text has {length} tokens, but the model's context is {self.config.context}: cut it")
        x_BTD = look_up(self.embedding, ids_BT, self.config.vocab).to(self.compute_dtype)
        fields: dict[str, Any] = {}
        there_BT = torch.arange(length, device=ids_BT.device) < lengths_B[:, None].clamp(min=1)
        if self.config.pool == "mean":
            fields = {"causal": False, "mask": there_BT[:, None, None]}
        if self.positions is None:
            view = self.view(x_BTD, **fields)
        else:
            x_BTD, view = x_BTD + self.positions[:length].to(x_BTD.dtype), View(**fields)
        x_BTD = self.run(x_BTD, view)
        if self.config.pool == "mean":
            return (x_BTD * there_BT[..., None]).sum(1) / there_BT.sum(1, keepdim=True)
        return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), there_BT.sum(1) - 1]


class PairModel(nn.Module):
    """A trunk of images, a trunk of texts, their projections, and a learned scale (and bias) of their cosines.

    >>> tower = {"layers": 1, "dim": 32, "heads": 4, "qkv_tokens": 16, "proj_tokens": 16, "ffn_tokens": 64}
    >>> image = ModelConfig(of="image", image_size=32, patch=8, classes=0, **tower)
    >>> text = ModelConfig(of="text", pool="end", context=8, vocab=128, **tower)
    >>> model = PairModel(ModelConfig(of="pair", embed=16, trunks={"image": image, "text": text}))
    >>> images, texts = model(torch.rand(2, 3, 32, 32), torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([3, 2]))
    >>> images.shape, model.logits(images, texts).shape
    (torch.Size([2, 16]), torch.Size([2, 2]))
    """

    # ways in beside forward; FSDP must know them, and gathers once more what one of them used inside of forward
    entries = ("encode_image", "encode_text")

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = c = config.resolved()
        self.compute_dtype: torch.dtype | None = None  # None: as the parameters
        self.history: list[dict] = []  # the growths that led to this model
        self.active: dict[str, float] = {}  # adapters that count: none, since trunks of a pair have none
        self.images: dict[str, Any] = {}  # how its pixels are made (images.json)
        self.tokenizer_json: str | None = None  # that lay beside the weights
        self.image, self.text = ImageModel(c.trunks["image"], seed), TextTrunk(c.trunks["text"])
        self.image_projection = Linear(self.image.config.dim, c.embed)
        self.text_projection = Linear(self.text.config.dim, c.embed)
        self.scale = nn.Parameter(torch.empty(()))
        self.bias = nn.Parameter(torch.empty(())) if c.loss == "sigmoid" else None
        self.ends: dict[str, Role] = {
            f"{prefix}{name}": role for prefix, trunk in self.trunks().items() for name, role in trunk.ends.items()
        }
        self.ends |= {"image_projection.weight": TABLE, "text_projection.weight": TABLE}
        self.ends |= {"scale": own(SCALE[c.loss]), "bias": own(BIAS)}
        if self.scale.device.type != "meta":
            init_weights(self, c, seed)

    def trunks(self) -> dict[str, Trunk]:
        return {"image.": self.image, "text.": self.text}

    def forward(
        self, pixels: Tensor | None = None, ids: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Any, Any]:
        """Features (B, E) of images and of texts, of length 1; None of what is not given."""
        image_BE = None if pixels is None else unit(self._image_features(pixels))
        return image_BE, None if ids is None else unit(self._text_features(ids, lengths))

    def encode_image(self, pixels: Tensor, normalize: bool = True) -> Tensor:
        """`pixels` (B, C, height, width), normalised → features (B, E); of length 1, if `normalize`."""
        features_BE = self._image_features(pixels)
        return unit(features_BE) if normalize else features_BE

    def encode_text(self, ids: Tensor, lengths: Tensor | None = None, normalize: bool = True) -> Tensor:
        """`ids` (B, T), of which the first `lengths` (B,) of each row are its text (absent: all) → features (B, E)."""
        features_BE = self._text_features(ids, lengths)
        return unit(features_BE) if normalize else features_BE

    def _image_features(self, pixels: Tensor) -> Tensor:
        return self.image_projection(self.image(pixels))

    def _text_features(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        if lengths is None:
            lengths = torch.full((len(ids),), ids.shape[-1], device=ids.device)
        return self.text_projection(self.text(ids, lengths))

    def logits(self, image_AE: Tensor, text_BE: Tensor) -> Tensor:
        """How well images and texts of these features fit (A, B)."""
        scores_AB = self.scale.clamp(max=LARGEST).exp() * image_AE @ text_BE.T
        return scores_AB if self.bias is None else scores_AB + self.bias

    def cost(self) -> Cost:
        """Parameters and FLOPs of this model."""
        return cost(self.config)


def unit(features_BE: Tensor) -> Tensor:
    """The features with length 1, in single precision or better."""
    return F.normalize(features_BE.to(torch.promote_types(features_BE.dtype, torch.float32)), dim=-1)
