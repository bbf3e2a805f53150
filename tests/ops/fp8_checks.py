"""How far the fp8 kernels are from their specification, `reference` of ops/fp8.py. Run as a program it prints one JSON
object: in Triton's interpreter (TRITON_INTERPRET=1 before it starts; fp32 beside the products in fp8), or with `cuda`
on a GPU in bf16; with `compiled`, what compiled blocks differ by. The interpreter rounds to fp8 wrongly, so there Θ's
kernel writes fp32 and PyTorch rounds it.
"""

import itertools
import json
import sys
import types
from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor

from tests.ops import training_kernel_checks as plain
from tests.ops.training_kernel_checks import Seen, differentiated, draw, far
from tokenformer.config import ModelConfig
from tokenformer.models import LanguageModel
from tokenformer.ops import fp8
from tokenformer.ops import pattention as ops
from tokenformer.ops.kernels import fp8 as kernels
from tokenformer.ops.kernels.fp8 import fused
from tokenformer.ops.pattention import pattention_group
from tokenformer.train.compile import recompute
from tokenformer.train.fp8 import attach, groups, keep_weights

SMALL = {
    "one": (17, 48, [((100,), 32)]),
    "qkv": (13, 64, [((64,), 64)] * 3),
    "segments": (9, 32, [((30, 70, 5), 32)] * 2),
    "members that differ": (7, 16, [((64,), 32), ((70, 3), 48)]),
    "one row": (1, 32, [((576, 200), 32)]),
    "over 8192": (2, 16, [((9000,), 16)]),
}
CHAIN = (576, 1564, 2710, 3770)
LARGE = {
    "150m qkv": (2048, 768, [((768,), 768)] * 3),
    "150m proj": (2048, 768, [((768,), 768)]),
    "150m ffn": (2048, 768, [((3072,), 768)]),
    "450m qkv": (1000, 1024, [((1024,), 1024)] * 3),
    "450m ffn": (1000, 1024, [((4096,), 1024)]),
    "900m ffn": (512, 1280, [((5120,), 1280)]),
    "1.5b qkv": (1024, 1536, [((1536,), 1536)] * 3),
    "1.5b ffn": (1024, 1536, [((6144,), 1536)]),
    "354m qkv": (777, 768, [((2140,), 768)] * 3),
    "354m ffn": (777, 768, [((8560,), 768)]),
    "1.4b ffn": (256, 768, [((34480,), 768)]),
    "1.4b qkv in segments": (256, 768, [(CHAIN, 768)] * 3),
    "1.4b ffn in segments": (256, 768, [(tuple(4 * n for n in CHAIN), 768)]),
    "fewer heads of keys": (100, 256, [((300,), 256), ((300,), 64), ((300,), 64)]),
}
TYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


def check_op(shape: str, theta: str, device: str) -> dict[str, float]:
    """Distances: of the kernels and of the specification to the truth, and between the two; outputs and gradients."""
    x, members, up = draw(shape, device, TYPE[device])
    with Seen() as seen:
        found = differentiated(lambda x, m: fused(x, m, theta), x, members, up)
    assert {"tokenformer::theta_fp8", "tokenformer::theta_fp8_backward", "aten::_scaled_mm"} <= seen.names, seen.names
    if device == "cuda":
        again = differentiated(lambda x, m: fused(x, m, theta), x, members, up)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "two runs differ"
    wanted = differentiated(lambda x, m: fp8.reference(x, m, theta), x, members, up)
    wide = [[(k.double(), v.double(), tau) for k, v, tau in m] for m in members]
    up = [u.double() for u in up]
    truth = differentiated(lambda x, m: pattention_group(x, m, theta=theta, choice="reference"), x.double(), wide, up)
    return {"kernels": far(found, truth), "specification": far(wanted, truth), "between": far(found, wanted)}


