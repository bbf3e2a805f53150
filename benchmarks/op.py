"""Pattention forward and backward on one GPU: kernels, the reference as it is and compiled, and the roofline.

  python benchmarks/op.py [--cells lm/150m:ffn:32768 …] [--out FILE]

A cell is preset:projection:rows, projection one of qkv (three in one), proj and ffn. bf16, without the residual stream.
The roofline is the larger of two times: products at the rate of an 8192³ one, fewest bytes at the rate of a large copy,
both measured first. All of them in bursts of 80 ms (bound.py says what lasts). Prints JSON lines; before timing,
outputs and gradients are compared.
"""

import argparse
import json
from pathlib import Path

import torch
import torch._functorch.config
from step import commit, parsed
from torch import Tensor
from triton.testing import do_bench

from tokenformer.config import load
from tokenformer.ops.pattention import pattention_group

CELLS = ["lm/150m:qkv:32768", "lm/150m:proj:32768", "lm/150m:ffn:32768", "lm/1.5b:qkv:16384", "lm/1.5b:ffn:16384"]
CELLS += ["grow/354m:ffn:32768", "grow/1.4b:ffn:16384"]
torch._functorch.config.donated_buffer = False  # backward is timed again and again, over one graph


def milliseconds(work) -> float:
    return do_bench(work, warmup=20, rep=80, return_mode="median")


def ceilings() -> tuple[float, float]:
    """FLOP/s of a large product, bytes/s of a large copy (read and written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    from_, to = (torch.empty(1 << 31, device="cuda", dtype=torch.uint8) for _ in range(2))
    product, copy = milliseconds(lambda: a @ b), milliseconds(lambda: to.copy_(from_))
    return 2 * 8192**3 / product * 1e3, 2 * from_.numel() / copy * 1e3


def draw(preset: str, projection: str, rows: int):
    c = load(preset).model
    ((tokens, tau),) = c.segments(projection, 0)
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    count = 3 if projection == "qkv" else 1
    members = [[(new(tokens, c.dim).requires_grad_(), new(tokens, c.dim).requires_grad_(), tau)] for _ in range(count)]
    return new(rows, c.dim).requires_grad_(), members, [new(rows, c.dim) for _ in range(count)], tokens * count, c.dim


def measure(cell: str, ceiling: tuple[float, float]) -> dict:
    preset, projection, rows = cell.split(":")
    x, members, up, tokens, dim = draw(preset, projection, int(rows))
    leaves = [x, *(t for m in members for k, v, _ in m for t in (k, v))]
    ways = {
        choice: (lambda x, m, choice=choice: pattention_group(x, m, choice=choice))
        for choice in ("triton", "reference")
    }
    ways["compiled"] = torch.compile(ways["reference"], dynamic=False)
    times: dict[str, tuple[float, float]] = {}
    results: dict[str, list[Tensor]] = {}
    for name, work in ways.items():
        outputs = work(x, members)
        results[name] = [*outputs, *torch.autograd.grad(outputs, leaves, up, retain_graph=True)]
        forward = milliseconds(lambda work=work: work(x, members))
        backward = milliseconds(lambda outputs=outputs: torch.autograd.grad(outputs, leaves, up, retain_graph=True))
        times[name] = (round(forward, 3), round(backward, 3))
        del outputs
    far = max(((a - b).norm() / b.norm()).item() for a, b in zip(results["triton"], results["reference"], strict=True))
    work = 2 * int(rows) * tokens * 2 * dim  # FLOPs of the two products of a forward pass
    moved = 2 * 2 * dim * (int(rows) + tokens)  # bytes: input, keys and values read once, output written once
    floor = 3e3 * max(work / ceiling[0], moved / ceiling[1])  # backward is twice forward
    ours, rival = sum(times["triton"]), sum(times["compiled"])
    return {
        "name": "pattention, forward and backward", "model": cell, "value": round(ours, 3), "unit": "ms",
        "rival": "reference compiled", "rival_value": round(rival, 3), "ratio": round(rival / ours, 3),
        "forward_backward_ms": times, "roofline_ms": round(floor, 3), "of_roofline": round(floor / ours, 3),
        "mfu": round(3 * work / ours * 1e3 / 989e12, 3), "furthest_from_reference": far,
        "ceiling_tflops": round(ceiling[0] / 1e12), "ceiling_tb_s": round(ceiling[1] / 1e12, 2),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "commit": commit(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--out", type=Path)
    args = parsed(parser)
    ceiling, lines = ceilings(), []
    for cell in args.cells:
        lines.append(json.dumps(measure(cell, ceiling)))
        print(lines[-1], flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
