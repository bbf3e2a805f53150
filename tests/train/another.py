"""A model, a source and a task that the package does not know: does a word belong to a picture?

Two trunks, one of them not causal, with ends of their own; a segment of one counts for odd words alone. No test in
here; test_another_model.py trains it.
"""

import numpy as np
import torch
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.data.loader import Loader
from tokenformer.data.source import Field
from tokenformer.models.cost import Cost, model_cost
from tokenformer.models.layers import Linear
from tokenformer.models.names import INWARD, TABLE, own
from tokenformer.models.trunk import Trunk
from tokenformer.train.task import Task


class Tower(Trunk):
    """A trunk over whatever was embedded."""

    def __init__(self, config: ModelConfig, causal: bool) -> None:
        super().__init__(config, embedding=nn.Embedding(config.vocab, config.dim) if causal else Linear(6, config.dim))
        self.causal = causal

    def forward(self, x: Tensor, **switches: Tensor) -> Tensor:
        x = self.embedding(x).to(self.compute_dtype)
        return self.run(x, self.view(x, causal=self.causal, switches=switches)).mean(1)


class Pair(nn.Module):
    """Scores a picture and a word by the product of what the two trunks make of them."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config, self.history, self.compute_dtype = config.resolved(), [], None
        self.image = Tower(self.config.trunks["image"], causal=False)
        self.text = Tower(self.config.trunks["text"], causal=True)
        self.scale = nn.Parameter(torch.empty(()))
        self.ends = {f"{trunk}{name}": role for trunk in self.trunks() for name, role in Trunk.ends.items()}
        self.ends |= {"image.embedding.weight": INWARD, "text.embedding.weight": TABLE, "scale": own(0.5)}
        self.entries = ("features",)

    def forward(self, pixels: Tensor, words: Tensor) -> Tensor:
        return self.scale * torch.mul(*self.features(pixels, words)).sum(-1)

    def features(self, pixels: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(pixels.to(self.scale.dtype)), self.text(words, odd=words[:, 0] % 2)

    def trunks(self) -> dict[str, nn.Module]:
        return {"image.": self.image, "text.": self.text}

    def cost(self) -> Cost:
        return model_cost(self)


class Pictures:
    """64 pictures of 4 patches, each with a word of 3 letters, which belongs to it or not."""

    def __init__(self) -> None:
        self.identity, self.shuffled, self.processes = {"data": "pictures"}, True, False
        self.fields = {"pixels": Field((4, 6), np.float32), "words": Field((3,), np.int64)}
        self.fields["labels"] = Field((), np.float32, np.nan)

    def __len__(self) -> int:
        return 64

    def read(self, indices: np.ndarray, epochs: np.ndarray, out: dict[str, np.ndarray]) -> None:
        for row, chance in enumerate(map(np.random.default_rng, indices)):
            out["pixels"][row] = chance.standard_normal((4, 6))
            out["words"][row] = chance.integers(0, 16, 3)
            out["labels"][row] = np.sign(out["pixels"][row, 0, 0] * (out["words"][row, 0] - 7.5))


class Match(Task):
    """Squared error of the score; a row that holds no picture does not count."""

    unit = "pairs"

    def __init__(self, config, place, device) -> None:
        super().__init__(config, place, device)
        self.loader = Loader(Pictures(), batch=self.batch, seed=config.seed, workers=0, **self.cut)
        self.held_out = Loader(Pictures(), batch=self.held_out_samples, epochs=1, workers=0, **self.cut)

    def loss(self, model, batch) -> tuple[Tensor, Tensor]:
        there = ~batch["labels"].isnan()
        error = model(batch["pixels"], batch["words"]) - batch["labels"].nan_to_num()
        return (error.square() * there).sum(), there.sum()

    def sample(self, model) -> dict[str, str | bytes]:
        return {"scale": f"{model.scale.item():.3f}", "scale.bin": model.scale.detach().numpy().tobytes()}
