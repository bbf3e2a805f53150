"""How far the training kernels are from the reference, output and all gradients. Run as a program it prints one JSON
object: in Triton's interpreter (TRITON_INTERPRET=1 before it starts; fp32 and fp16, it is wrong for bf16) or, with the
argument `cuda`, on a GPU.
"""

import json
import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tokenformer.config import ModelConfig
from tokenformer.models import LanguageModel
from tokenformer.ops import pattention as ops
from tokenformer.ops.cross_entropy import linear_cross_entropy
from tokenformer.ops.pattention import THETAS, fused, pattention, pattention_group
from tokenformer.train.compile import recompute

# rows, d_in, members: (segments, d_out)
SHAPES = {
    "one": (17, 48, [((100,), 40)]),
    "qkv": (13, 64, [((64,), 64)] * 3),
    "odd": (5, 80, [((2140,), 80)]),
    "segments": (9, 32, [((30, 70, 5), 24)] * 2),
    "members that differ": (7, 16, [((64,), 32), ((70, 3), 48)]),
    "one row": (1, 24, [((576, 200), 24)]),
    "over 4096": (3, 16, [((5000,), 16)]),
    "over 8192": (2, 16, [((9000,), 8)]),
    "over 16384": (2, 16, [((17000,), 8)]),
}


class Seen:
    """Which operators ran, compiled ones too."""

    def __enter__(self) -> "Seen":
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.profile.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.profile.__exit__(*error)
        self.names = {event.name for event in self.profile.events()}


def far(found, wanted) -> float:
    """The largest ‖found − wanted‖ / ‖wanted‖ over pairs of tensors; infinite where a number is none."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, wanted, strict=True)]
    errors = [((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in pairs]
    return max(e if math.isfinite(e) else math.inf for e in errors)


def draw(shape: str, device: str, dtype: torch.dtype):
    rows, d_in, kinds = SHAPES[shape]
    g = torch.Generator().manual_seed(len(shape))
    x = torch.randn(rows, d_in, generator=g)
    members = [
        [(torch.randn(n, d_in, generator=g) * 0.3, torch.randn(n, d_out, generator=g), 1.3 * n**0.5) for n in sizes]
        for sizes, d_out in kinds
    ]
    up = [torch.randn(rows, d_out, generator=g) for _, d_out in kinds]
    place = lambda t: t.to(device, dtype)  # noqa: E731
    return place(x), [[(place(k), place(v), tau) for k, v, tau in m] for m in members], [place(u) for u in up]


def differentiated(work, x: Tensor, members, up) -> tuple[Tensor, ...]:
    """Outputs, and the gradients of everything that went in."""
    x = x.clone().requires_grad_()
    members = [[(k.clone().requires_grad_(), v.clone().requires_grad_(), tau) for k, v, tau in m] for m in members]
    outputs = work(x, members)
    leaves = [x, *(t for m in members for k, v, _ in m for t in (k, v))]
    return *outputs, *torch.autograd.grad(list(outputs[: len(up)]), leaves, up)


def check_pattention(shape: str, theta: str, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Distances to the reference in float64: of the kernels, and of the reference in the same type."""
    x, members, up = draw(shape, device, dtype)
    wide = [[(k.double(), v.double(), tau) for k, v, tau in m] for m in members]
    truth = differentiated(
        lambda x, m: pattention_group(x, m, theta=theta, choice="reference"), x.double(), wide, [u.double() for u in up]
    )
    with Seen() as seen:
        found = differentiated(lambda x, m: pattention_group(x, m, theta=theta, choice="triton"), x, members, up)
    assert {"tokenformer::theta", "tokenformer::theta_backward"} <= seen.names, seen.names
    if device == "cuda":
        again = differentiated(lambda x, m: pattention_group(x, m, theta=theta, choice="triton"), x, members, up)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "two runs differ"
    with Seen() as seen:
        plain = differentiated(lambda x, m: pattention_group(x, m, theta=theta, choice="reference"), x, members, up)
    assert "tokenformer::theta" not in seen.names
    return far(found, truth), far(plain, truth)


