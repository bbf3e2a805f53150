"""Next-token prediction on prepared text: the task of language models."""

import functools
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tokenformer.config import Config
from tokenformer.data.loader import Batch
from tokenformer.data.text.samples import open_sets, text_loader, text_tokenizer
from tokenformer.data.text.tokenizer import padded_vocab
from tokenformer.errors import UserError
from tokenformer.parallel.mesh import Place
from tokenformer.train.task import Task


class LanguageTask(Task):
    """Documents cut into samples of the model's context; the loss is over all labels that count."""

    unit = "tokens"

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        super().__init__(config, place, device)
        c = config
        times = c.steps // c.validation.every + 1 if c.validation.every else 1
        if c.data.images is not None:
            raise UserError("data.images is given, but this is no image model: remove it, or set model.of=image")
        if c.train.drop_path:
            raise UserError(f"train.drop_path is {c.train.drop_path}, but this is no image model: remove it")
        sets = open_sets(c.data, c.model.vocab)
        self.tokenizer = text_tokenizer(c.data, sets)
        load = functools.partial(text_loader, c.data, sets=sets, context=c.model.context, seed=c.seed, **self.cut)
        self.loader = load(batch=self.batch, samples=c.steps * self.batch)
        held, fits = c.model.vocab, padded_vocab(self.tokenizer.vocab_size)
        said = f"the data has a vocabulary of {self.tokenizer.vocab_size} ids but"
        if self.tokenizer.vocab_size > held and c.start:
            raise UserError(f"{said} {c.start} knows {held}: prepare it with the tokenizer of these weights")
        if self.tokenizer.vocab_size > held:
            raise UserError(
                f"{said} model.vocab is {held}: set model.vocab={fits}, or prepare it with another tokenizer"
            )
        if 2 * fits <= held and not c.start:
            warnings.warn(f"{said} model.vocab is {held}: model.vocab={fits} would do", stacklevel=2)
        wanted, epochs = self.held_out_samples, None if len(sets) > 1 else 1  # each held-out sample counts once
        self.held_out = load(batch=wanted, samples=times * wanted, part="validation", epochs=epochs, empty=True)

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
        return {"tokenizer.json": self.tokenizer.to_json()}
