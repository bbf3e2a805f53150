"""The studies and benchmarks of image models run at toy size, as their `--check` does it, so that a GPU's time is not
lost to a mistake in them.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def check(script: str) -> list[str]:
    done = subprocess.run([sys.executable, ROOT / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.multi
def test_the_study_of_image_models():
    """All phases, twice: two processes train at once, finished arms are not run again, growth changes no prediction."""
    lines = check("experiments/vision/run.py")
    assert lines[-1].startswith("all is well: ") and int(lines[-1].split()[3]) > 40
    assert any(line.startswith("| ViT, ×1 for 1 | ") for line in lines) and any("(anew)" in line for line in lines)


def test_the_benchmark_of_image_models():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    found = [json.loads(line) for line in check("benchmarks/vision.py")]
    assert [line["model"] for line in found][:2] == ["timm:compiled:4", "vision/b16:kernels:4"] and len(found) == 4
    assert found[0]["per_flop"] == 1 and found[0]["parameters"] == found[2]["parameters"]
    assert found[0]["flops_per_image"] == found[2]["flops_per_image"] and all(line["value"] > 0 for line in found)
