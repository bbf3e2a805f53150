"""Writes and reads, without transformers, folders that transformers loads with our package or without it.

config.json has the keys of our own config, and tensors are called `model.…`. Where our manifest lies in such a folder,
what is read must be what it lists; people may edit the README, and transformers itself writes no manifest.
"""

import contextlib
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer.config import ModelConfig, build, to_dict
from tokenformer.data.images.decode import resized_to
from tokenformer.data.text.tokenizer import FileTokenizer
from tokenformer.errors import UserError
from tokenformer.files import MANIFEST, atomic_folder, check_manifest
from tokenformer.hub.fill import fill
from tokenformer.hub.folder import Tensors, write_tensors
from tokenformer.hub.remote import FILE, MAPS, modeling_source
from tokenformer.hub.sidecars import read_history
from tokenformer.models import LanguageModel
from tokenformer.parsing import read_json

INDEX = "model.safetensors.index.json"
# what transformers itself keeps in config.json; none of it changes what the model computes
THEIRS = (
    *("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_hidden_states", "output_attentions", "return_dict"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "name_or_path"),
    "history",  # ours: the growths that led to the model
)
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # mean and deviation of its pixels
CARD = Path(__file__).with_name("hf_card.md").read_text(encoding="utf-8")


def save_hf(
    model: Any,
    folder: str | Path,
    *,
    tokenizer_json: str | None = None,
    force: bool = False,
    max_shard_size: int | None = None,
) -> None:
    """Write a folder with everything that `AutoModelForCausalLM` and `AutoTokenizer` need, or, of an image model,
    `AutoModelForImageClassification` and `AutoImageProcessor`; of a pair, `AutoModel` and both of these.
    """
    of = model.config.of
    if of not in MAPS:
        raise UserError(f"transformers has no class for a model of {of}: write one of our folders (--to ours)")
    if of == "pair" and tokenizer_json is None:
        raise UserError("a pair reads texts, and no tokenizer lies beside it: give the one it was trained with")
    ids, suppressed = _special_ids(tokenizer_json, model.config)
    types = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    own, tensors = _one_vocabulary(model)
    config = to_dict(own) | ids | {"auto_map": MAPS[of], "model_type": f"tokenformer_{of}"}
    config["architectures"] = [list(MAPS[of].values())[-1].split(".")[1]]
    if of == "language":
        config["model_type"] = "tokenformer"
    elif of == "image":
        classes = dict(enumerate([*model.images.get("classes", [])]))
        names = {i: classes.get(i, f"LABEL_{i}") for i in range(model.config.classes)}
        config |= {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    config |= {"dtype": types.pop()} if len(types) == 1 else {}
    config |= {"history": model.history} if model.history else {}  # which transformers copies, unlike files
    with atomic_folder(folder, force) as beside:
        _write_json(beside / "config.json", config)
        if of != "language":
            processor = _processor(model) | ({"processor_class": "CLIPProcessor"} if of == "pair" else {})
            _write_json(beside / "preprocessor_config.json", processor)
        else:
            _write_json(beside / "generation_config.json", {**ids, **suppressed})
        _write_json(beside / "history.json", model.history)
        (beside / FILE).write_text(modeling_source(model.config.of), encoding="utf-8")
        card = {"language": _card, "image": _image_card, "pair": _pair_card}[of]
        (beside / "README.md").write_text(card(model, Path(folder).name, tokenizer_json), encoding="utf-8")
        if tokenizer_json is not None:
            text = _with_end(tokenizer_json) if of == "pair" else tokenizer_json
            (beside / "tokenizer.json").write_text(text, encoding="utf-8")
            _write_json(beside / "tokenizer_config.json", _tokenizer_config(model.config, tokenizer_json, bool(ids)))
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        files = write_tensors(beside, tensors.items(), kinds, max_shard_size)
        if len(set(files.values())) > 1:
            total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
            _write_json(beside / INDEX, {"metadata": total, "weight_map": files})


def _one_vocabulary(model: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return config and tensors with ids that a growth added as part of the vocabulary: transformers knows one table.

    Ids under a switch stay apart, since they do not count without it.
    """
    config, tensors = model.config, dict(model.named_parameters())
    if config.added_vocab and not config.added_switch:
        for part in ("embedding", "head"):
            if f"added_{part}.weight" in tensors:
                both = [tensors[f"{part}.weight"], tensors.pop(f"added_{part}.weight")]
                tensors[f"{part}.weight"] = torch.cat([tensor.detach() for tensor in both])
        config = dataclasses.replace(config, vocab=config.vocab + config.added_vocab, added_vocab=0)
    return config, tensors


def read_config(folder: str | Path) -> ModelConfig:
    """Read the model's config from a folder; a key that neither we nor transformers know is refused."""
    raw = read_json(Path(folder) / "config.json")
    own = {name: value for name, value in raw.items() if name not in THEIRS and value is not None}
    try:
        return build(ModelConfig, own)
    except UserError as error:
        raise UserError(f"{Path(folder) / 'config.json'}: {error}") from None


def load_hf(folder: str | Path) -> LanguageModel:
    """Load the native model of a folder that `save_hf` or transformers wrote."""
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        check_manifest(folder, edited=True)
    config, index = read_config(folder), folder / INDEX
    names = ["model.safetensors"]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        files = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
            raise UserError(f"{index} names no files of its own folder: get it anew")
        names = sorted(set(files))
    model = fill(config, Tensors((folder / name for name in names), prefix="model."), str(folder))
    raw = read_json(folder / "config.json")
    model.history = read_history(folder) or raw.get("history") or []
    if config.of in ("image", "pair"):
        model.images = _images(folder, raw.get("id2label") or {}, config)
    return model


def _processor(model: Any) -> dict[str, Any]:
    """A processor of transformers that needs no torchvision: shorter side resized, centre cut out, normalised."""
    images, size, config = model.images, model.images.get("size"), model.config.trunks.get("image", model.config)
    sides = [size, size] if size else [side * config.patch for side in config.grid]
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": max(resized_to(min(sides), images.get("crop_pct", 0.875)), *sides)},
        "resample": 2 if images.get("interpolation") == "bilinear" else 3,
        "do_center_crop": True,
        "crop_size": {"height": sides[0], "width": sides[1]},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": images.get("mean", IMAGENET[0]),
        "image_std": images.get("std", IMAGENET[1]),
    }


def _images(folder: Path, names: dict[str, str], config: ModelConfig) -> dict[str, Any]:
    """What an image model or a pair knows of its images, from transformers' files."""
    names, config = names if config.of == "image" else {}, config.trunks.get("image", config)
    path = folder / "preprocessor_config.json"
    raw = read_json(path) if path.is_file() else {}
    if not raw:
        do = "put the one of the base there, or call processor.save_pretrained"
        warnings.warn(f"{folder} has no {path.name}, so pixels are made as for ImageNet: {do}", stacklevel=2)
    size, crop = raw.get("size"), raw.get("crop_size")
    shorter = size.get("shortest_edge") if isinstance(size, dict) else None
    cut = [crop.get(side) for side in ("height", "width")] if isinstance(crop, dict) else []
    steps = all(raw.get(f"do_{step}", True) is True for step in ("resize", "center_crop", "rescale", "normalize"))
    if raw and not (steps and cut and isinstance(shorter, int) and shorter > 0 and raw.get("resample") in (2, 3)):
        do = "give size.shortest_edge, crop_size, resample 2 or 3, and no do_… that is false"
        raise UserError(f"{path} prepares images in a way that we do not know: {do}")
    sides = [n for n in cut if isinstance(n, int)] or [side * config.patch for side in config.grid]
    found = {"classes": [names[i] for i in sorted(names, key=int)], "mean": raw.get("image_mean")}
    found |= {"size": sides[0] if sides[0] == sides[-1] else None, "std": raw.get("image_std")}
    found["crop_pct"] = min(sides) / shorter if shorter else None
    found["interpolation"] = {2: "bilinear", 3: "bicubic"}.get(raw.get("resample", 0))
    return {name: value for name, value in found.items() if value is not None and value != []}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _special_ids(tokenizer_json: str | None, config: ModelConfig) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return the ids that begin, end and pad texts (none where the tokenizer has no end token), and the rows of the
    embedding that are no token, which transformers' `generate` must not choose.
    """
    from tokenizers import Tokenizer

    if tokenizer_json is None:
        return {}, {}
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(f"the tokenizer is not a tokenizer.json ({error}): give another") from None
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size > config.vocabulary:
        raise UserError(
            f"the tokenizer has an id {size - 1}, but the model ids below {config.vocabulary}: give its own"
        )
    end = None
    with contextlib.suppress(UserError):  # none that we know
        end = _end(tokenizer_json)[1]
    ids = {} if end is None else {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    return ids, {"suppress_tokens": list(range(size, config.vocab))} if size < config.vocab else {}


def _tokenizer_config(config: ModelConfig, tokenizer_json: str, has_end: bool) -> dict[str, Any]:
    pair = config.of == "pair"
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.trunks["text"].context if pair else config.context,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right" if pair else "left",  # a batch of language is continued at its right end
        "clean_up_tokenization_spaces": False,
        **(dict.fromkeys(("bos_token", "eos_token", "pad_token"), _end(tokenizer_json)[0]) if has_end else {}),
    }


def _end(tokenizer_json: str) -> tuple[str, int]:
    """Return the token that ends texts, and its id."""
    from tokenizers import Tokenizer

    number = FileTokenizer(tokenizer_json, "of the model").end_of_document
    return str(Tokenizer.from_str(tokenizer_json).id_to_token(number)), number


def _with_end(tokenizer_json: str) -> str:
    """Return the tokenizer that appends the end token, as a pair reads texts."""
    from tokenizers import Tokenizer, processors

    tokenizer, end = Tokenizer.from_str(tokenizer_json), _end(tokenizer_json)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    return tokenizer.to_str()


def _card(model: LanguageModel, title: str, tokenizer_json: str | None) -> str:
    c = model.config
    kinds = {"tokenformer": "A TokenFormer language model", "transformer": "A Transformer", "llama": "A Llama"}
    tokens, use = "", "logits = model(torch.tensor([[1, 2, 3]])).logits\n"
    if c.kind == "tokenformer":
        tokens = (
            f"Parameter tokens per projection: {c.qkv_tokens} (q, k, v), {c.proj_tokens} (after attention), "
            f"{c.ffn_tokens} (feed-forward){' in most layers' if c.layer_overrides else ''}; Θ is `{c.theta}`.\n"
        )
    imports = "import torch\nfrom transformers import AutoModelForCausalLM"
    if tokenizer_json is not None:
        imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
        use = (
            f'tokenizer = AutoTokenizer.from_pretrained("{title}", trust_remote_code=True)\n'
            'ids = tokenizer("Once upon a time", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**ids, max_new_tokens=20)[0]))\n"
        )
    words = {"kind": kinds[c.kind], "tokens": tokens, "imports": imports, "use": use}
    return CARD.format(c=c, title=title, parameters=model.cost().parameters, **words)


def _image_card(model: Any, title: str, _tokenizer: str | None) -> str:
    c = model.config
    head, rest = CARD.partition("# {title}")[0], CARD[CARD.index("With the package `tokenformer`") :]
    about = f"""# {title}

An image classifier ({c.kind}) with {model.cost().parameters:,} parameters: {c.layers} layers of width {c.dim},
patches of {c.patch} × {c.patch} pixels, {c.classes:,} classes.

## Use

```python
from transformers import pipeline

print(pipeline("image-classification", "{title}", trust_remote_code=True)("picture.jpg"))
```

"""
    head = head.replace("text-generation", "image-classification")
    return head + about + rest.format(title=title)


def _pair_card(model: Any, title: str, _tokenizer: str | None) -> str:
    c = model.config
    shapes = " and ".join(f"{t.layers} layers of width {t.dim} ({n}, {t.kind})" for n, t in c.trunks.items())
    head, rest = CARD.partition("# {title}")[0], CARD[CARD.index("With the package `tokenformer`") :]
    about = f"""# {title}

Images and texts in one space of {c.embed} dimensions, compared by {c.loss}: {model.cost().parameters:,} parameters,
{shapes}.

## Use

```python
from transformers import pipeline

find = pipeline("zero-shot-image-classification", "{title}", trust_remote_code=True)
print(find("picture.jpg", candidate_labels=["a cat", "a dog"], hypothesis_template="{{}}"))
```

"""
    head = head.replace("text-generation", "zero-shot-image-classification")
    return head + about + rest.format(title=title)
