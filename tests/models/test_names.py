"""A name says what a parameter is, for every kind of model; what nobody declared is refused."""

import subprocess
import sys

import pytest

from tokenformer.config import ModelConfig
from tokenformer.models import build
from tokenformer.models.names import TABLE, own, parse

TOKENS = {"qkv_tokens": 8, "proj_tokens": [8, 4], "ffn_tokens": 16}
KINDS = {"tokenformer": TOKENS, "transformer": {}, "llama": {"kv_heads": 2}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_of_every_kind_has_a_role_and_its_name_again(kind, tied):
    model = build(ModelConfig(layers=2, dim=32, heads=4, vocab=64, tied=tied, kind=kind, **KINDS[kind]))
    for text, parameter in model.named_parameters():
        name = parse(text, model.ends)
        assert name.text == text
        assert name.role.matrix == (parameter.ndim == 2 and text.startswith("blocks."))
        assert name.role.decays == (parameter.ndim == 2)
        assert parse(f"image.{text}", {f"image.{end}": role for end, role in model.ends.items()}).role == name.role
        if text.startswith("blocks."):
            assert parse(f"image.{text}", {}).trunk == "image."


@pytest.mark.parametrize(
    "name", ["norm.weight", "blocks.0.gate.weight", "blocks.x.ffn.up.weight", "blocks.0.ffn.tokens", ""]
)
def test_an_unknown_name_is_an_error(name):
    with pytest.raises(ValueError, match="nor among the ends"):
        parse(name, {"embedding.weight": TABLE})


def test_an_end_of_its_own_begins_where_it_says():
    from tokenformer.models.init import initial

    config = ModelConfig(of="two", trunks={"image": ModelConfig(layers=8, dim=16, heads=2, **TOKENS)})
    assert initial("scale", (2,), config, 0, {"scale": own(2.5)}).tolist() == [2.5, 2.5]
    values = initial("image.blocks.0.ffn.segments.0.value_tokens", (4096, 16), config, 0, {})
    assert values.std().item() == pytest.approx(2 / (8 * 16**0.5), rel=0.02)


def test_names_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import tokenformer.models.names"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
