"""Studies and benchmarks run at toy size, as their `--check` does it, so that a GPU's time is not lost to a mistake in
them.
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


@pytest.mark.multi
def test_the_study_of_adapters():
    """All phases, twice; every method begins as the base, methods of one size have equally many parameters, and LoRA is
    peft's.
    """
    lines = check("experiments/adapters/run.py")
    assert lines[-1].startswith("all is well: ") and int(lines[-1].split()[3]) > 60
    assert any(line.startswith("| segment 1.3 % copied keys in ffn | 6,656 ") for line in lines)
    assert any(line.startswith("| lora 5 % from books | ") for line in lines)


@pytest.mark.slow
def test_the_study_of_fp8():
    """Arms that are stopped go on to the same loss, finished ones are not run again, bf16 on a CPU has no noise."""
    lines = check("experiments/fp8/run.py")
    assert lines[-1].startswith("all is well: 6 arms, stopped ") and not lines[-1].endswith("stopped 0 times")
    assert any(line.startswith("| toy | ") for line in lines)


def test_the_study_of_skipped_values():
    """A model is trained and measured once; a threshold of nothing skips nothing; half is half on unseen text too."""
    lines = check("experiments/skip/run.py")
    assert lines[-1] == "all is well: 130 measurements"
    assert any(line.startswith("| constant, one per projection | ") for line in lines)


def test_the_benchmark_of_adapters():
    """An adapter and LoRA have equally many parameters, and what is frozen is held in bf16 where that is asked for."""
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    found = {line["model"].rpartition(":")[0]: line for line in map(json.loads, check("benchmarks/adapters.py"))}
    assert len(found) == 6 and found["full:compiled"]["share"] == 1
    sizes = {line["learning"] for who, line in found.items() if not who.startswith("full")}
    assert len(sizes) == 1 and all(line["time_of_full"] > 0 for line in found.values())
    whole, less = (found[f"adapter{hold}:compiled"]["held_bytes"] for hold in ("", "-bf16"))
    assert whole - less == 2 * found["full:compiled"]["parameters"]


def test_the_benchmark_of_the_jax_twin():
    """Both sides begin with the same values and take as many steps; the loss is that of random ids."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed: pip install 'tokenformer[jax]'")
    found = {line["model"]: line for line in map(json.loads, check("benchmarks/jax_step.py"))}
    assert list(found) == [f"{who}:{what}:2" for what in ("step", "decode") for who in ("reference", "kernels", "jax")]
    assert all(line["value"] > 0 and line["rival"].startswith("reference") for line in found.values())
    assert all(5.3 < line["loss"] < 5.6 for line in found.values() if line["name"] == "step")


def test_the_benchmark_of_image_models():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    found = [json.loads(line) for line in check("benchmarks/vision.py")]
    assert [line["model"] for line in found][:2] == ["timm:compiled:4", "vision/b16:kernels:4"] and len(found) == 4
    assert found[0]["per_flop"] == 1 and found[0]["parameters"] == found[2]["parameters"]
    assert found[0]["flops_per_image"] == found[2]["flops_per_image"] and all(line["value"] > 0 for line in found)


def test_the_benchmark_of_token_parallel_kernels():
    pytest.importorskip("triton")
    found = [json.loads(line) for line in check("benchmarks/token_kernels.py")]
    assert [line["model"] for line in found] == ["lm/3m:qkv:5:2", "lm/3m:ffn:5:4"]
    assert all(line["furthest_from_reference"] < 1e-6 for line in found)


def test_the_study_of_reading_and_drawing():
    """Both phases, twice: finished arms are not run again; names, bits and copies are in the tables."""
    lines = check("experiments/draw/run.py")
    assert lines[-1] == "all is well: 11 arms"
    assert any(line.startswith("| Σ log p(name) | ") for line in lines)
    assert any("exact copies of training icons" in line for line in lines)
