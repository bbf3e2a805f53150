"""The learning rate as a function of the step."""

import itertools
import math

import pytest

from tokenformer.config_train import ScheduleConfig
from tokenformer.train.schedule import factor


def test_the_official_schedule():
    """Linear warm-up over 1 % (first step at rate 0), cosine to a tenth."""
    official, steps = ScheduleConfig(kind="cosine", warmup=0.01, floor=0.1), 143000
    for step in (0, 1, 715, 1430, 1431, 70000, 142999, 143000):
        if step <= 1430:
            expected = 6e-4 * step / 1430
        else:
            expected = 6e-5 + (6e-4 - 6e-5) / 2 * (math.cos(math.pi * (step - 1430) / (143000 - 1430)) + 1)
        assert 6e-4 * factor(official, step, steps) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_schedules_end_at_the_floor_and_stay_there(kind):
    schedule = ScheduleConfig(kind=kind, warmup=5, decay=0.25, floor=0.2)
    values = [factor(schedule, step, 100) for step in range(120)]
    assert values[5] == 1.0 and values[100] == pytest.approx(0.2) and values[119] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(values[5:]))


def test_stable_means_stable_and_the_decay_is_a_line():
    schedule = ScheduleConfig(kind="wsd", warmup=0, decay=20, floor=0.0)
    values = [factor(schedule, step, 100) for step in range(101)]
    assert values[:81] == [1.0] * 81 and values[90] == pytest.approx(0.5) and values[100] == 0


def test_constant_and_an_own_length():
    assert {factor(ScheduleConfig(kind="constant", warmup=0), s, 10) for s in range(30)} == {1.0}
    assert factor(ScheduleConfig(kind="linear", warmup=0, floor=0, steps=200), 100, 1000) == pytest.approx(0.5)


def test_a_decay_longer_than_what_the_warm_up_leaves_begins_at_its_end():
    """From the peak: the rate must not fall in one step."""
    schedule = ScheduleConfig(kind="wsd", warmup=50, decay=80, floor=0.0)
    values = [factor(schedule, step, 100) for step in range(101)]
    assert values[50] == 1.0 and values[75] == pytest.approx(0.5) and values[100] == 0


def test_below_1_is_a_share_of_the_run_and_1_is_one_step():
    assert factor(ScheduleConfig(kind="constant", warmup=1), 5, 100) == 1.0
    assert factor(ScheduleConfig(kind="constant", warmup=0.5), 25, 100) == 0.5
    assert factor(ScheduleConfig(kind="wsd", warmup=0, decay=1, floor=0.0), 99, 100) == 1.0
