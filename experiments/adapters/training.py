"""Trains the base and tunes it: both texts lie on the device, and a whole step is a CUDA graph.

Unusual: a base is written in bf16, in two files of 10 MB, and read from there by everybody, so that arms of another
call begin with the same values.
"""

import dataclasses
import lzma
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from methods import Arm, Use, tuned, uses_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenformer.config import ModelConfig
from tokenformer.config_train import OptimizerConfig
from tokenformer.models import build
from tokenformer.parallel.layout import Layout
from tokenformer.train.optim import Optimizer
from tokenformer.train.rules.adamw import AdamW

OTHER = {"enwik8": "books", "books": "enwik8"}
WARMUP = 0.05


@dataclass(frozen=True)
class Size:
    """How large everything is: the study, or the check."""

    model: ModelConfig
    base_steps: int
    steps: int
    sequences: int
    held_out: int = 1 << 20  # bytes of each held-out part
    used: int = 64  # sequences of each text by which tokens are chosen
    base_rate: float = 2e-3


class Text:
    """The bytes of a text, on the device: what is trained on, `dev` to choose rates by, and `test`."""

    def __init__(self, name: str, raw: np.ndarray, size: Size, device: str) -> None:
        self.parts = {n: torch.tensor(part, device=device) for n, part in CUTS[name](raw, size.held_out).items()}

    def windows(self, part: str, starts: Tensor, length: int) -> Tensor:
        at = starts[:, None] + torch.arange(length, device=starts.device)
        return self.parts[part][at].long() + 1  # as the byte tokenizer numbers them


