"""Ways to tune a model: what learns, and what stays as it was.

Unusual: all of them give the model other segments, which it calls for keys, values and τ, so that no faster path reads
past a method; LoRA is ΔK = s·B·A and ΔV likewise, as peft makes it by `target_parameters`, but can be captured as a
CUDA graph. Legend: N parameter tokens, D dim, R rank.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenformer.adapters import with_segments
from tokenformer.config import PROJECTION_OF, ModelConfig
from tokenformer.models import build
from tokenformer.models.layers import Pattention, Segment
from tokenformer.train.adapting import Base, first_values

ALPHA = 8  # of LoRA, as peft's default; rslora divides it by √R
NOISE = 0.5  # of copied keys, as a share of their RMS
SHARES: dict[str, tuple[int, int]] = {"0.5": (1, 1), "1.3": (3, 2), "5": (10, 9)}  # % → R of attention's and ffn's
NAME = "adapter"


@dataclass(frozen=True)
class Arm:
    """One run of tuning. `share`: the learning parameters in % of the model, of methods that have a size."""

    method: str
    share: str = ""
    rate: float = 1e-3
    keys: str = "fresh"  # of a segment: or copies of those that the new text uses most, plus noise
    place: str = "all"  # of a segment: all projections or ffn
    base: str = "enwik8"  # what the model was trained on; it is tuned to the other text
    seed: int = 0

    @property
    def what(self) -> str:
        """Everything but rate and seed."""
        words = [self.method, f"{self.share} %" if self.share else ""]
        words += ["copied keys" if self.keys == "copies" else "", "in ffn" if self.place == "ffn" else ""]
        return " ".join([w for w in words if w]) + (f" from {self.base}" if self.base != "enwik8" else "")

    @property
    def name(self) -> str:
        return f"{self.what}, rate {self.rate:g}, seed {self.seed}"


class Use(NamedTuple):
    """How much each parameter token of a projection counts: mean |Θ| on the new text, and its TF-IDF."""

    mass_N: Tensor
    score_N: Tensor


class LowRank(nn.Module):
    def __init__(self, segment: Segment, rank: int) -> None:
        super().__init__()
        self.segment, self.scale = segment, ALPHA / math.sqrt(rank)
        for name, weight_ND in (("key", segment.key_tokens), ("value", segment.value_tokens)):
            n, d = weight_ND.shape
            a_RD = nn.init.kaiming_uniform_(torch.empty(rank, d), a=math.sqrt(5))
            setattr(self, f"{name}_a", nn.Parameter(a_RD.to(weight_ND)))
            setattr(self, f"{name}_b", nn.Parameter(torch.zeros(n, rank).to(weight_ND)))

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        key_ND = self.segment.key_tokens + self.scale * (self.key_b @ self.key_a)
        value_ND = self.segment.value_tokens + self.scale * (self.value_b @ self.value_a)
        return key_ND.to(dtype), value_ND.to(dtype), self.segment.tau


class Chosen(nn.Module):
    """Some tokens learn; they are copied into their places at every call."""

    def __init__(self, segment: Segment, rows: Tensor) -> None:
        super().__init__()
        self.segment, self.rows = segment, rows
        self.key, self.value = (nn.Parameter(t[rows].clone()) for t in (segment.key_tokens, segment.value_tokens))

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        key_ND = self.segment.key_tokens.index_copy(0, self.rows, self.key)
        value_ND = self.segment.value_tokens.index_copy(0, self.rows, self.value)
        return key_ND.to(dtype), value_ND.to(dtype), self.segment.tau


class Scaled(nn.Module):
    """IA³ on Θ: each token's activation is multiplied by a number that learns, which is the same as its value."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self.segment, self.factor_N = segment, nn.Parameter(torch.ones_like(segment.value_tokens[:, 0]))

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        value_ND = self.factor_N[:, None] * self.segment.value_tokens
        return self.segment.key_tokens.to(dtype), value_ND.to(dtype), self.segment.tau


def projections(model: Any) -> dict[str, Pattention]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Pattention)}


def ranks(c: ModelConfig, share: str) -> dict[str, int]:
    attention, ffn = SHARES[share]
    return {"qkv": attention, "proj": attention, "ffn": ffn}


