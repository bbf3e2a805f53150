"""Pipeline stages: a rank holds some of the blocks, the first one the embedding, the last one the head.

Unusual: a stage is the model itself without the blocks of others, so names stay; a tied embedding is held by the first
and the last stage, and its two gradients are added. The schedules are PyTorch's own.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tokenformer.config_data import IGNORED
from tokenformer.models import LanguageModel, Output
from tokenformer.models.names import parse
from tokenformer.parallel.mesh import Place, stages


class Stage(LanguageModel):
    """A part of a model: ids or hidden states in, hidden states or (at the end) the loss sum out."""

    edges: tuple[bool, bool]  # whether it is the first stage, and the last

    def forward(self, x: Tensor, documents: Tensor | None = None, labels: Tensor | None = None) -> Tensor:  # pyrefly: ignore
        if self.edges[0]:
            x = self.embedding(x).to(self.compute_dtype)
        x = self.run(x, self.view(x, documents=documents))
        if not self.edges[1]:
            return x
        assert labels is not None
        return self.loss(x, labels)[0][None]


def layers_of(number: int, layers: int, count: int) -> range:
    """Return the layers of stage `number` of `count`.

    >>> [list(layers_of(n, 5, 2)) for n in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    return range(number * layers // count, (number + 1) * layers // count)


def pipeline_ranks(model: LanguageModel, place: Place) -> dict[str, int]:
    """Return the pipeline rank that holds each parameter (of two, the first)."""
    count, embedding, found = stages(place.degrees, place.config), set(model.embedding.parameters()), {}
    stage_of = {layer: number for number in range(count) for layer in layers_of(number, model.config.layers, count)}
    for name, parameter in model.named_parameters():
        layer = parse(name, model.ends).layer
        end = 0 if parameter in embedding else count - 1
        found[name] = (end if layer is None else stage_of[layer]) % place.degrees.pipeline
    return found


def make_stages(model: LanguageModel, place: Place) -> list[LanguageModel]:
    """Return the stages of this rank, from a whole model on the meta device."""
    count, found = stages(place.degrees, place.config), []
    for number in range(place.pipeline, count, place.degrees.pipeline):
        part: Any = copy.deepcopy(model)
        part.edges = (number == 0, number == count - 1)
        part.blocks = nn.ModuleDict({str(i): part.blocks[i] for i in layers_of(number, model.config.layers, count)})
        if not (part.edges[0] or (part.edges[1] and model.head is None)):
            part.embedding = None
        if not part.edges[1]:
            part.norm = part.head = None
        part.__class__ = type("Stage", (Stage, model.__class__), {})
        found.append(part)
    return found


class Pipeline:
    """Runs the stages of this rank together with those of the other ranks."""

    def __init__(self, parts: Sequence[LanguageModel], place: Place, device: torch.device) -> None:
        self.place, self.device, self.scale = place, device, torch.ones((), device=device)
        self.count, self.ranks = stages(place.degrees, place.config), place.degrees.pipeline
        self.parts = {place.pipeline + i * self.ranks: cast(Stage, part) for i, part in enumerate(parts)}
        self.schedule: Any = None

    def _prepare(self, micro_batches: int) -> Any:
        group = self.place.groups["pipeline"]
        parts = [PipelineStage(p, n, self.count, self.device, group=group) for n, p in self.parts.items()]
        how = {"n_microbatches": micro_batches, "loss_fn": lambda out, _: out.sum() * self.scale, "scale_grads": False}
        if self.place.config.schedule == "interleaved":
            return ScheduleInterleaved1F1B(parts, **how)  # pyrefly: ignore
        return (ScheduleGPipe if self.place.config.schedule == "gpipe" else Schedule1F1B)(parts[0], **how)

    def gradients(self, batches: Sequence[Mapping[str, Tensor]], scale: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients of a step's micro-batches, which are of one size.

        Return the sum of their losses and the number of labels that count, on every rank.
        """
        self.scale = scale
        self.schedule = self.schedule or self._prepare(len(batches))
        more = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        ids, labels = more.pop("ids"), more["labels"]
        losses: list[Tensor] = []
        first, last = 0 in self.parts, self.count - 1 in self.parts
        self.schedule.step(*([ids] if first else []), target=labels if last else None, losses=losses, **more)
        total = torch.stack([loss.detach() for loss in losses]).sum() / scale if last else torch.zeros_like(scale)
        return self.place.sum(total, "pipeline"), (labels != IGNORED).sum()

    def __call__(self, ids: Tensor, *, labels: Tensor, documents: Tensor | None = None) -> Output:
        """Compute the loss of one batch as the whole model would, stage after stage; every rank gets it."""
        x, group = ids, self.place.groups["pipeline"]
        dtype = next(iter(self.parts.values())).compute_dtype or torch.get_default_dtype()
        total = torch.zeros((), device=self.device)
        for number in range(self.count):
            part = self.parts.get(number)
            if part is None:
                continue
            if number:
                x = torch.empty(*labels.shape, part.config.dim, dtype=dtype, device=self.device)
                dist.recv(x, group=group, group_src=(number - 1) % self.ranks)
            x = part(x, documents, labels)
            if number < self.count - 1:
                dist.send(x.contiguous(), group=group, group_dst=(number + 1) % self.ranks)
            else:
                total = x[0]
        return Output(loss_sum=self.place.sum(total.clone(), "pipeline"), count=(labels != IGNORED).sum())
