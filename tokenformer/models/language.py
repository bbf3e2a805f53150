"""The language model: embedding, blocks, final norm, output head tied to the embedding.

`forward` with labels returns a loss sum and a count, and never holds all logits.
Legend: B batch, T positions, D dim, W vocabulary.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.models.init import init_weights
from tokenformer.models.layers import Linear, look_up, outside_vocabulary, readable
from tokenformer.models.names import TABLE, Role
from tokenformer.models.trunk import Cache, Trunk, View
from tokenformer.ops.cross_entropy import LOGITS, linear_cross_entropy, summed_loss
from tokenformer.ops.palette import Codes


class Output(NamedTuple):
    """`logits` without labels; `loss_sum` over `count` labels with them."""

    logits: Tensor | None = None
    loss_sum: Tensor | None = None
    count: Tensor | None = None


torch.utils._pytree._register_namedtuple(Output, serialized_type_name="tokenformer.Output")  # for torch.export.save


class LanguageModel(Trunk):
    """A TokenFormer, or a Transformer or Llama to compare with, as its config says.

    Built on the meta device it holds no memory: `to_empty(device=…)`, then `init_weights(model, model.config, seed)`.

    >>> config = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=64, vocab=128)
    >>> model = LanguageModel(config, seed=1)
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 128])
    """

    ends: ClassVar[Mapping[str, Role]] = {
        "embedding.weight": TABLE,
        **Trunk.ends,
        "head.weight": TABLE,
        "added_embedding.weight": TABLE,
        "added_head.weight": TABLE,
    }
    embedding: nn.Embedding

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        table = torch.empty(config.vocab, config.dim)
        super().__init__(config, embedding=nn.Embedding(config.vocab, config.dim, _weight=table))
        self.head = None if config.tied else Linear(config.dim, config.vocab)
        more, dim = config.added_vocab, config.dim
        self.added_embedding = nn.Embedding(more, dim, _weight=torch.empty(more, dim)) if more else None
        self.added_head = Linear(dim, more) if more and not config.tied else None
        self.tokenizer_json: str | None = None  # that lay beside the weights
        self.codes: Codes | None = None  # the colours that its added ids stand for, if it draws (codes.safetensors)
        if table.device.type != "meta":
            init_weights(self, self.config, seed)

    def forward(self, ids: Tensor | None = None, *, labels: Tensor | None = None, **fields: Any) -> Output:
        """`ids` (B, T). `labels` (B, T): the target of each position, -100 = none. The rest: see `hidden`."""
        hidden_BTD = self.hidden(ids, **fields)
        added_WD = self.added_rows(fields.get("switches"), hidden_BTD)
        if labels is None:
            return Output(logits=self.logits(hidden_BTD, added_WD))
        if labels.shape != hidden_BTD.shape[:-1]:
            shapes = f"{tuple(labels.shape)}, but the input {tuple(hidden_BTD.shape[:-1])}"
            raise UserError(f"labels have the shape {shapes}: give each position a label, -100 where there is none")
        if torch.compiler.is_compiling():
            return Output(None, *self.loss(hidden_BTD, labels, added_WD))
        try:
            return Output(None, *self.loss(hidden_BTD, labels, added_WD))
        except IndexError:
            count = self.config.vocab + (0 if added_WD is None else len(added_WD))
            raise outside_vocabulary("labels", labels, count) from None

    def hidden(
        self,
        ids: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        positions: Tensor | None = None,
        **fields: Any,
    ) -> Tensor:
        """The input of the output head: (B, T, D) after the final norm. Give `ids` (B, T) or `embeddings` (B, T, D).

        `positions` (T,) or (B, T). `fields`: those of a `View`, such as documents, mask, cache.
        """
        for name in fields:
            if name not in View._fields[1:]:
                known = ", ".join(["ids", "labels", "embeddings", "positions", *View._fields[1:]])
                raise UserError(f"{type(self).__name__} knows no '{name}': its words are {known}")
        if (ids is None) == (embeddings is None):
            raise UserError("a language model reads ids or embeddings: give one of them")
        found = self.look_up(ids, fields.get("switches")) if embeddings is None else embeddings
        x_BTD = found.to(self.compute_dtype)
        return self.run(x_BTD, self.view(x_BTD, positions, **fields))

    def adds(self, switches: Mapping[str, Any] | None) -> bool:
        """Whether the rows that growth added to the vocabulary count in a call with these switches."""
        name = self.config.added_switch
        given = self.active if switches is None else switches
        return self.added_embedding is not None and (not name or name in given)

    def look_up(self, ids: Any, switches: Mapping[str, Any] | None) -> Tensor:
        """The embeddings (B, T, D) of ids (B, T)."""
        if self.added_embedding is None or not self.adds(switches):
            return look_up(self.embedding, ids, self.config.vocab)
        first, last = self.config.vocab, self.config.vocab + self.config.added_vocab
        old_BTD = look_up(self.embedding, torch.where(ids < last, ids.clamp(max=first - 1), ids), last)
        new_BTD = self.added_embedding((ids - first).clamp(min=0))
        return torch.where((ids < first)[..., None], old_BTD, new_BTD)

    def added_rows(self, switches: Mapping[str, Any] | None, hidden: Tensor) -> Tensor | None:
        """The output head's weight of the ids that growth added, where they count."""
        added = self.added_head or self.added_embedding
        return added.weight.to(hidden) if added is not None and self.adds(switches) else None

    def logits(self, hidden_BTD: Tensor, added_WD: Tensor | None = None) -> Tensor:
        """Those of the vocabulary, then those of `added_rows`; apart, so that growth changes no bit of the old ones."""
        if self.head is not None and not readable(self.head):
            found_BTW = self.head(hidden_BTD)
        else:
            found_BTW = hidden_BTD @ self.head_rows(hidden_BTD).T
        return found_BTW if added_WD is None else torch.cat([found_BTW, hidden_BTD @ added_WD.T], dim=-1)

    def loss(self, hidden_BTD: Tensor, labels: Tensor, added_WD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss summed over the labels, and how many there are."""
        if self.head is not None and not readable(self.head):

            def loss_of_chunk(hidden_TD: Tensor, _: Tensor, labels_T: Tensor) -> Tensor:
                return summed_loss(self.logits(hidden_TD, added_WD), labels_T)

            chunk = max(1, LOGITS // (self.config.vocab + self.config.added_vocab))
            return linear_cross_entropy(hidden_BTD, hidden_BTD, labels, chunk, loss_of_chunk)
        rows_WD = self.head_rows(hidden_BTD)
        return linear_cross_entropy(hidden_BTD, rows_WD if added_WD is None else torch.cat([rows_WD, added_WD]), labels)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def head_rows(self, hidden: Tensor) -> Tensor:
        """The output head's weight, on the device and in the type of `hidden`."""
        weight_WD = self.head_weight
        changed = self.head is None and not isinstance(self.embedding, nn.Embedding)  # peft's LoRA: its rows are sums
        if changed or weight_WD.device != hidden.device:  # offloaded: calling the embedding loads it
            every = torch.arange(self.config.vocab, device=hidden.device)
            weight_WD = self.embedding(every).to(hidden.device)
        return weight_WD.to(hidden.dtype)

    @torch.no_grad()
    def generate(self, ids: Tensor, n: int, temperature: float = 0.0, seed: int = 0, **fields: Any) -> Tensor:
        """`ids` (B, T) → (B, T + n): greedy at temperature 0, else sampled. The reference of the decoding engine.

        `fields`: of the `View`, such as a cache that holds what comes before the ids.
        """
        generator = torch.Generator(ids.device).manual_seed(seed)
        fields, step = {"cache": Cache(), **fields}, ids
        for _ in range(n):
            logits_BW = self(step, **fields).logits[:, -1].float()
            if temperature == 0:
                step = logits_BW.argmax(-1, keepdim=True)
            else:
                step = (logits_BW / temperature).softmax(-1).multinomial(1, generator=generator)
            ids = torch.cat([ids, step], dim=-1)
        return ids
