"""A pair as transformers knows it: a config with our keys, and a model that compares images and texts as CLIP's does.

Unusual: `hub/remote.py` writes a file from this one that needs torch and transformers alone.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.errors import UserError
from tokenformer.hub.hf.image import TokenFormerImageModel
from tokenformer.hub.hf.language import TokenFormerConfig
from tokenformer.models.pair import PairModel, unit

try:
    from transformers import AutoConfig, AutoModel, AutoModelForZeroShotImageClassification
    from transformers.modeling_outputs import BaseModelOutputWithPooling
    from transformers.models.clip.modeling_clip import CLIPOutput
    from transformers.utils import can_return_tuple
except ImportError as error:
    raise UserError(f"transformers 5.17 or newer is needed here ({error}): pip install 'tokenformer[hf]'") from None


class TokenFormerPairConfig(TokenFormerConfig):
    """The keys of a pair's `ModelConfig` under their own names; `trunks` holds those of the two trunks."""

    model_type = "tokenformer_pair"
    attribute_map = {}  # noqa: RUF012 (transformers' own form)

    def __init__(self, **keys: Any) -> None:
        super().__init__(**{**keys, "of": "pair"})


class TokenFormerPairModel(TokenFormerImageModel):
    """`self.model` is the native `PairModel`, its tensors under `model.`.

    A text ends where its attention mask does; its last token must be the end token, which the tokenizer of an exported
    folder appends.
    """

    config_class = TokenFormerPairConfig
    native = PairModel

    @can_return_tuple
    def get_image_features(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """Features of images as `pooler_output`, not made a unit, as CLIP's."""
        return BaseModelOutputWithPooling(pooler_output=cast(Any, self.model.encode_image(pixel_values, False)))

    @can_return_tuple
    def get_text_features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Features of texts as `pooler_output`, not made a unit, as CLIP's."""
        lengths = None if attention_mask is None else attention_mask.sum(1)
        if lengths is None and not torch.compiler.is_compiling() and (input_ids[:, -2:-1] == input_ids[:, -1:]).any():
            raise UserError("texts that are padded have an attention_mask: give it, as the tokenizer returns it")
        if attention_mask is not None and not attention_mask[:, 0].all():
            raise UserError("a text of a pair is padded on its right: set tokenizer.padding_side to 'right'")
        return BaseModelOutputWithPooling(
            pooler_output=cast(Any, self.model.encode_text(input_ids, lengths, normalize=False))
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_loss: bool | None = None,
        **kwargs: Any,
    ) -> CLIPOutput:
        """As CLIP of transformers; with `return_loss`, image i belongs to text i."""
        if input_ids is None or pixel_values is None:
            raise UserError("the model compares images and texts: give pixel_values and input_ids")
        image = unit(self.get_image_features(pixel_values).pooler_output)
        text = unit(self.get_text_features(input_ids, attention_mask).pooler_output)
        logits, loss = self.model.logits(image, text), None
        if return_loss and self.model.bias is None:
            own = torch.arange(len(logits), device=logits.device)
            loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
        elif return_loss:
            sign = 2 * torch.eye(len(logits), device=logits.device) - 1
            loss = -F.logsigmoid(sign * logits).sum() / len(logits)
        found: dict[str, Any] = {"logits_per_image": logits, "logits_per_text": logits.T, "loss": loss}
        return CLIPOutput(**found, image_embeds=cast(Any, image), text_embeds=cast(Any, text))


AutoConfig.register("tokenformer_pair", TokenFormerPairConfig, exist_ok=True)
AutoModel.register(TokenFormerPairConfig, TokenFormerPairModel, exist_ok=True)
AutoModelForZeroShotImageClassification.register(TokenFormerPairConfig, TokenFormerPairModel, exist_ok=True)
