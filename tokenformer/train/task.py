"""What differs between tasks: how to make the model and the data, how a batch becomes a loss, how to validate.

Here language modelling; the trainer knows nothing of it.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from tokenformer.config import Config, ModelConfig
from tokenformer.data.loader import Batch, Loader
from tokenformer.data.text.tokenizer import padded_vocab
from tokenformer.errors import UserError
from tokenformer.models import LanguageModel, build
from tokenformer.models.init import initial
from tokenformer.ops import pattention
from tokenformer.parallel.layout import Layout
from tokenformer.parallel.mesh import Place
from tokenformer.parallel.parallelize import Source, parallelize
from tokenformer.train.compile import choose_compiler, wrap

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


class LanguageTask:
    """Next-token prediction on prepared text. Making one opens and checks the data and writes nothing."""

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        c, self.place, self.device = config, place, device
        self.config, rank, world = config, place.data_rank, place.data_world
        self.compiler = choose_compiler(c.train, device)
        split = place.degrees.token > 1  # of which there are no kernels yet
        self.pattention = pattention.backend(
            torch.empty(0, dtype=COMPUTE[c.train.precision], device=device), "reference" if split else None
        )
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
        ranks = place.degrees.pipeline
        if ranks > 1 and (self.micro_batches < ranks or self.micro_batches % ranks):
            raise UserError(
                f"a step has {self.micro_batches} micro-batches, not a multiple of the {ranks} ranks of the pipeline: "
                "give another micro_batch or batch"
            )

    def build(self, config: ModelConfig, source: Source | None) -> Layout:
        """The model, laid over the ranks; without a source its values are still to come (from a checkpoint)."""
        with torch.device("meta"):
            model = build(config)
        model.compute_dtype = COMPUTE[self.config.train.precision]
        self.layout = parallelize(
            model,
            self.place,
            self.device,
            source,
            functools.partial(wrap, config=self.config.train, compiler=self.compiler),
        )
        return self.layout

    def dress(self, model: LanguageModel) -> Layout:
        """The same for a model that is there, in one process."""
        for block in model.blocks:
            wrap(block, self.config.train, self.compiler)
        self.layout = Layout(model, self.place)
        return self.layout

    def first_values(self) -> Source:
        """Of a new run: the initialisation, or other weights."""
        config = self.config.model.resolved()
        first = functools.partial(initial, config=config, seed=self.config.seed, ends=LanguageModel.ends)
        return started(config, self.config.start, first) if self.config.start else first

    def batches(self) -> Iterator[Batch]:
        """The micro-batches of this rank, one after the other, without end."""
        return iter(self.loader)

    def gradients(self, model: LanguageModel, batches: Iterator[Batch], scale: Tensor) -> tuple[Tensor, Tensor]:
        """Of a step's micro-batches, by loss × scale: the sum over the labels that count, and how many those are."""
        if self.layout.pipeline is not None:
            step = [self._placed(next(batches)) for _ in range(self.micro_batches)]
            return self.layout.pipeline.gradients(step, scale)
        total = count = torch.zeros((), device=self.device)
        for _ in range(self.micro_batches):
            loss_sum, labels = self.loss(model, next(batches))
            (loss_sum * scale).backward()
            total, count = total + loss_sum.detach(), count + labels
        return total, count

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum over the labels that count, and how many those are."""
        ids, labels, documents = self._placed(batch)
        out = model(ids, labels=labels, documents=documents)
        return out.loss_sum, out.count

    def _placed(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        ids, labels = (t.to(self.device, non_blocking=True) for t in (batch.ids, batch.labels))
        documents = batch.documents
        return ids, labels, None if documents is None else documents.to(self.device, non_blocking=True)

    @torch.no_grad()
    def validate(self, model: LanguageModel) -> float | None:
        """Mean loss over the same samples of the held-out part each time; None where there is no such part."""
        if not self.held_out.samples:
            return None
        total, count = torch.zeros(2, device=self.device)
        self.held_out.samples_seen = 0
        for batch in self.held_out:
            if self.layout.pipeline is not None:
                loss_sum, labels = self.layout.pipeline.evaluate(self._placed(batch))
            else:
                loss_sum, labels = self.loss(model, batch)
            total, count = total + loss_sum, count + labels
            if batch.last:
                break
        total, count = self.place.sum(torch.stack([total, count]))
        return (total / count).item()

    def sample(self, model: LanguageModel) -> str:
        """A short text, by the model's reference generation."""
        v = self.config.validation
        ids = torch.tensor([self.tokenizer.encode(v.prompt) or [self.tokenizer.end_of_document]], device=self.device)
        with torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
            return self.tokenizer.decode(model.generate(ids, v.generate, v.temperature, self.config.seed)[0].tolist())


def started(config: ModelConfig, start: str, first: Source) -> Source:
    """Values from other weights. Parameter tokens of a smaller model fill the first rows, the rest keeps its initial

    values and τ follows the new number: the official `pretrain_partial_init`, which does not keep the function.
    """
    from tokenformer import hub

    with torch.device("meta"):
        mine = dict(build(config).named_parameters())
    try:
        given = {name: tensor.detach() for name, tensor in hub.load(start).named_parameters()}
    except UserError as error:
        raise UserError(f"start (official: pretrain_partial_init): {error}") from None
    for name, tensor in given.items():
        own = mine.get(name)
        fits = own is not None and own.shape[1:] == tensor.shape[1:] and len(own) >= len(tensor)
        if own is None or not fits or (own.shape != tensor.shape and not name.endswith("_tokens")):
            raise UserError(
                f"start: {name} of {start} is {list(tensor.shape)}, which does not fit into this model's "
                f"{'missing one' if own is None else list(own.shape)}: only the number of parameter tokens may differ"
            )

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        values = first(name, shape)
        if name in given:
            values[: len(given[name])] = given[name]
        return values

    return source
