"""What several tests need: the golden tensors of the official code, and the shared folder where there is one."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file

torch.set_num_threads(1)  # two test processes share two cores
settings.register_profile("same cases every time", derandomize=True, deadline=None)
if not os.environ.get("NEW_CASES"):  # NEW_CASES=1 pytest -m hypothesis: look for what no run has tried yet
    settings.load_profile("same cases every time")
DATA = Path(__file__).parent / "data"
collect_ignore_glob = ["data/before/*"]  # an exported folder has a module in it
THETAS = ("l2_norm_gelu", "gelu_l2_norm", "softmax")


@pytest.fixture(autouse=True)
def online_again():
    """The harness on local files lets its whole process fetch nothing; here, tests of fetching may come after it."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None and os.environ.pop(name, None) is not None:
            for module in ("huggingface_hub.constants", "datasets.config"):
                if hasattr(sys.modules.get(module), name):
                    setattr(sys.modules[module], name, False)


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """`{theta}/` folders with official weights, config and tensors; `rotary.safetensors`; `indexed/`."""
    return DATA / "golden"


@pytest.fixture(params=THETAS)
def golden(request, golden_folder) -> tuple[Path, dict[str, torch.Tensor]]:
    """An official model folder and what the official code computed with it."""
    folder = golden_folder / request.param
    return folder, load_file(folder / "golden.safetensors")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data that may not be copied into the repository: beside the checkout on some machines."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the folder {folder.name} beside the checkout, which is not here")
    return folder


@pytest.fixture
def relative():
    """Largest difference over the largest magnitude."""

    def measure(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return ((ours - theirs).abs().max() / theirs.abs().max()).item()

    return measure
