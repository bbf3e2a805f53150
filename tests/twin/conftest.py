"""A prepared set, a tiny config on it, and JAX on eight virtual devices of one CPU.

XLA's optimisations are off: compiling is most of what these tests do, and what they compare does not depend on it.
"""

import os
from pathlib import Path

import pytest

FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}  # read when jax is first imported

from tokenformer.config import Config, load
from tokenformer.data.text.prepare import prepare

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
ONE = ("parallel.replicate=1",)  # of the eight devices
TINY = """
model: {layers: 2, dim: 16, heads: 2, qkv_tokens: 16, proj_tokens: 12, ffn_tokens: 32, vocab: 384, context: 16}
data: {path: DATA, split: [90, 10, 0], workers: 0}
steps: 10
batch: 8
micro_batch: 4
optimizer: {rate: 4e-3}
schedule: {warmup: 2}
train: {precision: fp32, device: cpu}
checkpoint: {every: 0}
validation: {every: 0, samples: 4, generate: 0}
log: {every: 1}
"""


@pytest.fixture(scope="session")
def config_file(tmp_path_factory) -> Path:
    data = prepare([TEXT], tmp_path_factory.mktemp("set"), "alice", tokenizer="byte", workers=1)
    path = tmp_path_factory.mktemp("config") / "tiny.yml"
    path.write_text(TINY.replace("DATA", str(data)))
    return path


@pytest.fixture
def tiny(config_file):
    def make(*overrides: str) -> Config:
        return load(config_file, overrides=overrides)

    return make
