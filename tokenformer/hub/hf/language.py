"""The model as transformers knows it: a config with our keys, and a causal language model around the native one.

Unusual: blocks stay native; `HFCache` gives them transformers' own cache; training with labels makes no logits.
`hub/remote.py` writes a file from this one that needs torch and transformers alone.
"""

import contextlib
import dataclasses
import difflib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.config import ModelConfig, build, to_dict
from tokenformer.config_data import IGNORED
from tokenformer.errors import UserError
from tokenformer.files import MANIFEST
from tokenformer.hub.hf.base import TokenFormerPreTrainedModel
from tokenformer.models.init import initial
from tokenformer.models.language import LanguageModel
from tokenformer.models.layers import outside_vocabulary
from tokenformer.models.trunk import Attention, Block, View

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig
    from transformers.cache_utils import DynamicCache
    from transformers.masking_utils import create_causal_mask
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import can_return_tuple
except ImportError as error:
    raise UserError(f"transformers 5.17 or newer is needed here ({error}): pip install 'tokenformer[hf]'") from None


# keywords that `forward` uses itself, or that tell generation something
OWN = ("output_attentions", "shift_labels", "num_items_in_batch", "return_dict", "cache_position")


class TokenFormerConfig(PreTrainedConfig):
    """The keys of `ModelConfig` under their own names, beside what transformers adds; every τ is written out.

    >>> config = TokenFormerConfig(layers=2, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=[4, 16])
    >>> config.hidden_size, config.tau["ffn"]
    (32, [2.0, 4.0])
    """

    model_type = "tokenformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    has_no_defaults_at_init = True
    attribute_map = {  # noqa: RUF012 (transformers' own form)
        "num_hidden_layers": "layers",
        "hidden_size": "dim",
        "num_attention_heads": "heads",
        "max_position_embeddings": "context",
        "tie_word_embeddings": "tied",
    }

    def __init__(self, **keys: Any) -> None:
        known = self.attribute_map | {"vocab_size": "vocab"}
        keys = {known.get(name, name): value for name, value in keys.items()}
        names = [field.name for field in dataclasses.fields(ModelConfig)]
        own = {name: keys.pop(name) for name in names if keys.get(name) is not None}
        for name in keys.keys() - set(names):  # transformers keeps whatever it is given: a typo would pass in silence
            for close in difflib.get_close_matches(name, names, n=1, cutoff=0.8):
                raise UserError(f"unknown key '{name}' in a TokenFormerConfig: did you mean '{close}'?")
        super().__init__(**{name: value for name, value in keys.items() if name not in names})
        self._take(build(ModelConfig, own).resolved())

    def _take(self, config: ModelConfig) -> None:
        names = [field.name for field in dataclasses.fields(ModelConfig)]
        for name, value in (dict.fromkeys(names) | to_dict(config)).items():
            setattr(self, name, value)

    def follow(self, model: Any) -> None:
        """Take the keys and the growths of a native model that is to be held, and prepare its blocks."""
        for trunk in model.trunks().values():
            for block in trunk.blocks:
                block.__class__ = HFBlock
                if isinstance(model, LanguageModel):
                    block.attention.__class__, block.attention.config = HFAttention, self
        if model.config != self.to_native().resolved():
            self._take(model.config)
            self.history = model.history

    @classmethod
    def from_native(cls, config: ModelConfig, **keys: Any) -> "TokenFormerConfig":
        return cls(**to_dict(config), **keys)

    def to_native(self) -> ModelConfig:
        keys = {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelConfig)}
        return build(ModelConfig, {name: value for name, value in keys.items() if value is not None})

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write it, and remove our manifest beside it, which describes the one before."""
        if Path(json_file_path).name == "config.json":
            Path(json_file_path).with_name(MANIFEST).unlink(missing_ok=True)
        super().to_json_file(json_file_path, use_diff)

    @property
    def vocab_size(self) -> int:
        """How many logits there are; those of ids under a switch are not counted."""
        if self.vocab is None:
            raise AttributeError("a model of images has no vocabulary")
        return self.vocab + (0 if self.added_switch else self.added_vocab or 0)

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.vocab = size

    @property
    def num_key_value_heads(self) -> int:
        return getattr(self, "kv_heads", None) or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class HFBlock(GradientCheckpointingLayer, Block):
    """The native block, recomputed in backward when gradient checkpointing is on."""


class HFAttention(Attention):
    """The native attention; one that is not called sdpa is computed by the function that transformers has by its name.
    The attributes are those that such functions look for.
    """

    config: Any
    is_causal = True

    @property
    def layer_idx(self) -> int:
        return self.layer

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5

    @property
    def num_key_value_groups(self) -> int:
        return self.config.num_attention_heads // self.config.num_key_value_heads

    def mix(self, q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, view: View) -> Tensor:
        name, more = self.config._attn_implementation, dict(view.more or {})
        if name in (None, "sdpa") and "cache" not in more:  # which is the paged one of continuous batching
            return super().mix(q_BHTC, k_BGSC, v_BGSC, view)
        kept, how = more.pop("kept_weights", None), {"scaling": self.scaling, "dropout": 0.0}
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        seen, weights = interface(self, q_BHTC, k_BGSC, v_BGSC, view.mask, **how, **more)
        if kept is not None:
            kept.append(weights)
        batch, heads, positions, _ = q_BHTC.shape  # some engines return (B·T, H·C)
        return seen.reshape(batch, positions, heads, -1).transpose(1, 2)


def eager_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return attention (B, T, H, C) and its weights (B, H, T, S), which the fused functions do not keep."""
    key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is None:
        attention_mask = torch.ones_like(scores, dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class HFCache:
    """Gives transformers' cache the interface of our models' caches."""

    def __init__(self, past: Any) -> None:
        self.past = past

    @property
    def length(self) -> int:
        return self.past.get_seq_length()

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.past.update(k, v, layer)


class TokenFormerLanguageModel(TokenFormerPreTrainedModel):
    """What the two classes for language models share; `self.inner` is the native `LanguageModel`."""

    config_class = TokenFormerConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _no_split_modules = ["HFBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    native = LanguageModel  # what `inner` is made by

    def __init__(self, config: TokenFormerConfig) -> None:
        super().__init__(config)
        made = self.native(config.to_native(), seed=int(torch.randint(2**31, (), device="cpu")))
        made.history = list(getattr(config, "history", None) or [])
        for parameter in made.parameters():
            if not parameter.is_meta:  # the native model has filled itself
                setattr(parameter, "_is_hf_initialized", True)  # noqa: B010
        self._hold(made)
        self.post_init()

    def _hold(self, made: LanguageModel) -> None:
        raise NotImplementedError

    def inputs(
        self,
        ids: Tensor | None,
        embeddings: Tensor | None,
        mask: Tensor | None,
        positions: Tensor | None,
        past: Any,
        use_cache: bool,
        kwargs: dict[str, Any],
    ) -> tuple[dict[str, Any], list[Tensor] | None]:
        """Return what the native model gets, and a list that attention weights will be added to, if they are wanted.

        `output_attentions` needs eager attention: fused ones keep no weights. Keywords that are not known here go to
        the attention function untouched.
        """
        given = embeddings if ids is None else ids
        if given is None or (ids is not None and embeddings is not None):
            raise UserError("the model reads input_ids or inputs_embeds: give one of them")
        more = {name: value for name, value in kwargs.items() if name not in OWN}
        wanted = kwargs.get("output_attentions")
        weights: list[Tensor] | None = [] if (self.config.output_attentions if wanted is None else wanted) else None
        if weights is not None:
            if self.config._attn_implementation != "eager":
                raise UserError(
                    'output_attentions needs attn_implementation "eager", since fused attention keeps no weights: load '
                    "the model so, or leave it out"
                )
            more["kept_weights"] = weights
        recomputed = any(getattr(module, "gradient_checkpointing", False) for module in self.modules())
        if self.training and torch.is_grad_enabled() and recomputed:  # the property of transformers warns since 5.23
            use_cache = False
            if past is not None:  # backward would fill it a second time
                raise UserError("gradient checkpointing cannot fill past_key_values: leave the cache out in training")
        before = past  # with an empty cache of our own, positions that begin anew still mean another document
        if use_cache and past is None:
            past = DynamicCache(config=self.config)
        if positions is None and past is not None:
            positions = torch.arange(given.shape[1], device=given.device) + past.get_seq_length()
        return {
            "ids": ids,
            "embeddings": embeddings,
            "positions": positions,
            "mask": self._mask(given, mask, positions, before),
            "cache": None if past is None else HFCache(past),
            "more": more or None,
        }, weights

    def _mask(self, given: Tensor, mask: Tensor | None, positions: Tensor | None, past: Any) -> Tensor | None:
        """Return what each position sees, or None where that is causal attention (then flash attention is used)."""
        seen: Any = create_causal_mask(
            config=self.config,
            # its shape and type alone are looked at
            inputs_embeds=torch.empty((*given.shape[:2], 0), dtype=self.dtype, device=given.device),
            attention_mask=mask,
            past_key_values=past,
            position_ids=positions if positions is None or positions.ndim == 2 else positions[None],
            # a static cache has keys behind the last query: our None, the last query at the last key, is not its mask
            allow_is_causal_skip=not getattr(past, "is_compileable", False),
        )
        if seen is None or seen.dtype == torch.bool:
            return seen
        return seen.to(self.inner.compute_dtype or self.dtype) if seen.is_floating_point() else seen.bool()

    @contextlib.contextmanager
    def _states(self, wanted: bool | None) -> Iterator[list[Tensor]]:
        """Collect the inputs of all blocks and the output of the final norm, if hidden states are wanted."""
        states: list[Tensor] = []
        hooks = []
        if self.config.output_hidden_states if wanted is None else wanted:
            hooks = [b.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])) for b in self.inner.blocks]
            hooks.append(self.inner.norm.register_forward_hook(lambda _, __, output: states.append(output)))
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what a folder did not hold, as the native model would."""
        names = {id(parameter): name for name, parameter in self.inner.named_parameters()}
        for parameter in module.parameters(recurse=False):
            if not getattr(parameter, "_is_hf_initialized", False):
                seed, name = int(torch.randint(2**31, (), device="cpu")), names.get(id(parameter), "embedding.weight")
                parameter.copy_(initial(name, tuple(parameter.shape), self.inner.config, seed, self.inner.ends))

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        before, how = self.inner.config, getattr(self, "generation_config", None)
        if before.added_vocab:
            do = 'save it by tokenformer.save(…, format="hf"), which makes one table, and load that'
            raise UserError(f"a growth added ids to this vocabulary, which would get other numbers: {do}")
        embedding = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        self.inner.config = dataclasses.replace(before, vocab=embedding.num_embeddings)
        if new_num_tokens is not None and how is not None and how.suppress_tokens:  # no id of the tokenizer is padding
            never, first = set(how.suppress_tokens), before.vocab
            while first - 1 in never:
                first -= 1
            kept = [id for id in sorted(never) if id < first]
            how.suppress_tokens = [*kept, *range(new_num_tokens, embedding.num_embeddings)] or None
        return embedding


class TokenFormerModel(TokenFormerLanguageModel):
    """A language model without its output head: `last_hidden_state` is what the head would read.

    Its tensors have the native model's names, so that engines which bring a head of their own (vLLM, SGLang) find those
    of a whole model under `model.`.
    """

    @property
    def inner(self) -> Any:
        return self._inner

    def _hold(self, made: LanguageModel) -> None:
        made.head = None
        self.config.follow(made)
        self.__dict__["_inner"] = made  # not registered: its parts are
        for name, part in made.named_children():
            self.add_module(name, part)

    def __setattr__(self, name: str, value: Any) -> None:
        """A part that is replaced, such as the embedding, is replaced in the native model, too."""
        super().__setattr__(name, value)
        if name in self._modules:
            setattr(self.inner, name, value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Take what `TokenFormerForCausalLM` takes, but labels."""
        if kwargs.get("labels") is not None:
            raise UserError("a TokenFormerModel has no loss: use TokenFormerForCausalLM, or leave labels out")
        caches = not self.training if use_cache is None else use_cache
        inputs, weights = self.inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, caches, kwargs
        )
        with self._states(output_hidden_states) as states:
            hidden = self.inner.hidden(**inputs)
        found: dict[str, Any] = {"hidden_states": tuple(states) or None}
        found["attentions"] = None if weights is None else tuple(weights)
        past = inputs["cache"] and inputs["cache"].past
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past, **found)


