"""A training step of Vision TokenFormer-B/16 (768/3072) at 224² beside timm's compiled ViT-B/16, with the whole recipe.

  python benchmarks/vision.py [--cells timm:compiled:256 vision/b16:kernels:256] [--seconds 540] [--out FILE]
  python benchmarks/vision.py --check          # toy sizes on the CPU, to see that it runs

bf16, AdamW, drop path 0.1, mixup and cutmix with smoothed targets, EMA 0.9999. Both are given the same bytes and draws,
which lie ready, and mix them by the same functions; decoding is benchmarks/images.py. Each cell is measured in its own
process (a minute or two, most of it for compiling); one that would not end in time is left out. FLOPs are those of the
model without recomputation, attention not causal; MFU is against 989 TFLOP/s. `per_flop` is images/s × FLOPs of an
image beside timm's in the same call: above 1, a FLOP takes less time here.
"""

import argparse
import importlib
import json
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import PEAK, commit
from torch import Tensor, nn

from tokenformer.config import ModelConfig, load
from tokenformer.config_data import DRAWS, ImagesConfig
from tokenformer.models import ImageModel
from tokenformer.models.cost import training_flops_per_sample
from tokenformer.ops import pattention as ops
from tokenformer.ops.augment import augment
from tokenformer.parallel.layout import Layout
from tokenformer.train.average import Average

CELLS = ["timm:compiled:256", "vision/b16:kernels:256", "vision/vit-b16:kernels:256", "vision/b16:reference:256"]
RECIPE = ImagesConfig(mixup=0.8, cutmix=1.0, smoothing=0.1)
DROP_PATH, EMA = 0.1, 0.9999
TOY = {"layers": 2, "dim": 64, "heads": 2, "image_size": 32, "classes": 10}


