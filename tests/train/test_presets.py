"""Every preset is a whole recipe, and says where its rate comes from."""

import pytest

from tokenformer.config import find, load, presets, read
from tokenformer.train.run import with_batch_sizes
from tokenformer.train.schedule import factor


@pytest.mark.parametrize("name", presets())
def test_a_preset_carries_its_recipe(name):
    raw, config = read(name), load(name)
    laptop = name == "lm/3m"  # any batch that a user gives fits at once
    assert {"steps", "batch", "optimizer", "schedule", *(() if laptop else ("micro_batch",))} <= raw.keys()
    assert {"kind", "rate"} <= raw["optimizer"].keys()
    assert with_batch_sizes(config, world=8).batch == raw["batch"]
    said = find(name).read_text()
    assert any(words in said for words in ("was not measured at this size", "published recipe", "of experiments/"))
    assert config.optimizer.kind == ("adamw" if name.startswith("llama/") or name.endswith("-adamw") else "muon")


def test_a_vision_preset_warms_up_for_20_epochs_and_in_a_short_run_for_the_same_share():
    for name in (name for name in presets() if name.startswith("vision/") and name != "vision/cifar"):
        whole, short = load(name), load(name, overrides=["steps=5000"])
        assert factor(whole.schedule, 6200, whole.steps) < 1, name
        assert factor(whole.schedule, 6256, whole.steps) == pytest.approx(1, abs=1e-6), name
        assert factor(short.schedule, 501, short.steps) > 0.98, name
