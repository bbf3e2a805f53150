"""A training step (forward, backward, AdamW; bf16, random ids) of our models and of their rivals, in one run.

  python benchmarks/step.py [--cells lm/150m:kernels:16 … | --fp8] [--profile FOLDER] [--out FILE]

A cell is who:how:samples[:context]. Who: one of our presets (`+4` behind it: in the four segments of the growth
chain), `official` (the released code's formulation, operation by operation) or `gpt-neox` (transformers' own of 160M).
How: `kernels`, `fp8` and `reference` (compiled, ours; of a baseline the kernel is that of the loss; fp8 in all shapes,
weights quantised in the step), `eager`, `checkpointed` or `compiled` (rivals). --fp8: fp8 beside bf16. Prints JSON
lines and a table; MFU against 989 TFLOP/s of bf16, attention counted causally once and, beside it, the usual double
count.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tokenformer.config import ModelConfig, load
from tokenformer.models import LanguageModel
from tokenformer.models.cost import cost
from tokenformer.ops import pattention as ops
from tokenformer.ops.rotary import angles
from tokenformer.train.fp8 import attach, groups

PEAK = 989e12
CELLS = [
    "official:checkpointed:16",
    "official:eager:16",
    "official:compiled:16",
    "gpt-neox:compiled:16",
    "baseline/124m:kernels:16:2048",
    "baseline/124m:kernels:64:2048",
    "lm/150m:reference:16",
    "lm/150m:kernels:16",
    "lm/150m:kernels:64",
    "lm/1.5b:kernels:8",
    "grow/354m:kernels:32",
    "grow/1.4b:kernels:16",
    "grow/1.4b+4:kernels:16",
]
FP8 = [
    f"{preset}:{how}:{samples}"
    for preset, samples in (
        ("lm/150m", "16"), ("lm/150m", "64"), ("lm/450m", "16"), ("lm/1.5b", "8"), ("grow/354m", "32"),
        ("grow/1.4b", "16"), ("grow/1.4b+4", "16"), ("baseline/757m", "8:2048"),
    )
    for how in ("kernels", "fp8")
]  # fmt: skip
CHAIN = {"qkv_tokens": [576, 1564, 2710, 3770], "proj_tokens": [576, 1564, 2710, 3770]}
CHAIN["ffn_tokens"] = [4 * n for n in CHAIN["qkv_tokens"]]


class OfficialPattention(nn.Module):
    """Operation by operation as released: scores by 1, by a mask of ones, by the norm, by √n, GELU."""

    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.keys, self.values = (nn.Parameter(torch.randn(tokens, dim) * 0.02) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.keys.to(x.dtype).T * 1
        scores *= torch.ones(x.shape[-2], len(self.keys), dtype=x.dtype, device=x.device)
        scores = scores / torch.norm(scores, p=2, dim=-1, keepdim=True) * math.sqrt(scores.shape[-1])
        return F.gelu(scores) @ self.values.to(x.dtype)


class OfficialBlock(nn.Module):
    """Positions first, then samples: (T, B, D)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c, sizes = c, (c.qkv_tokens, c.qkv_tokens, c.qkv_tokens, c.proj_tokens, c.ffn_tokens)
        self.query, self.key, self.value, self.proj, self.ffn = (OfficialPattention(c.dim, int(n)) for n in sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        seen = F.layer_norm(x, (self.c.dim,), eps=1e-5)
        q, k, v = (p(seen).unflatten(-1, (self.c.heads, -1)) for p in (self.query, self.key, self.value))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (self.turned(q, cos, sin), self.turned(k, cos, sin), v))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.proj(out.permute(2, 0, 1, 3).contiguous().flatten(2)) + x
        bias = torch.zeros((), dtype=x.dtype, device=x.device).expand_as(x)  # which it adds
        return x + (self.ffn(F.layer_norm(x, (self.c.dim,), eps=1e-5)) + bias)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turns, stays = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turns.chunk(2, dim=-1)
        return torch.cat([turns * cos + torch.cat([-second, first], dim=-1) * sin, stays], dim=-1)