def tokens(c: ModelConfig, share: str, place: str = "all") -> dict[str, int]:
    """Parameter tokens of each projection that hold as many numbers as LoRA of this share: R·(N + D) = tokens·D."""
    counts = {which: c.segments(which)[0][0] for which in ("qkv", "proj", "ffn")}
    found = {which: rank * (counts[which] + c.dim) / c.dim for which, rank in ranks(c, share).items()}
    assert all(n == int(n) for n in found.values()), "the model's tokens must be multiples of its dim"
    if place == "ffn":
        return {"ffn": int(3 * found["qkv"] + found["proj"] + found["ffn"])}
    return {which: int(n) for which, n in found.items()}


def tuned(c: ModelConfig, base: dict[str, Tensor], arm: Arm, uses: dict[str, Use]) -> Any:
    """Return the base as this arm begins to tune it: it computes the same, and what learns requires gradients."""
    torch.manual_seed(arm.seed)  # LoRA draws from it
    device = next(iter(base.values())).device
    if arm.method == "segment":
        model = with_segment(c, base, arm, uses)
    else:
        model = build(c).to(device)
        model.load_state_dict(base)
        model.requires_grad_(arm.method == "full")
    if arm.method == "last":
        for part in (model.blocks[-1], model.norm):
            part.requires_grad_(True)
    for name, layer in projections(model).items():
        which = PROJECTION_OF[name.rpartition(".")[2]]
        if arm.method == "lora":
            layer.segments[0] = LowRank(layer.segments[0], ranks(c, arm.share)[which])
        elif arm.method == "chosen":
            rows = uses[name].score_N.topk(tokens(c, arm.share)[which]).indices.sort().values
            layer.segments[0] = Chosen(layer.segments[0], rows)
        elif arm.method == "ia3":
            layer.segments[0] = Scaled(layer.segments[0])
    return model


@torch.no_grad()
def with_segment(c: ModelConfig, base: dict[str, Tensor], arm: Arm, uses: dict[str, Use]) -> Any:
    """An adapter as `tokenformer train` begins it, but for its keys if they are copies."""
    sizes = tokens(c, arm.share, arm.place)
    config = with_segments(c, {(which, i): [n] for which, n in sizes.items() for i in range(c.layers)}, NAME)
    model, device = build(config), next(iter(base.values())).device
    here = {name: tensor.cpu() for name, tensor in base.items()}
    values = first_values(Base(None, here, config, []), arm.seed, model.ends)  # pyrefly: ignore
    for name, parameter in model.named_parameters():
        parameter.copy_(values(name, tuple(parameter.shape)))
        parameter.requires_grad_(name not in base)
    model = model.to(device)
    random = torch.Generator().manual_seed(arm.seed)
    for name, layer in projections(model).items() if arm.keys == "copies" else ():
        for segment, switch in zip(layer.segments, layer.switch, strict=True):
            if switch:
                rows = uses[name].mass_N.topk(len(segment.key_tokens)).indices
                keys_ND = layer.segments[0].key_tokens[rows]
                noise_ND = torch.randn(keys_ND.shape, generator=random).to(keys_ND)
                segment.key_tokens.copy_(keys_ND + NOISE * keys_ND.square().mean().sqrt() * noise_ND)
    model.active = {NAME: 1.0}
    return model


@torch.no_grad()
def uses_of(model: Any, new_BT: Tensor, old_BT: Tensor, batch: int = 8) -> dict[str, Use]:
    """Return how much every token is used: TF is its share of Σ|Θ| on the new text, IDF is log(1 / the share of the old
    text's positions in which it fires, Θ > 1). Θ is dense here, so "fires" needs a bound: scores have RMS 1.
    """
    found: dict[str, list[Tensor]] = {}
    for name, layer in projections(model).items():
        zeros = torch.zeros(len(layer.segments[0].key_tokens), device=new_BT.device)
        found[name] = [zeros, zeros.clone()]
    for at, ids in enumerate((new_BT, old_BT)):

        def watch(layer: Any, inputs: Any, name: str, at: int = at) -> None:
            active_TN = layer.activations(inputs[0].float())[0][1].flatten(0, -2)
            found[name][at] += (active_TN.abs() if at == 0 else (active_TN > 1).float()).sum(0)

        hooks = [
            layer.register_forward_pre_hook(lambda layer, inputs, name=name, watch=watch: watch(layer, inputs, name))
            for name, layer in projections(model).items()
        ]
        for some in ids.split(batch):
            model(some)
        for hook in hooks:
            hook.remove()
    made = {}
    for name, (mass_N, fired_N) in found.items():
        idf_N = ((old_BT.numel() + 1) / (fired_N + 1)).log()
        made[name] = Use(mass_N / new_BT.numel(), mass_N / mass_N.sum() * idf_N)
    return made
