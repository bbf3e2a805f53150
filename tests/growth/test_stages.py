"""Growth inside a run as pure decisions: the models it leads through, when, and at which rate."""

import pytest
from growing import config

from tokenformer import UserError
from tokenformer.config_growth import GrowthStage
from tokenformer.config_train import ScheduleConfig
from tokenformer.growth.stages import Progress, chain, due, plateau, rate
from tokenformer.strict import build
from tokenformer.train.schedule import factor


def stage(**changes) -> GrowthStage:
    return build(GrowthStage, {"at": {"step": 100}, "ffn_tokens": 60, **changes}, "growth")


def test_the_chain_is_known_before_any_step_and_refuses_what_cannot_be():
    two = chain(config(), [stage(), stage(at={"tokens": 1e6}, ffn_tokens=90, layers=4)])
    assert [m.ffn_tokens for m in two] == [48, [48, 12], [48, 12, 30]] and two[2].layers == 4
    with pytest.raises(UserError, match="already"):
        chain(config(), [stage(), stage(ffn_tokens=50)])
    with pytest.raises(UserError, match="sort them"):
        chain(config(), [stage(), stage(at={"step": 50}, ffn_tokens=90)])


def test_each_growth_comes_once_in_order():
    stages, progress, found = [stage(), stage(at={"step": 150}, ffn_tokens=90)], Progress(), []
    for step in range(200):
        if due(stages, progress, step, 10):
            progress.grew(step)
            found.append(step)
    assert found == [100, 150]
    again = Progress()
    again.load_state_dict(progress.state_dict())
    assert again == progress and due(stages, again, 999, 10) is None


def test_a_plateau_is_seen_in_validation_losses_and_forgotten_at_growth():
    stages, progress = [stage(at={"plateau": 0.05, "patience": 2})], Progress()
    for loss, expected in ((4.0, False), (3.0, False), (2.0, False), (1.99, False), (1.98, True)):
        progress.losses.append(loss)
        assert (due(stages, progress, 7, 10) is not None) == expected, loss
    progress.grew(7)
    assert progress.losses == []
    assert not plateau([4.0, 3.0], share=0.25, patience=1)  # it fell by this share: not by less


def test_growing_in_the_stable_phase_before_any_decay_is_expressible():
    wsd = ScheduleConfig(kind="wsd", warmup=10, decay=0.2, floor=0.0)
    stages, progress = [stage(rate=0.5, warmup=20)], Progress(steps=[100])
    rates = [rate(stages, progress, step, 400, wsd, factor) for step in (100, 110, 120, 319, 360, 400)]
    assert rates == [0.0, 0.25, 0.5, 0.5, pytest.approx(0.25), 0.0]
    assert rate(stages, Progress(), 99, 400, wsd, factor) == 1.0


def test_a_stage_may_begin_a_schedule_of_its_own():
    own = stage(schedule={"kind": "linear", "warmup": 0, "floor": 0.0})
    rates = [rate([own], Progress(steps=[100]), s, 300, ScheduleConfig(), factor) for s in (100, 200, 300)]
    assert rates == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"at": {"step": 3, "tokens": 9}}, "give {step: N}"),
        ({"at": {"patience": 3}}, "give {step: N}"),
        ({"at": {"tokens": 0}}, "above 0"),
        ({"rate": -1}, "0 or more"),
        ({"old_tokens": 0, "new_tokens": "zero_key"}, "is segment"),
    ],
)
def test_a_stage_that_says_nonsense_is_one_sentence(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        stage(**changes)
