"""What devices send each other, read from the compiled program."""

import math
import re

import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'tokenformer[jax]'")
import jax
import numpy as np

from tokenformer.config import ParallelConfig
from tokenformer_jax.mesh import make_mesh, put
from tokenformer_jax.model import THETAS, pattention

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
