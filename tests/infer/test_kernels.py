"""The fused kernels against the reference: in Triton's interpreter (fp32, fp16; it is wrong for bf16) and on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_checks import SHAPES, SMALL, model_of, step_error
from small_models import make

from tokenformer.errors import UserError
from tokenformer.infer import Engine, Sampling
from tokenformer.infer.fused import FusedModel, Tuning, why_not

CASES = {
    "one segment, 1 rows": 2e-5,
    "one segment, 3 rows": 2e-5,
    "segments, 1 rows": 2e-5,
    "segments, 3 rows": 2e-5,
    "library": 2e-5,
    "zeros": 2e-5,
    "half precision, 1 rows, undivided": 1e-2,
    "half precision, 2 rows, undivided": 1e-2,
}


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    pytest.importorskip("triton")
    script = Path(__file__).parent / "kernel_checks.py"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parent)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_in_the_interpreter_a_fused_step_is_the_reference_step(errors):
    assert errors.keys() == CASES.keys()
    assert {name: error for name, error in errors.items() if not error < CASES[name]} == {}


TYPES = {  # of the arguments that are not constants
    "*fp32": "stat tau cos sin part",
    "*bf16": "keys values ahead copy",
    "*i32": "bounds counter",
    "*i64": "positions",
    "i32": "count lines batch slots",
    "fp32": "scale",
}
ONE = {"x": "*fp32", "out": "*fp32", "score": "*fp32", "qkv": "*fp32"}
MANY = {"x": "*bf16", "out": "*bf16", "score": "*bf16"}
TILE = {"N": 1536, "E": 1536, "PARTS": 64, "PAR": 32, "SEGMENTS": 2, "AHEAD": 2, "PDL": True}
DOT = {"BK": 128, "BB": 32, "PRECISION": "tf32", "AHEAD": 2, "PDL": True}
KERNELS = {
    "_scores_one": (ONE, {"D": 1536, "ROWS": 8, "BK": 512, "STAT": True, "AHEAD": 2, "PDL": True}),
    "_values_one": (ONE, {**TILE, "ROWS": 4, "BK": 512, "ADD": True, "SEGMENTS": 1}),
    "_scores_many": (MANY, {**DOT, "D": 1536, "ROWS": 64}),
    "_values_many": (MANY | {"out": "*fp32"}, {**TILE, **DOT, "ROWS": 64, "SPLIT": 6, "ADD": True}),
    "_activate": (MANY, {"N": 1536, "BK": 2048, "SEGMENTS": 2, "PDL": True}),
    "_attend": (ONE, {"H": 16, "C": 96, "CP": 128, "HALF": 12, "BS": 32, "SPLIT": 8, "AHEAD": 2, "PDL": True}),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compile_for_hopper_as_they_are_meant(name):
    """The interpreter takes what the compiler does not. Matrix products are on the matrix units and fetched ahead."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tokenformer.ops.kernels import decode

    kernel, (own, constants) = getattr(decode, name), KERNELS[name]
    types = {n: t for t, names in TYPES.items() for n in names.split()} | own
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    whole = [i for i, n in enumerate(names) if signature[n].startswith("*") or n in ("count", "slots")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in whole},
    )
    options = {"num_warps": 4, "num_stages": 4, "launch_pdl": True}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "griddepcontrol.wait" in text
    before, _, after = text.partition("griddepcontrol.wait")
    assert ("prefetch.global.L2" in before) == (name != "_activate")
    assert ("ld.global" in before) == name.endswith("_one")  # weights, which depend on nothing, come before the wait
    assert "st.global" in after and "st.global" not in before
    assert ("wgmma" in text and "cp.async" in text) == name.endswith("_many")


def test_what_the_kernels_cannot_do_is_said(tokenformer_model):
    cpu = torch.device("cpu")
    assert "not softmax" in why_not(make("softmax").config, cpu)
    assert "not llama" in why_not(make("llama").config, cpu)
    assert "multiple of 64" in why_not(tokenformer_model.config, cpu)
    assert "on cpu" in why_not(model_of("one segment").config, cpu)
    with pytest.raises(UserError, match="the triton kernels cannot be used"):
        Engine(tokenformer_model, backend="triton")
    assert FusedModel(model_of("one segment"), torch.float32).step(65, SMALL) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_on_the_gpu_a_fused_step_is_the_reference_step(shape, overlapped, dtype, tolerance):
    model = model_of(shape).to("cuda", dtype)
    for lengths in ([9], [5, 1, 12], [3] * 33):
        assert step_error(model, lengths, Tuning(pdl=overlapped, ahead=overlapped)) < tolerance


@pytest.mark.gpu
def test_on_the_gpu_the_graph_decodes_as_the_reference_does(prompts):
    model = model_of("one segment", context=128).cuda()
    expected = [model.generate(torch.tensor([p]).cuda(), 20)[0, len(p) :].tolist() for p in prompts]
    for backend in ("torch", "triton"):
        engine = Engine(model, backend=backend)
        assert engine.backend == backend and engine.graph
        assert [r.ids for r in engine.generate(prompts, 20)] == expected
        assert [engine.generate([p], 20)[0].ids for p in prompts] == expected
        how = Sampling(temperature=1.0, top_p=0.9)
        rows = engine.generate(prompts, 20, how)
        assert engine.generate(prompts, 20, how) == rows
