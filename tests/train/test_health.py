"""Loss scaling against a plain Python account of it; clipping; what is skipped."""

import random

import torch

from tokenformer.config_train import TrainConfig
from tokenformer.train.health import Guard, Spikes

CPU = torch.device("cpu")


def test_loss_scaling_is_the_dynamic_rule_with_hysteresis():
    """Halve at the second overflow, double after a window without one, never below the minimum."""
    config = TrainConfig(
        precision="fp16", loss_scale=64, loss_scale_window=4, loss_scale_hysteresis=2, loss_scale_min=2
    )
    guard, rng = Guard(config, CPU), random.Random(0)
    scale, patience, good, seen = 64.0, 2, 0, set()
    for _ in range(300):
        overflow = rng.random() < 0.35
        guard.update(torch.tensor(float(overflow)))
        if overflow:
            good = 0
            if patience == 1:
                scale = max(scale / 2, 2)
            else:
                patience -= 1
        else:
            good += 1
            if good % 4 == 0:
                scale, patience = scale * 2, 2
        assert (guard.scale.item(), guard.patience.item(), guard.good.item()) == (scale, patience, good)
        seen.add(scale)
    assert len(seen) > 3 and 2 in seen


def test_overflows_of_fp16_count_against_the_run_only_when_the_scale_can_fall_no_further():
    config = TrainConfig(precision="fp16", loss_scale=8, loss_scale_hysteresis=1)
    guard = Guard(config, CPU)
    for _ in range(5):
        guard.update(torch.tensor(1.0))
    assert guard.scale == 1 and guard.skipped == 5 and guard.in_a_row == 2
    guard.update(torch.tensor(0.0))
    assert guard.in_a_row == 0 and guard.skipped == 5


def test_check_gives_the_true_norm_and_a_divisor_that_clips():
    guard = Guard(TrainConfig(precision="fp16", loss_scale=4, clip=1.0), CPU)
    divisor, skip, norm = guard.check(torch.tensor(5.0) * 8, torch.tensor(1.0), torch.tensor(2.0))
    assert norm == 5 and skip == 0 and divisor == 4 * 2 * 5
    divisor, skip, norm = guard.check(torch.tensor(0.5) * 8, torch.tensor(1.0), torch.tensor(2.0))
    torch.testing.assert_close(norm, torch.tensor(0.5))
    assert divisor == 8


def test_a_non_finite_gradient_or_loss_is_skipped():
    guard = Guard(TrainConfig(precision="bf16"), CPU)
    one = torch.tensor(1.0)
    assert guard.check(one, one, one)[1] == 0
    assert guard.check(torch.tensor(torch.inf), one, one)[1] == 1
    assert guard.check(one, torch.tensor(torch.nan), one)[1] == 1


def test_state_survives():
    guard = Guard(TrainConfig(precision="fp16"), CPU)
    for flag in (1.0, 1.0, 0.0):
        guard.update(torch.tensor(flag))
    other = Guard(TrainConfig(precision="fp16"), CPU)
    other.load_state_dict(guard.state_dict())
    assert other.state_dict() == guard.state_dict() == {
        "scale": 2048.0, "good": 1, "patience": 1, "skipped": 2, "in_a_row": 0
    }  # fmt: skip


def test_a_spike_moves_the_running_mean_no_further_than_its_limit():
    spikes = Spikes(6.0)
    for loss in [2.0, 2.1] * 20:
        assert not spikes(loss)
    assert spikes(1e6) and spikes.mean < 2.2
    assert spikes(9.0)  # the one before it did not hide it
