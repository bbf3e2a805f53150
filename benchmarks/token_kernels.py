"""Token-parallel Pattention: the time of one rank's share, forward and backward, by kernels and by the reference.

  python benchmarks/token_kernels.py [--cells lm/1.5b:ffn:16384:8 …] [--out FILE]
  python benchmarks/token_kernels.py --check        # small and without times, on the CPU in Triton's interpreter

A cell is preset:projection:rows:ranks, projection one of qkv (three in one), proj and ffn. bf16. One process stands for
one of so many ranks: it holds its slice of the parameter tokens, and its group has no other member, so that what an
exchange over the network takes is not in the figure. "whole" is the same share as whole segments, without halves.
Prints JSON lines; before timing, outputs and gradients are compared.
"""

import argparse
import json
import os
import sys
from pathlib import Path

if "--check" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # counts when Triton is imported

import torch
import torch._functorch.config
import torch.distributed as dist
from step import commit
from torch import Tensor

from tokenformer.config import load
from tokenformer.ops import pattention as ops
from tokenformer.parallel.collectives import Team
from tokenformer.parallel.partial import partial_group
from tokenformer.parallel.tokens import tiled

CELLS = ["lm/1.5b:qkv:16384:2", "lm/1.5b:ffn:16384:2", "lm/1.5b:ffn:16384:8", "grow/1.4b:ffn:16384:8"]
SMALL = ["lm/3m:qkv:5:2", "lm/3m:ffn:5:4"]
torch._functorch.config.donated_buffer = False  # backward is timed again and again, over one graph


def draw(cell: str, device: str, dtype: torch.dtype):
    preset, projection, rows, ranks = cell.split(":")
    c = load(preset).model
    slices = [(tiled(n, int(ranks))[1], tau) for n, tau in c.segments(projection, 0)]  # of the first rank
    g = torch.Generator(device).manual_seed(0)
    new = lambda *shape: torch.randn(*shape, device=device, generator=g).to(dtype)  # noqa: E731
    count = 3 if projection == "qkv" else 1
    members = [
        [(new(n, c.dim).requires_grad_(), new(n, c.dim).requires_grad_(), tau) for n, tau in slices]
        for _ in range(count)
    ]
    return new(int(rows), c.dim).requires_grad_(), members, [new(int(rows), c.dim) for _ in range(count)]


def measure(cell: str, team: Team, device: str, timed: bool) -> dict:
    from triton.testing import do_bench

    x, members, up = draw(cell, device, torch.bfloat16 if device == "cuda" else torch.float32)
    leaves = [x, *(t for m in members for k, v, _ in m for t in (k, v))]
    whole = Team(team.group, 0, 1, whole=True)
    ways = {"kernels": ("triton", team), "kernels, whole": ("triton", whole), "reference": ("reference", team)}
    times: dict[str, float] = {}
    results: dict[str, list[Tensor]] = {}
    for name, (choice, own) in [*ways.items(), *([("compiled", ("reference", team))] if timed else [])]:
        ops.CHOICE = choice
        assert ops.backend(x) == choice
        work = lambda own=own: partial_group(x, members, "l2_norm_gelu", own)  # noqa: E731
        work = torch.compile(work, dynamic=False) if name == "compiled" else work
        outputs = work()
        results[name] = [*outputs, *torch.autograd.grad(outputs, leaves, up, retain_graph=True)]
        if timed:
            forward = do_bench(work, warmup=20, rep=80, return_mode="median")
            back = lambda outputs=outputs: torch.autograd.grad(outputs, leaves, up, retain_graph=True)  # noqa: E731
            times[name] = round(forward + do_bench(back, warmup=20, rep=80, return_mode="median"), 3)
    pairs = zip(results["kernels"], results["reference"], strict=True)
    line = {
        "name": "token-parallel pattention, one rank's share", "model": cell, "unit": "ms", "times": times,
        "furthest_from_reference": max(((a - b).norm() / b.norm()).item() for a, b in pairs), "commit": commit(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
    }  # fmt: skip
    if timed:
        ours, rival = times["kernels"], times["compiled"]
        line |= {"value": ours, "rival": "reference compiled", "rival_value": rival, "ratio": round(rival / ours, 3)}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="small, on the CPU, in Triton's interpreter")
    args = parser.parse_args()
    if not args.check and not torch.cuda.is_available():
        parser.error("this is measured on a GPU, and PyTorch sees none here (--check runs without)")
    device = "cpu" if args.check else "cuda"
    dist.init_process_group("gloo" if args.check else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    lines = []
    for cell in SMALL if args.check else args.cells:
        lines.append(json.dumps(measure(cell, Team(group.group_name, 0, 1, whole=False), device, not args.check)))
        print(lines[-1], flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
