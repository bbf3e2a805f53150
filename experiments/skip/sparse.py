"""A packed model whose value tokens can be left out, and what that costs. Legend: T rows, M members (q, k, v), N tokens
of each, E output dim; S = Θ(x·Kᵀ).
"""

import functools
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenformer.infer import Engine, Sampling
from tokenformer.infer.engine import OWN_TEXT
from tokenformer.infer.packed import Packed, PackedTokens
from tokenformer.infer.quantised import rounded
from tokenformer.infer.skipping import find_range, skipping

METHODS = ("plain", "constant", "token", "energy")
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
KINDS = ("query", "key", "value", "proj", "ffn")
SCOPES = {"all": "one for all", "each": "one per projection"}
SAMPLES = 400_000  # numbers per projection from which thresholds are taken


class Skip(NamedTuple):
    """|S − middle| · factor < threshold counts as its centre."""

    middle_M1: Tensor
    factor_MN: Tensor
    threshold_M1: Tensor
    centre_MN: Tensor

    def small(self, weight_TMN: Tensor) -> Tensor:
        return (weight_TMN - self.middle_M1).abs() * self.factor_MN < self.threshold_M1


class Sparse:
    """A `PackedTokens` that leaves tokens out while `skip` is set."""

    def __init__(self, packed: PackedTokens, layer: int, kinds: Sequence[str]) -> None:
        self.packed, self.layer, self.kinds = packed, layer, kinds
        self.norm_MN = packed.value_MNE.float().norm(dim=-1)
        self.watching, self.samples = False, []
        self.skip: Skip | None = None
        self.skipped_M, self.rows = torch.zeros(len(kinds), dtype=torch.double), 0

    def __call__(self, x: Tensor, switches: Any = None) -> Tensor:
        weight_TMN = self.packed.weights(x).flatten(0, -3)
        if self.watching:
            self.watch(weight_TMN)
        if self.skip is not None:
            small_TMN = self.skip.small(weight_TMN)
            self.skipped_M += small_TMN.sum((0, 2)).cpu() / small_TMN.shape[2]
            self.rows += len(small_TMN)
            weight_TMN = torch.where(small_TMN, self.skip.centre_MN, weight_TMN)
        out_MTE = torch.bmm(weight_TMN.to(self.packed.value_MNE.dtype).transpose(0, 1), self.packed.value_MNE)
        return out_MTE.unflatten(1, x.shape[:-1])

    def watch(self, weight_TMN: Tensor) -> None:
        order = torch.randperm(len(weight_TMN), device=weight_TMN.device)
        self.samples.append(weight_TMN[order[: max(1, len(weight_TMN) // 32)]])

    def settle(self) -> None:
        """Make a sample of what was seen."""
        self.watching, sample_TMN = False, torch.cat(self.samples)
        order = torch.randperm(len(sample_TMN), device=sample_TMN.device)
        self.sample_TMN, self.samples = sample_TMN[order[: max(1, SAMPLES // sample_TMN.shape[2])]], []

    def choose(self, method: str, share: float, everywhere: Tensor | None) -> Skip:
        """Return what to skip so that it is this share; with thresholds from values of `everywhere`, or from these."""
        sample_MS = self.sample_TMN.transpose(0, 1).flatten(1) if everywhere is None else everywhere[None]
        one_MN, zero_MN = torch.ones_like(self.norm_MN), torch.zeros_like(self.norm_MN)
        if method == "plain":
            threshold = torch.stack([torch.quantile(some.abs(), share) for some in sample_MS])
            return Skip(zero_MN[:, :1], one_MN, threshold[:, None], zero_MN)
        found = [torch.stack(find_range(some, share)) for some in sample_MS]
        low, high, _ = (ends.expand(len(one_MN), 1) for ends in torch.stack(found, 1)[:, :, None])
        middle, threshold = (low + high) / 2, (high - low) / 2
        skip = Skip(middle, one_MN, threshold, zero_MN)
        if method == "energy":
            factor_MN = self.norm_MN / self.norm_MN.mean(-1, keepdim=True)
            gaps = ((self.sample_TMN - middle).abs() * factor_MN).transpose(0, 1).flatten(1)
            threshold = torch.stack([torch.quantile(some, share) for some in gaps])[:, None]
            skip = Skip(middle, factor_MN, threshold, zero_MN)
        small_TMN = skip.small(self.sample_TMN)
        inside_TMN = torch.where(small_TMN, self.sample_TMN, 0.0)
        centre_M1 = inside_TMN.sum((0, 2))[:, None] / small_TMN.sum((0, 2))[:, None].clamp_min(1)
        count_MN = small_TMN.sum(0)
        # a token that was seldom seen there counts as all of them do, more or less
        own_MN = (inside_TMN.sum(0) + 4 * centre_M1) / (count_MN + 4)
        return skip._replace(centre_MN=centre_M1.expand_as(own_MN) if method == "constant" else own_MN)

    def spread(self) -> Iterator[dict]:
        """Tell how S is distributed in each projection."""
        for i, kind in enumerate(self.kinds):
            active_TN = self.sample_TMN[:, i]
            line: dict[str, Any] = {"name": f"spread {self.layer} {kind}", "layer": self.layer, "kind": kind}
            line |= {"average": active_TN.mean().item(), "rms": active_TN.square().mean().sqrt().item()}
            line["below"] = {str(t): (active_TN.abs() < t).float().mean().item() for t in (0.05, 0.1, 0.2, 0.5)}
            for method, share in ((method, share) for method in METHODS[:2] for share in SHARES):
                # the share of ‖S·V‖² (as if values were orthogonal) that is lost with so many tokens skipped
                skip = self.choose(method, share, None)
                gap_TN = torch.where(skip.small(self.sample_TMN)[:, i], active_TN - skip.centre_MN[i], 0.0)
                lost = (gap_TN * self.norm_MN[i]).square().sum() / (active_TN * self.norm_MN[i]).square().sum()
                line.setdefault(method, {})[str(share)] = lost.item()
            yield line


@torch.no_grad()
def loss(model: Any, ids_BT: Tensor) -> float:
    total = count = 0.0
    for some in ids_BT.split(max(1, 8192 // ids_BT.shape[1])):
        nats, n = model.loss(model.hidden(some[:, :-1]), some[:, 1:])
        total, count = total + nats.item(), count + n.item()
    return total / count


class Study:
    """One model: each thing is measured of it once, and written to a file."""

    def __init__(self, name: str, model: Any, seen_BT: Tensor, unseen_BT: Tensor, file: Path) -> None:
        self.name, self.unseen_BT, self.file, self.own = name, unseen_BT, file, model
        lines = file.read_text().splitlines() if file.exists() else []
        self.done = {line["name"]: line for line in map(json.loads, lines) if line["model"] == name}
        self.model, self.sparse = Packed(model).model, []
        for layer, block in enumerate(self.model.blocks):
            holders = (block.attention, block.attention.proj, block.ffn)
            for holder, kinds in zip(holders, (KINDS[:3], KINDS[3:4], KINDS[4:]), strict=True):
                holder.packed = Sparse(holder.packed, layer, kinds)
                holder.packed.watching = True
                self.sparse.append(holder.packed)
        torch.manual_seed(0)
        loss(self.model, seen_BT)
        for one in self.sparse:
            one.settle()

    def once(self, name: str, measure: Any) -> float:
        if name not in self.done:
            begun = time.perf_counter()
            line = {"name": name, "model": self.name, **measure(), "seconds": round(time.perf_counter() - begun, 2)}
            with open(self.file, "a") as file:
                file.write(json.dumps(line) + "\n")
            self.done[name] = line
            shown = ", ".join(f"{k} {v:.4f}" for k, v in line.items() if type(v) is float)
            print(f"{self.name}: {name}: {shown}", flush=True)
        return self.done[name].get("loss")

    def skipping(self, method: str, scope: str, share: float, kinds: Sequence[str] = KINDS) -> dict:
        """The loss if this share of the tokens of these kinds is skipped, as far as thresholds tell it beforehand."""
        rows = min(len(one.sample_TMN) for one in self.sparse)
        pool = torch.cat([one.sample_TMN[:rows].flatten() for one in self.sparse])
        pool = pool[torch.randperm(len(pool), device=pool.device)[: 1 << 22]]
        for one in self.sparse:
            skip = one.choose(method, share, pool if scope == "all" else None)
            wanted_M1 = torch.tensor([[kind in kinds] for kind in one.kinds], device=pool.device)
            one.skip = skip._replace(threshold_M1=torch.where(wanted_M1, skip.threshold_M1, 0.0))
            one.skipped_M.zero_()
            one.rows = 0
        found = loss(self.model, self.unseen_BT)
        for one in self.sparse:
            one.skip = None
        skipped = sum(one.skipped_M.sum().item() / one.rows * one.norm_MN.shape[1] for one in self.sparse)
        return {"loss": found, "skipped": skipped / sum(one.norm_MN.numel() for one in self.sparse)}

    def as_generated(self, share: float, fp8: bool) -> dict:
        """The loss with what `generate --skip` does: ranges come from a text that the model writes itself."""
        model = rounded(self.own) if fp8 else self.own
        count = min(OWN_TEXT, model.config.context - 1)
        ids = [0, *Engine(model).generate([[0]], count, Sampling(temperature=1.0))[0].ids]
        sparse, _ = skipping(model, torch.float32, torch.tensor([ids], device=self.unseen_BT.device), share)
        return {"loss": loss(sparse.model, self.unseen_BT)}

    def run(self) -> None:
        self.once("whole", lambda: {"loss": loss(self.model, self.unseen_BT)})
        self.once("fp8", lambda: {"loss": loss(rounded(self.own), self.unseen_BT)})
        for line in (line for one in self.sparse for line in one.spread()):
            self.once(line["name"], lambda line=line: line)
        for method, scope, share in itertools.product(METHODS, SCOPES, SHARES):
            if (method, scope) != ("energy", "all"):  # norms of values are comparable inside a projection only
                self.once(f"{method} {scope} {share}", lambda m=method, s=scope, x=share: self.skipping(m, s, x))
        for share, weights in itertools.product((0.5, 0.6, 0.7), ("fp32", "fp8")):
            measure = functools.partial(self.as_generated, share, weights == "fp8")
            self.once(f"generate {share} {weights}", measure)
        method = min(METHODS, key=lambda method: self.done[f"{method} each 0.5"]["loss"])
        for kind in KINDS:
            self.once(f"{method} only {kind}", lambda kind=kind: self.skipping(method, "each", 0.5, [kind]))

    def report(self) -> None:
        """Print tables in Markdown."""
        whole, count = self.done["whole"]["loss"], self.unseen_BT[:, 1:].numel()

        def more(name: str) -> str:
            return f"{(self.done[name]['loss'] / whole - 1) * 100:+.2f} %"

        eight = self.done["fp8"]["loss"]
        print(f"\n**{self.name}**: loss {whole:.4f} on {count:,} tokens; weights in fp8 {eight:.4f}, {more('fp8')}\n")
        print(f"| thresholds | {' | '.join(f'{s:.0%}' for s in SHARES)} |\n|{'---|' * (len(SHARES) + 1)}")
        for method in METHODS:
            for scope, words in SCOPES.items():
                if f"{method} {scope} 0.5" not in self.done:
                    continue
                names = [f"{method} {scope} {share}" for share in SHARES]
                cells = [f"{more(name)} ({self.done[name]['skipped']:.0%})" for name in names]
                print(f"| {method}, {words} | {' | '.join(cells)} |")
        own = [name for name in self.done if name.startswith("generate ")]
        print(f"\nAs `generate --skip` does it: {', '.join(f'{name[9:]} {more(name)}' for name in own)}")
        only = [name for name in self.done if " only " in name]
        shown = ", ".join(f"{name.split()[2]} {more(name)}" for name in only)
        print(f"\nHalf of the tokens of one kind alone ({only[0].split()[0]}): {shown}\n")
        held = " | ".join(f"{method}, {share:.0%}" for method in METHODS[:2] for share in (0.5, 0.6, 0.7))
        print(f"| lost of the energy: layer, kind | mean of S | below 0.1 | {held} |\n|{'---|' * 9}")
        for d in (line for name, line in self.done.items() if name.startswith("spread ")):
            cells = " | ".join(f"{d[m][str(share)]:.1%}" for m in METHODS[:2] for share in (0.5, 0.6, 0.7))
            print(f"| {d['layer']} {d['kind']} | {d['average']:+.3f} | {d['below']['0.1']:.0%} | {cells} |")
