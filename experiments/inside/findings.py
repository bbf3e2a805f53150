"""Findings about a model that was explored: how few tokens carry a projection, how much new segments carry, whether
tokens write what follows the places where they are strongest, and how well direct effects predict what happens when a
token is switched off.

  tokenformer train experiments/inside/enwik8.yml data.path=SET --out MODEL
  tokenformer explore MODEL --text TEXT --out LOOKED
  python experiments/inside/findings.py MODEL LOOKED TEXT
"""

import argparse
import collections
import json
import random
from pathlib import Path

import torch

from tokenformer.growth.measure import layers
from tokenformer.hub.open import open_model
from tokenformer.inside.ablation import Token
from tokenformer.inside.effects import direct_effects, real_effects


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def carried(lines: list[dict], share: float = 0.5) -> int:
    """How many tokens add this share of a projection's energy."""
    total, count = 0.0, 0
    for energy in sorted((line["energy"] for line in lines), reverse=True):
        total, count = total + energy, count + 1
        if total >= share:
            break
    return count


def written(lines: list[dict]) -> tuple[float, float]:
    """The share of strongest places whose next character begins a word that the token raises, and the same for places
    of other tokens of the projection.
    """
    nexts = [[context.split("⟩")[1][:1] for _, _, context in line["high"]] for line in lines]
    first = [{word[:1] for word in line["raises"]} for line in lines]
    own = [mean([n in f for n in some]) for some, f in zip(nexts, first, strict=True)]
    other = [mean([n in f for n in some]) for some, f in zip(nexts[1:] + nexts[:1], first, strict=True)]
    return mean(own), mean(other)


def predicted(model, ids: torch.Tensor, pairs: int, draw: random.Random) -> list[tuple[int, float, float, float]]:
    """(layer, direct effect, switched off, masked) of random tokens at random places of a passage."""
    seen, wanted = ids[:-1], ids[1:]
    found, asked, direct = direct_effects(model, seen, wanted), [], []
    writers = [(layer, name, module) for layer, name, module in layers(model) if name in ("proj", "ffn")]
    for _ in range(pairs):
        layer, name, module = draw.choice(writers)
        sizes = [len(s.key_tokens) for s in module.segments]
        row, place = draw.randrange(sum(sizes)), draw.randrange(len(seen))
        effect = torch.cat([found.tokens[layer, name, i][place] for i in range(len(sizes))])[row].item()
        asked.append((Token(layer, name, row), place))
        direct.append(effect)
    off, masked = (real_effects(model, seen, wanted, asked, how) for how in ("value", "mask"))
    return [(token.layer, *rest) for (token, _), *rest in zip(asked, direct, off, masked, strict=True)]


def correlation(a: list[float], b: list[float]) -> float:
    return torch.corrcoef(torch.tensor([a, b], dtype=torch.float64))[0, 1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("looked", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--pairs", type=int, default=200, help="of tokens and places, in each of several passages")
    parser.add_argument("--passages", type=int, default=10)
    args = parser.parse_args()
    groups = collections.defaultdict(list)
    for text in (args.looked / "tokens.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        groups[line["token"].split(":")[1]].append(line)
    depth = 1 + max(int(line["token"].split(":")[0]) for line in groups["ffn"])
    for name, lines in groups.items():
        of_layer = [[line for line in lines if line["token"].startswith(f"{layer}:")] for layer in range(depth)]
        counts = ", ".join(f"{carried(some)} of {len(some)}" for some in of_layer)
        print(f"{name}: half of what it adds comes from {counts} tokens (by layer)")
        for segment in sorted({line["segment"] for line in lines}):
            some = [line for line in lines if line["segment"] == segment]
            share, fires = sum(line["energy"] for line in some) / depth, mean([line["fires"] for line in some])
            print(f"{name}: segment {segment} adds {share:.1%} of it; its tokens fire at {fires:.2%} of the places")
    for name in ("proj", "ffn"):
        own, other = written(groups[name])
        print(f"{name}: what follows begins a word that the token raises in {own:.1%} (another token's: {other:.1%})")
    dead, twins = (
        sum(bool(line.get(word)) for lines in groups.values() for line in lines) for word in ("dead", "twin")
    )
    print(f"{dead} dead tokens, {twins} with a twin, of {sum(map(len, groups.values()))}")
    opened = open_model(args.model, dtype="float32")
    model = opened.model.eval()
    ids = torch.tensor(opened.tokenizer.encode(args.text.read_text(encoding="utf-8")))
    length, draw = model.config.context + 1, random.Random(0)
    assert len(ids) >= args.passages * length, "the text is too short for so many passages"
    starts = [i * (len(ids) - length) // max(1, args.passages - 1) for i in range(args.passages)]
    rows = [row for start in starts for row in predicted(model, ids[start : start + length], args.pairs, draw)]
    for layer in [None, *range(depth)]:
        some = [row for row in rows if layer in (None, row[0])]
        _, direct, off, masked = (list(column) for column in zip(*some, strict=True))
        worst = max(abs(a - b) for a, b in zip(direct, off, strict=True))
        where = "all layers" if layer is None else f"layer {layer}"
        print(
            f"{where}: {len(some)} pairs, direct effect and switching off correlate {correlation(direct, off):.2f} "
            f"(worst difference {worst:.2f}), switching off and masking {correlation(off, masked):.2f}"
        )


if __name__ == "__main__":
    main()
