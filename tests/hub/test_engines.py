"""What engines that run transformers' classes ask of them (vLLM's and SGLang's Transformers backends, in their written
requirements), tried on a stand-in that does the same steps: neither engine runs here.
"""

import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tokenformer
from tests.hub.hf_models import CONFIGS, IDS, lively
from tokenformer import UserError

pytest.importorskip("transformers", minversion="5.17")

from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM

from tokenformer.hub.hf import TokenFormerForCausalLM


class Attention(nn.Module):
    """One layer's attention of an engine: rows of several requests behind each other, and no mask from outside."""

    def __init__(self, heads: int, kv_heads: int, lengths: list[int]) -> None:
        super().__init__()
        self.counts, self.lengths, self.scale = (heads, kv_heads, kv_heads), lengths, 0.0

    def forward(self, query, key, value):
        q, k, v = (x.unflatten(-1, (n, -1)) for x, n in zip((query, key, value), self.counts, strict=True))
        k, v = (x.repeat_interleave(self.counts[0] // self.counts[1], 1) for x in (k, v))
        parts = zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True)
        found = [
            nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in part), is_causal=True, scale=self.scale
            ).transpose(0, 1)
            for part in parts
        ]
        return torch.cat(found).flatten(1)


def engine_attention(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **_):
    assert attention_mask is None and attention_instances is not None
    mine = attention_instances[module.layer_idx]
    mine.scale = scaling
    rows = query.shape[2]
    return mine(*(x.transpose(1, 2).reshape(rows, -1) for x in (query, key, value))), None


AttentionInterface.register("of_an_engine", engine_attention)


class Embedding(nn.Module):
    """The table that an engine puts in the place of the model's."""

    def __init__(self, like: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(like.weight.shape))

    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight)


class Engine(nn.Module):
    """The steps of such a backend: an empty base model from a config, layers replaced, tensors by their names."""

    def __init__(self, folder, lengths: list[int], compiled: bool) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        assert "AutoModel" in config.auto_map
        config._attn_implementation = "of_an_engine"
        with torch.device("meta"):
            self.model = AutoModel.from_config(config, dtype=torch.float32)
        assert type(self.model).is_backend_compatible() and self.model.get_decoder() is self.model
        self.model.set_input_embeddings(Embedding(self.model.get_input_embeddings()))
        text, heads = config.get_text_config(), config.num_attention_heads
        self.instances = {i: Attention(heads, text.num_key_value_heads, lengths) for i in range(text.num_hidden_layers)}
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    setattr(module, name, nn.Parameter(torch.empty(parameter.shape)))
        children = "|".join(name for name, _ in self.model.named_children())
        own, left = dict(self.named_parameters()), []
        for name, tensor in load_file(folder / "model.safetensors").items():
            name = re.sub(rf"^(?!model\.)(({children}).*)", r"model.\1", name)
            name = re.sub(rf"^(model\.)((?!{children}).+)", r"\2", name)
            if name in own:
                own.pop(name).data.copy_(tensor)
            else:
                left.append(name)
        assert not own, f"nothing was loaded into {list(own)}"
        self.left = left
        self.run = torch.compile(self.model, fullgraph=True, backend="eager") if compiled else self.model

    def forward(self, ids, positions):
        words = {"use_cache": False, "attention_instances": self.instances, "return_dict": False}
        return self.run(input_ids=ids[None], inputs_embeds=None, position_ids=positions[None], **words)[0][0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_engine_of_other_people_gets_the_hidden_states_of_each_request(kind, tmp_path):
    model = lively(CONFIGS[kind])
    TokenFormerForCausalLM.from_native(model).save_pretrained(tmp_path)
    lengths = [7, 3, 10]
    engine = Engine(tmp_path, lengths, compiled=kind == "one")
    assert engine.left == ([] if model.head is None else ["head.weight"])  # such engines read a head by another name
    requests = [IDS[i, :n] for i, n in enumerate(lengths)]
    with torch.no_grad():
        found = engine(torch.cat(requests), torch.cat([torch.arange(n) for n in lengths])).split(lengths)
        for part, ids in zip(found, requests, strict=True):
            torch.testing.assert_close(part, model.hidden(ids[None])[0], atol=2e-5, rtol=2e-5)
            if model.head is None:
                logits = part @ engine.model.get_input_embeddings().weight.T
                torch.testing.assert_close(logits, model(ids[None]).logits[0], atol=2e-4, rtol=2e-5)


def test_a_smaller_model_may_propose_what_a_larger_one_checks(tmp_path):
    """transformers' assisted generation: the text is that of the larger model alone."""
    model = lively(CONFIGS["one"])
    grown = tokenformer.grow(model, ffn_tokens=96)
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            if "segments.1.value" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(5))
    large, small = TokenFormerForCausalLM.from_native(grown), TokenFormerForCausalLM.from_native(model)
    words = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    alone = large.generate(IDS[:1], **words).tolist()
    assert large.generate(IDS[:1], assistant_model=small, **words).tolist() == alone
    assert alone != small.generate(IDS[:1], **words).tolist()


@pytest.mark.parametrize("word", ["quantization_config", "load_in_8bit"])
def test_quantisation_of_linear_layers_is_refused(word, tmp_path):
    TokenFormerForCausalLM.from_native(lively(CONFIGS["one"])).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{word} is given, but such methods replace Linear layers"):
        AutoModelForCausalLM.from_pretrained(tmp_path, **{word: {"quant_method": "bitsandbytes"}})


def test_the_base_model_is_saved_and_its_embedding_replaced(tmp_path):
    model = lively(CONFIGS["llama"])
    TokenFormerForCausalLM.from_native(model).save_pretrained(tmp_path / "whole")
    base = AutoModel.from_pretrained(tmp_path / "whole")
    assert "embedding.weight" in base.state_dict() and not any("head" in name for name in base.state_dict())
    base.save_pretrained(tmp_path / "base")
    again = AutoModel.from_pretrained(tmp_path / "base")
    again.resize_token_embeddings(300)
    with torch.no_grad():
        assert torch.equal(again(IDS).last_hidden_state, model.hidden(IDS))
        assert again(torch.full((1, 2), 299)).last_hidden_state.isfinite().all()
