"""A prepared set of real text, a tiny config on it, and what makes two runs equal."""

import os
from pathlib import Path

import pytest
import torch

from tokenformer.config import Config, load
from tokenformer.data.text.prepare import prepare
from tokenformer.hub.dcp import read_tensors
from tokenformer.hub.run_folder import newest_whole
from tokenformer.train.checkpoint import read_state

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
TINY = """
model: {layers: 2, dim: 16, heads: 2, qkv_tokens: 16, proj_tokens: 12, ffn_tokens: 32, vocab: 384, context: 16}
data: {path: DATA, split: [90, 10, 0], workers: 0}
steps: 40
batch: 4
micro_batch: 2
optimizer: {rate: 4e-3}
schedule: {warmup: 4, steps: 40}
train: {precision: fp32, device: cpu}
checkpoint: {every: 0}
validation: {every: 0, samples: 4, generate: 0}
log: {every: 10}
"""


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models are slower on two, and sums must be those of the child processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    return prepare([TEXT], tmp_path_factory.mktemp("set"), "alice", tokenizer="byte", workers=1)


@pytest.fixture(scope="session")
def config_file(prepared, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yml"
    path.write_text(TINY.replace("DATA", str(prepared)))
    return path


@pytest.fixture
def tiny(config_file):
    def make(*overrides: str) -> Config:
        return load(config_file, overrides=overrides)

    return make


def result(run: Path) -> dict:
    """All that a run's newest checkpoint holds, apart from how long it took."""
    found = newest_whole(run)
    assert found is not None
    tensors = {part: read_tensors(found / part) for part in ("model", "optim")}
    state = read_state(found)
    state["totals"].pop("hours")
    return {**tensors, "state": state}


def same(one: dict, other: dict) -> bool:
    """Bit for bit."""
    return one["state"] == other["state"] and all(
        one[part].keys() == other[part].keys()
        and all(torch.equal(tensor, other[part][name]) for name, tensor in one[part].items())
        for part in ("model", "optim")
    )


def child_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
