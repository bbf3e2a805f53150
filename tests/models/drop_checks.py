"""How far an image model with drop path is on the kernels from the reference: logits and all gradients, also compiled.

Run as a program with TRITON_INTERPRET=1 it prints one JSON object.
"""

import json
import sys

import torch
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.models import ImageModel
from tokenformer.models.trunk import Block
from tokenformer.ops import pattention

SHAPE = {"of": "image", "layers": 2, "dim": 32, "heads": 2, "image_size": 16, "patch": 8, "classes": 5}
TOKENS = {"qkv_tokens": [24, 8], "proj_tokens": 16, "ffn_tokens": 48}


def computed(choice: str, drop: Tensor, compiled: bool = False, **keys) -> list[Tensor]:
    pattention.CHOICE = choice
    model = ImageModel(ModelConfig(**SHAPE, **TOKENS, **keys), seed=3)
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    pixels = torch.randn(4, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    logits = model(pixels, drop=drop)
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


def far(compiled: bool = False, **keys) -> float:
    drop = torch.tensor([[[1.25, 0, 1, 1], [0, 1, 1.5, 1]], [[2, 1, 0, 1], [1, 0.5, 1, 0]]])
    pairs = zip(computed("triton", drop, compiled, **keys), computed("reference", drop, **keys), strict=True)
    return max(((one - other).norm() / other.norm()).item() for one, other in pairs)


if __name__ == "__main__":
    ran, plain = [], Block.fused_forward
    Block.fused_forward = lambda self, *known: ran.append(self) or plain(self, *known)
    found = {"learned": far(), "compiled": far(compiled=True), "rotary": far(positions="rotary", rotary_fraction=1.0)}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    json.dump({**found, "fused": len(ran), "graphs": graphs}, sys.stdout)
