"""Train three small models on icons and write what they do as one page: search by words, captions, drawings.

python examples/icons/gallery.py --out gallery.html
python examples/icons/gallery.py --out gallery.html --runs runs/gallery caption/icons:steps=2000   (settings of a model)

The page needs nothing but itself: pictures and features are inside. Runs that are finished are not trained again, and
interrupted ones go on.
Nothing is chosen: all held-out icons are named, and the drawings are the first of each.
"""

import argparse
import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenformer import load
from tokenformer.config import load as load_config
from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.data.images.decode import png
from tokenformer.data.images.pairs import open_pair_parts, pairs_of
from tokenformer.data.images.samples import batches
from tokenformer.data.text.tokenizer import FileTokenizer
from tokenformer.eval.pairs import encoder
from tokenformer.files import write_text
from tokenformer.infer.captions import as_input, captions, words
from tokenformer.infer.draw import Drawer
from tokenformer.infer.images import reading
from tokenformer.infer.pairs import image_features, text_features
from tokenformer.infer.sampling import Sampling
from tokenformer.train.trainer import Trainer

HERE = Path(__file__).parent
PRESETS = ("pair/icons", "caption/icons", "draw/icons")
SHOWN = 40  # icons whose captions are drawn


def trained(preset: str, runs: Path, settings: list[str], data: str) -> Any:
    """Return the model of a preset, trained on the icons; a run that was interrupted goes on."""
    run = runs / preset.split("/")[0]
    if Trainer(load_config(preset, overrides=[f"data.path={data}", *settings]), run, resume=True).run():
        raise SystemExit("interrupted: give the same command to go on")
    return load(run).eval()


def pictures(images: Any, settings: ImagesConfig, size: int) -> np.ndarray:
    """Return all images as a model of these settings sees them, bytes (N, size, size, 3)."""
    return np.concatenate([pixels for _, pixels, _, _ in batches(images, settings, size, 64, 0)])


def image(pixels: np.ndarray, scale: int = 1) -> str:
    """Return pixels as an address that is its own content."""
    return "data:image/png;base64," + base64.b64encode(png(pixels.repeat(scale, 0).repeat(scale, 1))).decode()


def tokenizer_of(model: Any) -> FileTokenizer:
    return FileTokenizer(model.tokenizer_json, "of the model")


def search_part(model: Any, parts: list[Any]) -> dict[str, Any]:
    """Return features of all icons, and of every word of their captions: a question is the mean of its words."""
    settings, size = reading(model)
    found = np.concatenate([image_features(model, pictures(p, settings, size), settings).numpy() for p in parts])
    known = sorted({word for p in parts for i in range(len(p)) for text in p.captions(i) for word in words(text)})
    texts = text_features(model, known, encoder(tokenizer_of(model), model)).numpy()
    return {"images": _numbers(found), "words": dict(zip(known, _numbers(texts), strict=True))}


def _numbers(features: np.ndarray) -> list[list[float]]:
    return [[round(float(value), 3) for value in row] for row in features]


def caption_part(model: Any, held: Any) -> list[dict[str, str]]:
    """Return what the model says of every held-out icon, beside its name."""
    settings, size = reading(model)
    with torch.no_grad():
        said = captions(model, as_input(model, pictures(held, settings, size), settings), tokenizer_of(model), 24)
    return [{"name": held.captions(i)[0], "said": text} for i, text in enumerate(said)]


def draw_part(model: Any, train: Any, held: Any, data: ImagesConfig) -> list[dict[str, Any]]:
    """Return a drawing of each held-out name, with the training icon of most equal pixels."""
    side, names = model.codes.side, [held.captions(i)[0] for i in range(min(SHOWN, len(held)))]
    made = Drawer(model, tokenizer_of(model)).draw(names, Sampling(temperature=1.0), guidance=2.0)
    known = pictures(train, data, side).astype(int)
    rows = []
    for name, picture in zip(names, made, strict=True):
        distance = ((known - picture.astype(int)) ** 2).mean((1, 2, 3))
        nearest = int(distance.argmin())
        rows.append({"name": name, "drawn": image(picture, 5), "nearest": nearest})
        rows[-1]["off"] = round(float(distance[nearest]) ** 0.5, 1)
    return rows


def page(facts: dict[str, Any]) -> str:
    """Return the page: the template with these facts in it."""
    inside = json.dumps(facts, ensure_ascii=False).replace("</", "<\\/")
    return re.sub("FACTS", lambda _: inside, (HERE / "gallery.html").read_text(encoding="utf-8"), count=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="PRESET:KEY=VALUE", help="settings of a model's training")
    parser.add_argument("--out", type=Path, default=Path("gallery.html"))
    parser.add_argument("--runs", type=Path, default=Path("runs/gallery"))
    parser.add_argument("--data", default=str(HERE), help="pairs of images and captions (train and val)")
    args = parser.parse_args(arguments)
    told = {preset: [s.partition(":")[2] for s in args.settings if s.startswith(f"{preset}:")] for preset in PRESETS}
    pair, caption, draw = (trained(preset, args.runs, told[preset], args.data) for preset in PRESETS)
    parameters = sum(model.cost().parameters for model in (pair, caption, draw))
    plain = ImagesConfig(crop_pct=1.0)
    train, held = (pairs_of(part) for part in open_pair_parts(DataConfig(path=args.data, images=plain)))
    icons = [{"name": p.captions(i)[0], "held": p is held} for p in (train, held) for i in range(len(p))]
    for icon, pixels in zip(icons, np.concatenate([pictures(p, plain, 48) for p in (train, held)]), strict=True):
        icon["image"] = image(pixels)
    facts = {
        "icons": icons,
        "training": len(train),
        "parameters": parameters,
        "search": search_part(pair, [train, held]),
    }
    facts |= {"captions": caption_part(caption, held), "drawings": draw_part(draw, train, held, plain)}
    write_text(args.out, page(facts))
    print(f"{args.out}: {len(icons)} icons, three models of {parameters:,} parameters together")


if __name__ == "__main__":
    main()