def check_stream(onto: str, device: str) -> float:
    """With keys without their mean, and sums: against the specification of the same."""
    x, members, up = draw("segments", device, TYPE[device])
    x, members, up = x * 3 + 2, members[:1], up[:1]
    up = [*up, torch.cos(up[0])] if onto == "fork" else up

    def wanted(x: Tensor, m):
        centred = [[(k - k.mean(-1, keepdim=True), v, tau) for k, v, tau in segments] for segments in m]
        (y,) = fp8.reference(x, centred, "l2_norm_gelu")
        return [y, x * 1.0] if onto == "fork" else [x + y] if onto in ("input", "residual") else [y]

    def found(x: Tensor, m):
        how = {"residual": x.clone()} if onto == "residual" else {}
        return fused(x, m, "l2_norm_gelu", centred=True, onto=onto, **how)

    return far(differentiated(found, x, members, up), differentiated(wanted, x, members, up))


def trained(device: str, choice: str, how: str = "") -> list[Tensor]:
    """The loss and gradients of a model of several segments. `how`: what is special; "plain" computes without fp8."""
    ops.CHOICE = choice
    shape = {"layers": 2, "dim": 32, "heads": 2, "vocab": 128, "context": 16, "rotary_fraction": 0.5}
    shape |= {"qkv_tokens": [16, 24], "proj_tokens": 20, "ffn_tokens": [70, 64]}
    model = LanguageModel(ModelConfig(**shape), seed=1).to(device)
    model.compute_dtype = TYPE[device]
    for block in model.blocks:
        compiler = "none" if how != "compiled" else "inductor" if device == "cuda" else "aot_eager"
        if how != "plain":
            attach(block, [name for name, _ in groups(block)], compiler)
        if how.startswith(("selective", "full")):
            recompute(block, selective=how.startswith("selective"))
        if how == "compiled":
            block.compile(backend=compiler, dynamic=False, fullgraph=True)
    if "kept" in how or how == "compiled":
        train = types.SimpleNamespace(precision="fp8")
        keep_weights(model, types.SimpleNamespace(train=train, batch=4, micro_batch=2), alone=True)
        assert all(len(layers[0].fp8.kept) == 4 + 3 * len(layers) for b in model.blocks for _, layers in groups(b))
    ids = torch.arange(18, device=device).reshape(2, 9) * 7 % 128
    again = AssertionError("weights that were kept are quantised again")
    with Seen() as seen, mock.patch.object(kernels, "quantise", side_effect=again) if "kept" in how else nullcontext():
        loss = model(ids, labels=ids).loss_sum
        loss.backward()
    assert ("tokenformer::theta_fp8" in seen.names) == (choice == "triton" and how != "plain"), seen.names
    return [loss, *(p.grad for p in model.parameters())]


def main(device: str) -> dict:
    gpu = device == "cuda"
    plain.SHAPES = SMALL | (LARGE if gpu else {})
    pairs = list(itertools.product(plain.SHAPES, fp8.BOUNDED if gpu else fp8.BOUNDED[:1]))
    pairs += [] if gpu else [("segments", "gelu_l2_norm")]
    found: dict = {"op": {f"{shape}, {theta}": check_op(shape, theta, device) for shape, theta in pairs}}
    found["stream"] = {onto: check_stream(onto, device) for onto in ("nothing", "input", "residual", "fork")}
    truth, wanted = trained(device, "reference", "plain"), trained(device, "reference")
    first = trained(device, "triton")
    found["model"] = {"kernels": far(first, truth), "specification": far(wanted, truth)}
    found["same"] = {how: far(trained(device, "triton", how), first) for how in ("selective", "full, kept")}
    return found


def compiled(device: str) -> dict[str, float]:
    truth, eager = trained(device, "reference", "plain"), trained(device, "triton")
    found = trained(device, "triton", "compiled")
    return {"compiled": far(found, truth), "eager": far(eager, truth), "between": far(found, eager)}


if __name__ == "__main__":
    work = compiled if "compiled" in sys.argv else main
    print(json.dumps(work("cuda" if "cuda" in sys.argv else "cpu")))
