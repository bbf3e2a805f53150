"""200 damaged or foreign adapter folders: each is refused in one sentence, and the base is not touched."""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tokenformer
from tests.test_adapters import make_adapter, make_base
from tokenformer.errors import UserError
from tokenformer.files import MANIFEST, write_manifest
from tokenformer.hub.adapter_folder import ABOUT

WEIGHTS = "adapter.safetensors"
FILES = (ABOUT, WEIGHTS, "history.json", MANIFEST)
Damage = Callable[[Path], object]


def resealed(change: Callable[[Path], object]) -> Damage:
    """A damage by somebody who also writes a manifest that fits it: what is inside must be checked, too."""

    def damage(folder: Path) -> None:
        change(folder)
        (folder / MANIFEST).unlink()
        write_manifest(folder)

    return damage


def of_bytes(seed: int) -> Iterator[tuple[str, Damage]]:
    """Files that are missing, empty, cut, changed in a byte, folders, or of another kind."""
    rng = random.Random(seed)
    for name in FILES:
        yield f"no {name}", lambda f, n=name: (f / n).unlink()
        yield f"empty {name}", lambda f, n=name: (f / n).write_bytes(b"")
        yield f"{name} is a folder", lambda f, n=name: ((f / n).unlink(), (f / n).mkdir())
        yield f"{name} is noise", lambda f, n=name, s=rng.random(): (f / n).write_bytes(random.Random(s).randbytes(99))
        for share in (0.1, 0.4, 0.7, 0.95):
            yield f"{name} cut at {share}", lambda f, n=name, s=share: cut(f / n, s)
        for i in range(5):
            yield f"{name} has a wrong byte {i}", lambda f, n=name, s=rng.random(): flip(f / n, s)
    for name in (WEIGHTS, ABOUT, "history.json"):
        for share in (0.0, 0.2, 0.6):
            yield f"{name} cut at {share}, resealed", resealed(lambda f, n=name, s=share: cut(f / n, s))


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1 << int(where * 1000) % 8
    path.write_bytes(bytes(data))


def of_tensors() -> Iterator[tuple[str, Damage]]:
    """Whole files whose tensors are missing, too many, of another shape, type or layer, or not finite."""

    def change(how: Callable[[dict], object]) -> Damage:
        def work(folder: Path) -> None:
            tensors = load_file(folder / WEIGHTS)
            how(tensors)
            save_file(tensors, folder / WEIGHTS)

        return resealed(work)

    qkv = [(layer, f"attention.{part}", 2) for layer in (0, 1) for part in ("query", "key", "value")]
    places = itertools.product([(0, "ffn", 1), (1, "ffn", 3), *qkv], ("key", "value"))
    names = [f"blocks.{layer}.{part}.segments.{at}.{half}_tokens" for (layer, part, at), half in places]
    for name in names:
        yield f"without {name}", change(lambda t, n=name: t.pop(n))
        yield f"{name} has a row more", change(lambda t, n=name: t.update({n: torch.ones(len(t[n]) + 1, 32)}))
        yield f"{name} is narrower", change(lambda t, n=name: t.update({n: t[n][:, :31].contiguous()}))
        yield f"{name} is not finite", change(lambda t, n=name: t[n].view(-1)[5:6].fill_(float("nan")))
        yield f"{name} of integers", change(lambda t, n=name: t.update({n: t[n].int()}))
    one = names[0]
    for foreign in (
        "blocks.2.ffn.segments.1.key_tokens", "blocks.0.ffn.segments.2.key_tokens", "blocks.0.ffn.weight", "lora_A", "",
        "blocks.0.ffn.segments.99999999999999999999.key_tokens", "blocks.0.ffn.segments.1.bias", "head.weight",
        "model.embedding.weight", "embedding.weight", "norm.weight", "blocks.0.attention_norm.weight", "x" * 999,
        "blocks.99999999999.ffn.segments.1.key_tokens", "blocks.0.mlp.segments.1.key_tokens", "blocks.-1.ffn.bias",
        "image.blocks.0.ffn.segments.1.key_tokens",
    ):  # fmt: skip
        yield f"with '{foreign[:40]}'", change(lambda t, n=foreign: t.update({n: torch.ones(7, 32)}))
        yield f"'{foreign[:40]}' for {one}", change(lambda t, n=foreign: t.update({n: t.pop(one)}))
    yield "no tensors", change(lambda t: t.clear())
    yield "segments of no tokens", change(lambda t: t.update({n: torch.zeros(0, 32) for n in t}))
    yield "vectors", change(lambda t: t.update({n: torch.zeros(7) for n in t}))
    yield "numbers", change(lambda t: t.update({n: torch.zeros(()) for n in t}))


