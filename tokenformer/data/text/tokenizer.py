"""Tokenizers: `gpt-neox-20b` (bundled), `byte` (no file), or any tokenizer.json or Hugging Face folder by its path.

Unusual: every one knows the id that ends a document, and its vocabulary padded to the multiple of 128 that models use.
"""

import contextlib
import hashlib
import json
import lzma
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from tokenformer.data.text.cutting import cut_rule
from tokenformer.errors import UserError
from tokenformer.parsing import is_file, read_json, read_text, shown

BUNDLED = "gpt-neox-20b"
_END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<EOS>", "[EOS]", "[SEP]")


def padded_vocab(size: int) -> int:
    """Return the number of rows of a model's embedding for a vocabulary.

    >>> padded_vocab(50277), padded_vocab(257)
    (50304, 384)
    """
    return -(-size // 128) * 128


class ByteTokenizer:
    """Byte b is id b + 1, id 0 ends a document.

    >>> ByteTokenizer().encode("AB"), ByteTokenizer().decode([66, 67, 0])
    ([66, 67], 'AB')
    """

    name = "byte"
    vocab_size = 257
    end_of_document = 0
    special_ids: tuple[int, ...] = ()
    cuts = re.compile("")  # anywhere

    def encode(self, text: str) -> list[int]:
        with _refused_text(text, self.name):
            return [b + 1 for b in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(t.encode(), np.uint8).astype(np.uint16) + 1 for t in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i - 1 for i in ids if 0 < i <= 256).decode(errors="replace")

    def to_json(self) -> str:
        """Return the same tokenizer in the format of the `tokenizers` library."""
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the byte-level alphabet of GPT-2
        others = iter(range(256, 512))
        letters = {chr(b if b in plain else next(others)): b + 1 for b in range(256)}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model = {"type": "BPE", "vocab": {"<|endoftext|>": 0, **letters}, "merges": []}
        stages = {"normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level}
        return json.dumps({"version": "1.0", "added_tokens": [], **stages, "model": model})


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from the text of its JSON.

    All ids are below `vocab_size`. `special_ids` belong to tokens that a text can name, such as <|endoftext|>. `cuts`
    is a pattern of the places where a long text may be cut (None: nowhere).
    """

    def __init__(self, text: str, name: str, end: str | int | None = None) -> None:
        from tokenizers import Tokenizer as Library

        self.name, self._text = name, text
        try:
            self._inner = Library.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises plain Exceptions, and panics that are not even these
            why = str(error)[:150]
            raise UserError(f"{name} is not a tokenizer.json ({why}): give the file or folder of one") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size = max(self.vocabulary().values(), default=-1) + 1
        self.special_ids = tuple(sorted(i for i, t in self._inner.get_added_tokens_decoder().items() if t.special))
        end = _marked_end(text, self.vocab_size) if end is None else end
        if isinstance(end, int):
            self.end_of_document = end
            return
        found = [i for i in map(self._inner.token_to_id, [end] if end else _END_NAMES) if i is not None]
        if not found:
            what = f"no token '{end}'" if end else "no end-of-document token that we know"
            raise UserError(f"tokenizer {name} has {what}: name one of its tokens with --end")
        self.end_of_document = found[0]

    def vocabulary(self) -> dict[str, int]:
        return self._inner.get_vocab(with_added_tokens=True)

    @cached_property
    def cuts(self) -> re.Pattern | None:
        return cut_rule(json.loads(self._text))

    def encode(self, text: str) -> list[int]:
        with _refused_text(text, self.name):
            return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        kind = dtype_for(self.vocab_size)
        try:
            encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException:  # one by one: says at which text it failed
            return [np.array(self.encode(text), kind) for text in texts]
        return [np.frombuffer(array("I", e.ids), np.uint32).astype(kind) for e in encoded]  # thrice as fast as np.array

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        return self._text


Tokenizer = ByteTokenizer | FileTokenizer


def with_end(tokenizer: Tokenizer) -> str:
    """Return the JSON that goes beside weights: it names the token that ends documents, if that is not the usual one.

    A tokenizer.json has no place for it but a template, which here adds nothing to texts.
    """
    text, end = tokenizer.to_json(), tokenizer.end_of_document
    with contextlib.suppress(UserError):
        if isinstance(tokenizer, ByteTokenizer) or FileTokenizer(text, tokenizer.name).end_of_document == end:
            return text
    raw = json.loads(text)
    token = next((token for token, id in tokenizer.vocabulary().items() if id == end), None)
    if token is None:
        raise UserError(f"tokenizer {tokenizer.name} has no id {end} to end documents with: prepare the data anew")
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokens = {token: {"id": token, "ids": [end], "tokens": [token]}}
    mark = {"type": "TemplateProcessing", "single": [a], "pair": [a, b], "special_tokens": tokens}
    before = [raw["post_processor"]] if raw.get("post_processor") else []
    raw["post_processor"] = {"type": "Sequence", "processors": [*before, mark]}
    return json.dumps(raw, ensure_ascii=False)


def _marked_end(text: str, vocab: int) -> int | None:
    """Return the id of a template's only token, if texts end with it or it is not added at all."""
    if "TemplateProcessing" not in text:
        return None
    found = json.loads(text).get("post_processor") or {}
    for one in reversed(found.get("processors", [found])):
        ids = [id for token in one.get("special_tokens", {}).values() for id in token["ids"]]
        places = [place for place, piece in enumerate(one.get("single", [])) if "SpecialToken" in piece]
        if len(ids) == 1 and ids[0] < vocab and places in ([], [len(one["single"]) - 1]):
            return ids[0]
    return None


@contextlib.contextmanager
def _refused_text(text: str, name: str) -> Iterator[None]:
    """Refuse in a sentence a text that cannot be encoded: the library panics, and half a surrogate pair is no text."""
    try:
        text.encode()
        yield
    except UnicodeEncodeError:
        raise UserError(f"{shown(text)} holds bytes that are no UTF-8 text (half a surrogate pair): mend it") from None
    except (KeyboardInterrupt, SystemExit, MemoryError, UserError):
        raise
    except BaseException as error:
        raise UserError(f"tokenizer {name} cannot encode {shown(text)} ({str(error)[:100]}): get it anew") from None


def same_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Tell whether two tokenizers give the same ids: by their files, or by what the library writes of them."""
    from tokenizers import Tokenizer as Library

    def plain(tokenizer: Tokenizer) -> str:
        inner = Library.from_str(tokenizer.to_json())
        inner.no_truncation()
        inner.no_padding()
        return json.dumps({**json.loads(inner.to_str()), "post_processor": None})  # which adds tokens to whole texts

    return fingerprint(one) == fingerprint(other) or plain(one) == plain(other)


def fingerprint(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def dtype_for(vocab: int) -> type[np.integer]:
    """Return the type of stored ids: two bytes if they fit, by the official limit."""
    return np.uint16 if vocab < 65500 else np.int32


def load_tokenizer(name: str | Path, end: str | None = None) -> Tokenizer:
    """Load a tokenizer by its name (`gpt-neox-20b`, `byte`) or path. `end` names the token that ends a document.

    >>> neox = load_tokenizer("gpt-neox-20b")
    >>> neox.encode("Hello world"), neox.vocab_size, neox.end_of_document
    ([12092, 1533], 50277, 0)
    """
    if str(name) == "byte":
        if end is not None:
            raise UserError(f"the tokenizer byte ends documents with an id of its own: leave --end {end} out")
        return ByteTokenizer()
    if str(name) == BUNDLED:
        packed = (Path(__file__).parent / f"{BUNDLED}.json.xz").read_bytes()
        return FileTokenizer(lzma.decompress(packed).decode(), BUNDLED, end)
    path = Path(name)
    if path.is_dir():
        settings = path / "tokenizer_config.json"
        if end is None and settings.is_file():
            named = read_json(settings).get("eos_token")
            end = named.get("content") if isinstance(named, dict) else named
        path /= "tokenizer.json"
    if not is_file(path):
        raise UserError(f"there is no tokenizer '{name}': give {BUNDLED}, byte, a tokenizer.json or a folder with one")
    return FileTokenizer(read_text(path), str(name), end)


def train_tokenizer(texts: Iterable[str], vocab: int) -> FileTokenizer:
    """Train a byte-level BPE of `vocab` ids, which splits text as GPT-2 does; id 0 is <|endoftext|>.

    >>> tiny = train_tokenizer(["to be or not to be"] * 9, 260)
    >>> tiny.vocab_size, tiny.end_of_document, tiny.decode(tiny.encode("not to be"))
    (260, 0, 'not to be')
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    if vocab < 257:
        raise UserError(f"a vocabulary of {vocab} cannot hold all bytes and the end of a document: give 257 or more")
    inner = Library(models.BPE())
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet}
    inner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, show_progress=False, **special))
    return FileTokenizer(inner.to_str(), "trained")
