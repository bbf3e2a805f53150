"""Drawing: a caption, then the pixels of its picture as codes of a palette, one after another, in one language model.

The ids of the codes are those that `grow(vocab=N)` added: the first of them begins a picture, code c is the (c + 1)th
after it. The palette is found by k-means over training pictures, or is that of the weights that a run starts with. The
language model may be that of a model that reads images.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer.config import Config, ModelConfig
from tokenformer.config_data import IGNORED, ImagesConfig
from tokenformer.data.images.decode import png
from tokenformer.data.images.opening import some_of
from tokenformer.data.images.samples import batches
from tokenformer.data.loader import Batch
from tokenformer.errors import UserError
from tokenformer.models.draw import SWITCH, bare_pixels, picture_sequences
from tokenformer.ops.augment import augment_pixels
from tokenformer.ops.palette import Codes, colours, find_palette, quantise
from tokenformer.parallel.mesh import Place
from tokenformer.train.images import TextsTask
from tokenformer.train.task import check_switches

SIDE = 16  # of pictures, where data.images.size is absent
MOST = 4096  # pictures whose colours the palette is for
SHOWN = 4  # pictures of a sample
ROUND = 8  # sequences are cut to a multiple of this: fewer shapes to compile


class DrawTask(TextsTask):
    """Pictures with texts; the loss is over the codes of the pictures."""

    unit = "images"

    def __init__(self, config: Config, place: Place, device: torch.device) -> None:
        self.drop = (config.data.images or ImagesConfig()).drop_caption
        super().__init__(config, place, device)

    def find_size(self, model: ModelConfig) -> int:
        self.on = self.config.model.language_prefix or ""
        self.language = language = self.config.model.trunk(self.on)
        if language.of != "language" or language.added_vocab < 3:
            where = f" --on {self.on}" if self.on else ""
            raise UserError(
                f"task is draw, but the model (of {language.of}) has {language.added_vocab} added ids: grow a language "
                f"model by `tokenformer grow MODEL{where} --vocab N --switch draw`, an id for each colour and one that "
                "begins pictures, or set model.added_vocab to 3 or more"
            )
        if language.added_switch not in ("", SWITCH):
            raise UserError(f"the added ids have the switch '{language.added_switch}', but drawing gives '{SWITCH}'")
        check_switches(self.config, SWITCH, self.on)
        return self.settings.size or SIDE

    def find_context(self) -> int:
        left = self.language.context - self.size**2
        if left < 2:
            where = f"model.{'trunks.text.' if self.on else ''}context"
            raise UserError(
                f"a picture of {self.size} × {self.size} has {self.size**2} codes, but {where} is "
                f"{self.language.context}: give more than that, for the text before it"
            )
        return left

    def inherit(self, folder: Path) -> None:
        """Draw in the colours of these weights, if they have any."""
        from tokenformer.hub.folder import read_codes

        super().inherit(folder)
        if (given := read_codes(folder, self.config.model)) is not None:
            if (side := given.side) != self.size:
                raise UserError(
                    f"the weights in {folder} draw {side} × {side} pixels, but data.images.size is {self.size}: set it "
                    f"to {side}"
                )
            self.codes = given

    @functools.cached_property
    def codes(self) -> Codes:
        """The colours of training pictures."""
        how = dataclasses.replace(self.settings, mixup=0.0, cutmix=0.0)
        found = batches(some_of(self.pairs, MOST), how, self.size, 64, self.config.data.workers)
        good = (pixels[[row for row in range(len(pixels)) if row not in damage]] for _, pixels, _, damage in found)
        return Codes(find_palette(good, self.language.added_vocab - 1), self.size)

    @functools.cached_property
    def palette(self) -> Tensor:
        return self.codes.palette.to(self.device)

    def flops(self, cost: Any) -> float:
        return 0.0 if self.on else 3 * cost.sample_flops(self.size**2)  # an image trunk does not take part

    def on_device(self, batch: Batch) -> dict[str, Any]:
        longest = -(-max(1, int(batch.fields["length"].max())) // ROUND) * ROUND
        cut = {**batch.fields, "ids": batch.fields["ids"][:, :longest].copy()}
        return super().on_device(batch._replace(fields=cut))

    def loss(self, model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        shown = bare_pixels(augment_pixels(batch, self.settings)[0], self.settings.mean, self.settings.std)
        codes_BN, end = quantise(shown, self.palette), self.tokenizer.end_of_document
        ids, labels = picture_sequences(batch["ids"], batch["length"], codes_BN, end, self.language.vocab)
        labels = labels.masked_fill((batch["label"] < 0)[:, None], IGNORED)
        found = model(ids, labels=labels, switches=self.switches(model, len(ids)))
        return found.loss_sum, found.count

    def switches(self, model: Any, batch: int) -> dict[str, Tensor] | None:
        if SWITCH not in model.config.trunk(self.on).switch_names():
            return None
        counts = {**model.active, SWITCH: 1.0}  # an adapter that is trained counts, too
        return {name: torch.full((batch,), weight, device=self.device) for name, weight in counts.items()}

    def measures(self, model: Any) -> dict[str, float]:
        """Return the loss, and the bits of a code: what a held-out picture costs, given its caption."""
        trained, self.damaged = self.damaged, 0
        found = super().measures(model)
        skipped, self.damaged = self.logged(), trained
        return {**found, "bits_per_code": found["loss"] / math.log(2), **skipped} if found else {}

    def sample(self, model: Any) -> dict[str, str | bytes]:
        """Return a picture for each of the first held-out captions, side by side."""
        if self.held_out is None or not self.config.validation.generate:
            return {}
        fields = self.first_held_out()
        first, end = self.language.vocab, self.tokenizer.end_of_document
        drawn = []
        for ids, length in zip(fields["ids"][:SHOWN], fields["length"][:SHOWN].tolist(), strict=True):
            prompt = torch.tensor([[end, *ids[: max(0, length - 1)].tolist(), first]], device=self.device)
            how = {"temperature": 1.0, "seed": self.config.seed, "switches": self.switches(model, 1)}
            with torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
                before = (None,) if self.on else ()  # no image
                made = model.generate(*before, prompt, self.size**2, **how)[:, prompt.shape[1] :]
            drawn.append(colours((made - first - 1).clamp(0, len(self.palette) - 1), self.codes)[0].cpu())
        return {"drawings.png": png(torch.cat(drawn, 1).numpy())}

    def files(self) -> dict[str, Any]:
        from tokenformer.hub.folder import CODES, codes_file

        return {"tokenizer.json": self.tokenizer.to_json(), CODES: codes_file(self.codes)}
