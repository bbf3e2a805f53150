"""A small model, a small tokenizer, their Hugging Face folder. Tests here can import `rows.py`."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from rows import write_rows

from tokenformer import hub
from tokenformer.config import ModelConfig
from tokenformer.data.text.tokenizer import FileTokenizer, train_tokenizer
from tokenformer.models import LanguageModel

ALICE = Path(__file__).parents[1] / "data" / "alice.txt"


@pytest.fixture(scope="session")
def tokenizer() -> FileTokenizer:
    return train_tokenizer([ALICE.read_text(encoding="utf-8")], 600)


@pytest.fixture(scope="session")
def model() -> LanguageModel:
    config = ModelConfig(
        layers=2, dim=32, heads=4, qkv_tokens=16, proj_tokens=16, ffn_tokens=[32, 16], vocab=640, context=128
    )
    model = LanguageModel(config)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.5)
        model.embedding.weight *= 0.3
    return model


@pytest.fixture(scope="session")
def hf_folder(model, tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "folder"
    hub.save(model, folder, format="hf", tokenizer_json=tokenizer.to_json())
    return folder


@pytest.fixture
def data_dir(tmp_path) -> Path:
    folder = tmp_path / "zero-shot"
    folder.mkdir()
    return write_rows(folder)
