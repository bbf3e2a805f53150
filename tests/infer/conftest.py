"""Fixtures of this folder; its tests can import `small_models.py`, whatever pytest's import mode."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from small_models import KINDS, make

from tokenformer.models import LanguageModel


@pytest.fixture(params=KINDS)
def model(request) -> LanguageModel:
    return make(request.param)


@pytest.fixture
def tokenformer_model() -> LanguageModel:
    return make()


@pytest.fixture
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(64, (n,), generator=draw).tolist() for n in (7, 1, 30, 12)]
