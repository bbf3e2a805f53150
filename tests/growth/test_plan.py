"""A plan is arithmetic on a config and names: it needs no torch, and grows one trunk of several."""

import subprocess
import sys

import pytest
from growing import config

from tokenformer import ModelConfig, UserError
from tokenformer.config_growth import Growth, GrowthStage
from tokenformer.growth.plan import Recipe, plan_growth
from tokenformer.models.names import ONE, own
from tokenformer.strict import build

PAIR = ModelConfig(of="two", trunks={"image": config(layers=1), "text": config(layers=2)})
ENDS = {"image.norm.weight": ONE, "scale": own(2.66)}
LAYER = [f"{part}.segments.0.{half}_tokens" for part in ("attention.query", "ffn") for half in ("key", "value")]
NAMES = [f"image.blocks.0.{rest}" for rest in LAYER] + ["image.norm.weight"]
NAMES += [f"text.blocks.{layer}.{rest}" for layer in (0, 1) for rest in LAYER] + ["scale"]


def test_plans_import_and_work_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from tokenformer.config_growth import Growth; "
        "from tokenformer.growth.plan import plan_growth; "
        "from tokenformer.growth.stages import chain; from tokenformer.config import ModelConfig; "
        "tiny = ModelConfig(layers=1, dim=32, heads=2, qkv_tokens=9, proj_tokens=4, ffn_tokens=4); "
        "name = 'blocks.0.ffn.segments.0.key_tokens'; "
        "print(*plan_growth(tiny, [name], Growth(ffn_tokens=20, layers=2)).recipes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "blocks.0.ffn.segments.1.key_tokens blocks.1.ffn.segments.0.key_tokens" in done.stdout


def test_one_trunk_of_several_grows_and_the_rest_stays():
    growth = plan_growth(PAIR, NAMES, Growth(on="text.", ffn_tokens=60, layers=3), ends=ENDS, number=1)
    assert growth.config.trunk("text.").ffn_tokens == [48, 12] and growth.config.trunk("text.").layers == 3
    assert growth.config.trunk("image.") == PAIR.resolved().trunk("image.") and growth.event["on"] == "text."
    for name in [*NAMES[:5], "scale"]:
        assert growth.recipes[name] == Recipe(old=name)
    new = growth.recipes["text.blocks.0.ffn.segments.1.key_tokens"]
    assert isinstance(new, Recipe)
    assert (new.old, new.new_rows, new.like) == (None, 12, ("text.blocks.0.ffn.segments.0.key_tokens",))
    assert "text.blocks.2.ffn.segments.1.key_tokens" in growth.recipes and growth.kept == set(NAMES)


@pytest.mark.parametrize(
    ("shape", "how", "sentence"),
    [
        (PAIR, {"ffn_tokens": 60}, "trunks are image., text."),
        (PAIR, {"ffn_tokens": 60, "on": "video."}, "trunks are image., text."),
        (config(), {"ffn_tokens": 60, "on": "text."}, "one trunk: leave it out"),
        (config(), {"layers": 10**8}, "give at most 10,000"),
        (config(), {"layers": 0}, "above 0"),
        (config(), {"ffn_tokens": 10**12}, "give at most 1,073,741,824"),
        (config(), {"ffn_tokens": 1e6}, "give one whole number"),
        (config(), {"ffn_tokens": 60, "noise": -1}, "0 or more"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_sentence(shape, how, sentence):
    with pytest.raises(UserError, match=sentence):
        plan_growth(shape, [], Growth(**how))


def test_a_name_that_nobody_declared_is_an_error():
    with pytest.raises(ValueError, match="'scale' is neither a parameter"):
        plan_growth(PAIR, NAMES, Growth(on="text.", ffn_tokens=60), ends={"image.norm.weight": ONE})


def test_a_key_of_earlier_versions_may_stand_there_as_null_alone():
    old = {"at": {"step": 5}, "layers": 3, "dim": None, "widen": None}
    assert build(GrowthStage, old).layers == 3
    with pytest.raises(UserError, match="unknown key 'dim'"):
        build(GrowthStage, {**old, "dim": 64})
