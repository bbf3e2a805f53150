"""What a step multiplies when a base is frozen. Run as a program it prints one JSON object; with TRITON_INTERPRET=1 and
TOKENFORMER_PATTENTION=triton it does so on the kernels, in the interpreter.
"""

import json

import torch
from torch.utils.flop_counter import FlopCounterMode

from tokenformer.config import ModelConfig
from tokenformer.models import build
from tokenformer.ops.pattention import backend, pattention

IDS = torch.arange(32).view(2, 16)


def layer(keys: bool, values: bool, inputs: bool = True) -> tuple[int, list[torch.Tensor | None]]:
    """Multiply-adds of one Pattention's backward pass, and its gradients."""
    torch.manual_seed(0)
    x, key, value = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64, 64)
    for tensor, learns in ((x, inputs), (key, keys), (value, values)):
        tensor.requires_grad_(learns)
    out = pattention(x, [(key, value, 8.0)])
    with FlopCounterMode(display=False) as count:
        out.square().sum().backward()
    return count.get_total_flops() // (2 * 64**3), [x.grad, key.grad, value.grad]


def step(adapter: bool) -> float:
    """FLOPs of a step of a model with an adapter, of which all learns or the adapter alone."""
    sizes = {"qkv_tokens": [64, 8], "proj_tokens": 64, "ffn_tokens": [128, 8]}
    switch = {"qkv": ["", "a"], "ffn": ["", "a"]}
    model = build(ModelConfig(layers=2, dim=64, heads=2, vocab=64, context=16, switch=switch, **sizes))
    model.active = {"a": 1.0}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not adapter or ".segments.1." in name)
    with FlopCounterMode(display=False) as count:
        model(IDS, labels=IDS).loss_sum.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    return count.get_total_flops()


def main() -> None:
    every, full = layer(True, True)
    cases = {"keys": (False, True), "values": (True, False), "both": (False, False)}
    found = {name: layer(*learns) for name, learns in cases.items()}
    saved = {name: every - count for name, (count, _) in found.items()}
    saved["inputs"] = every - layer(True, True, inputs=False)[0]
    for _, grads in found.values():
        assert all(grad is None or torch.equal(grad, own) for grad, own in zip(grads, full, strict=True))
    print(json.dumps({"backend": backend(torch.zeros(1)), "saved": saved, "step": step(True) / step(False)}))


if __name__ == "__main__":
    main()
