"""Token parallelism on kernels, in Triton's interpreter on 2 and 4 ranks: as near to the truth as the reference is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.conftest import free_port
from tests.parallel.token_kernel_checks import SHAPES

pytestmark = pytest.mark.multi
RANKS = 4


def checks(out: Path, compiler: str) -> list[dict]:
    """What each rank found. Every check asserts which path ran: the kernels' halves, whole kernels, or none."""
    pytest.importorskip("triton")
    program = [sys.executable, "-m", "tests.parallel.token_kernel_checks"]
    how = {"env": os.environ | {"TRITON_INTERPRET": "1"}, "cwd": Path(__file__).parents[2]}
    words = [str(RANKS), str(free_port()), str(out), compiler]
    ranks = [subprocess.Popen([*program, str(rank), *words], **how) for rank in range(RANKS)]
    codes = [process.wait(300) for process in ranks]
    logs = "\n".join((out / f"rank-{r}.log").read_text()[-3000:] for r in range(RANKS))
    assert codes == [0] * RANKS, logs
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_kernels_on_slices_are_as_near_to_one_process_as_the_reference_is(tmp_path):
    for rank in checks(tmp_path, "none"):
        assert len(rank["op"]) == 2 * (7 + 2) and len(rank["model"]) == 2
        for name, one in rank["op"].items():
            assert one["triton"] < 1.5 * one["reference"] + 1e-6, (name, one)
            ranks, shape, theta, _, whole = name.split(", ")
            rows, _, members = SHAPES[shape]
            numbers = rows * sum(len(sizes) for sizes, _ in members)  # one per row and segment, forward and backward
            each = int(ranks) if theta == "softmax" else 1  # forward, logarithms are gathered
            sent = 0 if whole == "True" else 4 * numbers * (each + 1)
            assert one["triton bytes"] == one["reference bytes"] == sent, (name, one)
        for name, (kernels, reference) in rank["model"].items():
            assert kernels < 1.5 * reference + 1e-6, (name, kernels, reference)


@pytest.mark.slow
def test_compiled_blocks_have_them_too(tmp_path):
    for rank in checks(tmp_path, "aot_eager"):
        assert len(rank["model"]) == 2
        assert all(kernels < 1.5 * reference + 1e-6 for kernels, reference in rank["model"].values()), rank["model"]
