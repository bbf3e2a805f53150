"""Every preset is a whole recipe, and says where its rate comes from."""

import pytest

from tokenformer.config import find, load, presets, read
from tokenformer.train.run import with_batch_sizes


@pytest.mark.parametrize("name", presets())
def test_a_preset_carries_its_recipe(name):
    raw, config = read(name), load(name)
    assert {"steps", "batch", "micro_batch", "optimizer", "schedule"} <= raw.keys()
    assert {"kind", "rate"} <= raw["optimizer"].keys()
    assert with_batch_sizes(config, world=8).batch == raw["batch"]
    said = find(name).read_text()
    assert "was not measured at this size" in said or "published recipe" in said
    assert config.optimizer.kind == ("adamw" if name.startswith("llama/") or name.endswith("-adamw") else "muon")
