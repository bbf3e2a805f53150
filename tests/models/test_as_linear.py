"""Pattention where an nn.Linear stands, and what a model says to callers from Python."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenformer import LanguageModel, ModelConfig, Pattention, UserError

CONFIG = ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=8, proj_tokens=8, ffn_tokens=16, vocab=32)
IDS = torch.arange(12).view(2, 6)


def test_it_is_made_as_a_linear_is():
    layer = Pattention(in_features=16, out_features=32, tokens=8, device="cpu", dtype=torch.float64)
    linear = nn.Linear(in_features=16, out_features=32, device="cpu", dtype=torch.float64)
    assert (layer.in_features, layer.out_features) == (linear.in_features, linear.out_features)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    assert layer(x).shape == linear(x).shape and layer(x).dtype == linear(x).dtype
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    assert Pattention(4, 4, 4, device="meta").segments[0].key_tokens.device.type == "meta"
    assert "in_features=16, out_features=32" in repr(layer)


@pytest.mark.parametrize("tokens", [np.int64(8), np.array([3, 5])[0] + 5, (np.int32(3), 5)])
def test_whole_numbers_of_numpy_are_whole_numbers(tokens):
    layer = Pattention(np.int64(16), np.int32(4), tokens)
    assert sum(len(segment.key_tokens) for segment in layer.segments) == 8
    assert type(layer.in_features) is int and layer(torch.randn(2, 16)).shape == (2, 4)


@pytest.mark.parametrize("sizes", [(0, 4, 4), (4, -1, 4), (4.5, 4, 4), (4, 4, True), (4, 4, np.float64(3))])
def test_what_is_no_size_is_refused(sizes):
    with pytest.raises(ValueError, match="above 0"):
        Pattention(*sizes)


def test_another_width_is_said():
    with pytest.raises(ValueError, match=r"reads \(…, 16\), not \(2, 8\)"):
        Pattention(16, 4, 4)(torch.randn(2, 8))


def test_a_caller_that_reads_the_weight_is_told_what_to_do():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    layer.linear1, layer.linear2 = Pattention(16, 32, tokens=32), Pattention(32, 16, tokens=32)
    x = torch.randn(2, 3, 16)
    expected = layer(x)  # in training it calls its layers
    layer.eval()
    assert not hasattr(layer.linear1, "weight")
    with torch.no_grad(), pytest.raises(AttributeError, match=r"has no weight.*set_fastpath_enabled\(False\)"):
        layer(x)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            torch.testing.assert_close(layer(x), expected)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    heads = nn.MultiheadAttention(16, 2, batch_first=True)
    heads.out_proj = Pattention(16, 16, tokens=8)
    with pytest.raises(AttributeError, match="such as MultiheadAttention, cannot use it"):
        heads(x, x, x)


@pytest.mark.parametrize(
    ("ids", "labels", "sentence"),
    [
        (IDS[0], None, r"shape \(6,\), but must be \(batch, positions\)"),
        (IDS + 21, None, "ids go from 21 to 32, but the vocabulary from 0 to 31"),
        (IDS - 1, None, "ids go from -1 to 10"),
        (IDS.float(), None, r"ids are torch.float32: give whole numbers"),
        (IDS, IDS[:, 1:], r"labels have the shape \(2, 5\), but the input \(2, 6\)"),
    ],
)
def test_wrong_ids_and_shapes_are_said_in_a_sentence(ids, labels, sentence):
    with pytest.raises(UserError, match=sentence):
        LanguageModel(CONFIG)(ids, labels=labels)


def test_an_exported_model_is_saved_and_loaded_elsewhere(tmp_path):
    model = LanguageModel(CONFIG).eval()
    torch.export.save(torch.export.export(model, (IDS,)), tmp_path / "m.pt2")
    code = (
        "import torch, tokenformer.models.language; ids = torch.arange(12).view(2, 6); "
        f"print(torch.export.load({str(tmp_path / 'm.pt2')!r}).module()(ids).logits.double().sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(model(IDS).logits.double().sum().item(), rel=1e-5)


def test_the_callers_choice_of_attention_kernels_is_respected():
    """Only the plain form of attention can be differentiated twice."""
    model = LanguageModel(CONFIG)
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(IDS, labels=IDS).loss_sum
    (gradient,) = torch.autograd.grad(loss, [model.embedding.weight], create_graph=True)
    gradient.square().sum().backward()
    assert model.embedding.weight.grad.abs().sum() > 0
