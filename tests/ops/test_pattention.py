"""The reference of Pattention: against plain formulas, its laws as properties, gradients in float64, compile."""

import math
import shutil
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.ops import pattention as ops
from tokenformer.ops.pattention import pattention, pattention_group

THETAS = ("l2_norm_gelu", "gelu_l2_norm", "softmax", "l1_norm_gelu")


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def plain(x: Tensor, keys: Tensor, values: Tensor, tau: float, theta: str) -> Tensor:
    """One segment, from the table of the paper, without any safety."""
    a = x @ keys.T
    s = {
        "l2_norm_gelu": lambda: gelu(a * tau / a.norm(dim=-1, keepdim=True)),
        "gelu_l2_norm": lambda: gelu(a) * tau / gelu(a).norm(dim=-1, keepdim=True),
        "softmax": lambda: tau**2 * a.exp() / a.exp().sum(-1, keepdim=True),
        "l1_norm_gelu": lambda: gelu(a * tau**2 / a.abs().sum(-1, keepdim=True)),
    }[theta]()
    return s @ values


def make(sizes, d_in=5, d_out=4, dtype=torch.float64, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    return [(normal(n, d_in), normal(n, d_out), math.sqrt(n) * 1.1) for n in sizes]


def rows(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("theta", THETAS)
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    lead=st.lists(st.integers(1, 4), max_size=3),
    d_in=st.integers(1, 20),
    d_out=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_segments_are_separate_pattentions_added(theta, sizes, lead, d_in, d_out, seed):
    segments = make(sizes, d_in, d_out, seed=seed)
    x = rows(*lead, d_in, seed=seed + 1) / math.sqrt(d_in)  # at -7 both sides' 1 + erf has few digits left
    expected = sum(plain(x, k, v, tau, theta).nan_to_num(0) for k, v, tau in segments)  # 0/0: gelu(-40) is zero
    torch.testing.assert_close(pattention(x, segments, theta=theta), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_two_segments_equal_two_layers_to_rounding(theta, dtype, limit, relative):
    segments = make([40, 72], 64, 48, dtype)
    x = rows(3, 7, 64, dtype=dtype)
    apart = pattention(x, segments[:1], theta=theta) + pattention(x, segments[1:], theta=theta)
    assert relative(pattention(x, segments, theta=theta), apart) <= limit


@pytest.mark.parametrize("mask", ["none", "per layer", "per data token"])
@pytest.mark.parametrize("sizes", [[6], [4, 3, 5]])
@pytest.mark.parametrize("theta", THETAS)
def test_gradients_are_those_of_the_formula(theta, sizes, mask):
    segments = make(sizes, grad=True)
    x = rows(2, 3, 5).requires_grad_()
    shape = {"none": None, "per layer": (sum(sizes),), "per data token": (2, 3, sum(sizes))}[mask]
    count = None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7
    tensors = [t for k, v, _ in segments for t in (k, v)]

    def f(x, *flat):
        parts = [(flat[2 * i], flat[2 * i + 1], tau) for i, (_, _, tau) in enumerate(segments)]
        return pattention(x, parts, theta=theta, mask=count)

    assert torch.autograd.gradcheck(f, (x, *tensors))


@pytest.mark.parametrize("theta", THETAS)
def test_a_mask_slices(theta):
    """A masked token counts in no sum, as if its row were not there, and τ stays."""
    segments = make([9, 6])
    x = rows(4, 5)
    keep = torch.rand(4, 15, generator=torch.Generator().manual_seed(2)) < 0.6
    keep[0], keep[1, 9:] = False, False
    masked = pattention(x, segments, theta=theta, mask=keep)
    for row in range(4):
        parts = keep[row].split([9, 6])
        left = [(k[m], v[m], tau) for (k, v, tau), m in zip(segments, parts, strict=True) if m.any()]
        expected = pattention(x[row], left, theta=theta) if left else torch.zeros(4, dtype=x.dtype)
        torch.testing.assert_close(masked[row], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("theta", THETAS)
def test_a_row_without_statistic_gives_zeros_and_zero_gradients(theta):
    segments = make([6, 4], grad=True)
    x = rows(3, 5)
    x[1] = 0
    x.requires_grad_()
    y = pattention(x, segments, theta=theta)
    if theta == "softmax":  # a zero row is τ²/n each
        expected = sum(tau**2 / len(v) * v.sum(0) for _, v, tau in segments)
        torch.testing.assert_close(y[1], expected)
    else:
        assert (y[1] == 0).all()
        (gradient,) = torch.autograd.grad(y[1].sum(), x, retain_graph=True)
        assert (gradient == 0).all()
    y.sum().backward()
    assert all(t.grad.isfinite().all() for k, v, _ in segments for t in (k, v, x))


def test_gelu_first_is_zero_where_every_gelu_underflows():
    """fp32 gelu of very negative scores is −0: the official code gives NaN."""
    keys = torch.full((3, 2), -50.0, requires_grad=True)
    y = pattention(torch.ones(1, 2), [(keys, torch.ones(3, 2), 2.0)], theta="gelu_l2_norm")
    y.sum().backward()
    assert (y == 0).all() and (keys.grad == 0).all()


@pytest.mark.parametrize("theta", THETAS)
def test_a_row_that_is_masked_whole_gives_zeros_and_zero_gradients(theta):
    segments = make([5], grad=True)
    x = rows(2, 5).requires_grad_()
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[0] = False
    y = pattention(x, segments, theta=theta, mask=keep)
    y.sum().backward()
    assert (y[0] == 0).all() and (x.grad[0] == 0).all() and x.grad[1].abs().sum() > 0
    assert segments[0][0].grad.isfinite().all()


def test_softmax_is_safe_for_large_scores():
    x, keys = torch.tensor([[1000.0]]), torch.tensor([[1.0], [-1.0]])
    y = pattention(x, [(keys, torch.eye(2), 3.0)], theta="softmax")
    torch.testing.assert_close(y, torch.tensor([[9.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", THETAS)
def test_statistics_are_taken_in_fp32(theta, dtype, relative):
    """4,096 tokens summed in half precision would be off by far more than the rounding of the inputs (2⁻⁸)."""
    segments = make([4096], 16, 8, dtype)
    x = rows(4, 16, dtype=dtype)
    exact = pattention(x.double(), [(k.double(), v.double(), t) for k, v, t in segments], theta=theta)
    y = pattention(x, segments, theta=theta)
    assert y.dtype == dtype
    assert relative(y.double(), exact) < 0.02


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(1e-6, 1e6), seed=st.integers(0, 50))
def test_l2_norm_gelu_ignores_the_scale_of_keys_and_input(scale, seed):
    (keys, values, tau), x = make([7], seed=seed)[0], rows(2, 5, seed=seed)
    y = pattention(x, [(keys, values, tau)])
    torch.testing.assert_close(pattention(x * scale, [(keys, values, tau)]), y)
    torch.testing.assert_close(pattention(x, [(keys * scale, values, tau)]), y)


@pytest.mark.parametrize("theta", THETAS)
def test_a_group_equals_its_members_and_takes_one_product_for_all_scores(theta):
    members = [make([6, 3], seed=i) for i in range(3)]
    masks = [None, torch.arange(9) % 2 == 0, None]
    x = rows(2, 5)
    with FlopCounterMode(display=False) as counter:
        together = pattention_group(x, members, theta=theta, masks=masks)
    for y, segments, mask in zip(together, members, masks, strict=True):
        torch.testing.assert_close(y, pattention(x, segments, theta=theta, mask=mask))
    products = []
    original = torch.Tensor.__matmul__
    try:
        torch.Tensor.__matmul__ = lambda a, b: products.append(b.shape) or original(a, b)
        pattention_group(x, members, theta=theta)
    finally:
        torch.Tensor.__matmul__ = original
    assert products[0] == (5, 27)  # all keys of q, k and v at once
    assert len(products) == 1 + 6
    assert counter.get_total_flops() == 3 * 2 * 2 * 9 * (5 + 4)


@pytest.mark.parametrize(
    ("theta", "backend"), [*((theta, "aot_eager") for theta in THETAS), ("l2_norm_gelu", "inductor")]
)
def test_compiles_as_one_graph(theta, backend, relative):
    if backend == "inductor" and not shutil.which("g++"):
        backend = "aot_eager"  # inductor needs a C++ compiler on the CPU
    torch._dynamo.reset()
    segments = make([6, 10], dtype=torch.float32, grad=True)
    x = rows(3, 5, dtype=torch.float32).requires_grad_()
    keep = torch.arange(16) % 3 > 0
    compiled = torch.compile(pattention, fullgraph=True, backend=backend)
    y, expected = compiled(x, segments, theta=theta, mask=keep), pattention(x, segments, theta=theta, mask=keep)
    assert relative(y, expected) < 1e-5
    (ours,), (theirs,) = (torch.autograd.grad(t.square().sum(), x) for t in (y, expected))
    assert relative(ours, theirs) < 1e-4


def test_an_unknown_theta_is_refused():
    with pytest.raises(ValueError, match="theta is 'relu'"):
        pattention(rows(1, 5), make([3]), theta="relu")


def test_the_config_and_the_table_know_the_same_thetas():
    assert get_args(get_type_hints(ModelConfig)["theta"]) == tuple(ops.THETAS) == THETAS


def test_kernels_are_refused_for_a_theta_that_they_do_not_know(monkeypatch):
    monkeypatch.setitem(ops.THETAS, "l2_norm_relu", ops.Theta(ops._identity, torch.square, 0.5, torch.relu))
    x_TD, segments = torch.tensor([3.0, -4.0]), [(torch.eye(2), torch.eye(2), 5.0)]
    assert pattention(x_TD, segments, theta="l2_norm_relu").tolist() == [3.0, 0.0]
    with pytest.raises(UserError, match="there are none for l2_norm_relu"):
        pattention(x_TD, segments, theta="l2_norm_relu", choice="triton")
