"""Programs over many devices: what these send each other, and what can be known about TPUs without one."""

import math
import re

import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'tokenformer[jax]'")
import jax
import jax.export
import numpy as np

from tokenformer.config import ParallelConfig, load
from tokenformer_jax.mesh import make_mesh, put
from tokenformer_jax.model import THETAS, How, check, pattention, shapes
from tokenformer_jax.step import fresh, train_step

ROWS, DIM, TOKENS, SEGMENTS = 6, 32, 16, 2


@pytest.mark.parametrize("theta", THETAS)
def test_of_split_tokens_one_number_per_row_and_segment_is_sent_beside_the_outputs(theta):
    mesh = make_mesh(ParallelConfig(replicate=1, token=8))
    names = [f"ffn.segments.{i}.{half}_tokens" for i in range(SEGMENTS) for half in ("key", "value")]
    layer = put({name: np.ones((TOKENS, DIM), np.float32) for name in names}, mesh)
    program = jax.jit(lambda x, layer: pattention(x, layer, "ffn", [4.0] * SEGMENTS, theta, mesh))
    text = program.lower(np.ones((1, ROWS, DIM), np.float32), layer).compile().as_text()
    kinds = set(re.findall(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", text))
    assert kinds == {"all-reduce"}
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    shapes = re.findall(r"f32\[([\d,]*)\]", " ".join(results))
    sizes = sorted(math.prod(map(int, shape.split(","))) for shape in shapes)
    numbers = 2 if theta == "softmax" else 1  # its maximum, and its sum
    assert sizes == [ROWS] * numbers * SEGMENTS + [ROWS * DIM] * SEGMENTS


def test_a_step_over_many_devices_can_be_lowered_for_tpus():
    """What needs no TPU: every operation of the step has a form there."""
    config = load("lm/3m", overrides=["batch=8", "parallel.shard=4", "parallel.token=2", "model.layers=2"])
    model, mesh = check(config.model), make_mesh(config.parallel)
    sized = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)  # noqa: E731
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes(model).items()}
    state = {name: jax.tree.map(sized, fresh(name, p.shape, config.optimizer)) for name, p in params.items()}
    batch = dict.fromkeys(("ids", "labels"), jax.ShapeDtypeStruct((2, 4, model.context), np.int32))
    step = train_step(config, model, How(jax.numpy.bfloat16, "full", mesh), set(), {})
    lowered = jax.export.export(step, platforms=["tpu"])(params, state, batch, jax.ShapeDtypeStruct((), np.float32))
    assert lowered.platforms == ("tpu",) and lowered.nr_devices == 8
