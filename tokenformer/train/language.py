"""Next-token prediction on prepared text: the task of language models."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tokenformer.config import Config
from tokenformer.data.loader import Batch
from tokenformer.data.text.samples import training_text
from tokenformer.data.text.tokenizer import with_end
from tokenformer.errors import UserError
from tokenformer.parallel.mesh import Place
from tokenformer.train.task import Task, check_switches


class LanguageTask(Task):
    """Documents cut into samples of the model's context; the loss is over all labels that count."""

    unit = "tokens"

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        super().__init__(config, place, device)
        if config.data.images is not None:
            raise UserError("data.images is given, but this is no image model: remove it, or set model.of=image")
        if config.train.drop_path:
            raise UserError(f"train.drop_path is {config.train.drop_path}, but this is no image model: remove it")
        if config.train.freeze != "none":
            raise UserError(
                "train.freeze is language, and text has no switch: nothing would learn: set train.freeze=none"
            )
        check_switches(config)
        self.tokenizer, self.loader, self.held_out = training_text(config, **self.cut)

    @property
    def units_per_step(self) -> int:
        return self.batch * self.config.model.context

    def flops(self, cost: Any) -> float:
        return cost.training_flops(self.config.model.context)

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = model(batch["ids"], labels=batch["labels"], documents=batch.get("documents"))
        return out.loss_sum, out.count

    def gradients(
        self, model: Any, batches: Iterator[Batch], scale: Tensor, pipeline: Any = None
    ) -> tuple[Tensor, Tensor]:
        if pipeline is None:
            return super().gradients(model, batches, scale)
        return pipeline.gradients([self.on_device(next(batches)) for _ in range(self.loader.micro_batches)], scale)

    def measures(self, model: Any) -> dict[str, float]:
        found = super().measures(model)
        return {**found, "perplexity": math.exp(min(found["loss"], 700))} if found else {}

    def sample(self, model: Any) -> dict[str, str | bytes]:
        """Return a short text, by the model's reference generation."""
        v = self.config.validation
        if not v.generate:
            return {}
        ids = torch.tensor([self.tokenizer.encode(v.prompt) or [self.tokenizer.end_of_document]], device=self.device)
        with torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
            made = model.generate(ids, v.generate, v.temperature, self.config.seed)
        return {"text": self.tokenizer.decode(made[0].tolist())}

    def files(self) -> dict[str, str]:
        return {"tokenizer.json": with_end(self.tokenizer)}