class TokenFormerForCausalLM(TokenFormerLanguageModel, GenerationMixin):
    """`self.model` is the native `LanguageModel`, its tensors under `model.`; a tied head has no tensor of its own."""

    model: LanguageModel
    # Trainer's label smoothing shifts the labels of classes that are named there, and of no others
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["tokenformer"] = "TokenFormerForCausalLM"

    def _hold(self, made: LanguageModel) -> None:
        self.model = made

    @classmethod
    def from_native(cls, model: LanguageModel, **keys: Any) -> "TokenFormerForCausalLM":
        """Wrap a native model, whose tensors are shared and not copied."""
        with torch.device("meta"):
            wrapped = cls(TokenFormerConfig.from_native(model.config, history=model.history, **keys))
        wrapped.model = model
        return wrapped.train(model.training)

    def __setattr__(self, name: str, value: Any) -> None:
        """Another model, such as the one that `tokenformer.grow(self.model, …)` returns, brings its config with it."""
        if name == "model" and isinstance(value, LanguageModel):
            self.config.follow(value)
        super().__setattr__(name, value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits and loss as every causal model of transformers: `labels` are not shifted, and
        `num_items_in_batch` divides the loss. With labels and `skip_logits` (the default in training) no logits are
        made, the loss is computed in chunks.
        """
        targets = kwargs.get("shift_labels")
        if targets is None and labels is not None:
            targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        caches = targets is None and not self.training if use_cache is None else use_cache
        inputs, weights = self.inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, caches, kwargs
        )
        skip_logits = targets is not None and (self.training if skip_logits is None else skip_logits)
        logits, loss, count = cast(Any, (None, None, None))
        with self._states(output_hidden_states) as states:
            if skip_logits:
                _, loss, count = self.model(labels=targets, **inputs)
            else:
                hidden = self.model.hidden(**inputs)
                if targets is None:
                    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
                    hidden = hidden[:, kept]
                logits = self.model.logits(hidden, self.model.added_rows(None, hidden))
        if targets is not None:
            if loss is None:
                exact = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
                try:
                    loss, count = F.cross_entropy(exact, targets.flatten(), reduction="sum"), (targets != IGNORED).sum()
                except IndexError:
                    raise outside_vocabulary("labels", targets, self.model.config.vocab) from None
            items = kwargs.get("num_items_in_batch")
            loss = loss / (count.clamp(min=1) if items is None else torch.as_tensor(items, device=loss.device))
        seen: Any = tuple(states) or None
        looked: Any = None if weights is None else tuple(weights)
        past = inputs["cache"] and inputs["cache"].past
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past, hidden_states=seen, attentions=looked
        )

    def get_output_embeddings(self) -> nn.Module:
        """Return the module that holds the head's weight: of a tied head, the embedding."""
        return self.model.embedding if self.model.head is None else self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.model.head = None if new_embeddings is self.model.embedding else new_embeddings

    def generate(self, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        ids, how = kwargs.get("input_ids", inputs), generation_config or self.generation_config
        never = getattr(how, "suppress_tokens", None)
        if isinstance(ids, Tensor) and never and (found := torch.isin(ids, ids.new_tensor(never))).any():
            do = "if its token was added, call resize_token_embeddings(len(tokenizer))"
            warnings.warn(f"the prompt holds the id {ids[found][0]}, which is never chosen: {do}", stacklevel=2)
        return cast(Any, super()).generate(inputs, generation_config, *args, **kwargs)


AutoConfig.register("tokenformer", TokenFormerConfig, exist_ok=True)
AutoModel.register(TokenFormerConfig, TokenFormerModel, exist_ok=True)
AutoModelForCausalLM.register(TokenFormerConfig, TokenFormerForCausalLM, exist_ok=True)
