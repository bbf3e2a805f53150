"""The language model: embedding, blocks, final norm, output head tied to the embedding.

`forward` with labels returns a loss sum and a count and never holds all logits. Legend: B batch, T positions, D dim.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.models.cost import Cost, cost
from tokenformer.models.init import init_weights
from tokenformer.models.layers import Block, Linear, Norm, readable
from tokenformer.models.names import ONE, TABLE, ZERO, Role
from tokenformer.ops.cross_entropy import LOGITS, linear_cross_entropy, summed_loss
from tokenformer.ops.rotary import angles


class Output(NamedTuple):
    """`logits` without labels; `loss_sum` over `count` labels with them."""

    logits: Tensor | None = None
    loss_sum: Tensor | None = None
    count: Tensor | None = None


class AnyCache(Protocol):
    """What a key/value cache must be: how many positions it holds, what a query may see (None: causal), and update."""

    length: int
    mask: Tensor | None

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


class Cache:
    """The reference cache: it appends."""

    mask = None

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[-2] if self.layers else 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            k, v = (torch.cat(pair, dim=-2) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = (k, v)
        return k, v


class LanguageModel(nn.Module):
    """A TokenFormer, or a Transformer or Llama to compare with, as its config says.

    Built on the meta device it holds no memory: `to_empty(device=…)`, then `init_weights(model, model.config, seed)`.

    >>> config = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=64, vocab=128)
    >>> model = LanguageModel(config, seed=1)
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 128])
    """

    ends: ClassVar[Mapping[str, Role]] = {  # what lies outside the blocks
        "embedding.weight": TABLE,
        "norm.weight": ONE,
        "norm.bias": ZERO,
        "head.weight": TABLE,
    }

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config.resolved()
        self.compute_dtype: torch.dtype | None = None  # None: as the parameters
        self.history: list[dict] = []  # the growths that led to this model
        self.embedding = nn.Embedding(config.vocab, config.dim, _weight=torch.empty(config.vocab, config.dim))
        self.blocks = nn.ModuleList(Block(self.config, layer) for layer in range(config.layers))
        self.norm = Norm(config, affine=True)
        self.head = None if config.tied else Linear(config.dim, config.vocab)
        if self.embedding.weight.device.type != "meta":
            init_weights(self, self.config, seed)

    def forward(
        self,
        ids: Tensor,
        *,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: AnyCache | None = None,
    ) -> Output:
        """`ids` (B, T). `labels` (B, T): the target of each position, -100 = none. `positions` (T,) or (B, T)."""
        hidden_BTD = self.hidden(ids, positions=positions, documents=documents, cache=cache)
        if labels is None:
            return Output(logits=self.logits(hidden_BTD))
        loss_sum, count = self.loss(hidden_BTD, labels)
        return Output(loss_sum=loss_sum, count=count)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        if self.head is not None and not readable(self.head):
            return self.head(hidden_BTD)
        return hidden_BTD @ self.head_rows(hidden_BTD).T

    def loss(self, hidden_BTD: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss summed over the labels, and how many there are."""
        head = self.head
        if head is not None and not readable(head):

            def called(hidden_TD: Tensor, _: Tensor, labels_T: Tensor) -> Tensor:
                return summed_loss(head(hidden_TD), labels_T)

            chunk = max(1, LOGITS // self.config.vocab)
            return linear_cross_entropy(hidden_BTD, hidden_BTD, labels, chunk, called)
        return linear_cross_entropy(hidden_BTD, self.head_rows(hidden_BTD), labels)

    def hidden(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: AnyCache | None = None,
    ) -> Tensor:
        """What the output head reads: (B, T, D) after the final norm."""
        x_BTD = self.embedding(ids).to(self.compute_dtype)
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + ids.shape[-1], device=ids.device)
        rotary = angles(positions, self.config.rotary_dims, self.config.rotary_base, x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary, documents, cache)
        return self.norm(x_BTD)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def trunks(self) -> dict[str, "LanguageModel"]:
        """The parts that have blocks, by the prefix of their parameters: here the model itself."""
        return {"": self}

    def head_rows(self, hidden: Tensor) -> Tensor:
        """The output head's rows, where `hidden` is and in its type."""
        weight_WD = self.head_weight
        if weight_WD.device != hidden.device:  # offloaded, or on another device: a call brings it
            every = torch.arange(self.config.vocab, device=hidden.device)
            weight_WD = self.embedding(every).to(hidden.device)
        return weight_WD.to(hidden.dtype)

    def cost(self) -> Cost:
        """Parameters, FLOPs and cache bytes of this model."""
        return cost(self.config)

    @torch.no_grad()
    def generate(self, ids: Tensor, n: int, temperature: float = 0.0, seed: int = 0) -> Tensor:
        """`ids` (B, T) → (B, T + n): greedy at temperature 0, else sampled. The reference for every faster way."""
        generator = torch.Generator(ids.device).manual_seed(seed)
        cache, step = Cache(), ids
        for _ in range(n):
            logits_BW = self(step, cache=cache).logits[:, -1].float()
            if temperature == 0:
                step = logits_BW.argmax(-1, keepdim=True)
            else:
                step = (logits_BW / temperature).softmax(-1).multinomial(1, generator=generator)
            ids = torch.cat([ids, step], dim=-1)
        return ids
