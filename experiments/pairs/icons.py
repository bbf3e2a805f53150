"""The icons of the study: which of them are held out, what their captions are, and all of it as arrays.

Unusual: icons are held out by groups. "woman cook: dark skin tone" and "man cook" are of the group "cook", so that no
icon is asked for whose twin was trained on. A flag is a group of its own.

python experiments/pairs/icons.py DATA --out examples/all-icons   (small icons as tables of pairs, and their tokenizer)
"""

import argparse
import io
import json
import lzma
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from PIL import Image
from tokenizers import Regex
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Sequence, Split, Whitespace

from tokenformer.data.images.captions import encode_captions
from tokenformer.data.text.tokenizer import FileTokenizer, Tokenizer, train_tokenizer

GENDER = re.compile(r"\b(person|man|woman|people|men|women)\b")
HELD_OUT = 0.1  # of the groups for the test, and of the groups that are left for validation
PARTS = ("train", "validation", "test")
READING = {"size": 32, "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0, "interpolation": "bicubic"}


@dataclass
class Icons:
    """All icons: pixels (N, size, size, 3), the part of each, which are variants of skin tone, and their captions."""

    rows_of: list[dict]
    pixels: np.ndarray
    part: np.ndarray
    variant: np.ndarray
    captions: list[list[str]]  # the first is the whole one
    tokenizer: "Tokenizer | SpellingTokenizer"
    ids: np.ndarray  # (N, captions, context)
    lengths: np.ndarray  # (N, captions)

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab_size

    def names(self, rows: np.ndarray) -> list[str]:
        return [self.rows_of[row]["name"] for row in rows]

    def rows(self, *parts: str, variants: bool = False) -> np.ndarray:
        return np.nonzero(np.isin(self.part, parts) & (variants | ~self.variant))[0]


def group_of(name: str) -> str:
    """Return what is left of a name without gender, skin and direction.

    >>> [group_of(name) for name in ("woman cook: dark skin tone", "man: bald", "flag: Chad", "family: man, boy")]
    ['cook', '', 'flag: Chad', 'family']
    """
    if name.startswith("flag: "):
        return name
    return " ".join(GENDER.sub(" ", name.partition(":")[0]).split())


def parts_of(rows: list[dict]) -> np.ndarray:
    """Return the part of each icon: held-out groups are drawn once, by a fixed seed, among those of the base icons."""
    groups = sorted({group_of(row["name"]) for row in rows if not row["skin_variant"]})
    order = np.random.default_rng(20241023).permutation(len(groups))
    test = round(HELD_OUT * len(groups))
    held = test + round(HELD_OUT * (len(groups) - test))
    part = {groups[g]: PARTS[(place < held) + (place < test)] for place, g in enumerate(order.tolist())}
    return np.array([part[group_of(row["name"])] for row in rows])


def captions_of(row: dict, rng: np.random.Generator, count: int) -> list[str]:
    """Return the name with what the keywords add to it; then captions of some of these in any order."""
    name, found = row["name"], []
    more = [word for word in row["keywords"] if word not in name.split()]
    for _ in range(count - 1):
        parts = [word for word in [name, *more] if rng.random() < (0.8 if word == name else 0.6)] or [name]
        found.append(" ".join(parts[place] for place in rng.permutation(len(parts))))
    return [" ".join([name, *more]), *found]


def shared_words(rows: list[dict]) -> set[str]:
    """Return the words that two groups of these icons share.

    A word of a single icon says nothing about another one, and would let a model learn icons by heart.
    """
    groups: dict[str, set[str]] = {}
    for row in rows:
        for word in re.findall(r"\w+", " ".join([row["name"], *row["keywords"]]).lower()):
            groups.setdefault(word, set()).add(group_of(row["name"]))
    return {word for word, some in groups.items() if len(some) > 1}


def words_tokenizer(rows: list[dict]) -> FileTokenizer:
    """Return a tokenizer of the words that two groups of these icons share; the others are one unknown word."""
    known = ["<|endoftext|>", "<unk>", *sorted(shared_words(rows))]
    made = tokenizers.Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = Lowercase(), Sequence([Whitespace(), Split(Regex(r"\W+"), "removed")])
    made.add_special_tokens(["<|endoftext|>"])
    return FileTokenizer(made.to_str(), "words")


class SpellingTokenizer:
    """Words that two training groups share are tokens; any other word is a mark and its bytes: none is unknown."""

    end_of_document, spelled = 0, 1

    def __init__(self, words: set[str]) -> None:
        self.ids = {word: 258 + number for number, word in enumerate(sorted(words))}
        self.vocab_size = 258 + len(self.ids)

    def encode(self, text: str) -> list[int]:
        found = []
        for word in re.findall(r"\w+", text.lower()):
            found += [self.ids[word]] if word in self.ids else [self.spelled, *(2 + byte for byte in word.encode())]
        return found


def subwords_tokenizer(rows: list[dict], vocab: int) -> FileTokenizer:
    """Return a byte-level BPE of the names and keywords of these icons, in small letters: no text is unknown to it.

    Every word begins with its space, the first one too: "fox" is the same token wherever it stands.
    """
    texts = (f" {text.lower()}" for row in rows for text in [row["name"], *row["keywords"]])
    made = json.loads(train_tokenizer(texts, vocab).to_json())
    made["pre_tokenizer"]["add_prefix_space"] = True
    made["normalizer"] = {"type": "Sequence", "normalizers": [made["normalizer"], {"type": "Lowercase"}]}
    return FileTokenizer(json.dumps(made), "subwords")


def read(folder: Path, *, size: int, captions: int, context: int, vocab: int = 0, spelled: bool = False) -> Icons:
    """Read `emoji-captions`; icons are laid on white. `vocab`: of subwords, or words, rare ones spelled or not."""
    with lzma.open(folder / "captions.jsonl.xz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    pixels = []
    for path in sorted(folder.glob("images-*.webp")):
        column = Image.open(path).convert("RGBA")
        white = Image.alpha_composite(Image.new("RGBA", column.size, "white"), column).convert("RGB")
        small = white.resize((size, white.height * size // 64), Image.Resampling.BOX)
        pixels.append(np.asarray(small).reshape(-1, size, size, 3))
    return _with_texts(rows, np.concatenate(pixels), captions, context, vocab, spelled)


def made(count: int, *, size: int, captions: int, context: int, vocab: int = 0, spelled: bool = False) -> Icons:
    """Make icons of noise in this form, to check the study with."""
    rng = np.random.default_rng(0)
    words = ["cook", "fox", "tree", "red", "round", "small"]
    rows = [
        {"name": f"{who} {words[i % 6]} {i}{tone}", "keywords": words[i % 5 :], "skin_variant": bool(tone)}
        for i in range(count)
        for who in ("man", "woman")
        for tone in ("", ": dark skin tone")
    ]
    pixels = rng.integers(0, 256, (len(rows), size, size, 3)).astype(np.uint8)
    return _with_texts(rows, pixels, captions, context, vocab, spelled)


def _with_texts(rows: list[dict], pixels: np.ndarray, captions: int, context: int, vocab: int, spelled: bool) -> Icons:
    rng, part = np.random.default_rng(0), parts_of(rows)
    texts = [captions_of(row, rng, captions) for row in rows]
    variant = np.array([row["skin_variant"] for row in rows])
    training = [row for row, p in zip(rows, part, strict=True) if p == "train"]
    if spelled:
        tokenizer = SpellingTokenizer(shared_words(training))
    else:
        tokenizer = subwords_tokenizer(training, vocab) if vocab else words_tokenizer(training)
    ids, lengths = encode_captions(tokenizer, [text for some in texts for text in some], context)
    shape = (len(rows), captions)
    arrays = ids.reshape(*shape, context), lengths.reshape(shape)
    return Icons(rows, pixels, part, variant, texts, tokenizer, *arrays)


def write_tables(folder: Path, out: Path, size: int = 48, colours: int = 32, vocab: int = 1024) -> None:
    """Write the icons without skin tone as Parquet, in an order drawn once: image, name, and captions (`text`)."""
    import pyarrow
    from pyarrow import parquet

    found = read(folder, size=64, captions=16, context=64, vocab=vocab)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(found.tokenizer.to_json())
    for part, name in zip(PARTS, ("train", "val", "test"), strict=True):
        table: dict[str, list] = {"image": [], "name": [], "text": []}
        for row in np.random.default_rng(0).permutation(found.rows(part)):
            file = io.BytesIO()
            small = Image.fromarray(found.pixels[row]).resize((size, size), Image.Resampling.LANCZOS)
            small.quantize(colours).convert("RGB").save(file, "webp", lossless=True, quality=100, method=6)
            table["image"].append(file.getvalue())
            table["name"].append(found.rows_of[row]["name"])
            table["text"].append(found.captions[row])
        parquet.write_table(pyarrow.table(table), out / f"{name}.parquet", compression="zstd")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write_tables(args.data, args.out)
