"""The training kernels against the reference: in Triton's interpreter (fp32, fp16; it is wrong for bf16), on a GPU if
there is one, and which of them runs where.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tokenformer.errors import UserError
from tokenformer.ops import pattention as ops
from tokenformer.ops.cross_entropy import linear_cross_entropy
from tokenformer.ops.pattention import backend, pattention

INPUTS = {
    "one row without a dimension": "equal",
    "labels with gaps": "equal",
    "a label outside": "nan",
    "a theta that is none": "theta is 'relu', not one of l2_norm_gelu, gelu_l2_norm, softmax, l1_norm_gelu",
    "fewer values": "a segment has 100 keys and 99 values: give as many of each",
}
SCRIPT = Path(__file__).parent / "training_kernel_checks.py"


def checks(device: str, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), device], capture_output=True, text=True, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def too_far(found: dict) -> dict:
    """Whatever is further from the truth than the reference in the same type, by more than a half."""
    pairs = {f"{room} {name}": pair for room in ("pattention", "loss", "model") for name, pair in found[room].items()}
    alone = {f"{room} {name}": (error, 1e-6) for room in ("stream", "zeros") for name, error in found[room].items()}
    return {name: pair for name, pair in (pairs | alone).items() if not pair[0] < 1.5 * pair[1] + 1e-6}


def test_in_the_interpreter_outputs_and_gradients_are_as_close_to_the_truth_as_the_reference():
    pytest.importorskip("triton")
    found = checks("cpu", TRITON_INTERPRET="1")
    assert len(found["pattention"]) == 40 and len(found["loss"]) == 4 and len(found["model"]) == 7
    assert too_far(found) == {}
    assert "no second derivative: set TOKENFORMER_PATTENTION=reference" in found["second"]
    assert found["inputs"] == INPUTS


@pytest.mark.gpu
def test_on_a_gpu_outputs_and_gradients_are_as_close_to_the_truth_as_the_reference_and_always_the_same():
    found = checks("cuda")
    assert len(found["pattention"]) == 63
    assert too_far(found) == {} and found["inputs"] == INPUTS


X, SEGMENT = torch.randn(3, 4), (torch.randn(5, 4), torch.randn(5, 6), 2.0)


def test_on_a_cpu_the_reference_runs_and_kernels_are_refused_in_a_sentence(monkeypatch):
    assert backend(X) == backend(X.double()) == "reference"
    with pytest.raises(UserError, match="do not run on cpu"):
        pattention(X, [SEGMENT], choice="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # which is a no
    with pytest.raises(UserError, match="do not run on cpu"):
        linear_cross_entropy(X, torch.randn(7, 4), torch.tensor([1, 2, 3]), choice="triton")


def test_a_gpu_older_than_the_kernels_were_tried_on_gets_the_reference(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", {98: (8, 0), 99: (7, 5)}.get)
    new, old = (SimpleNamespace(device=torch.device("cuda", index), dtype=torch.bfloat16) for index in (98, 99))
    assert backend(new) == "triton"
    with pytest.warns(UserWarning, match="GPU 99 is older"):
        assert backend(old) == "reference"


def test_a_backend_that_does_not_exist_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"no backend 'fast': set .* to one of auto, reference, triton"):
        pattention(X, [SEGMENT], choice="fast")
    monkeypatch.setattr(ops, "CHOICE", "kernel")
    with pytest.raises(UserError, match="no backend 'kernel': set"):
        pattention(X, [SEGMENT])


def test_the_environment_variable_chooses():
    code = "import torch; from tokenformer.ops.pattention import backend; print(backend(torch.ones(1, 1)))"
    told = {}
    for choice in ("reference", "triton"):
        environment = os.environ | {"TOKENFORMER_PATTENTION": choice, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        told[choice] = done.stdout.strip()
    assert told == {"reference": "reference", "triton": "triton"}


def test_masks_are_for_the_reference(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    mask = torch.tensor([True, True, False, True, False])
    assert backend(X, "auto", masked=True) == "reference"
    with pytest.raises(UserError, match="masks are computed by the reference"):
        pattention(X, [SEGMENT], mask=mask, choice="triton")
