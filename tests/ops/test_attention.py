"""Attention between data tokens, rotary positions, and the loss: against plain formulas and the official tensors."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tokenformer.ops.attention import attention
from tokenformer.ops.cross_entropy import linear_cross_entropy
from tokenformer.ops.rotary import angles, rotate


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(q, k, v, seen):
    """Softmax attention with an explicit mask; grouped heads by repetition."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    score = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return score.masked_fill(~seen, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("length", "keys"), [(7, 7), (1, 9), (3, 9)])
def test_is_causal_with_the_last_query_at_the_last_key(length, keys, kv_heads):
    q, k, v = normal(2, 4, length, 8), normal(2, kv_heads, keys, 8, seed=1), normal(2, kv_heads, keys, 8, seed=2)
    seen = torch.arange(keys)[None] <= torch.arange(length)[:, None] + keys - length
    torch.testing.assert_close(attention(q, k, v), plain(q, k, v, seen))


def test_documents_do_not_see_each_other():
    q, k, v = (normal(2, 4, 6, 8, seed=i) for i in range(3))
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 6, 6]])
    seen = (documents[:, None, :, None] == documents[:, None, None, :]) & torch.ones(6, 6).tril().bool()
    torch.testing.assert_close(attention(q, k, v, documents_BT=documents), plain(q, k, v, seen))
    alone = attention(*(t[:1, :, 2:5] for t in (q, k, v)))
    torch.testing.assert_close(attention(q, k, v, documents_BT=documents)[:1, :, 2:5], alone)


def test_a_mask_replaces_the_causal_one():
    q, k, v = normal(2, 4, 3, 8), normal(2, 4, 5, 8, seed=1), normal(2, 4, 5, 8, seed=2)
    mask = torch.rand(2, 1, 3, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[..., 0] = True
    torch.testing.assert_close(attention(q, k, v, mask=mask), plain(q, k, v, mask))


def test_rotary_equals_the_official_tensors(golden_folder):
    tensors = load_file(golden_folder / "rotary.safetensors")
    cases = sorted({name.rsplit(".", 1)[0] for name in tensors if name.startswith("b")})
    assert len(cases) > 3
    for case in cases:
        batch, length, offset = (int(part.lstrip("bsof")) for part in case.split("_"))
        cos, sin = angles(torch.arange(offset, offset + length), dims=8, base=10000.0)
        for name in ("q", "k"):
            x = tensors[f"{case}.{name}"].transpose(0, 1)  # official: position first
            assert x.shape[:3] == (batch, length, 2)
            expected = tensors[f"{case}.{name}_out"].transpose(0, 1)
            torch.testing.assert_close(rotate(x, cos, sin), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 3])
def test_rotary_depends_on_the_position_and_on_nothing_else(batch):
    """Fails if positions are ignored, or taken from the batch axis."""
    x = normal(1, 1, 2, 8).expand(batch, 5, 2, 8)
    rotated = rotate(x, *angles(torch.arange(5), 8, 10000.0, x.dtype))
    for position in range(1, 5):
        assert not torch.allclose(rotated[:, position], rotated[:, 0])
    assert all(torch.equal(rotated[b], rotated[0]) for b in range(batch))
    positions = torch.arange(5).expand(batch, 5) + torch.arange(batch)[:, None]
    apart = rotate(x, *angles(positions, 8, 10000.0, x.dtype))
    for b in range(batch):
        torch.testing.assert_close(apart[b], rotate(x[b : b + 1], *angles(positions[b], 8, 10000.0, x.dtype))[0])


def test_angles_of_half_precision_are_taken_in_fp32():
    """8 bits cannot tell position 256 from 257."""
    for dtype in (torch.bfloat16, torch.float16):
        ours, exact = angles(torch.arange(600), 8, 1e4, dtype), angles(torch.arange(600), 8, 1e4, torch.float64)
        for one, other in zip(ours, exact, strict=True):
            assert one.dtype == torch.float32 and (one.double() - other).abs().max() < 1e-4


def test_attention_scores_depend_on_the_distance_alone():
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def turn(x, position):
        return rotate(x, *angles(torch.tensor([position]), 6, 100.0, x.dtype))

    def score(i, j):
        return (turn(q, i) * turn(k, j)).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert not torch.isclose(score(9, 4), score(9, 5))


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_cross_entropy_in_chunks_equals_the_whole(chunk):
    hidden, weight = normal(2, 5, 8).requires_grad_(), normal(16, 8, seed=1).requires_grad_()
    labels = torch.tensor([[1, -100, 3, 15, 0], [7, 7, -100, -100, 2]])
    total, count = linear_cross_entropy(hidden, weight, labels, chunk)
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    assert count == 7
    torch.testing.assert_close(total, expected)
    for ours, theirs in zip(*(torch.autograd.grad(t, (hidden, weight)) for t in (total, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_cross_entropy_of_half_precision_is_taken_in_fp32():
    hidden, weight = normal(3, 8).bfloat16(), normal(16, 8, seed=1).bfloat16()
    total, _ = linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3]))
    assert total.dtype == torch.float32
    expected = F.cross_entropy((hidden @ weight.T).float(), torch.tensor([1, 2, 3]), reduction="sum")
    torch.testing.assert_close(total, expected)
