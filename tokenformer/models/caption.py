"""A language model that reads images: an image trunk, a projection, and the language model, which sees the image's
positions before its text.

Unusual: segments of the language model with `switch: image` count only in samples that have an image, so that a text
alone is computed as if there were no images in the world. It may draw, too: by ids and segments with `switch: draw`, as
a language model without an image trunk does (draw.py). Positions of an image see each other; a text sees its image
and what comes before. Legend: B batch, P positions of an image, T of a text, S = P + T, D dim of the language model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.config_data import IGNORED
from tokenformer.errors import UserError
from tokenformer.models.cost import Cost, cost
from tokenformer.models.image import ImageModel
from tokenformer.models.init import init_weights
from tokenformer.models.language import LanguageModel, Output
from tokenformer.models.layers import Linear
from tokenformer.models.names import TABLE, Role
from tokenformer.models.trunk import Cache, Trunk
from tokenformer.ops.palette import Codes

SWITCH = "image"  # of the segments that count where there is an image


def shifted(ids_BT: Tensor, lengths_B: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """What a language model reads and predicts of texts that end with `end` (`encode_captions`): they begin so too.

    >>> [part.tolist() for part in shifted(torch.tensor([[7, 8, 0, 0]]), torch.tensor([3]), 0)]
    [[[0, 7, 8, 0]], [[7, 8, 0, -100]]]
    """
    there_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device) < lengths_B[:, None]
    return F.pad(ids_BT, (1, -1), value=end), ids_BT.masked_fill(~there_BT, IGNORED)


class CaptionModel(nn.Module):
    """
    >>> tokens = {"layers": 1, "dim": 32, "heads": 4, "qkv_tokens": 16, "proj_tokens": 16}
    >>> image = ModelConfig(of="image", image_size=32, patch=8, classes=0, ffn_tokens=64, **tokens)
    >>> text = ModelConfig(context=32, vocab=128, ffn_tokens=[64, 32], switch={"ffn": ["", "image"]}, **tokens)
    >>> model = CaptionModel(ModelConfig(of="caption", trunks={"image": image, "text": text}))
    >>> model(torch.tensor([[1, 2, 3]]), torch.rand(1, 3, 32, 32)).logits.shape
    torch.Size([1, 3, 128])
    """

    # ways in beside forward; FSDP must know them, and gathers once more what one of them used inside of another
    entries = ("encode_image", "generate", "likelihoods")

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = c = config.resolved()
        self.compute_dtype: torch.dtype | None = None  # None: as the parameters
        self.history: list[dict] = []  # the growths that led to this model
        self.active: dict[str, float] = {}  # adapters that count: none, since trunks of several have none
        self.images: dict[str, Any] = {}  # how its pixels are made (images.json)
        self.tokenizer_json: str | None = None  # that lay beside the weights
        self.image, self.text = ImageModel(c.trunks["image"], seed), LanguageModel(c.trunks["text"], seed)
        self.projection = Linear(self.image.config.dim, self.text.config.dim)
        self.ends: dict[str, Role] = {
            f"{prefix}{name}": role for prefix, trunk in self.trunks().items() for name, role in trunk.ends.items()
        }
        self.ends |= {"projection.weight": TABLE}
        if self.projection.weight.device.type != "meta":
            init_weights(self, c, seed)

    def trunks(self) -> dict[str, Trunk]:
        return {"image.": self.image, "text.": self.text}

    def forward(
        self,
        ids: Tensor,
        pixels: Tensor | None = None,
        there: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        switches: dict[str, Tensor] | None = None,
    ) -> Output:
        """`ids` and `labels` (B, T) as those of a language model. `pixels` (B, C, height, width), normalised; `there`
        (B,) says which samples have an image, absent: all. Without any image this is the language model itself, and
        `switches` are its own, such as that of drawing.
        """
        if pixels is None or (there is not None and not there.any()):
            return self.text(ids, labels=labels, switches=switches)
        if switches is not None:
            raise UserError("switches are given together with an image, which has its own: give one of them")
        image_BPD = self._read(pixels)
        switches = self.switches(len(ids), there)
        text_BTD = self.text.look_up(ids, switches).to(image_BPD.dtype)
        length, own = image_BPD.shape[1], torch.arange(image_BPD.shape[1] + ids.shape[1], device=ids.device)
        seen = (own <= own[:, None]) | (own < length)  # (S, S): the image, and what comes before
        if there is None:
            mask, positions = seen[None, None], own
        else:  # where there is no image, a text sees none, and begins at position 0
            mask = (seen & (there[:, None, None] | (own >= length) | (own[:, None] < length)))[:, None]
            positions = torch.where(there[:, None] | (own < length), own, own - length)
        how: dict[str, Any] = {"positions": positions, "mask": mask, "switches": switches}
        hidden_BTD = self.text.hidden(embeddings=torch.cat([image_BPD, text_BTD], 1), **how)[:, length:]
        added_WD = self.text.added_rows(switches, hidden_BTD)
        if labels is None:
            return Output(logits=self.text.logits(hidden_BTD, added_WD))
        return Output(None, *self.text.loss(hidden_BTD, labels, added_WD))

    def encode_image(self, pixels: Tensor) -> Tensor:
        """What the language model reads of images: (B, P, D) in place of embeddings."""
        return self._read(pixels)

    def _read(self, pixels: Tensor) -> Tensor:
        return self.projection(self.image.forward_features(pixels))

    def switches(self, batch: int, there: Tensor | None = None) -> dict[str, Tensor] | None:
        """The switches of samples of which some have an image; None if the language model has none for images."""
        if SWITCH not in self.text.config.switch_names():
            return None
        like = self.projection.weight
        on = {name: like.new_full((batch,), weight) for name, weight in self.text.active.items()}
        return {**on, SWITCH: like.new_ones(batch) if there is None else there.to(like.dtype)}

    @property
    def codes(self) -> Codes | None:
        """The colours that it draws with, if it does."""
        return self.text.codes

    @codes.setter
    def codes(self, codes: Codes | None) -> None:
        self.text.codes = codes

    def prefill(self, pixels: Tensor) -> dict[str, Any]:
        """Read images: what the language model is given with each text about them (a cache, and switches)."""
        image_BPD = self._read(pixels)
        if image_BPD.shape[1] >= self.text.config.context:
            raise UserError(
                f"an image has {image_BPD.shape[1]} positions, but the context is {self.text.config.context}: give "
                "smaller images"
            )
        fields = {"cache": Cache(), "switches": self.switches(len(pixels))}
        self.text.hidden(embeddings=image_BPD, causal=False, **fields)
        return fields

    @torch.no_grad()
    def generate(
        self, pixels: Tensor | None, ids: Tensor, n: int, temperature: float = 0.0, seed: int = 0, **fields: Any
    ) -> Tensor:
        """`ids` (B, T), texts about images (None: about none) → (B, T + n); see `LanguageModel.generate`."""
        fields |= {} if pixels is None else self.prefill(pixels)
        return self.text.generate(ids, n, temperature, seed, **fields)

    @torch.no_grad()
    def likelihoods(self, pixels: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """Σ log p of each of N texts (N, T) about each of B images: (B, N). An image is read once."""
        found = []
        for row in range(len(pixels)):
            fields = self.prefill(pixels[row : row + 1])
            held: dict[int, tuple[Tensor, Tensor]] = fields["cache"].layers
            fields["cache"].layers = {i: tuple(t.expand(len(ids), -1, -1, -1) for t in kv) for i, kv in held.items()}
            logits_NTW = self.text(ids, **{**fields, "switches": self.switches(len(ids))}).logits
            wide = logits_NTW.to(torch.promote_types(logits_NTW.dtype, torch.float32))
            found.append(-F.cross_entropy(wide.mT, labels, reduction="none").sum(1))
        return torch.stack(found)

    def cost(self) -> Cost:
        """Parameters and FLOPs of this model."""
        return cost(self.config)
