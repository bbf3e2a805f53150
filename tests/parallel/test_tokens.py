"""What is sent is what was predicted."""

import json

import pytest

from tests.parallel.conftest import COUNTS

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
