"""A trunk by itself: what a View lets a block see, switches, and drop factors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenformer import UserError, models
from tokenformer.config import ModelConfig
from tokenformer.config_train import ParallelConfig
from tokenformer.infer import Engine
from tokenformer.models import Trunk, View
from tokenformer.parallel.mesh import Degrees, check

TINY = {"layers": 2, "dim": 16, "heads": 2, "qkv_tokens": 8, "proj_tokens": 8, "vocab": 32, "context": 16}
CONFIG = ModelConfig(**TINY, ffn_tokens=[8, 8], switch={"ffn": ["", "image"]})
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def trunk() -> Trunk:
    made = Trunk(CONFIG)
    models.init_weights(made, made.config, 1)
    with torch.no_grad():
        for parameter in made.blocks.parameters():
            parameter.mul_(10)
    return made


def reaches(made: Trunk, view: View) -> list[list[bool]]:
    """[i][j]: whether the output at position i depends on the input at position j, in the first sample."""
    jacobian = torch.func.jacrev(lambda x: made.run(x, view)[0])(X)
    return (jacobian[:, :, 0].abs().sum((1, 3)) > 0).tolist()


def test_a_trunk_is_causal_or_sees_everything_or_what_a_mask_or_its_documents_say():
    made = trunk()
    below = torch.ones(5, 5, dtype=torch.bool).tril()
    documents = torch.tensor([[0, 0, 1, 1, 1]] * 2)
    same = documents[0][:, None] == documents[0]
    mask = torch.eye(5, dtype=torch.bool)
    mask[:, 2] = True
    for known, wanted in (
        ({}, below),
        ({"causal": False}, torch.ones(5, 5, dtype=torch.bool)),
        ({"documents": documents}, below & same),
        ({"documents": documents, "causal": False}, same),
        ({"mask": mask}, mask),
        ({"mask": mask, "documents": documents}, mask & same),
    ):
        assert reaches(made, made.view(X, **known)) == wanted.tolist(), known
    assert made.run(X, View(causal=False)).shape == X.shape  # without positions
    flipped = made.run(X.flip(1), View(causal=False)).flip(1)
    torch.testing.assert_close(flipped, made.run(X, View(causal=False)), rtol=1e-5, atol=1e-6)


def test_drop_factors_are_those_of_each_block_and_branch_and_sample():
    made, view = trunk(), trunk().view(X)
    ones = torch.ones(2, 2, 2)
    torch.testing.assert_close(made.run(X, view._replace(drop=ones)), made.run(X, view))
    drop = ones.clone()
    drop[1, 0, 0] = 0.0  # the attention of the second block, in the first sample
    found = made.run(X, view._replace(drop=drop))
    with torch.no_grad():
        made.blocks[1].attention.proj.segments[0].value_tokens.zero_()
    torch.testing.assert_close(found[0], made.run(X, view)[0])
    assert not torch.allclose(found[1], made.run(X, view)[1])
    block = trunk().blocks[0]
    block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(block(X, view._replace(drop=ones[0])), trunk().blocks[0](X, view))


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_a_switch_that_is_absent_leaves_no_trace_and_a_weight_multiplies_its_segments(path):
    pytest.importorskip("triton" if path == "triton" else "torch")
    settings = {"TOKENFORMER_PATTENTION": path, "TRITON_INTERPRET": "1" if path == "triton" else "0"}
    script = Path(__file__).parent / "switch_checks.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=os.environ | settings, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["backend"] == path and len(found["far"]) == 12 and found["learned"] < 1e-2
    assert {name: error for name, error in found["far"].items() if not error < 1e-6} == {}


def test_switches_that_nobody_knows_are_refused_in_a_sentence():
    model = models.build(CONFIG)
    ids, weights = torch.tensor([[1, 2]]), torch.ones(1)
    with pytest.raises(UserError, match=r"has no adapter or switch 'imgae': there are "):
        model(ids, switches={"imgae": weights})
    for degrees in (Degrees(pipeline=2), Degrees(token=2)):
        with pytest.raises(UserError, match=r"switches .* neither parallel.pipeline nor parallel.token knows"):
            check(CONFIG, degrees, ParallelConfig())
    check(CONFIG, Degrees(shard=2), ParallelConfig())
    with pytest.raises(UserError, match=r"switch.ffn has 1 names for 2 segments"):
        ModelConfig(**TINY, ffn_tokens=[8, 8], switch={"ffn": ["image"]})
    with pytest.raises(UserError, match=r"switch names 'fnn': its keys are qkv, proj and ffn"):
        ModelConfig(**TINY, ffn_tokens=8, switch={"fnn": ["image"]})
    with pytest.raises(UserError, match=r"model.switch has no meaning for kind transformer"):
        ModelConfig(layers=1, dim=16, heads=2, kind="transformer", switch={"ffn": ["image"]})


def test_the_engine_generates_as_a_call_without_switches_does():
    model = models.build(CONFIG, seed=2)
    assert Engine(model).generate([[1, 2, 3]], 4)[0].ids == model.generate(torch.tensor([[1, 2, 3]]), 4)[0, 3:].tolist()
    split = models.build(ModelConfig(**TINY, ffn_tokens=[8, 8], switch={"ffn": ["text", "image"]}))
    assert split(torch.tensor([[1, 2, 3]] * 2), switches={"text": torch.ones(2)}).logits.shape == (2, 3, 32)
    with pytest.raises(UserError, match="no segment without a switch"):
        Engine(split)


def test_a_grown_model_keeps_its_switches():
    import tokenformer

    weights, ids = {"image": torch.tensor([0.5])}, torch.tensor([[1, 2, 3]])
    model = models.build(CONFIG, seed=2)
    grown = tokenformer.grow(model, ffn_tokens=24, layers=3)
    assert grown.config.switches("ffn", 2) == ["", "image", ""] and grown.config.switches("qkv", 0) == [""]
    torch.testing.assert_close(grown(ids, switches=weights).logits, model(ids, switches=weights).logits)


def test_folders_keep_switches(tmp_path):
    import tokenformer

    model = models.build(CONFIG, seed=2)
    for form in ("ours", "hf"):
        tokenformer.save(model, tmp_path / form, format=form)
        assert tokenformer.load(tmp_path / form).config == model.config