class OfficialLoss(torch.autograd.Function):
    """Its cross entropy of fp32 logits (T, W), a pass an operation, most of them in place, the softmax kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        rows = torch.arange(len(labels), device=labels.device)
        logits.sub_(logits.max(dim=-1)[0][:, None])
        own = logits[rows, labels]
        total = logits.exp_().sum(dim=-1)
        ctx.save_for_backward(logits.div_(total[:, None]), rows, labels)
        return total.log() - own

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        softmax, rows, labels = ctx.saved_tensors
        softmax[rows, labels] -= 1.0
        return softmax.mul_(grads[0][:, None]), None


class Official(nn.Module):
    """The released code's formulation, written again; its kindnesses: AdamW of PyTorch, no synchronisation at each
    layer, and under the compiler, which does not take the other, PyTorch's own cross entropy.
    """

    def __init__(self, c: ModelConfig, how: str) -> None:
        super().__init__()
        self.c, self.how = c, how
        self.embedding, self.norm = nn.Embedding(c.vocab, c.dim), nn.LayerNorm(c.dim)
        self.blocks = nn.ModuleList(OfficialBlock(c) for _ in range(c.layers))
        both = angles(torch.arange(c.context), c.rotary_dims, c.rotary_base)  # made once, as it does
        self.rotary = [torch.cat([t, t], dim=-1)[:, None, None].bfloat16() for t in both]

    def forward(self, ids: Tensor) -> Tensor:
        return self.losses(ids, ids).mean()

    def losses(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Of each position by itself."""
        x = self.embedding(ids).bfloat16().transpose(0, 1).contiguous()
        for block in self.blocks:
            args = block, x, *self.rotary
            x = checkpoint(*args, use_reentrant=False) if self.how == "checkpointed" else block(*args[1:])
        x = x.transpose(0, 1).contiguous()
        x = F.layer_norm(x, (self.c.dim,), self.norm.weight.bfloat16(), self.norm.bias.bfloat16())
        logits = (x @ self.embedding.weight.bfloat16().T).float().flatten(0, 1)
        if self.how == "compiled":
            return F.cross_entropy(logits, labels.flatten(), reduction="none")
        return OfficialLoss.apply(logits, labels.flatten())