def of_words() -> Iterator[tuple[str, Damage]]:
    """Files of words that say something else."""
    other = "0" * 64
    for text in (
        "", "[]", "7", "base: x", "sha256: y", "base: x\nsha256: 7", "base: 7\nsha256: " + other, "{", "\0", "a: &a *a",
        "base: x\nsha256: short", "base: x\nsha256: " + other, "base: x\nsha256: " + "0" * 63 + "G", "base: [x]",
        "base: x\nsha256: " + other + "\nmore: 1", "base: null\nsha256: null", "!!python/object:os.system x", "\xff",
        "base: " + "x" * 5000 + "\nsha256: " + other, "base: x\nbase: y\nsha256: " + other,
    ):  # fmt: skip
        yield f"adapter.yml {text[:30]!a}", resealed(lambda f, t=text: (f / ABOUT).write_text(t, encoding="latin1"))
    for text in ("{}", "7", "[7]", "[", '"x"', "null", "[[]]"):
        yield f"history.json {text}", resealed(lambda f, t=text: (f / "history.json").write_text(t))
    foreign = {"/etc/passwd": 1}, {"../x": {"bytes": 1, "sha256": ""}}, {}, []
    for files in ({}, *({"files": listed} for listed in foreign)):
        yield f"manifest {files}", lambda f, m=files: (f / MANIFEST).write_text(json.dumps(m))


def of_folders() -> Iterator[tuple[str, Damage]]:
    """Folders of something else."""

    def instead(make: Callable[[Path], object]) -> Damage:
        def work(folder: Path) -> None:
            shutil.rmtree(folder)
            make(folder)

        return work

    yield "nothing", instead(lambda f: None)
    yield "a file", instead(lambda f: f.write_text("adapter"))
    yield "an empty folder", instead(lambda f: f.mkdir())
    yield "a model", instead(lambda f: tokenformer.save(make_base(), f))
    yield "a model of Hugging Face", instead(lambda f: tokenformer.save(make_base(), f, format="hf"))
    yield "of another base", instead(lambda f: make_adapter(f, make_base(theta="softmax"), 1, qkv=5, ffn=7))
    yield "of a longer context", instead(lambda f: make_adapter(f, make_base(context=64), 1, qkv=5, ffn=7))
    yield "peft's", instead(lambda f: (f.mkdir(), (f / "adapter_config.json").write_text("{}")))
    yield "weights too many", lambda f: save_file({"x": torch.ones(1)}, f / "adapter-2.safetensors")
    yield "a config too many", lambda f: (f / "config.yml").write_text("model: {}")


DAMAGES = dict([*of_bytes(0), *of_tensors(), *of_words(), *of_folders()])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("whole") / "adapter", make_base(), 1, qkv=5, ffn=7)


def test_200_damaged_or_foreign_folders_are_a_sentence_each_and_the_base_is_untouched(whole, tmp_path):
    assert len(DAMAGES) >= 200
    base, untouched = make_base(), make_base()
    config, wrong = base.config, []
    for i, (what, damage) in enumerate(DAMAGES.items()):
        folder = tmp_path / str(i)
        shutil.copytree(whole, folder)
        damage(folder)
        try:
            tokenformer.attach(base, folder, "a")
            wrong.append(f"{what}: was attached")
        except UserError as error:
            said = str(error)
            if not (20 < len(said) < 900 and "\n" not in said and ":" in said):
                wrong.append(f"{what}: said {said!r}")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        same = base.config is config and not base.active and not hasattr(base, "adapters")
        pairs = zip(base.named_parameters(), untouched.named_parameters(), strict=True)
        if not same or not all(n == m and torch.equal(p, q) for (n, p), (m, q) in pairs):
            wrong.append(f"{what}: the base was touched")
            break
    assert wrong == []
    assert tokenformer.attach(base, whole, "a").active == {"a": 1.0}  # the copy that nobody damaged
