"""Configs: strict keys, types, overrides, bases, segments and τ, and the way back to YAML."""

import dataclasses
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenformer import config as c
from tokenformer import config_data, config_growth, config_train
from tokenformer.config import Config, LayerOverride, ModelConfig
from tokenformer.errors import UserError
from tokenformer.strict import all_keys, parse_yaml

SMALL = "model: {layers: 2, dim: 32, heads: 4, qkv_tokens: 8, proj_tokens: 8, ffn_tokens: 16}\n"


def write(tmp_path, text, name="my.yml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_becomes_a_config_and_overrides_lie_on_top(tmp_path):
    path = write(tmp_path, SMALL)
    model = c.load(path, overrides=["model.layers=3", "model.ffn_tokens=[16, 24]", "model.norm_eps=1e-3"]).model
    assert (model.layers, model.ffn_tokens, model.norm_eps) == (3, [16, 24], 1e-3)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", "1.e-3", "0.001", ".1e-2", "1e-03"])
def test_scientific_notation_is_a_number(tmp_path, text):
    assert c.load(write(tmp_path, SMALL), overrides=[f"model.norm_eps={text}"]).model.norm_eps == 0.001


def test_whole_floats_are_whole_numbers_and_a_base_is_laid_under(tmp_path):
    path = write(tmp_path, "base: lm/150m\nmodel: {context: 1e3}\n")
    model = c.load(path).model
    assert (model.context, model.dim) == (1000, 768)
    write(tmp_path, SMALL, "below.yml")
    assert c.load(write(tmp_path, "base: below.yml\nmodel: {layers: 5}", "above.yml")).model.layers == 5


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        ("model: {layres: 2}", [], "unknown key 'model.layres': did you mean 'model.layers'?"),
        ("modell: {}", [], "did you mean 'model'"),
        ("model: {layers: 2, dim: 32}", [], "key 'model.heads' is missing"),
        ("{}", [], "key 'model' is missing"),
        ("- 1", [], "should hold keys and values"),
        ("model: [", [], "is not YAML that we read"),
        ("model:\n\tlayers: 2", [], "my.yml, line 2, begins with a tab: use spaces"),
        ("model: {layers: 2\nsteps: 3", [], "my.yml, line 2, has a bracket that is not closed"),
        ("a: b: c", [], "my.yml, line 1, has a second colon"),
        ("model:\n  layers: 2\n dim: 3", [], "my.yml, line 3, is indented in another way"),
        ("", [], "my.yml should hold keys and values, such as 'model:', but is empty"),
        ("model: {layers: 1, layers: 2}", [], "stands twice"),
        (SMALL, ["model.layers=two"], "model.layers is 'two', but must be a whole number"),
        (
            SMALL,
            ["train.compile=null"],
            "train.compile is empty, but must be one of auto, none, inductor, aot_eager",
        ),
        (SMALL, ["optimizer.eps=-1"], "optimizer.eps is -1.0: give 0 or more"),
        (SMALL, ["optimizer.eps=.nan"], "optimizer.eps is nan: give 0 or more"),
        (SMALL, ["train.clip=.inf"], "train.clip is inf"),
        (SMALL, ["optimizer.betas=[0.9, 1.0]"], "optimizer.betas is 1.0: give a number below 1"),
        (SMALL, ["data.path={books: 0}"], "data.path.books is 0.0: give a number above 0"),
        (SMALL, ["growth=[{at: {step: -1}}]"], "growth[0].at.step is -1.0: give 0 or more"),
        (SMALL, ["model.layers=true"], "must be a whole number"),
        (SMALL, ["optimizer.rate=true"], "optimizer.rate is True, but must be a number"),
        (SMALL, ["model.layers=2.5"], "must be a whole number"),
        (SMALL, ["model.layers=0"], "give a number above 0"),
        (SMALL, ["model.tied=1"], "must be true or false"),
        (SMALL, ["model.theta=l2_norm_gleu"], "did you mean 'l2_norm_gelu'"),
        (SMALL, ["model.heads=5"], "does not divide dim 32"),
        (SMALL, ["model.layers"], "is not an override: write section.key=value"),
        (SMALL, ["model.ffn_tokens=[]"], "at least one token"),
        (SMALL, ["model.ffn_tokens=[4, 0]"], "at least one token"),
        (SMALL, ["model.ffn_tokens=[4, x]"], "model.ffn_tokens[1] is 'x'"),
        (SMALL, ["model.tau={ffn: [1.0, 2.0]}"], "has 1 segments but tau.ffn has 2 numbers"),
        (SMALL, ["model.tau={fnn: [1.0]}"], "its keys are qkv, proj and ffn"),
        (SMALL, ["model.tau={ffn: [0]}"], "finite number above 0"),
        (SMALL, ["model.tau={ffn: [.inf]}"], "finite number above 0"),
        (SMALL, ["model.layer_overrides={7: {ffn_tokens: 4}}"], "names layer 7, but layers go from 0 to 1"),
        (SMALL.replace("model: {", "model: {kind: transformer, "), [], "has no meaning for kind transformer"),
        (SMALL, ["model.kind=transformer", "model.tau={ffn: [1]}"], "model.tau has no meaning for kind transformer"),
        (SMALL, ["model.ffn_dim=8"], "has no meaning for kind tokenformer"),
        (SMALL, ["model.rotary_fraction=0.4"], "gives an even number"),
        (SMALL, ["model.qkv_tokens=null"], "model.qkv_tokens is missing"),
        ("model: {kind: llama, layers: 1, dim: 32, heads: 4, kv_heads: 3}", [], "does not divide heads 4"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path, text, overrides, sentence):
    with pytest.raises(UserError) as caught:
        c.load(write(tmp_path, text), overrides=overrides)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("growth", ["progressive", "{progressive: {hops: 2}}", "[{at: {step: 9}, ffn_tokens: 32}]"])
@pytest.mark.parametrize("kind", ["transformer", "llama"])
def test_another_kind_drops_what_has_no_meaning_there_wherever_it_stands(tmp_path, growth, kind):
    path = write(tmp_path, f"{SMALL[:-2]}, tau: {{ffn: [4.0]}}}}\nsteps: 20\ngrowth: {growth}\n")
    above = write(tmp_path, f"base: my.yml\nmodel: {{kind: {kind}}}", "above.yml")
    second = write(tmp_path, f"model: {{kind: {kind}, ffn_dim: 24}}", "second.yml")
    for config in c.load(path, overrides=[f"model.kind={kind}"]), c.load(above), c.load(path, second):
        model = config.model
        assert (model.kind, model.dim, config.steps, config.growth) == (kind, 32, 20, [])
        assert (model.ffn_tokens, model.tau) == (None, {})
    assert c.load(second, path, overrides=["model.kind=tokenformer"]).model.ffn_tokens == 16  # and the other way round


def test_growth_of_what_another_kind_has_too_stays(tmp_path):
    path = write(tmp_path, f"{SMALL}growth: [{{at: {{plateau: 0.01, patience: 2}}, layers: 4}}]\n")
    assert len(c.load(path, overrides=["model.kind=transformer"]).growth) == 1


def test_an_unknown_preset_gets_a_suggestion():
    with pytest.raises(UserError, match="did you mean the preset 'lm/150m'"):
        c.load("lm/150M")


def test_a_base_that_leads_back_is_refused(tmp_path):
    write(tmp_path, "base: b.yml", "a.yml")
    write(tmp_path, "base: a.yml", "b.yml")
    with pytest.raises(UserError, match="leads back to itself"):
        c.load(tmp_path / "a.yml")


def test_tau_is_the_root_of_n_until_it_is_written_out():
    model = ModelConfig(layers=2, dim=32, heads=4, qkv_tokens=9, proj_tokens=4, ffn_tokens=[16, 25])
    assert model.segments("ffn") == [(16, 4.0), (25, 5.0)]
    resolved = model.resolved()
    assert resolved.tau == {"qkv": [3.0], "proj": [2.0], "ffn": [4.0, 5.0]}
    grown = dataclasses.replace(resolved, proj_tokens=8)  # τ held
    assert grown.segments("proj") == [(8, 2.0)]
    assert resolved.resolved() == resolved


def test_a_layer_that_differs_takes_the_models_tau_only_with_the_models_tokens():
    model = ModelConfig(
        layers=4, dim=32, heads=4, qkv_tokens=9, proj_tokens=4, ffn_tokens=16, tau={"ffn": [7.0], "qkv": [5.0]},
        layer_overrides={1: LayerOverride(ffn_tokens=[4, 9]), 2: LayerOverride(tau={"ffn": [6.0]})},
    )  # fmt: skip
    assert model.segments("ffn", 0) == model.segments("ffn") == [(16, 7.0)]
    assert model.segments("ffn", 1) == [(4, 2.0), (9, 3.0)]
    assert model.segments("qkv", 1) == [(9, 5.0)]
    assert model.segments("ffn", 2) == [(16, 6.0)]
    resolved = model.resolved()
    assert all(
        resolved.segments(w, layer) == model.segments(w, layer) for w in c.PROJECTIONS for layer in (None, 0, 1, 2, 3)
    )


tokens = st.one_of(st.integers(1, 999), st.lists(st.integers(1, 999), min_size=1, max_size=4))


@given(
    tokens=st.tuples(tokens, tokens, tokens),
    layers=st.integers(1, 9),
    theta=st.sampled_from(["l2_norm_gelu", "softmax"]),
    tau=st.floats(1e-6, 1e6),
    eps=st.floats(1e-12, 1e-2),
    data=st.data(),
)
def test_a_config_goes_to_yaml_and_to_json_and_back(tokens, layers, theta, tau, eps, data):
    import json

    qkv, proj, ffn = tokens
    overrides = data.draw(
        st.dictionaries(st.integers(0, layers - 1), st.builds(LayerOverride, ffn_tokens=st.just(ffn)), max_size=3)
    )
    model = ModelConfig(
        layers=layers, dim=32, heads=4, qkv_tokens=qkv, proj_tokens=proj, ffn_tokens=ffn, theta=theta, norm_eps=eps,
        tau={"proj": [tau] * (len(proj) if isinstance(proj, list) else 1)}, layer_overrides=overrides,
    ).resolved()  # fmt: skip
    whole = Config(model=model)
    assert c.build(Config, c.parse_yaml(c.to_yaml(whole), "text")) == whole
    assert c.build(Config, json.loads(json.dumps(c.to_dict(whole)))) == whole


def test_every_key_is_listed_with_its_type_default_and_meaning():
    listed = {key.name: key for key in all_keys(Config)}
    modules = (c, config_data, config_growth, config_train)
    classes = {cls for module in modules for cls in vars(module).values() if dataclasses.is_dataclass(cls)}
    declared = {field.name.rstrip("_") for cls in classes for field in dataclasses.fields(cls)}
    assert declared == {name.split(".")[-1] for name in (n.replace("[]", "") for n in listed)}
    assert all(key.doc and key.type for key in listed.values())
    assert listed["growth[].at"][1:3] == ("a mapping", "required") and "growth.progressive.from" in listed
    assert listed["optimizer.betas"].default == "[0.9, 0.95]" and listed["model.layer_overrides.*.tau"].default == "{}"
    assert listed["data"].type == "section" and listed["model.tied"].default == "true"


def test_the_defaults_that_are_listed_change_nothing_when_they_are_given(tmp_path):
    path, plain = write(tmp_path, SMALL), re.compile(r"(?!model\.(layers|dim|heads)$)[a-z_]+(\.[a-z_]+)*")
    keys = [key for key in all_keys(Config) if plain.fullmatch(key.name) and key.default and key.type != "section"]
    given = [f"{key.name}={json.dumps(key.default) if key.type == 'text' else key.default}" for key in keys]
    given = [words for words in given if "progressive" not in words and not words.startswith("adapter.")]
    assert len(given) > 90
    assert c.load(path, overrides=given) == c.load(path, overrides=["data.images={}"])


def test_what_says_nothing_is_not_written():
    assert "{}" not in c.to_yaml(c.load("lm/150m", overrides=["data.path=set", "batch=8"]))


def test_every_preset_loads_and_goes_to_yaml_and_back():
    for name in c.presets():
        config = c.load(name)
        assert c.build(Config, c.parse_yaml(c.to_yaml(config), name)) == config
        for model in config.model.trunks.values() or [config.model]:
            if model.kind == "tokenformer":
                assert model.resolved().tau["qkv"][0] == pytest.approx(math.sqrt(model.segments("qkv")[0][0]))


def test_the_key_on_is_text_though_yaml_reads_it_as_true():
    assert parse_yaml("{on: image., at: {step: 3}, deep: [{on: yes}]}", "x") == {
        "on": "image.", "at": {"step": 3}, "deep": [{"on": True}]
    }  # fmt: skip
