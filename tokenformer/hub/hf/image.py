"""The image model as transformers knows it: a config with our keys, and a classifier that holds the native model.

Unusual: `hub/remote.py` writes a file from this one that needs torch and transformers alone.
"""

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.errors import UserError
from tokenformer.files import write_text
from tokenformer.hub.hf.language import TokenFormerConfig
from tokenformer.hub.remote import FILE, IMAGE_MAP, modeling_source
from tokenformer.models.image import ImageModel
from tokenformer.models.init import initial

try:
    from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedModel
    from transformers.modeling_outputs import ImageClassifierOutput
    from transformers.utils import can_return_tuple
except ImportError as error:
    raise UserError(f"transformers 5.17 or newer is needed here ({error}): pip install 'tokenformer[hf]'") from None


class TokenFormerImageConfig(TokenFormerConfig):
    """The keys of an image model's `ModelConfig` under their own names; `id2label` names the classes."""

    model_type = "tokenformer_image"
    attribute_map = {  # noqa: RUF012 (transformers' own form)
        "num_hidden_layers": "layers",
        "hidden_size": "dim",
        "num_attention_heads": "heads",
        "patch_size": "patch",
        "num_channels": "channels",
    }

    def __init__(self, **keys: Any) -> None:
        super().__init__(**{**keys, "of": "image"})


class TokenFormerForImageClassification(PreTrainedModel):
    """`self.model` is the native `ImageModel`, its tensors under `model.`."""

    config_class = TokenFormerImageConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["HFBlock"]  # noqa: RUF012

    def __init__(self, config: TokenFormerImageConfig) -> None:
        super().__init__(config)
        self.model = ImageModel(config.to_native(), seed=int(torch.randint(2**31, (), device="cpu")))
        for parameter in self.parameters():
            if not parameter.is_meta:  # the native model has filled itself
                setattr(parameter, "_is_hf_initialized", True)  # noqa: B010
        self.post_init()

    def __setattr__(self, name: str, value: Any) -> None:
        """Another model, such as the one that `tokenformer.grow(self.model, …)` returns, brings its config with it."""
        if name == "model" and isinstance(value, ImageModel):
            self.config.follow(value)
        super().__setattr__(name, value)

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """As every image classifier of transformers; `labels` (B,) are numbers of classes."""
        if pixel_values is None:
            raise UserError("the model reads pixel_values: give them")
        logits = self.model(pixel_values)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = None if labels is None else F.cross_entropy(wide, labels)
        return ImageClassifierOutput(loss=cast(Any, loss), logits=logits)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fills what a folder did not hold, as the native model would."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter in module.parameters(recurse=False):
            if not getattr(parameter, "_is_hf_initialized", False):
                seed, name = int(torch.randint(2**31, (), device="cpu")), names[id(parameter)]
                parameter.copy_(initial(name, tuple(parameter.shape), self.model.config, seed, self.model.ends))

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """With the modelling file beside the weights, so that the folder loads where our package is not."""
        if is_main_process:
            write_text(Path(save_directory) / FILE, modeling_source("image"))
        self.config.auto_map = IMAGE_MAP
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)


AutoConfig.register("tokenformer_image", TokenFormerImageConfig, exist_ok=True)
AutoModelForImageClassification.register(TokenFormerImageConfig, TokenFormerForImageClassification, exist_ok=True)