def check_stream(onto: str, device: str) -> float:
    """With LayerNorm left out and sums inside, against norm, Pattention and sum."""
    x, members, up = draw("segments", device, torch.float32)
    x, members, up = x * 3 + 2, members[:1], up[:1]
    members = [[(k, torch.cat([v, v[:, :8]], 1), tau) for k, v, tau in m] for m in members]  # d_in = d_out
    up = [torch.cat([u, u[:, :8]], 1) for u in up]
    if onto == "fork":
        up = [*up, torch.cos(up[0])]

    def plain(x: Tensor, m):
        (y,) = pattention_group(F.layer_norm(x, x.shape[-1:]), m, choice="reference")
        return [y, x * 1.0] if onto == "fork" else [x + y] if onto in ("input", "residual") else [y]

    def quick(x: Tensor, m):
        how = {"residual": x.clone()} if onto == "residual" else {}
        return fused(x, m, "l2_norm_gelu", centred=True, onto=onto, **how)

    return far(differentiated(quick, x, members, up), differentiated(plain, x, members, up))


def check_second_derivative(device: str) -> str:
    """What is said to somebody who asks for one."""
    x, members, _ = draw("one", device, torch.float32)
    x.requires_grad_()
    (y,) = pattention_group(x, members, choice="triton")
    try:
        torch.autograd.grad(y.sum(), x, create_graph=True)
    except NotImplementedError as error:
        return str(error)
    return ""


def check_inputs(device: str) -> dict[str, str]:
    """What is not plain: the kernels do as the reference does, or say what is wrong."""
    x, (segment, *_), _ = draw("one", device, torch.float32)
    key, value, tau = segment[0]
    hidden, weight, labels = x[:6, :8], x[6:16, :8], torch.arange(12, device=device) % 10
    kept = hidden.clone().requires_grad_()

    def both(work) -> str:
        found, wanted = work("triton"), work("reference")
        return "equal" if found.shape == wanted.shape and far([found], [wanted]) < 1e-6 else f"{found} {wanted}"

    def said(work) -> str:
        try:
            return f"accepted: {work()}"
        except ValueError as error:
            return str(error)

    outside, _ = linear_cross_entropy(kept, weight, labels[:6] + 5, choice="triton")
    outside.backward()
    return {
        "one row without a dimension": both(lambda c: pattention(x[0], segment, choice=c)),
        "labels with gaps": both(lambda c: linear_cross_entropy(hidden, weight, labels[::2], choice=c)[0]),
        "a label outside": str(outside.item()),
        "a theta that is none": said(lambda: pattention(x, segment, theta="relu", choice="triton")),
        "fewer values": said(lambda: pattention(x, [(key, value[:-1], tau)], choice="triton")),
    }


def check_zeros(theta: str, device: str) -> float:
    """Rows of zeros among others: zeros (or τ²/n each) and finite gradients, as the reference has them."""
    x, members, up = draw("segments", device, torch.float32)
    x[2:5] = 0
    quick, plain = (
        differentiated(lambda x, m, c=c: pattention_group(x, m, theta=theta, choice=c), x, members, up)
        for c in ("triton", "reference")
    )
    return far(quick, plain)


def check_loss(dtype: torch.dtype, vocab: int, rows: int, device: str) -> tuple[float, float]:
    g = torch.Generator().manual_seed(vocab)
    hidden, weight = torch.randn(rows, 32, generator=g).to(dtype), torch.randn(vocab, 32, generator=g).to(dtype)
    labels = torch.randint(vocab, (rows,), generator=g)
    labels[::5], labels[1], labels[2] = -100, 0, vocab - 1

    def run(choice: str, kind: torch.dtype):
        h, w = (t.to(device, kind).requires_grad_() for t in (hidden, weight))
        total, count = linear_cross_entropy(h, w, labels.to(device), 3, choice=choice)
        return total, count, *torch.autograd.grad(total * 0.37, [h, w])

    truth = run("reference", torch.float64)
    with Seen() as seen:
        found = run("triton", dtype)
    assert "tokenformer::linear_cross_entropy" in seen.names
    with torch.no_grad():
        only, _ = linear_cross_entropy(hidden.to(device), weight.to(device), labels.to(device), choice="triton")
    return max(far(found, truth), far([only], truth[:1])), far(run("reference", dtype), truth)


