"""`train.precision: fp8`: what it cannot do, which products it computes in fp8, and weights quantised once per step.

Unusual: which shapes get faster is measured when a run begins, and written to its config.yml: resuming never measures.
Validation and samples are computed in bf16, as everything that uses the model after training.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer.config import Config, ModelConfig
from tokenformer.errors import UserError
from tokenformer.models.layers import Linear, Pattention, project
from tokenformer.models.trunk import MLP, Block
from tokenformer.ops import fp8
from tokenformer.ops.pattention import backend
from tokenformer.parallel.hardware import Hardware
from tokenformer.parallel.mesh import Place
from tokenformer.strict import need

LEAST = (8, 9)  # compute capability of GPUs with fp8 products
Layers = Sequence[Pattention | Linear]


class Products:
    """Computes layers of one input in fp8, and keeps their quantised weights where several micro-batches share them."""

    def __init__(self, compiler: str) -> None:
        self.compiler, self.kept, self.centred = compiler, [], False

    def pattention(self, x: Tensor, members: Any, theta: str) -> list[Tensor]:
        if backend(x, theta=theta) == "triton":
            return self.fused(x, members, theta)
        return fp8.reference(x, members, theta)

    def fused(self, x: Tensor, members: Any, theta: str, centred: bool = False, **options: Any) -> list[Tensor]:
        from tokenformer.ops.kernels import fp8 as kernels

        fits = len(self.kept) == 1 + 3 * (1 + len(members)) and centred == self.centred
        return kernels.fused(x, members, theta, self.kept if fits else (), centred=centred, **options)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return fp8.product(x, weight, emulated=x.device.type != "cuda")

    def keep(self, layers: Sequence[Pattention], dtype: torch.dtype, centred: bool) -> None:
        """Quantise the weights for all micro-batches of a step."""
        quantised, self.centred = compiled_quantiser(self.compiler), centred
        self.kept = quantised([layer.parts(None) for layer in layers], dtype, centred)


@functools.cache
def compiled_quantiser(compiler: str) -> Callable[..., list[Tensor]]:
    from tokenformer.ops.kernels.fp8 import quantised

    return quantised if compiler == "none" else torch.compile(quantised, backend=compiler, dynamic=False)


def check(config: Config, models: Sequence[ModelConfig], device: torch.device) -> None:
    """Refuse what fp8 cannot do, for all models that a run passes through."""
    if config.train.precision != "fp8":
        return
    instead = "set train.precision=bf16"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"{name} has no fp8 products: {instead}, or train.device=cpu, which emulates them for checks")
    need(config.parallel.token == 1, f"parallel.token splits products that fp8 needs whole: leave it out, or {instead}")
    need(config.model.of != "pair", f"a pair's features are computed twice, which fp8 would round apart: {instead}")
    for trunk in (trunk for model in models for trunk in model.trunks.values() or [model]):
        switched = config.adapter or trunk.switch_names()
        need(not switched, f"fp8 knows no segments with a switch, and no adapters: {instead}")
        sides = {"model.dim": trunk.dim, "the width of keys and values": trunk.head_dim * (trunk.kv_heads or 0)}
        sides |= {"the width of the feed-forward layer": 0 if trunk.kind == "tokenformer" else trunk.mlp_dim}
        for what, side in sides.items():
            need(side % fp8.STEP == 0, f"{what} is {side}, but fp8 needs multiples of {fp8.STEP}: {instead}")
        for layer in range(trunk.layers) if trunk.kind == "tokenformer" else ():
            for which in ("qkv", "proj", "ffn"):
                fp8.scale_of_theta(trunk.theta, [tau for _, tau in trunk.segments(which, layer)])
    for shape in [] if isinstance(config.train.fp8, str) else config.train.fp8:
        known = sorted(shapes(models))
        have = ", ".join(known)
        what = f"train.fp8 names '{shape}', which no model of this run has"
        need(shape in known, f"{what}: give some of {have}, or train.fp8=auto")


def planned(config: Config, models: Sequence[ModelConfig], hardware: Hardware) -> list[str]:
    """Return what `plan` says beside its figures. Refuse what the run would refuse."""
    check(config, models, torch.device("cpu"))
    need(hardware.fp8 > 1, "this hardware has no products in fp8 (hardware.fp8 is 1): set train.precision=bf16")
    rate = f"products in fp8 count {hardware.fp8:g} × as fast as in bf16 (hardware.fp8)"
    return [f"{rate}, in every shape and without casts: a step in fp8 was not measured"]


def as_before(config: Config, before: Config | None) -> Config:
    """Return the config with the shapes that the run chose when it began, unless others are given."""
    if before is None or config.train.fp8 != "auto" or config.train.precision != before.train.precision:
        return config
    return dataclasses.replace(config, train=dataclasses.replace(config.train, fp8=before.train.fp8))


def choose(
    config: Config,
    models: Sequence[ModelConfig],
    device: torch.device,
    compiler: str,
    place: Place,
    say: Callable[[str], None],
) -> Config:
    """Return the config with the shapes that are computed in fp8, and say which they are. The first rank measures."""
    t = config.train
    if t.precision != "fp8":
        return config
    every, chosen, said = shapes(models), t.fp8, ""
    if chosen == "all" or (chosen == "auto" and device.type == "cpu"):
        chosen = sorted(every)
    elif chosen == "auto":
        taken = place.run_on_first(lambda: measure(every, config.micro_batch or 1, device, compiler))
        gains = {name: bf16 / eight for name, (bf16, eight) in taken.items()}
        chosen = [name for name, gain in gains.items() if gain > 1]
        said = " by measurement (" + ", ".join(f"{name} {gain:.2f} ×" for name, gain in gains.items()) + ")"
    tokens = any(isinstance(layers[0], Pattention) for layers, _ in every.values())
    emulated = device.type == "cpu" or (tokens and backend(torch.empty(0, device=device)) == "reference")
    how = "emulated, which is slower than fp32 and is for checks" if emulated else "by the GPU's fp8 units"
    say(f"products in fp8, {how}{said}: {', '.join(chosen) or 'none'}; weight gradients and the head stay in bf16")
    if rest := ", ".join(sorted(every.keys() - set(chosen))):
        say(f"not in fp8: {rest} (train.fp8 chooses)")
    if device.type == "cuda":
        say("the MFU of products in fp8 is against the peak of bf16")
    return dataclasses.replace(config, train=dataclasses.replace(t, fp8=list(chosen)))


def shapes(models: Sequence[ModelConfig]) -> dict[str, tuple[Layers, int]]:
    """Return the layers, without memory, of each shape that these models have, and their positions per sample."""
    found = {}
    for trunk in (trunk for model in models for trunk in model.trunks.values() or [model]):
        with torch.device("meta"):
            for layer in range(trunk.layers):
                for name, layers in groups(Block(trunk.resolved(), layer)):
                    found[name] = layers, trunk.length
    return found


def groups(block: Block) -> Iterator[tuple[str, Layers]]:
    """Yield the layers of a block that share an input, with the name of their shape, such as "ffn 768x3072"."""
    a, ffn = block.attention, block.ffn
    every: dict[str, Any] = {"qkv": [a.query, a.key, a.value], "proj": [a.proj]}
    if isinstance(ffn, MLP):
        every |= {"up": [layer for layer in (ffn.gate, ffn.up) if layer is not None], "down": [ffn.down]}
    else:
        every["ffn"] = [ffn]
    for which, layers in every.items():
        first, wide = layers[0], sum(layer.out_features for layer in layers)
        sizes = [len(s.key_tokens) for s in first.segments] if isinstance(first, Pattention) else [wide]
        yield f"{which} {first.in_features}x{'+'.join(map(str, sizes))}", layers


def attach(block: nn.Module, chosen: Sequence[str], compiler: str) -> None:
    """Let the layers of the chosen shapes compute in fp8."""
    if not isinstance(block, Block):
        raise UserError("train.precision fp8 knows this package's blocks alone: set train.precision=bf16")
    for name, layers in groups(block):
        if name in chosen:
            products = Products(compiler)
            for layer in layers:
                layer.fp8 = products


def keep_weights(model: Any, config: Config, alone: bool) -> None:
    """Quantise all weights once for the micro-batches of a step, where the kernels use them.

    What is sharded is gathered for each micro-batch, and quantised then.
    """
    if config.train.precision != "fp8" or not alone or config.batch == config.micro_batch:
        return
    for trunk in model.trunks().values():
        x = torch.empty(0, dtype=trunk.compute_dtype, device=trunk.norm.weight.device)
        for block in trunk.blocks if backend(x) == "triton" else ():
            for name, layers in groups(block):
                if layers[0].fp8 and isinstance(layers[0], Pattention):
                    centred = layers[0].theta == "l2_norm_gelu" and not name.startswith("proj")
                    with torch.no_grad():
                        layers[0].fp8.keep(layers, x.dtype, centred)


def measure(
    every: dict[str, tuple[Layers, int]], samples: int, device: torch.device, compiler: str
) -> dict[str, tuple[float, float]]:
    """Return the seconds that layers of each shape take in bf16 and in fp8, forward and backward, on a GPU."""
    found = {}
    for name, (layers, length) in sorted(every.items()):
        x = torch.randn(samples * length, layers[0].in_features, device=device, dtype=torch.bfloat16).requires_grad_()
        found[name] = (_seconds(x, layers, None, compiler), _seconds(x, layers, Products(compiler), compiler))
        for layer in layers:
            layer.to(device="meta")
        torch.compiler.reset()  # PyTorch compiles one function a few times only
    return found


def _seconds(x: Tensor, layers: Layers, products: Products | None, compiler: str) -> float:
    for layer in layers:
        layer.to_empty(device=x.device).fp8 = products
    learned = [x, *(p for layer in layers for p in layer.parameters())]
    for parameter in learned[1:]:
        nn.init.normal_(parameter, std=0.02)
    work = project if compiler == "none" else torch.compile(project, backend=compiler, dynamic=False)
    taken = []
    for repeats in (3, 10, 10, 10):  # the first round compiles
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(repeats):
            outputs = work(x, layers)
            torch.autograd.grad(outputs, learned, [torch.ones_like(out) for out in outputs])
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - begun) / repeats)
    return min(taken[1:])
