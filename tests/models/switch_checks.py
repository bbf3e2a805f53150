"""How far a model with switches is from models without them: loss and all gradients. Run as a program it prints one
JSON object: on the reference, or (TRITON_INTERPRET=1 TOKENFORMER_PATTENTION=triton) on the kernels in the interpreter.
"""

import json
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tokenformer import models
from tokenformer.config import LayerOverride, ModelConfig
from tokenformer.models.names import parse
from tokenformer.ops import pattention
from tokenformer.ops.pattention import THETAS, backend

SHAPE = {"layers": 2, "dim": 32, "heads": 2, "vocab": 32, "context": 16, "proj_tokens": 24, "qkv_tokens": [24, 16]}
PLAIN = ModelConfig(**SHAPE | {"qkv_tokens": 24}, ffn_tokens=[24, 40])
SWITCHED = {
    "ffn_tokens": [24, 40, 8],
    "switch": {"qkv": ["", "image"], "ffn": ["", "", "image"]},
    "layer_overrides": {1: LayerOverride(ffn_tokens=[24, 40, 8, 8], switch={"ffn": ["", "", "image", "other"]})},
}
IDS = torch.randint(32, (2, 6), generator=torch.Generator().manual_seed(0))


def model(**keys) -> nn.Module:
    made = models.build(ModelConfig(**SHAPE, **SWITCHED, **keys), seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2)
    return made


def switched_by(net: nn.Module, name: str) -> str:
    """The switch of a parameter; "" where it always counts."""
    found = parse(name, net.ends)
    return net.blocks[found.layer].get_submodule(found.part).switch[found.segment] if found.token else ""


def gradients(net: nn.Module, ids: Tensor, **known) -> dict[str, Tensor]:
    net.zero_grad()
    loss = net(ids, labels=ids.roll(-1, 1), **known).loss_sum
    loss.backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def far(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    loss = ((found["loss"] - wanted["loss"]) / wanted["loss"]).abs().item()
    largest = max(w.norm() for name, w in wanted.items() if name != "loss")  # small ones nearly cancel: few digits
    return max(loss, *(((found[n] - w).norm() / largest).item() for n, w in wanted.items() if n != "loss"))


def absent(theta: str) -> float:
    """Without its switches the model is the one without those segments, to the last bit."""
    net, plain = model(theta=theta), models.build(ModelConfig(**{**PLAIN.__dict__, "theta": theta}))
    plain.load_state_dict({name: p for name, p in net.state_dict().items() if name in dict(plain.named_parameters())})
    wanted = gradients(plain, IDS)
    found = gradients(net, IDS)
    assert all(torch.equal(found[name], w) for name, w in wanted.items()) and found.keys() == wanted.keys()
    return 0.0


def weighted(theta: str) -> float:
    """Each sample has its own weight: as if the values of the switched segments were multiplied by it.

    Returns how much further than that model without switches (the control) the switched one is from the control in
    float64. The control's own gradients are up to 5e-6 off in fp32, on the reference as on the kernels: the gradient
    of the embedding passes through LayerNorms of small rows. So 1e-6 can be asked of what a switch adds to that.
    """
    net, weights = model(theta=theta), torch.tensor([0.5, 2.0])
    found = gradients(net, IDS, switches={"image": weights})
    assert not any(switched_by(net, name) == "other" for name in found if name != "loss")
    single = control(net, found, theta, weights, torch.float32)
    chosen, pattention.CHOICE = pattention.CHOICE, "reference"  # the kernels have no float64
    double = control(net, found, theta, weights, torch.float64)
    pattention.CHOICE = chosen
    loss = ((found["loss"] - double["loss"]) / double["loss"]).abs().item()
    return max(loss, far(found, double) - far(single, double))


def control(net: nn.Module, found: Iterable[str], theta: str, weights: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Loss and gradients of the model without switches whose values are multiplied by each sample's weight."""
    override = LayerOverride(ffn_tokens=[24, 40, 8, 8], switch={"ffn": ["", "", "", "other"]})
    config = ModelConfig(**SHAPE, theta=theta, ffn_tokens=[24, 40, 8], layer_overrides={1: override})
    values = [name for name in found if name.endswith("value_tokens") and switched_by(net, name)]
    summed: dict[str, Tensor] = {}
    for row, weight in enumerate(weights.tolist()):
        same = models.build(config)
        same.load_state_dict(dict(net.state_dict()))  # plain: its metadata names other switches
        same.to(dtype)
        with torch.no_grad():
            for name in values:
                same.get_parameter(name).mul_(weight)
        for name, grad in gradients(same, IDS[row : row + 1]).items():
            summed[name] = summed.get(name, 0) + grad * (weight if name in values else 1)
    return summed


def layer(theta: str) -> float:
    """One Pattention: its output, and the gradients of its input, keys, values and weights."""
    torch.manual_seed(0)
    net = models.Pattention(32, 24, [40, 16], theta=theta, switch=["", "image"])
    parts = [models.Pattention(32, 24, n, theta=theta) for n in (40, 16)]
    for part, segment in zip(parts, net.segments, strict=True):
        part.segments[0].load_state_dict(segment.state_dict())
    x, weights, back = torch.randn(2, 5, 32), torch.tensor([0.5, 2.0]), torch.randn(2, 5, 24)
    found, wanted = [], []
    for results, call, nets in (
        (found, lambda x, w: net(x, switches={"image": w}), [net]),
        (wanted, lambda x, w: parts[0](x) + w[:, None, None] * parts[1](x), parts),
    ):
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        inputs += [p for one in nets for p in one.parameters()]
        out = call(*inputs[:2])
        results += [out.detach(), *torch.autograd.grad(out, inputs, back)]
    return max(((f - w).norm() / w.norm()).item() for f, w in zip(found, wanted, strict=True))


def learned() -> float:
    """A weight may need a gradient: it is what moving it gives."""
    net = model().double() if backend(torch.zeros(1)) == "reference" else model()
    weights = torch.tensor([0.5, 2.0], dtype=net.embedding.weight.dtype, requires_grad=True)
    net(IDS, labels=IDS.roll(-1, 1), switches={"image": weights}).loss_sum.backward()
    step, grads = 1e-2, []
    for i in range(2):
        ends = [weights.detach() + sign * step * torch.eye(2, dtype=weights.dtype)[i] for sign in (1, -1)]
        up, down = (net(IDS, labels=IDS.roll(-1, 1), switches={"image": w}).loss_sum.item() for w in ends)
        grads.append((up - down) / (2 * step))
    return ((weights.grad - torch.tensor(grads)).norm() / weights.grad.norm()).item()


def main() -> None:
    found = {f"{case.__name__} {theta}": case(theta) for theta in THETAS for case in (absent, layer, weighted)}
    print(json.dumps({"backend": backend(torch.zeros(1, requires_grad=True)), "learned": learned(), "far": found}))


if __name__ == "__main__":
    main()
