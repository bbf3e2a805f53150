"""What a token is called where it stands alone: its text, or its bytes where these are no whole character."""

import json
from collections.abc import Callable
from functools import lru_cache

from tokenformer.data.text.tokenizer import ByteTokenizer, Tokenizer


def token_names(tokenizer: Tokenizer) -> Callable[[int], tuple[str, bytes]]:
    r"""Return a function that gives the text of a token by its id, and its bytes. No two tokens have the same text, as
    far as the tokenizer itself tells them apart.

    >>> name = token_names(ByteTokenizer())
    >>> name(66), name(0xE2 + 1), name(0)
    (('A', b'A'), ('bytes:\\xe2', b'\xe2'), ('<|endoftext|>', b'<|endoftext|>'))
    """
    from tokenizers import Tokenizer as Library

    text = tokenizer.to_json()
    library, level = Library.from_str(text), _byte_level(json.loads(text).get("decoder"))
    added = library.get_added_tokens_decoder()
    letters = {letter: id - 1 for letter, id in json.loads(ByteTokenizer().to_json())["model"]["vocab"].items() if id}

    @lru_cache(maxsize=1 << 17)
    def name(id: int) -> tuple[str, bytes]:
        token = library.id_to_token(id)
        if token is None:
            return f"id:{id}", b""
        if level and id not in added and all(letter in letters for letter in token):
            raw = bytes(letters[letter] for letter in token)
        elif level:
            raw = token.encode()
        else:
            # a decoder may treat a first token otherwise: what the second of two adds is its text
            once, twice = (
                library.decode([id], skip_special_tokens=False),
                library.decode([id] * 2, skip_special_tokens=False),
            )
            raw = (twice[len(once) :] if twice.startswith(once) else token).encode()
        try:
            found = raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw
        return (found, raw) if "�" not in found else (token, raw)

    return name


def _byte_level(decoder: dict | None) -> bool:
    """Tell whether letters of tokens stand for bytes."""
    kinds = [decoder, *(decoder or {}).get("decoders", [])]
    return any(kind is not None and kind.get("type") == "ByteLevel" for kind in kinds)