class Ours(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = LanguageModel(c)
        self.model.to_empty(device="cuda").compute_dtype = torch.bfloat16
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        out = self.model(ids, labels=ids)
        return out.loss_sum / ids.numel()


class NeoX(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        sizes = {"hidden_size": c.dim, "num_hidden_layers": c.layers, "num_attention_heads": c.heads}
        config = GPTNeoXConfig(**sizes, intermediate_size=4 * c.dim, vocab_size=c.vocab, max_position_embeddings=2048)
        config._attn_implementation = "sdpa"
        config.use_cache = False
        self.model = GPTNeoXForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self.model(ids, labels=ids).loss


def build(who: str, how: str, context: int | None) -> tuple[nn.Module, ModelConfig, float]:
    """The model on the GPU, its shape, and FLOPs of a token but for attention."""
    preset, _, cut = who.partition("+")
    keys = {"context": context} if context else {}
    c = load(preset if "/" in preset else "lm/150m").model
    c = ModelConfig(**{**{f: getattr(c, f) for f in c.__dataclass_fields__}, **keys, **(CHAIN if cut else {})})
    if who == "official":
        with torch.device("cuda"):
            model = Official(c, how)
    elif who == "gpt-neox":
        with torch.device("cuda"):
            model = NeoX(c)
        return model, c, 6 * sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed_in" not in n)
    else:
        model = Ours(c)
        ops.CHOICE = "reference" if how == "reference" else "triton" if c.kind == "tokenformer" else "auto"
        for block in model.model.blocks:
            if how == "fp8":
                attach(block, [name for name, _ in groups(block)], "inductor")
            block.compile(dynamic=False)
    if how == "compiled":
        model.compile(dynamic=False)
    return model, c, 3 * cost(c).parameter_flops


def measure(cell: str, repeats: int, profile: Path | None) -> dict:
    who, how, samples, *rest = cell.split(":")
    torch.manual_seed(0)
    model, c, flops = build(who, how, int(rest[0]) if rest else None)
    if who == "gpt-neox":
        model.compile(dynamic=False)
    ids = torch.randint(c.vocab, (int(samples), c.context), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(4):
        step()
    torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    for _ in range(3):
        begun = time.perf_counter()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            step()
        stop.record()
        host.append((time.perf_counter() - begun) / repeats)
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1000 / repeats)
    for _ in range(1 + round(1 / times[-1])):  # for a second, to be looked at
        step()
    seen = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    clock, watts = subprocess.run(seen, capture_output=True, text=True, check=True).stdout.split("\n")[0].split(",")
    torch.cuda.synchronize()
    taken, attention = sorted(times)[1], 6 * c.layers * c.dim * c.context
    if profile:
        table(step, profile / (cell.replace("/", "-").replace(":", "-") + ".txt"))
    tokens = ids.numel() / taken
    return {
        "name": "training step", "model": cell, "value": round(tokens), "unit": "tokens/s", "context": c.context,
        "mfu": round(tokens * (flops + attention) / PEAK, 4),
        "mfu_double_count": round(tokens * (flops + 2 * attention) / PEAK, 4),
        "milliseconds": round(taken * 1000, 2), "host_milliseconds": round(min(host) * 1000, 2),
        "spread": round((max(times) - min(times)) / taken, 4),
        "clock_mhz": float(clock), "watts": float(watts),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2), "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "commit": commit(),
    }  # fmt: skip


def table(step, path: Path) -> None:
    """Where the time of a step goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    rows = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
    lines = [f"{e.self_device_time_total / 3000:9.3f} ms {e.count // 3:5d}  {e.key[:150]}" for e in rows[:60]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_intermixed_args()
    if not torch.cuda.is_available():
        parser.error("this is measured on a GPU, and PyTorch sees none here")
    return args


def commit() -> str:
    """What is measured; COMMIT names it where there is no repository."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or asked.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--fp8", action="store_const", const=FP8, dest="cells", help="fp8 beside bf16")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--profile", type=Path, help="folder for a table of kernels for each cell")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parsed(parser)
    if args.one:
        try:
            line = measure(args.one, args.repeats, args.profile)
        except torch.OutOfMemoryError as error:
            line = {"name": "training step", "model": args.one, "error": str(error)[:200]}
        print(json.dumps(line))
        return
    for cell in args.cells:
        how = "(kernels|fp8|reference)" if "/" in cell else "(eager|checkpointed|compiled)"
        if not re.fullmatch(rf"(official|gpt-neox|[^:]+/[^:]+):{how}:\d+(:\d+)?", cell):
            parser.error(f"--cells {cell}: write who:how:samples[:context] as {CELLS[0]} or {CELLS[-1]}")
    lines, values = [], {}
    for cell in args.cells:  # each in a process of its own: what one compiled or chose, another would inherit
        command = [sys.executable, __file__, "--one", cell, "--repeats", str(args.repeats)]
        command += ["--profile", str(args.profile)] if args.profile else []
        line = json.loads(
            subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
        )
        values[cell] = line.get("value")
        rival = cell.replace(":fp8:", ":kernels:")
        if rival != cell and values.get(rival) and values[cell]:
            line |= {"rival": rival, "rival_value": values[rival], "ratio": round(values[cell] / values[rival], 4)}
        lines.append(json.dumps(line))
        print(lines[-1], flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for line in map(json.loads, lines):
        if "value" in line:
            print(
                f"{line['model']:36} {line['value']:>9,} tokens/s  {line['mfu']:6.1%}  {line['memory_gb']:6.1f} GB"
                + (f"  {line['ratio']:.3f} × bf16" if "ratio" in line else ""),
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
