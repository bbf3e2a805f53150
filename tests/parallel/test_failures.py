"""The useful share of a long run: the formula is what a simulation gives, also for 4,096 GPUs."""

import pytest

from tokenformer.cli.main import main
from tokenformer.parallel.failures import Outage, best_interval, simulate, useful


@pytest.mark.parametrize("between, save, restart", [(8.8e4, 5, 300), (879, 5, 120), (879, 60, 300), (400, 30, 200)])
def test_the_formula_is_what_a_simulation_gives_and_its_interval_is_the_best(between, save, restart):
    outage = Outage(between, save, restart)
    best = best_interval(outage)
    for interval in (best / 2, best, 2 * best):
        assert simulate(outage, interval) == pytest.approx(useful(outage, interval), abs=0.01)
    assert simulate(outage, best) > max(simulate(outage, best / 3), simulate(outage, 3 * best))


def test_plan_says_it_for_4096_gpus(capsys):
    command = ["plan", "lm/1.5b", "batch=8192", "micro_batch=1", "--gpus", "4096", "--failures", "1/1000h"]
    assert main([*command, "parallel.shard=8", "parallel.token=1", "parallel.pipeline=1"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("failures: one in 0.24 h with 4096 GPUs; a checkpoint every ") and "simulated)" in said
    assert main([*command[:-1], "often"]) == 2
    assert "--failures is 'often': give failures per hours of one GPU" in capsys.readouterr().err
