"""Training and measuring of both models of the study on one device: one names icons, the other draws them.

Unusual: icons, captions and their groups are those of experiments/pairs; nothing is read from disk between steps.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import counts
import numpy as np
import torch
import torch.nn.functional as F
from icons import Icons, group_of
from torch import Tensor
from training import augmented, factor, pixels_of

from tokenformer.config import ModelConfig
from tokenformer.config_data import IGNORED
from tokenformer.config_train import OptimizerConfig
from tokenformer.data.images.captions import encode_captions
from tokenformer.infer.draw import Drawer
from tokenformer.infer.sampling import Sampling
from tokenformer.models import CaptionModel, LanguageModel
from tokenformer.models.caption import shifted
from tokenformer.models.draw import picture_sequences
from tokenformer.ops.palette import Codes, find_palette, quantise
from tokenformer.parallel.layout import Layout
from tokenformer.train.optim import Optimizer

OTHERS, SHUFFLES, NO_TEXT = 99, 20, 0.1
PRIOR = 512  # training icons over which p(name) is averaged


@dataclass(frozen=True)
class Arm:
    """One run."""

    what: str  # captions or drawings
    rate: float = 2e-3
    seed: int = 0
    on: str = "validation"  # or test: then it is trained on the validation part too
    double: bool = False  # drawings of twice the side

    @property
    def name(self) -> str:
        return f"{self.what} rate {self.rate:g} seed {self.seed} {self.on}{' double' if self.double else ''}"


@dataclass(frozen=True)
class Size:
    """How large everything is: the study, or the check."""

    caption: ModelConfig
    draw: ModelConfig
    steps: dict[str, int]
    batch: dict[str, int]
    side: int = 16
    decay: float = 0.1


def training_rows(icons: Icons, arm: Arm) -> np.ndarray:
    return icons.rows(*(("train", "validation") if arm.on == "test" else ("train",)))


def fit(model: Any, arm: Arm, size: Size, rows: np.ndarray, loss: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    """Train by Muon; each epoch shows every icon once, in another order. `loss`: the mean over the rows of a batch."""
    random, order = torch.Generator().manual_seed(arm.seed), torch.empty(0, dtype=torch.long)
    steps, batch = size.steps[arm.what], size.batch[arm.what]
    optimizer = Optimizer(Layout(model), OptimizerConfig(kind="muon", rate=arm.rate, weight_decay=size.decay))
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(len(rows), generator=random)
        chosen, order = torch.from_numpy(rows)[order[:batch]], order[batch:]
        loss(chosen, random).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step(arm.rate * factor(step / steps), norm.clamp(min=1.0), (~norm.isfinite()).float())
        model.zero_grad(set_to_none=True)


def texts_of(icons: Icons, rows: Tensor, random: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """Return ids and lengths of one caption of each icon."""
    chosen = rows.numpy(), torch.randint(icons.ids.shape[1], (len(rows),), generator=random).numpy()
    lengths = torch.from_numpy(icons.lengths[chosen])
    return torch.from_numpy(icons.ids[chosen])[:, : int(lengths.max())].to(device), lengths.to(device)


# captions


def letters(labels: Tensor) -> Tensor:
    """Return where the bytes of a word are that only one group of training icons has (`SpellingTokenizer`)."""
    return (labels > 1) & (labels < 258)


def captions(arm: Arm, size: Size, icons: Icons, device: str) -> tuple[CaptionModel, dict[str, Any]]:
    """Train a model that names icons; measure how likely the right names of held-out icons are beside others."""
    model, pixels = CaptionModel(size.caption, seed=arm.seed).to(device), torch.from_numpy(icons.pixels).to(device)

    def loss(rows: Tensor, random: torch.Generator) -> Tensor:
        ids, lengths = texts_of(icons, rows, random, device)
        there = (torch.rand(len(rows), generator=random) > NO_TEXT).to(device)  # the others teach what names are like
        x = augmented(pixels_of(pixels[rows.to(device)]), random)
        ids, labels = shifted(ids, lengths, icons.tokenizer.end_of_document)
        labels = labels.masked_fill(letters(labels) & there[:, None], IGNORED)  # spelling is learned from texts alone
        found = model(ids, x, there, labels=labels)
        return found.loss_sum / found.count

    fit(model, arm, size, training_rows(icons, arm), loss)
    held = icons.rows(arm.on)
    names, groups = icons.names(held), [group_of(name) for name in icons.names(held)]
    ids, lengths = (torch.from_numpy(a).to(device) for a in encode_captions(icons.tokenizer, names, icons.ids.shape[2]))
    ids, labels = shifted(ids[:, : int(lengths.max())], lengths, icons.tokenizer.end_of_document)
    known = labels.masked_fill(letters(labels), IGNORED)  # words that two groups share, and where another one is
    some = np.random.default_rng(0).permutation(training_rows(icons, arm))[:PRIOR]
    x, seen = (pixels_of(pixels[torch.from_numpy(rows).to(device)]) for rows in (held, some))

    def likely(labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p of each name given each icon (the mean over it and its mirror image), and given any icon."""
        own = torch.stack([model.likelihoods(view, ids, labels) for view in (x, x.flip(3))]).mean(0)
        return own, model.likelihoods(seen, ids, labels).logsumexp(0)

    with torch.no_grad():
        (whole, any_whole), (part, any_part) = likely(labels), likely(known)
        prior = -F.cross_entropy(model(ids).logits.mT, labels, reduction="none").sum(1)
    ways = {"likelihood": whole, "per_token": whole / lengths, "ratio": whole - prior}
    ways |= {"marginal": whole - any_whole, "shared": part - any_part}
    return model, {way: ranks(score.cpu().numpy(), groups) for way, score in ways.items()}


