"""Fixtures of this folder; its tests can import `serving.py`, whatever pytest's import mode."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving import BYTES, Server, make_model

from tokenformer import hub
from tokenformer.infer import Engine
from tokenformer.models import LanguageModel


@pytest.fixture(scope="session")
def model() -> LanguageModel:
    return make_model()


@pytest.fixture(scope="session")
def engine(model) -> Engine:
    return Engine(model, vocab=BYTES.vocab_size)


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "small"
    hub.save(model, path, tokenizer_json=BYTES.to_json())
    return path


@pytest.fixture(scope="session")
def server(folder):
    running = Server(str(folder), "--rows", "16")
    yield running
    if running.process.poll() is None:
        assert running.end() == 0, running.log
    assert "Traceback" not in running.log, running.log