def check_model(
    theta: str, device: str, compiler: str, shifted: bool = False, selective: bool = False
) -> tuple[float, float]:
    """A whole model of several segments, its loss and all gradients; `shifted`: each sample at positions of its own;

    `selective`: products are kept, and what else backward needs is computed again.
    """
    results = []
    for choice, dtype in (("reference", torch.float64), ("triton", torch.float32), ("reference", torch.float32)):
        ops.CHOICE = choice
        tokens = {"qkv_tokens": [16, 24], "proj_tokens": 20, "ffn_tokens": [70, 64]}
        shape = {"layers": 2, "dim": 32, "heads": 4, "vocab": 128, "context": 16, "theta": theta}
        shape |= {"rotary_fraction": 0.75}  # three angles: no power of two
        model = LanguageModel(ModelConfig(**tokens, **shape), seed=1).to(device, dtype)
        with torch.no_grad():  # with its first keys a softmax is flat, and their gradients are rounding alone
            for name, p in model.named_parameters():
                p.mul_(20 if name.endswith("key_tokens") else 1)
        if selective:
            for block in model.blocks:
                recompute(block, selective=True)
        if compiler != "none":
            for block in model.blocks:
                block.compile(backend=compiler, dynamic=False, fullgraph=True)
        ids = torch.arange(18, device=device).reshape(2, 9) * 7 % 128
        with Seen() as seen:
            places = torch.arange(9, device=device) + torch.tensor([[0], [5]], device=device) if shifted else None
            loss = model(ids, labels=ids, positions=places).loss_sum
            loss.backward()
        assert ("tokenformer::theta" in seen.names) == (choice == "triton")
        assert ("tokenformer::rotate_" in seen.names) == (choice == "triton" and theta == "l2_norm_gelu")
        results.append([loss, *(p.grad for p in model.parameters())])
    ops.CHOICE = "auto"
    return far(results[1], results[0]), far(results[2], results[0])


def main(device: str) -> dict:
    gpu = device == "cuda"
    types = [torch.float32, torch.float16, *([torch.bfloat16] if gpu else [])]
    shapes = list(SHAPES) if gpu else [name for name in SHAPES if name != "over 16384"]
    found: dict = {"pattention": {}, "loss": {}, "stream": {}, "zeros": {}, "model": {}}
    for shape in shapes:
        for theta in THETAS if SHAPES[shape][0] > 5 else list(THETAS)[:1]:
            for dtype in types:
                found["pattention"][f"{shape}, {theta}, {dtype}"] = check_pattention(shape, theta, dtype, device)
    for dtype in types:
        for vocab, rows in ((50304 if gpu else 9000, 10), (130, 7)):
            found["loss"][f"{vocab}, {dtype}"] = check_loss(dtype, vocab, rows, device)
    found["stream"] = {onto: check_stream(onto, device) for onto in ("nothing", "input", "residual", "fork")}
    found["zeros"] = {theta: check_zeros(theta, device) for theta in THETAS}
    for theta in THETAS:
        found["model"][theta] = check_model(theta, device, "none")
    found["model"]["compiled"] = check_model("l2_norm_gelu", device, "inductor" if gpu else "aot_eager")
    found["model"]["shifted"] = check_model("l2_norm_gelu", device, "none", shifted=True)
    found["model"]["selective"] = check_model("l2_norm_gelu", device, "none", selective=True)
    found["second"], found["inputs"] = check_second_derivative(device), check_inputs(device)
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] if len(sys.argv) > 1 else "cpu")))
