"""Train two small models on icons and write what they do as one page: a pair of towers, by which words find icons, and
a language model that reads icons and then learns to draw some, too.

python examples/icons/gallery.py --out gallery.html            (160 icons, some minutes of one core)
python examples/icons/gallery.py --out gallery.html --large    (1,911 icons, a larger language model: half an hour)
python examples/icons/gallery.py --out gallery.html caption/icons:steps=2000                 (settings of a model)

The page needs nothing but itself: pictures and features are inside. Runs that are finished are not trained again, and
interrupted ones go on.
Nothing is chosen: all held-out icons are named, and each of their captions is drawn once.
"""

import argparse
import base64
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenformer import grow, load, save
from tokenformer.config import Config
from tokenformer.config import load as load_config
from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.data.images.decode import png
from tokenformer.data.images.pairs import Pairs, open_pairs, pairs_of
from tokenformer.data.images.samples import batches
from tokenformer.data.text.tokenizer import FileTokenizer
from tokenformer.eval.pairs import encoder
from tokenformer.files import write_text
from tokenformer.infer.captions import as_input, captions, words
from tokenformer.infer.draw import Drawer
from tokenformer.infer.images import reading
from tokenformer.infer.pairs import image_features, text_features
from tokenformer.infer.sampling import Sampling
from tokenformer.ops.palette import quantise
from tokenformer.train.trainer import Trainer

HERE = Path(__file__).parent
ALL = HERE.parent / "all-icons"
PRESETS = ("pair/icons", "caption/icons", "draw/icons")


def trained(preset: str, args: argparse.Namespace) -> Any:
    """Return the model of a preset, trained on the icons; a run that was interrupted goes on."""
    kind = preset.split("/")[0]
    over = [ALL / f"{kind}.yml"] if args.large else []
    told = [setting.partition(":")[2] for setting in args.settings if setting.startswith(f"{preset}:")]
    told = [f"data.path={args.data}", f"data.cache={args.runs / 'cache'}", *told]
    config = load_config(preset, *over, overrides=told)
    if kind == "draw":
        config = around(load(args.runs / "caption"), config, args.runs / "grown")
    if Trainer(config, args.runs / kind, resume=True).run():
        raise SystemExit("interrupted: give the same command to go on")
    return load(args.runs / kind).eval()


def around(reader: Any, config: Config, folder: Path) -> Config:
    """Return the config of a run in which a model that reads learns to draw, and nothing of it changes but what is new:
    ids of colours, and as many parameter tokens as its language model has, with the switch draw.
    """
    text, draws = reader.config.trunks["text"], config.model
    sizes = {f"{which}_tokens": 2 * sum(n for n, _ in text.segments(which)) for which in ("qkv", "proj", "ffn")}
    grown = grow(reader, on="text.", vocab=text.vocab + draws.added_vocab, switch="draw", **sizes)
    save(grown, folder, force=True)
    longer = dataclasses.replace(grown.config.trunks["text"], context=draws.context)
    train = dataclasses.replace(config.train, freeze="language")
    return dataclasses.replace(config, model=grown.config.with_trunk("text.", longer), start=str(folder), train=train)


def opened(args: argparse.Namespace, part: Any, column: str) -> Pairs:
    """Return the icons of a part, with the texts of a column."""
    column = column if args.large else "caption"
    images = ImagesConfig(crop_pct=1.0, caption_column=column)
    return pairs_of(open_pairs(DataConfig(path=args.data, cache=str(args.runs / "cache"), images=images), part))


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
    return [{"name": held.captions(i)[0], "said": text} for i, (text, _) in enumerate(said)]


def draw_part(model: Any, train: Pairs, held: Pairs, guidance: float, temperature: float) -> list[dict[str, Any]]:
    """Return a drawing of each held-out caption, with the training icon of most similar pixels, mirrored or not."""
    side, texts = model.codes.side, [held.captions(i)[0] for i in range(len(held))]
    made = Drawer(model, tokenizer_of(model)).draw(texts, Sampling(temperature=temperature), guidance=guidance)
    known = pictures(train, ImagesConfig(crop_pct=1.0), side)
    known = np.concatenate([known, known[:, :, ::-1]])
    codes = quantise(torch.from_numpy(known), model.codes.palette)
    rows = []
    for text, picture in zip(texts, made, strict=True):
        distance = ((known.astype(int) - picture) ** 2).mean((1, 2, 3))
        nearest, drawn = int(distance.argmin()), quantise(torch.from_numpy(picture[None]), model.codes.palette)
        rows.append({"text": text, "drawn": image(picture, 5), "nearest": nearest % len(train)})
        rows[-1] |= {"off": round(float(distance[nearest]) ** 0.5, 1), "copy": bool((codes == drawn).all(1).any())}
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
    parser.add_argument("--large", action="store_true", help="all icons (examples/all-icons) and a larger model")
    parser.add_argument("--data", help="pairs of images and captions (train and val), instead of the icons")
    parser.add_argument("--guidance", type=float, default=2.0, help="of drawings (default: what guidance.py found)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of drawings (default: what guidance.py found)")
    args = parser.parse_args(arguments)
    args.data = args.data or str(ALL if args.large else HERE)
    pair, _, both = (trained(preset, args) for preset in PRESETS)
    parameters = sum(model.cost().parameters for model in (pair, both))
    parts = ("train", "test" if args.large else "validation")
    (train, held), texts = ([opened(args, part, column) for part in parts] for column in ("name", "text"))
    icons = [{"name": p.captions(i)[0], "held": p is held} for p in (train, held) for i in range(len(p))]
    plain = ImagesConfig(crop_pct=1.0)
    for icon, pixels in zip(icons, np.concatenate([pictures(p, plain, 48) for p in (train, held)]), strict=True):
        icon["image"] = image(pixels)
    facts = {"icons": icons, "training": len(train), "parameters": parameters, "search": search_part(pair, texts)}
    facts |= {"captions": caption_part(both, held)}
    facts |= {"drawings": draw_part(both, *texts, args.guidance, args.temperature)}
    write_text(args.out, page(facts))
    print(f"{args.out}: {len(icons)} icons, two models of {parameters:,} parameters together")


if __name__ == "__main__":
    main()
