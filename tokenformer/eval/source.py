"""A model with its tokenizer from whatever a user names: folder, run, official weights, hub name, official configs.

The tokenizer: the one named, else beside the weights, else the config's vocab-file, else by the size of the vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenformer.data.text.tokenizer import BUNDLED, FileTokenizer, Tokenizer, load_tokenizer, padded_vocab
from tokenformer.errors import UserError

if TYPE_CHECKING:
    import torch

    from tokenformer.models import LanguageModel

DTYPES = ("float32", "bfloat16", "float16")


def pick_device(name: str | None) -> "torch.device":
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {name}, but torch sees no GPU here: give --device cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise UserError(f"device is '{name}': give cpu, cuda, or cuda:1 and so on") from None


def pick_dtype(name: str | None, device: "torch.device") -> "torch.dtype | None":
    """None: as stored."""
    import torch

    if name is None:
        return torch.bfloat16 if device.type == "cuda" else None
    return {n: getattr(torch, n) for n in DTYPES}[name]


def open_model(
    weights: str | Path,
    configs: Sequence[str | Path] = (),
    *,
    tokenizer: str | Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> tuple["LanguageModel", Tokenizer]:
    """The model, ready to be asked, and its tokenizer. Names are checked before weights are read."""
    from tokenformer import hub
    from tokenformer.hub.official_config import load_config, read_generation

    official = read_generation(*configs)
    config = load_config(*configs).model if official.has_model else None
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype is '{dtype}', but must be one of {', '.join(DTYPES)}")
    place = pick_device(device)
    named = load_tokenizer(tokenizer) if tokenizer else None
    kind, _ = hub.locate(weights)
    if kind != "official":
        config = None  # a folder carries its own
    model = hub.load(weights, config=config, device=place, dtype=pick_dtype(dtype, place)).eval()
    found = named or _tokenizer(weights, official.vocab_file, model.config.vocab)
    if found.vocab_size > model.config.vocab:
        raise UserError(
            f"tokenizer {found.name} has {found.vocab_size:,} ids but the model {weights} knows "
            f"{model.config.vocab:,}: give its own with --tokenizer"
        )
    return model, found


def _tokenizer(weights: str | Path, vocab_file: str | Path | None, vocab: int) -> Tokenizer:
    from tokenformer import hub

    text = hub.tokenizer_json(weights)
    if text is not None:
        return FileTokenizer(text, f"of {weights}")
    if vocab_file is not None and Path(vocab_file).is_file():
        return load_tokenizer(vocab_file)
    for name, size in ((BUNDLED, 50277), ("byte", 257)):
        if padded_vocab(size) == vocab:
            return load_tokenizer(name)
    raise UserError(f"{weights} has no tokenizer beside it: name one with --tokenizer")
