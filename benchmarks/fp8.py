"""Which shapes gain by fp8 on this GPU: forward and backward of their layers as `train.fp8: auto` measures them.

  python benchmarks/fp8.py [--models lm/150m:16 lm/1.5b:8 …] [--products]

A model is preset:samples. Compiled, in bursts of ten, random numbers, weights quantised each time. --products: the four
products alone through two seconds each, bf16 (cuBLAS) beside fp8 with fast and with fp32 accumulation, e4m3 and, for
gradients, e5m2. Prints JSON lines.
"""

import argparse
import json

import torch
from bound import timed
from step import commit, parsed

from tokenformer.config import ModelConfig, load
from tokenformer.models.layers import Pattention
from tokenformer.train.fp8 import measure, shapes

MODELS = ["lm/150m:16", "lm/150m:64", "lm/450m:16", "lm/900m:8", "lm/1.5b:8", "grow/354m:32", "grow/1.4b:16"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def layers_of(model: ModelConfig, samples: int) -> list[dict]:
    found = measure(shapes([model]), samples, torch.device("cuda"), "inductor")
    return [
        {"name": "layers in fp8", "shape": name, "value": eight * 1e3, "unit": "ms", "rival": "bf16",
         "rival_value": bf16 * 1e3, "ratio": bf16 / eight}
        for name, (bf16, eight) in found.items()
    ]  # fmt: skip


def products_of(model: ModelConfig, samples: int) -> list[dict]:
    lines = []
    for name, (layers, length) in sorted(shapes([model]).items()):
        if not isinstance(layers[0], Pattention):
            continue
        rows, dim = samples * length, layers[0].in_features
        tokens = sum(-(-len(s.key_tokens) // 64) * 64 for s in layers[0].segments)
        each = {
            "scores": (rows, dim, tokens * len(layers)), "values": (rows, tokens, layers[0].out_features),
            "gradient of theta": (rows, layers[0].out_features, tokens), "of x": (rows, tokens * len(layers), dim),
        }  # fmt: skip
        for what, (m, k, n) in each.items():
            a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
            one = torch.ones((), device="cuda")
            ways = {"bf16": lambda a=a, b=b: a @ b.T}
            for kind in (E4M3, E5M2) if "of" in what else (E4M3,):
                for fast in (True, False):
                    label = f"{str(kind).removeprefix('torch.float8_')}{', fast accumulation' * fast}"
                    ways[label] = lambda a=a.to(kind), b=b.to(E4M3), fast=fast, one=one: torch._scaled_mm(
                        a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
                    )
            taken = {}
            for label, work in ways.items():
                timed(work, 0.5)
                taken[label], joules = timed(work, 2.0)
                line = {"name": "product", "shape": name, "part": f"{what}, {label}", "unit": "TFLOP/s sustained"}
                line |= {"value": 2 * m * n * k / taken[label] / 1e12, "joules": joules}
                lines.append(line | {"rival": "bf16", "ratio": taken["bf16"] / taken[label]})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--products", action="store_true")
    args = parsed(parser)
    for cell in args.models:
        preset, _, samples = cell.partition(":")
        about = {"model": cell, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
        for line in (products_of if args.products else layers_of)(load(preset).model, int(samples)):
            print(json.dumps(line | about), flush=True)


if __name__ == "__main__":
    main()
