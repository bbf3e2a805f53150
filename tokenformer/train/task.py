"""What differs between tasks: how to make the model and the data, how a batch becomes a loss, how to validate.

Here language modelling; the trainer knows nothing of it.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from tokenformer.config import Config, ModelConfig
from tokenformer.data.loader import Batch, Loader
from tokenformer.data.tokenizer import padded_vocab
from tokenformer.errors import UserError
from tokenformer.models import LanguageModel, init_weights

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


class LanguageTask:
    """Next-token prediction on prepared text. Making one opens and checks the data and writes nothing."""

    def __init__(self, config: Config, rank: int, world: int) -> None:
        c = self.config = config
        assert c.batch is not None  # settled by the trainer
        wanted = c.validation.samples if c.validation.batches is None else c.validation.batches * c.batch
        times = c.steps // c.validation.every + 1 if c.validation.every else 1
        blended = isinstance(c.data.path, dict) and len(c.data.path) > 1
        load = functools.partial(
            Loader, c.data, context=c.model.context, micro_batch=c.micro_batch, rank=rank, world=world, seed=c.seed
        )
        self.loader = load(batch=c.batch, samples=c.steps * c.batch, vocab=c.model.vocab)
        self.tokenizer = self.loader.tokenizer
        if self.tokenizer.vocab_size > c.model.vocab:
            raise UserError(
                f"the data has a vocabulary of {self.tokenizer.vocab_size} ids but model.vocab is {c.model.vocab}: "
                f"set model.vocab={padded_vocab(self.tokenizer.vocab_size)}, or prepare it with another tokenizer"
            )
        epochs = None if blended else 1  # of held-out text each sample counts once
        self.held_out = load(batch=wanted, samples=times * wanted, part="validation", epochs=epochs, allow_empty=True)
        self.micro_batches = self.loader.micro_batches  # of a step, on this rank
        self.tokens_per_step = c.batch * c.model.context

    def build(self, config: ModelConfig, device: torch.device, fill: bool = True) -> LanguageModel:
        """The model on a device; without `fill` its values are still to come (from a checkpoint)."""
        with torch.device("meta"):
            model = LanguageModel(config)
        model.to_empty(device=device)
        model.compute_dtype = COMPUTE[self.config.train.precision]
        if fill:
            init_weights(model, model.config, self.config.seed)
            if self.config.start:
                start_from(model, self.config.start)
        return model

    def batches(self) -> Iterator[Batch]:
        """The micro-batches of this rank, one after the other, without end."""
        return iter(self.loader)

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum over the labels that count, and how many those are."""
        device, documents = model.embedding.weight.device, batch.documents
        ids, labels = (t.to(device, non_blocking=True) for t in (batch.ids, batch.labels))
        documents = None if documents is None else documents.to(device, non_blocking=True)
        out = model(ids, labels=labels, documents=documents)
        return out.loss_sum, out.count

    @torch.no_grad()
    def validate(self, model: LanguageModel) -> float | None:
        """Mean loss over the same samples of the held-out part each time; None where there is no such part."""
        if not self.held_out.samples:
            return None
        total, count = torch.zeros(2, device=model.embedding.weight.device)
        self.held_out.samples_seen = 0
        for batch in self.held_out:
            loss_sum, labels = self.loss(model, batch)
            total, count = total + loss_sum, count + labels
            if batch.last:
                break
        return (total / count).item()

    def sample(self, model: LanguageModel) -> str:
        """A short text, by the model's reference generation."""
        v, device = self.config.validation, model.embedding.weight.device
        ids = torch.tensor([self.tokenizer.encode(v.prompt) or [self.tokenizer.end_of_document]], device=device)
        with torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
            return self.tokenizer.decode(model.generate(ids, v.generate, v.temperature, self.config.seed)[0].tolist())


@torch.no_grad()
def start_from(model: LanguageModel, source: str) -> None:
    """Values from other weights. Parameter tokens of a smaller model fill the first rows, the rest keeps its initial

    values and τ follows the new number: the official `pretrain_partial_init`, which does not keep the function.
    """
    from tokenformer import hub

    mine = dict(model.named_parameters())
    try:
        other = hub.load(source)
    except UserError as error:
        raise UserError(f"start (official: pretrain_partial_init): {error}") from None
    for name, tensor in other.named_parameters():
        own = mine.get(name)
        fits = own is not None and own.shape[1:] == tensor.shape[1:] and len(own) >= len(tensor)
        if own is None or not fits or (own.shape != tensor.shape and not name.endswith("_tokens")):
            raise UserError(
                f"start: {name} of {source} is {list(tensor.shape)}, which does not fit into this model's "
                f"{'missing one' if own is None else list(own.shape)}: only the number of parameter tokens may differ"
            )
        own[: len(tensor)].copy_(tensor)
