"""The image model as transformers knows it: a config with our keys, and a classifier that holds the native model.

Unusual: `hub/remote.py` writes a file from this one that needs torch and transformers alone.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.errors import UserError
from tokenformer.hub.hf.base import TokenFormerPreTrainedModel
from tokenformer.hub.hf.language import TokenFormerConfig
from tokenformer.models.image import ImageModel
from tokenformer.models.init import initial

try:
    from transformers import AutoConfig, AutoModelForImageClassification
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

    def __setattr__(self, key: str, value: Any) -> None:
        """Keep `classes` and `id2label`, which `num_labels` of transformers sets, equally many."""
        super().__setattr__(key, value)
        names, classes = getattr(self, "id2label", None), getattr(self, "classes", None)
        if names is None or classes in (None, len(names)):
            return
        if key == "id2label":
            self.classes = len(value)
        elif key == "classes":
            self.id2label = {i: f"LABEL_{i}" for i in range(value)}
            self.label2id = {label: i for i, label in self.id2label.items()}


class TokenFormerImageModel(TokenFormerPreTrainedModel):
    """A model that looks at images: `self.model` is the native one, its tensors under `model.`."""

    base_model_prefix = "model"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # the loss is a mean: Trainer divides it by the micro-batches of a step
    _supports_sdpa = True
    _no_split_modules = ["HFBlock"]  # noqa: RUF012
    native: Any  # what `model` is made by

    def __init__(self, config: TokenFormerConfig) -> None:
        super().__init__(config)
        self.model = self.native(config.to_native(), seed=int(torch.randint(2**31, (), device="cpu")))
        for parameter in self.parameters():
            if not parameter.is_meta:  # the native model has filled itself
                setattr(parameter, "_is_hf_initialized", True)  # noqa: B010
        self.post_init()

    def __setattr__(self, name: str, value: Any) -> None:
        """Another model, such as the one that `tokenformer.grow(self.model, …)` returns, brings its config with it."""
        if name == "model" and isinstance(value, self.native):
            self.config.follow(value)
        super().__setattr__(name, value)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fills what a folder did not hold, as the native model would."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter in module.parameters(recurse=False):
            if not getattr(parameter, "_is_hf_initialized", False):
                seed, name = int(torch.randint(2**31, (), device="cpu")), names[id(parameter)]
                parameter.copy_(initial(name, tuple(parameter.shape), self.model.config, seed, self.model.ends))


class TokenFormerForImageClassification(TokenFormerImageModel):
    """`self.model` is the native `ImageModel`."""

    config_class = TokenFormerImageConfig
    native = ImageModel

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """As every image classifier of transformers; `labels` (B,) are numbers of classes, or (B, classes) shares of
        them that add up to 1.
        """
        if pixel_values is None:
            raise UserError("the model reads pixel_values: give them")
        if self.config.problem_type not in (None, "single_label_classification"):
            raise UserError(f"problem_type is {self.config.problem_type}, but an image has one class: leave it out")
        shares = labels is not None and labels.is_floating_point()
        if shares and not torch.allclose(labels.sum(-1), labels.new_ones(()), atol=1e-2):
            raise UserError("labels are shares of classes, but do not add up to 1: give numbers of classes, or shares")
        logits = self.model(pixel_values)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = None
        if labels is not None:
            try:
                loss = F.cross_entropy(wide, labels)
            except IndexError:
                most = f"labels go from {labels.min()} to {labels.max()}, but the classes from 0 to {wide.shape[1] - 1}"
                raise UserError(f"{most}: give the numbers of the model's classes") from None
        return ImageClassifierOutput(loss=cast(Any, loss), logits=logits)


AutoConfig.register("tokenformer_image", TokenFormerImageConfig, exist_ok=True)
AutoModelForImageClassification.register(TokenFormerImageConfig, TokenFormerForImageClassification, exist_ok=True)