class Timm(nn.Module):
    """timm's ViT, in bf16 by autocast, compiled as a whole."""

    def __init__(self, c: ModelConfig, compiled: bool) -> None:
        super().__init__()
        timm = import_timm()
        shape = {"img_size": c.grid[0] * c.patch, "patch_size": c.patch, "embed_dim": c.dim, "depth": c.layers}
        shape |= {"num_heads": c.heads, "num_classes": c.classes, "drop_path_rate": DROP_PATH}
        self.model = timm.models.vision_transformer.VisionTransformer(**shape)
        if compiled:
            self.model.compile(dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.model(x)


class Ours(nn.Module):
    """Our model, its blocks compiled one by one as the trainer does it; drop path by factors drawn for each image."""

    def __init__(self, c: ModelConfig, compiled: bool) -> None:
        super().__init__()
        self.model = ImageModel(c)
        self.model.compute_dtype = torch.bfloat16
        stay = 1 - torch.linspace(0, DROP_PATH, c.layers).view(-1, 1, 1)
        self.register_buffer("stay", stay)
        for block in self.model.blocks if compiled else ():
            block.compile(dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        random = torch.rand(len(self.stay), 2, len(x), device=x.device)
        return self.model(x, drop=(random < self.stay) / self.stay)


def import_timm() -> Any:
    """Import timm; where torchvision is missing, without it: it makes transforms alone, which are not used here."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.meta_path.insert(0, NoTorchvision())
    return importlib.import_module("timm")


class Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class NoTorchvision:
    """Gives empty modules whose names are all there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None  # type: ignore

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = lambda name: getattr(Anything("any", (), {}), name)


def batch_of(c: ModelConfig, samples: int, device: str) -> dict[str, Any]:
    """Return bytes, labels, and draws that mix every pair, half of them by cutmix."""
    rng, side = np.random.default_rng(0), c.grid[0] * c.patch
    draws = np.zeros((samples, len(DRAWS)), np.float32)
    draws[:, DRAWS.index("flip")] = rng.random(samples) < 0.5
    draws[:, DRAWS.index("mix")] = np.repeat(1 + np.arange((samples + 1) // 2) % 2, 2)[:samples]
    for name in ("mix_share", "cut_row", "cut_column"):
        draws[:, DRAWS.index(name)] = rng.random(samples)
    pixels = torch.randint(0, 256, (samples, side, side, 3), dtype=torch.uint8, device=device)
    return {"pixels": pixels, "label": torch.randint(c.classes, (samples,), device=device), "draws": draws}


def measure(cell: str, repeats: int, check: bool) -> dict[str, Any]:
    who, how, samples = cell.split(":")
    device = "cpu" if check else "cuda"
    c = load("vision/vit-b16" if who == "timm" else who).model
    if check:
        fewer = {"qkv_tokens": 16, "proj_tokens": 16, "ffn_tokens": 64} if c.kind == "tokenformer" else {}
        c = ModelConfig(**{**{f: getattr(c, f) for f in c.__dataclass_fields__}, **TOY, **fewer})
    torch.manual_seed(0)
    if who != "timm" and c.kind == "tokenformer" and not check:
        ops.CHOICE = "triton" if how == "kernels" else "reference"
    kind = Timm if who == "timm" else Ours
    model = kind(c, compiled=not check).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.3, betas=(0.9, 0.95), fused=not check)
    average, batch, number = Average(EMA, Layout(model)), batch_of(c, int(samples), device), 0

    def step() -> Tensor:
        nonlocal number
        x, targets = augment(batch, RECIPE, c.classes)
        loss = -(targets * model(x).float().log_softmax(-1)).sum() / len(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update(number)
        number += 1
        return loss

    def wait() -> None:
        if not check:
            torch.cuda.synchronize()

    for _ in range(1 if check else 8):
        loss = step()
    assert torch.isfinite(loss), f"{cell}: the loss is {loss.item()}"
    times = []
    for _ in range(3):
        wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            step()
        wait()
        times.append((time.perf_counter() - begun) / repeats)
    taken, flops = sorted(times)[1], training_flops_per_sample(c)
    rate = int(samples) / taken
    return {
        "name": "training step of an image model", "model": cell, "value": round(rate, 1), "unit": "images/s",
        "parameters": sum(p.numel() for p in model.parameters()), "flops_per_image": flops,
        "mfu": round(rate * flops / PEAK, 4), "milliseconds": round(taken * 1000, 2),
        "spread": round((max(times) - min(times)) / taken, 4),
        "memory_gb": None if check else round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "device": "cpu" if check else torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit(),
    }  # fmt: skip


def main() -> None:
    import subprocess

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="a cell that would not end in time is not begun")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="toy sizes on the CPU, in this process")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.check and not torch.cuda.is_available():
        parser.error("this is measured on a GPU, and PyTorch sees none here; --check runs toy sizes")
    if args.one:
        print(json.dumps(measure(args.one, args.repeats, False)))
        return
    lines: list[dict[str, Any]] = []
    begun, longest = time.monotonic(), 0.0
    for cell in args.cells:
        now = time.monotonic()
        if now - begun + 1.2 * longest > args.seconds:
            print(f"not begun, {1.2 * longest:.0f} s are needed: {cell}", file=sys.stderr)
            continue
        if args.check:
            lines.append(measure(cell.rpartition(":")[0] + ":4", 1, True))
        else:  # in a process of its own: what one compiled or chose, another would inherit
            command = [sys.executable, __file__, "--one", cell, "--repeats", str(args.repeats)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            longest = max(longest, time.monotonic() - now)
            if done.returncode:  # the others are measured all the same
                print(f"{cell} failed with code {done.returncode}", file=sys.stderr)
                continue
            lines.append(json.loads(done.stdout.splitlines()[-1]))
        theirs = next((line for line in lines if line["model"].startswith("timm:")), None)
        if theirs:
            ours, other = (line["value"] * line["flops_per_image"] for line in (lines[-1], theirs))
            lines[-1]["per_flop"] = round(ours / other, 4)
        print(json.dumps(lines[-1]), flush=True)
        if args.out:
            args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
