"""Backward computes no product for the gradient of a frozen parameter, on the reference and on the kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_frozen_keys_values_and_inputs_cost_no_product(path):
    if path == "triton":
        pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "TOKENFORMER_PATTENTION": path}
    script = str(Path(__file__).with_name("frozen_checks.py"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["backend"] == path and found["saved"] == {"keys": 1, "values": 1, "both": 2, "inputs": 1}
    assert found["step"] < 0.75  # forward and one half of backward, and the adapter itself
