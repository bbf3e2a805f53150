"""Every layout computes what one process computes: losses, gradients (as the optimizer's state) and weights."""

from pathlib import Path

import pytest
import torch

from tests.parallel.cases import RUNS
from tests.parallel.workers import train
from tests.train.conftest import result
from tokenformer.train.report import read_rows

pytestmark = pytest.mark.multi
EXACT = [name for name, run in RUNS.items() if run.dtype == "float64"]
NAMED = {"growth": "what"}


def far(ours: dict, theirs: dict) -> float:
    """Largest difference over largest magnitude, of the tensor where that is largest."""
    assert ours.keys() == theirs.keys()
    return max(((ours[n] - t).abs().max() / t.abs().max().clamp_min(1e-300)).item() for n, t in theirs.items())


def losses(run: Path, kind: str = "train") -> torch.Tensor:
    return torch.tensor([row["loss"] for row in read_rows(run) if row["kind"] == kind], dtype=torch.float64)


@pytest.mark.parametrize("name", EXACT)
def test_ten_steps_in_float64_are_those_of_one_process(ran, name):
    run, one = ran(name), ran.alone(RUNS[name])
    theirs, ours = result(one), result(run)
    assert len(losses(run)) == 10 and len(losses(run, "validation")) == 2
    for which in ("train", "validation"):
        torch.testing.assert_close(losses(run, which), losses(one, which), rtol=1e-9, atol=0)
    assert far(ours["model"], theirs["model"]) < 1e-9
    assert far(ours["optim"], theirs["optim"]) < 1e-9
    assert ours["state"]["loader"] == theirs["state"]["loader"]
    assert ours["state"]["growth"]["steps"] == theirs["state"]["growth"]["steps"]


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("fp32")])
def test_three_steps_in_fp32_are_near_those_of_one_process(ran, name):
    """Gradients as the optimizer keeps their mean."""
    run, one = ran(name), ran.alone(RUNS[name])
    assert len(losses(run)) == 3
    torch.testing.assert_close(losses(run), losses(one), rtol=1e-5, atol=0)
    ours, theirs = ({n: t for n, t in result(which)["optim"].items() if n.startswith(("exp_avg/", "momentum/"))}
                    for which in (run, one))  # fmt: skip
    assert len(ours) == len(result(run)["model"]) and far(ours, theirs) < 1e-4


@pytest.mark.parametrize("name", ["mixed", "mixed-fp8"])
def test_what_a_user_would_run_is_within_the_noise_of_bf16(ran, name):
    """Activation checkpointing, bf16 or fp8, compiled blocks and accumulation on shard 2 × token 2; fp8 on shard 2."""
    one = losses(ran.alone(RUNS[name]))
    assert (losses(ran(name)) - one).abs().max() < 0.02 < (one[0] - one[-1])


@pytest.mark.parametrize("name", ["shard2-token2-muon", "grow-both", "hybrid-adamw"])
def test_one_process_goes_on_where_many_were(ran, name, tmp_path):
    run = RUNS[name]
    train(str(tmp_path / "run"), str(ran.file), list(run.settings), run.dtype, since=str(ran(name)))
    theirs = ran.alone(run)
    torch.testing.assert_close(losses(tmp_path / "run"), losses(theirs), rtol=1e-9, atol=0)
    assert far(result(tmp_path / "run")["model"], result(theirs)["model"]) < 1e-9


def test_runs_that_go_on_elsewhere_did_not_begin_anew(ran):
    for name, run in RUNS.items():
        if run.since is not None:
            assert "going on from step 5" in (ran(name) / "log").read_text(), name
