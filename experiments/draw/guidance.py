"""Guidance and temperature of drawings, chosen on validation icons: how well a pair of towers tells whose they are.

python examples/icons/gallery.py --out gallery.html --large
python experiments/draw/guidance.py --runs runs/gallery

A drawing's score is the share of other icons' captions that the pair of the gallery puts behind its own one: 50 % by
chance. Real icons in as few pixels and colours stand beside it.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(1, str(Path(__file__).parents[2] / "examples" / "icons"))

from gallery import ALL, pictures, tokenizer_of

from tokenformer import load
from tokenformer.config_data import DataConfig, ImagesConfig
from tokenformer.data.images.pairs import open_pairs, pairs_of
from tokenformer.eval.pairs import encoder
from tokenformer.infer.draw import Drawer
from tokenformer.infer.images import reading
from tokenformer.infer.pairs import image_features, text_features
from tokenformer.infer.sampling import Sampling
from tokenformer.ops.palette import colours, quantise

TEMPERATURES, GUIDANCES = (0.7, 0.85, 1.0), (1.0, 2.0, 3.0, 4.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/gallery"))
    parser.add_argument("--icons", type=int, default=158, help="so many validation icons")
    parser.add_argument("--draw", type=Path, help="draw by these weights, such as an earlier checkpoint of the run")
    args = parser.parse_args()
    pair, draw = (load(path).eval() for path in (args.runs / "pair", args.draw or args.runs / "draw"))
    plain = ImagesConfig(crop_pct=1.0, caption_column="text")
    held = pairs_of(open_pairs(DataConfig(path=str(ALL), cache=str(args.runs / "cache"), images=plain), "validation"))
    texts = [held.captions(i)[0] for i in range(min(args.icons, len(held)))]
    (settings, size), side = reading(pair), draw.codes.side
    features = text_features(pair, texts, encoder(tokenizer_of(pair), pair))

    def score(drawn: np.ndarray) -> float:
        large = drawn.repeat(size // side, 1).repeat(size // side, 2)
        found = image_features(pair, large, settings) @ features.T
        return ((found < found.diagonal()[:, None]).sum(1) / (len(texts) - 1)).mean().item()

    real = colours(quantise(torch.from_numpy(pictures(held, plain, side)), draw.codes.palette), draw.codes).numpy()
    print("| temperature | guidance | captions behind the right one |\n|---|---|---|")
    print(f"| real icons | | {score(real[: len(texts)]):.1%} |")
    drawer = Drawer(draw, tokenizer_of(draw))
    for temperature, guidance in itertools.product(TEMPERATURES, GUIDANCES):
        drawn = drawer.draw(texts, Sampling(temperature=temperature), guidance=guidance)
        print(f"| {temperature:g} | {guidance:g} | {score(drawn):.1%} |", flush=True)


if __name__ == "__main__":
    main()
