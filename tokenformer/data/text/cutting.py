"""Where a long text may be cut so that encoding the pieces gives the tokens of the whole.

Unusual: a text is cut only where the pre-tokenizer provably ends a match; where nothing is proven nothing is cut.
"""

import re

from tokenformer.errors import UserError

# A cut lies after a letter or digit of these blocks (letters in every Unicode version) …
_BEFORE = "0-9A-Za-zÀ-ÖØ-öø-ɏΑ-ΡΣ-Ωα-ωА-яا-غक-हぁ-ゖァ-ヺ一-龥가-힣"
# … and before white space or punctuation. No normal form joins these with what stands before them, and every pattern
# below ends its match there. The apostrophe is absent: some patterns take "don't" as one.
_AFTER = " \n\t" + '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~' + "。、，！？；：「」（）"

# Patterns of Split pre-tokenizers that always end a match between the two: no match that holds a letter or digit goes
# on into white space or punctuation, and none looks behind. (GPT-4 and Llama 3, Qwen 2, GPT-2 written out.)
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_KNOWN = {_GPT4.replace("DIGITS", r"\p{N}{1,3}"), _GPT4.replace("DIGITS", r"\p{N}"), _GPT2}
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}

FRAGMENT = 1 << 18  # characters: longer documents are encoded in fragments of about this size
LONGEST = 1 << 20  # characters without a place to cut: more would need memory without bound


def cut_rule(tokenizer: dict) -> re.Pattern | None:
    """Return a pattern of the places where a text may be cut, from a tokenizer's JSON; None if none is proven."""
    normalizer, splitter = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")
    if is_bytes(tokenizer):
        return re.compile("")
    if normalizer and not all(n["type"] in _NORMALIZERS for n in _steps(normalizer, "normalizers")):
        return None
    if not splitter or not _ends_at_cuts(_steps(splitter, "pretokenizers")):
        return None
    after = _AFTER
    for token in tokenizer.get("added_tokens") or []:
        if token.get("rstrip"):  # it takes white space that would be in the next fragment
            return None
        for place in re.finditer(f"(?<=[{_BEFORE}])[{re.escape(_AFTER)}]", token["content"]):
            after = after.replace(place.group(), "")  # never inside an added token
    return re.compile(f"(?<=[{_BEFORE}])(?=[{re.escape(after)}])") if after else None


def is_bytes(tokenizer: dict) -> bool:
    """Tell whether every token is one byte, as in `ByteTokenizer`: then a text may be cut anywhere."""
    model, splitter = tokenizer.get("model", {}), tokenizer.get("pre_tokenizer") or {}
    plain = model.get("type") == "BPE" and not model.get("merges") and not model.get("ignore_merges")
    level = splitter.get("type") == "ByteLevel" and not (
        splitter.get("use_regex", True) or splitter.get("add_prefix_space")
    )
    return plain and level and not tokenizer.get("normalizer") and not tokenizer.get("added_tokens")


def _steps(stage: dict, inner: str) -> list[dict]:
    return stage[inner] if stage["type"] == "Sequence" else [stage]


def _ends_at_cuts(steps: list[dict]) -> bool:
    first, rest = steps[0], steps[1:]
    if first["type"] == "Split":
        how = (first.get("behavior"), first.get("invert"))
        fits = first["pattern"].get("Regex") in _KNOWN and how in (("Isolated", False), ("Removed", True))
    else:
        fits = first["type"] == "ByteLevel" and first.get("use_regex", True) and not first.get("add_prefix_space")
    return fits and all(s["type"] == "ByteLevel" and not s.get("add_prefix_space") for s in rest)


def last_cut(text: str, rule: re.Pattern, low: int, high: int) -> int | None:
    """Return the last place in [low, high] where `text` may be cut.

    >>> last_cut("one two three", re.compile("(?<=[a-z])(?=[ ])"), 1, 12)
    7
    """
    while high >= low:
        start = max(low, high - 4096)
        places = [m.start() for m in rule.finditer(text, start, high + 1)]
        if places:
            return places[-1]
        high = start - 1
    return None


def fragments(text: str, rule: re.Pattern | None, where: str) -> list[str]:
    """Cut a document into fragments that can be encoded by themselves; a short one comes back whole."""
    pieces, start = [], 0
    while rule and len(text) - start > FRAGMENT and (stop := cut_near(text, rule, start, where)):
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def cut_near(text: str, rule: re.Pattern, start: int, where: str, limit: int | None = None) -> int | None:
    """Return the end of the fragment that starts at `start`; None if the rest is short and has no place to cut."""
    size, limit = FRAGMENT, len(text) if limit is None else limit
    while True:
        stop = last_cut(text, rule, start + 1, min(start + size, limit - 1))
        if stop is not None:
            return stop
        if start + size >= len(text):
            return None
        if size >= LONGEST:
            raise UserError(f"{where} has {LONGEST:,} characters without a place to cut it: put spaces into it")
        size *= 2
