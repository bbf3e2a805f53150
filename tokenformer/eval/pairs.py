"""How well a pair finds texts by images and images by texts, and what a pair needs to name classes."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenformer.config_data import ImagesConfig
from tokenformer.data.images.captions import distinct, encode_captions
from tokenformer.data.images.pairs import pairs_of
from tokenformer.data.images.samples import batches
from tokenformer.data.images.stored import Images, Some
from tokenformer.data.text.tokenizer import Tokenizer
from tokenformer.errors import UserError
from tokenformer.eval.images import known_file
from tokenformer.eval.ranks import spread
from tokenformer.infer.pairs import FIRST, Encode, image_features, recalls, text_features
from tokenformer.parsing import is_file, read_text, shown
from tokenformer.terminal import progress

Advance = Callable[[float], None]
BESIDE = {"names": "classnames.txt", "templates": "zeroshot_classification_templates.txt"}  # in clip-benchmark's sets


def encoder(tokenizer: Tokenizer, model: Any) -> Encode:
    """Return the function from texts to what a pair reads. That texts are too long and cut is said once."""
    context, said = model.text.config.context, False

    def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        nonlocal said
        ids, lengths = encode_captions(tokenizer, texts, context)
        for row in np.flatnonzero(lengths == context).tolist() if not said else ():
            if len(tokenizer.encode(texts[row])) >= context:
                what = f"a text has more than the {context - 1} tokens that the model reads, beside the end token"
                print(f"{what}, and is cut: {shown(texts[row])}", file=sys.stderr)
                said = True
                break
        return ids, lengths

    return encode


def read_lines(given: Path | None, what: str, data: str) -> list[str] | None:
    """Return the names of classes or the templates of a file: the given one, else the one beside the data, if any."""
    path = known_file(given, what) if given else Path(data) / BESIDE[what]
    if given is None and not is_file(path):
        return None
    lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if what == "templates" and not all("{}" in line or "{c}" in line for line in lines):
        raise UserError(f"{path} has a line without {{}}, where the name of a class stands: write `a photo of a {{}}.`")
    if not lines:
        raise UserError(f"{path} is empty: write a line for each of the {what}")
    return lines


def retrieval(
    model: Any,
    images: Images,
    tokenizer: Tokenizer,
    settings: ImagesConfig,
    size: int,
    batch: int,
    advance: Advance,
) -> tuple[dict[str, Any], dict[int, str]]:
    """Return recalls with the chance level beside them, and which images are damaged (they count in no figure).

    All captions of an image count. Under torchrun each process takes its share of images and captions.
    """
    pairs = pairs_of(images)

    def look(indices: Sequence[int]) -> list[tuple[int, list[float], str]]:
        found: list[tuple[int, list[float], str]] = []
        for _, pixels, labels, damage in batches(Some(images, np.array(indices)), settings, size, batch):
            rows = zip(labels.tolist(), image_features(model, pixels, settings).tolist(), strict=True)
            found += [(*fields, damage.get(row, "")) for row, fields in enumerate(rows)]
            advance(len(labels))
        return found

    seen = spread(range(len(images)), look)
    good = [(label, feature) for label, feature, damage in seen if not damage]
    if not good:
        raise UserError("no image could be decoded, so there is nothing to measure: check the images")
    captions = [(row, text) for row, (label, _) in enumerate(good) for text in pairs.captions(label)]
    texts, places = distinct([text for _, text in captions])
    with progress("reading captions", len(texts), " captions") as advance:
        read = partial(text_features, model, encode=encoder(tokenizer, model), batch=batch, advance=advance)
        features = spread(texts, lambda some: read(some).tolist())
    owners = torch.tensor([row for row, _ in captions])
    scores = torch.tensor([feature for _, feature in good]) @ torch.tensor(features)[places].T
    damaged = {index: damage for index, (_, _, damage) in enumerate(seen) if damage}
    images_of = Counter(text for _, text in set(captions))
    shared = sum(images_of[text] > 1 for _, text in captions)
    found: dict[str, Any] = {"images": len(good), "captions": len(captions), "shared": shared, "damaged": len(damaged)}
    return {**found, **recalls(scores, owners), "chance": chance(owners)}, damaged


def chance(owner_B: torch.Tensor) -> dict[str, float]:
    """Return the recalls of somebody who guesses.

    >>> found = chance(torch.tensor([0, 0, 1]))  # two captions of one image, one of the other
    >>> found["image_to_text_r1"], found["text_to_image_r1"]
    (0.5, 0.5)
    """
    counts, total = owner_B.bincount().double(), len(owner_B)
    counts, found = counts[counts > 0], {}
    for k in FIRST:
        missed = torch.ones(len(counts), dtype=torch.float64)  # that none of an image's captions is among the first k
        for place in range(min(k, total)):
            missed *= ((total - counts - place) / (total - place)).clamp(min=0)
        found[f"image_to_text_r{k}"] = (1 - missed).mean().item()
        found[f"text_to_image_r{k}"] = min(1.0, k / len(counts))
    return found


def metadata(names: Sequence[str], of: str, source: str) -> dict[str, str]:
    """Return what a safetensors file of features says of its rows."""
    return {"format": "pt", "of": of, "model": source, "names": json.dumps(list(names), ensure_ascii=False)}
