"""Good folders that tests may harm, and the check that a command is refused in one sentence."""

import shutil
from importlib import import_module

import pytest

from tokenformer import ModelConfig
from tokenformer.cli.main import main
from tokenformer.data.text.tokenizer import ByteTokenizer
from tokenformer.files import write_manifest
from tokenformer.hub import save
from tokenformer.models import build

SHAPE = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=8, proj_tokens=8, ffn_tokens=16, vocab=384, context=32)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A model as our folder and as an export."""
    root = tmp_path_factory.mktemp("originals")
    for kind in ("ours", "hf", "official"):
        save(build(SHAPE, seed=1), root / kind, format=kind, tokenizer_json=ByteTokenizer().to_json())
    return root


@pytest.fixture
def folder(originals, tmp_path):
    """Copies that a test may harm, by kind."""

    def copy(kind: str, manifest: bool = True):
        shutil.copytree(originals / kind, tmp_path / kind)
        if not manifest:
            (tmp_path / kind / "manifest.json").unlink()
        return tmp_path / kind

    return copy


@pytest.fixture(params=["one", "segmented", "transformer", "llama"])
def both(request):
    """A native model, and the same as a class of transformers."""
    return import_module("tests.hub.hf_models").pair(request.param)


@pytest.fixture
def one():
    return import_module("tests.hub.hf_models").pair("one")


def remade(folder):
    """As somebody would who knows how: the manifest fits the files again."""
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    return folder


def refused(capsys, *words) -> str:
    """One sentence and code 2."""
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("tokenformer: ") and said.err.count("\n") == 1 and len(said.err) < 1500, said.err
    return said.err


def write(folder, *more):
    return ["generate", folder, "--prompt", "a", "--tokens", "2", "--device", "cpu", *more]


def flip(path, at=-5):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
