"""What is sent is what was predicted."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.parallel.conftest import COUNTS
from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.models import build
from tokenformer.parallel.tokens import split_tokens

pytestmark = pytest.mark.multi
LAYERS = 2


@pytest.mark.parametrize(
    "name, statistics", [("l2", ("all_reduce", 3)), ("softmax", ("all_gather_into_tensor", 3)), ("whole", ("none", 0)),
                         ("three", ("all_reduce", 3)), ("one", ("all_reduce", 3))],
)  # fmt: skip
def test_collectives_are_those_of_the_formula(ran, name, statistics):
    """A block sends its statistics (for q, k and v together, for proj, for ffn), q, k and v by one reduce-scatter, the

    heads by one all-gather, and two outputs. The embedding is one more sum, the cross entropy one more gather.
    """
    found = json.loads(ran(f"count-{name}-0.json").read_text())
    kind, each = statistics
    forward = {"reduce_scatter_tensor": LAYERS, "all_gather_into_tensor": LAYERS + 1, "all_reduce": 2 * LAYERS + 1}
    forward[kind] = forward.get(kind, 0) + each * LAYERS
    forward.pop("none", None)
    backward = {"reduce_scatter_tensor": LAYERS, "all_gather_into_tensor": LAYERS, "all_reduce": 2 * LAYERS + 1}
    backward["all_reduce"] += each * LAYERS
    assert {"forward": found["forward"], "backward": found["backward"]} == {"forward": forward, "backward": backward}


@pytest.mark.parametrize("name", COUNTS)
def test_bytes_of_a_step_are_those_that_plan_prints_on_every_rank(ran, name):
    for rank in range(COUNTS[name].world):
        found = json.loads(ran(f"count-{name}-{rank}.json").read_text())
        assert found["counted"] == sum(found["formula"].values()) > 0, (rank, found)


@pytest.mark.parametrize("where", ["attention.query", "attention.value", "attention.proj", "ffn"])
def test_hooks_are_called_or_refused(tmp_path, where):
    """q, k and v are computed without their calls."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = build(ModelConfig(layers=1, dim=16, heads=2, qkv_tokens=8, proj_tokens=8, ffn_tokens=8, vocab=32))
        ids, values = torch.arange(6)[None], model.state_dict()
        place = SimpleNamespace(
            degrees=SimpleNamespace(token=1),
            config=SimpleNamespace(segments="sliced"),
            groups={"token": dist.group.WORLD},
            token=0,
        )
        split_tokens(model, place)
        model.load_state_dict(values, assign=True)
        model(ids)
        calls = []
        hook = lambda module, inputs, output: calls.append(output.shape)  # noqa: E731
        model.blocks[0].get_submodule(where).register_forward_hook(hook)
        if where in ("attention.proj", "ffn"):
            model(ids)
            assert calls == [(1, 6, 16)]
        else:
            with pytest.raises(UserError, match=r"carries a hook or an adapter, .* set parallel.token=1"):
                model(ids)
    finally:
        dist.destroy_process_group()