def cut_enwik8(raw: np.ndarray, held_out: int) -> dict[str, np.ndarray]:
    """The usual 90 % to train on; `dev` and `test` begin the two halves of the rest."""
    edges = {"dev": len(raw) * 90 // 100, "test": len(raw) * 95 // 100}
    return {"train": raw[: edges["dev"]], **{n: raw[e : e + held_out] for n, e in edges.items()}}


def cut_books(raw: np.ndarray, held_out: int) -> dict[str, np.ndarray]:
    """Of every 57 pieces of 64 KiB one is in `dev` and one in `test`, so something of every book."""
    length = min(65536, len(raw) // 114)
    pieces = np.split(raw, range(length, len(raw), length))
    part = {10: "dev", 28: "test"}
    found: dict[str, list[np.ndarray]] = {"train": [], "dev": [], "test": []}
    for i, piece in enumerate(pieces):
        found[part.get(i % 57, "train")].append(piece)
    return {n: np.concatenate(some)[: None if n == "train" else held_out] for n, some in found.items()}


CUTS = {"enwik8": cut_enwik8, "books": cut_books}


def read(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for name, file in (("enwik8", "enwik8.xz"), ("books", "books.txt.xz")):
        with lzma.open(next(folder.rglob(file))) as stream:
            found[name] = np.frombuffer(stream.read(), dtype=np.uint8)
    return found


class Learner:
    """A model in training: AdamW on what requires gradients, or Muon as the package has it; bf16 on a GPU."""

    def __init__(self, model: Any, text: Text, size: Size, rates: Tensor, seed: int, muon: bool = False) -> None:
        self.model, self.text, self.size, self.rates = model.train(), text, size, rates
        device = rates.device
        self.cuda = device.type == "cuda"
        model.compute_dtype = torch.bfloat16 if self.cuda else None
        self.learning = [p for p in model.parameters() if p.requires_grad]
        random = np.random.Generator(np.random.Philox(key=seed + 1000))
        room = len(text.parts["train"]) - size.model.context - 1
        starts = random.integers(0, room, (len(rates), size.sequences), dtype=np.int64)
        self.starts = torch.from_numpy(starts).to(device)
        self.number, self.loss = torch.zeros(1, dtype=torch.long, device=device), torch.zeros((), device=device)
        if muon:
            self.optimizer: Any = Optimizer(Layout(model), OptimizerConfig(kind="muon", rate=size.base_rate))
            for rule in self.optimizer.rules:
                for group in rule.torch.param_groups if isinstance(rule, AdamW) else ():
                    group["capturable"] = self.cuda
        else:
            self.rate = torch.zeros((), device=device)
            how = {"betas": (0.9, 0.95), "weight_decay": 0.0, "capturable": self.cuda}
            self.optimizer = torch.optim.AdamW(self.learning, lr=self.rate, foreach=self.cuda, **how)

    def step(self) -> None:
        starts = self.starts.index_select(0, self.number)[0]
        ids = self.text.windows("train", starts, self.size.model.context + 1)
        out = self.model(ids[:, :-1], labels=ids[:, 1:])
        loss = out.loss_sum / out.count
        loss.backward()
        rate = self.rates.index_select(0, self.number)[0]
        gradients = [p.grad for p in self.learning if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(self.optimizer, Optimizer):
            self.optimizer.step(rate, norm.clamp(min=1.0), (~norm.isfinite()).float())
        else:
            torch._foreach_div_(gradients, norm.clamp(min=1.0))
            self.rate.copy_(rate)
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.loss.copy_(loss.detach())
        self.number.add_(1)

    def run(self) -> float:
        """Take all steps; return the seconds of a step."""
        steps = len(self.rates)
        if not self.cuda:
            begun = time.monotonic()
            for _ in range(steps):
                self.step()
            return (time.monotonic() - begun) / steps
        kept, self.rates = self.rates, torch.zeros_like(self.rates)
        first = [p.detach().clone() for p in self.learning]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            self.step()
        torch.cuda.synchronize()
        with torch.no_grad():  # as if nothing had been done yet
            self.rates.copy_(kept)
            for tensor in (self.number, *self.state()):
                tensor.zero_()
            for parameter, value in zip(self.learning, first, strict=True):
                parameter.copy_(value)
        torch.cuda.synchronize()
        begun = time.monotonic()
        with torch.cuda.stream(stream):
            for _ in range(steps):
                graph.replay()
        stream.synchronize()
        return (time.monotonic() - begun) / steps

    def state(self) -> list[Tensor]:
        if isinstance(self.optimizer, Optimizer):
            return [t for entry in self.optimizer.state_by_name().values() for t in entry.values()]
        return [t for entry in self.optimizer.state.values() for t in entry.values()]


@torch.no_grad()
def bits(model: Any, text: Text, part: str, size: Size) -> float:
    """Bits per byte of a held-out part, in windows of the context's length."""
    model.eval()
    context, data = size.model.context, text.parts[part]
    starts = torch.arange(0, len(data) - context - 1, context, device=data.device)
    total = count = 0.0
    for some in starts.split(256):
        ids = text.windows(part, some, context + 1)
        out = model(ids[:, :-1], labels=ids[:, 1:])
        total, count = total + out.loss_sum.double(), count + out.count
    return float(total / count) / math.log(2)


class Workshop:
    """What all arms of a process share."""

    def __init__(self, size: Size, raw: dict[str, np.ndarray], out: Path, device: str) -> None:
        self.size, self.out, self.device = size, out, device
        self.texts = {name: Text(name, some, size, device) for name, some in raw.items()}
        self.uses: dict[str, dict[str, Use]] = {}

    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        return {n: {part: bits(model, text, part, self.size) for part in ("dev", "test")}
                for n, text in self.texts.items()}  # fmt: skip

    def train_base(self, name: str) -> dict:
        """Train a model on a text, and write it."""
        begun, size = time.monotonic(), self.size
        model = build(size.model, seed=0).to(self.device)
        share = torch.arange(size.base_steps, device=self.device) / size.base_steps
        shape = torch.minimum((share * size.base_steps + 1) / 20, 2 * (1 - share)).clamp(max=1)
        learner = Learner(model, self.texts[name], size, size.base_rate * shape, seed=0, muon=True)
        seconds = learner.run()
        found = {n: p.detach().bfloat16().cpu() for n, p in model.named_parameters()}
        half = sorted(found)[: len(found) // 2]
        for i, file in enumerate(base_files(self.out, name)):
            save_file({n: t for n, t in found.items() if (n in half) is (i == 0)}, file)
        model.load_state_dict(self.base(name))
        facts = {"parameters": sum(p.numel() for p in model.parameters()), "step_seconds": seconds}
        return {"bits": self.measures(model), **facts, "seconds": time.monotonic() - begun}

    def base(self, name: str) -> dict[str, Tensor]:
        files = [load_file(file, device=self.device) for file in base_files(self.out, name)]
        return {n: t.float() for some in files for n, t in some.items()}

    def uses_of(self, base: str) -> dict[str, Use]:
        """How the base's tokens are used by the text that it was not trained on, and by its own."""
        if base not in self.uses:
            model = build(self.size.model).to(self.device)
            model.load_state_dict(self.base(base))
            random = torch.Generator().manual_seed(0)
            some = {}
            for name, text in self.texts.items():
                room, length = len(text.parts["train"]), self.size.model.context
                starts = torch.randint(room - length, (self.size.used,), generator=random).to(self.device)
                some[name] = text.windows("train", starts, length)
            self.uses[base] = uses_of(model, some[OTHER[base]], some[base])
        return self.uses[base]

    def tune(self, arm: Arm) -> dict:
        begun, size = time.monotonic(), self.size
        model = tuned(size.model, self.base(arm.base), arm, self.uses_of(arm.base))
        share = torch.arange(size.steps, device=self.device) / size.steps
        cosine = 0.5 * (1 + torch.cos(math.pi * (share - WARMUP).clamp(min=0) / (1 - WARMUP)))
        rates = arm.rate * torch.minimum((share + 1 / size.steps) / WARMUP, cosine)
        learner = Learner(model, self.texts[OTHER[arm.base]], size, rates, arm.seed)
        count = sum(p.numel() for p in learner.learning)
        seconds = learner.run()
        facts = {"bits": self.measures(model), "learning": count, "step_seconds": seconds}
        return {**facts, "last_loss": float(learner.loss), "seconds": time.monotonic() - begun}


def base_files(out: Path, name: str) -> list[Path]:
    return [out / f"base-{name}-{half}.safetensors" for half in (1, 2)]


def toy(size: Size) -> Size:
    """Everything small, for the check."""
    c = dataclasses.replace(size.model, layers=2, dim=32, heads=2, context=32, qkv_tokens=64, proj_tokens=64,
                            ffn_tokens=224)  # fmt: skip
    return Size(c.resolved(), base_steps=12, steps=4, sequences=4, held_out=600, used=2)
