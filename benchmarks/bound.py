"""What a training step cannot beat on this GPU: its matrix products (cuBLAS) and attention (cuDNN) alone; then with Θ.

  python benchmarks/bound.py [--model lm/150m] [--samples 16] [--seconds 4]

A product that reaches 79 % of the peak in a burst reaches less through seconds, where the power limit lowers the clock:
so each part is timed in a burst and sustained, with the energy it takes; beside Θ a plain copy of as many bytes. Random
bf16 numbers. Prints JSON lines; MFU as in step.py, for a step that would consist of that part alone.
"""

import argparse
import ctypes
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from step import PEAK, commit, parsed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenformer.config import ModelConfig, load
from tokenformer.models.cost import cost
from tokenformer.ops.cross_entropy import ROWS
from tokenformer.ops.kernels.pattention import padded
from tokenformer.parallel.traffic import TIMES


def shapes(c: ModelConfig, rows: int) -> Iterator[tuple[str, int, int, int]]:
    """Layout and m, n, k of every product of a step: nt and tn have an operand the other way round."""
    for layer in range(c.layers):
        for which, members in TIMES.items():
            tokens = sum(padded(n) for n, _ in c.segments(which, layer))
            for layout, m, n, k, count in (
                ("nt", rows, members * tokens, c.dim, 1),  # scores
                ("nn", rows, c.dim, tokens, members),  # outputs
                ("nt", rows, tokens, c.dim, members),  # gradients: of Θ,
                ("nn", rows, c.dim, members * tokens, 1),  # of the input,
                ("tn", members * tokens, c.dim, rows, 1),  # of the keys,
                ("tn", tokens, c.dim, rows, members),  # of the values
            ):
                yield from [(layout, m, n, k)] * count
    for first in range(0, rows, ROWS):
        chunk = min(ROWS, rows - first)
        yield from [("nt", chunk, c.vocab, c.dim), ("nn", chunk, c.dim, c.vocab), ("tn", c.vocab, c.dim, chunk)]


def products(c: ModelConfig, rows: int) -> Callable[[], None]:
    every = list(shapes(c, rows))

    @functools.cache
    def matrix(which: int, m: int, n: int) -> Tensor:
        return torch.randn(m, n, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for layout, m, n, k in every:
            a = matrix(0, k, m).T if layout == "tn" else matrix(0, m, k)
            b = matrix(1, n, k).T if layout == "nt" else matrix(1, k, n)
            torch.mm(a, b, out=matrix(2, m, n))

    return work


def attention(c: ModelConfig, samples: int) -> Callable[[], None]:
    shape = samples, c.context, c.heads, c.head_dim
    q, k, v, up = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))

    def work() -> None:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            for _ in range(c.layers):
                torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), up)

    return work


def activation(c: ModelConfig, rows: int) -> Callable[[], None]:
    """Θ and its gradient by our kernels, of the first layer's tokens in each."""
    work = []
    for which, members in TIMES.items():
        sizes, taus = zip(*c.segments(which, 0), strict=True)
        layout = [*sizes] * members, [len(sizes)] * members, [*taus] * members, c.theta
        columns = sum(map(padded, sizes))
        scores = torch.randn(rows, members * columns, device="cuda", dtype=torch.bfloat16)
        grads = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(members)]
        work.append((scores, grads, layout))

    def all_layers() -> None:
        for _ in range(c.layers):
            for scores, grads, layout in work:
                _, totals = torch.ops.tokenformer.theta(scores, *layout)
                torch.ops.tokenformer.theta_backward(grads, scores, totals, *layout)

    return all_layers


def copies(c: ModelConfig, rows: int) -> Callable[[], None]:
    """Of as many bytes as Θ and its gradient read and write: two passes over the scores, then four."""
    columns = sum(m * padded(n) for which, m in TIMES.items() for n, _ in c.segments(which, 0))
    scores = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    to = torch.empty_like(scores)

    def all_layers() -> None:
        for _ in range(3 * c.layers):
            to.copy_(scores)

    return all_layers


@functools.cache
def counter() -> Callable[[], float]:
    """Joules that the GPU has taken since its driver was loaded."""
    nvml, gpu, millijoules = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_ulonglong()

    def ask(function: str, *arguments: Any) -> None:
        if failed := getattr(nvml, function)(*arguments):
            raise RuntimeError(f"the driver does not tell the energy: {function} gives error {failed}")

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # NVML counts GPUs that are hidden from us
    ask("nvmlInit_v2")
    ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(gpu))

    def read() -> float:
        ask("nvmlDeviceGetTotalEnergyConsumption", gpu, ctypes.byref(millijoules))
        return millijoules.value / 1000

    return read


def timed(work: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Seconds and joules of one of them, over at least so many seconds."""
    before = counter()()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count, begun = 0, time.perf_counter()
    start.record()
    while count == 0 or time.perf_counter() - begun < seconds:
        work()
        count += 1
        if count % 4 == 0:
            torch.cuda.synchronize()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000 / count, (counter()() - before) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lm/150m", help="a preset")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parsed(parser)
    c = load(args.model).model
    tokens = args.samples * c.context
    flops, scores = tokens * 3 * cost(c).parameter_flops, tokens * 6 * c.layers * c.dim * c.context
    every = {"products": products(c, tokens), "attention": attention(c, args.samples)}
    every |= {"theta": activation(c, tokens), "copy": copies(c, tokens)}
    for name in (*every, "products, attention", "products, attention, theta"):
        parts = [every[part] for part in name.split(", ")]

        def work(parts: list[Callable[[], None]] = parts) -> None:
            for part in parts:
                part()

        work()
        torch.cuda.synchronize()
        time.sleep(1)  # a burst begins cool
        burst, _ = timed(work, 0.0)
        timed(work, args.seconds / 2)
        sustained, joules = timed(work, args.seconds / 2)
        line = {
            "name": "bound of a step", "model": args.model, "part": name, "samples": args.samples, "context": c.context,
            "burst_ms": round(burst * 1000, 2), "value": round(sustained * 1000, 2), "unit": "ms sustained",
            "joules": round(joules, 2),
            "mfu": round((flops + scores) / sustained / PEAK, 4),
            "mfu_double_count": round((flops + 2 * scores) / sustained / PEAK, 4),
            "tokens_per_second": round(tokens / sustained), "device": torch.cuda.get_device_name(),
            "torch": torch.__version__, "commit": commit(),
        }  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