def ranks(score_IN: np.ndarray, groups: list[str]) -> dict[str, float]:
    """Return in which share of images the right name is first among it and 99 of other groups, the mean over all draws
    of these, and with images shuffled (the mean of 20 orders). A name that scores as high as the right one comes before
    it.
    """
    random, count = np.random.default_rng(20241118), len(groups)
    other = np.array([[a != b for b in groups] for a in groups])
    found = []
    for image in [np.arange(count), *(_deranged(other, random) for _ in range(SHUFFLES))]:
        first = 0.0
        for icon in range(count):
            row = score_IN[image[icon]]
            lower, every = int((row[other[icon]] < row[icon]).sum()), int(other[icon].sum())
            drawn = min(OTHERS, every)
            first += math.comb(lower, drawn) / math.comb(every, drawn)
        found.append(first / count)
    return {"first": found[0], "shuffled": float(np.mean(found[1:]))}


def _deranged(other: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return an order in which every icon has an image of another group."""
    order = random.permutation(len(other))
    for icon in range(len(order)):
        if not other[icon, order[icon]]:
            place = random.choice(np.nonzero(other[icon, order] & other[:, order[icon]])[0])
            order[icon], order[place] = order[place], order[icon]
    return order


# drawings


def drawings(arm: Arm, size: Size, icons: Icons, device: str) -> tuple[LanguageModel, dict[str, Any]]:
    """Train a model that draws; measure the bits of held-out icons, beside counts, and what it draws."""
    rows, held, side = training_rows(icons, arm), icons.rows(arm.on), size.side * (1 + arm.double)
    small = F.avg_pool2d(torch.from_numpy(icons.pixels).permute(0, 3, 1, 2).float(), icons.pixels.shape[1] // side)
    small = small.round().to(torch.uint8).permute(0, 2, 3, 1)
    colours = size.draw.added_vocab - 1
    palette = find_palette([small[torch.from_numpy(rows)].numpy()], colours)
    codes = quantise(small, palette)
    config = dataclasses.replace(size.draw, context=side * side + icons.ids.shape[2])
    model = LanguageModel(config, seed=arm.seed).to(device)
    model.codes, first, end = Codes(palette, side), model.config.vocab, icons.tokenizer.end_of_document
    every = codes.to(device)

    def loss(chosen: Tensor, random: torch.Generator) -> Tensor:
        ids, lengths = texts_of(icons, chosen, random, device)
        lengths = torch.where((torch.rand(len(chosen), generator=random) < NO_TEXT).to(device), 1, lengths)
        drawn = every[chosen.to(device)].unflatten(1, (side, side))
        mirror = (torch.rand(len(chosen), generator=random) < 0.5).to(device)
        drawn = torch.where(mirror[:, None, None], drawn.flip(2), drawn).flatten(1)
        ids, labels = picture_sequences(ids, lengths, drawn, end, first)
        out = model(ids, labels=labels, switches={"draw": torch.ones(len(ids), device=device)})
        return out.loss_sum / out.count

    fit(model, arm, size, rows, loss)
    text = (torch.from_numpy(a[held, 0]).to(device) for a in (icons.ids, icons.lengths))
    ids, lengths = text
    groups = np.array([group_of(name) for name in icons.names(held)])
    order = torch.from_numpy(_deranged(groups[:, None] != groups, np.random.default_rng(1))).to(device)
    right, wrong, none = (
        bits(model, *some, every[torch.from_numpy(held).to(device)], end)
        for some in ((ids, lengths), (ids[order], lengths[order]), (ids, torch.ones_like(lengths)))
    )
    gain = (wrong - right).numpy()
    pictures = codes.view(-1, side, side).numpy()
    validation = pictures[icons.rows("validation")] if arm.on == "test" else pictures[held]
    facts = {"bits": right.mean().item(), "bits_shuffled": wrong.mean().item(), "bits_no_text": none.mean().item()}
    facts |= {"gain": float(gain.mean()), "gain_95": 1.96 * float(gain.std(ddof=1)) / math.sqrt(len(gain))}
    facts |= {
        "counts": counts.order_two(pictures[icons.rows("train")], validation, pictures[rows], pictures[held], colours)
    }
    if arm.on == "test":
        facts |= copies(model, icons, rows, held, codes, device)
    return model, facts


@torch.no_grad()
def bits(model: LanguageModel, ids: Tensor, lengths: Tensor, codes: Tensor, end: int) -> Tensor:
    """Return the bits of a code of each picture, given its text."""
    found = []
    for some in torch.arange(len(ids)).split(64):
        x, labels = picture_sequences(ids[some], lengths[some], codes[some], end, model.config.vocab)
        logits = model(x, switches={"draw": torch.ones(len(x), device=x.device)}).logits
        loss = F.cross_entropy(logits.mT, labels, reduction="none").sum(1) / codes.shape[1] / math.log(2)
        found.append(loss.cpu())
    return torch.cat(found)


def copies(model: LanguageModel, icons: Icons, rows: np.ndarray, held: np.ndarray, codes: Tensor, device: str) -> dict:
    """Draw every held-out caption once; return the shares of exact copies, and how near training icons are."""
    drawer, drawn = Drawer(model.eval(), icons.tokenizer), []
    for some in np.array_split(held, max(1, len(held) // 64)):
        texts = [icons.captions[row][0] for row in some]
        drawn.append(drawer.draw(texts, Sampling(temperature=1.0), guidance=2.0, seeds=some.tolist()))
    made = quantise(torch.from_numpy(np.concatenate(drawn)), model.codes.palette)
    known = codes[torch.from_numpy(rows)]
    known = torch.cat([known, known.unflatten(1, (model.codes.side,) * 2).flip(2).flatten(1)])  # mirrored ones too
    near = torch.stack([(one == known).float().mean(1).max() for one in made])
    real = torch.stack([(one == known).float().mean(1).max() for one in codes[torch.from_numpy(held)]])
    return {
        "drawn": len(made),
        "copies": (near == 1).float().mean().item(),
        "nearest": near.mean().item(),
        "nearest_of_held_out": real.mean().item(),
        "pictures": made[:24].tolist(),
        "palette": model.codes.palette.tolist(),
        "texts": [icons.captions[row][0] for row in held[:24]],
    }


def train(arm: Arm, size: Size, icons: Icons, device: str) -> dict[str, Any]:
    begun = time.process_time()
    model, facts = {"captions": captions, "drawings": drawings}[arm.what](arm, size, icons, device)
    facts |= {"parameters": model.cost().parameters, "icons": len(training_rows(icons, arm))}
    facts |= {"held_out": len(icons.rows(arm.on)), "steps": size.steps[arm.what]}
    return {**dataclasses.asdict(arm), **facts, "cpu_seconds": time.process_time() - begun}
