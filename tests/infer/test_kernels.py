"""The fused kernels against the reference: in Triton's interpreter (fp32, fp16; it is wrong for bf16) and on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_checks import SHAPES, SMALL, SWITCHED, adapter_errors, model_of, step_error
from small_models import make

from tokenformer.errors import UserError
from tokenformer.infer import Engine, Sampling
from tokenformer.infer.kernel_step import FusedModel, Tuning, why_not

CASES = {
    "one segment, 1 rows": 2e-5,
    "one segment, 3 rows": 2e-5,
    "segments, 3 rows": 2e-5,
    "layers of two shapes": 2e-5,
    "fp8, 1 rows": 1e-5,
    "fp8, 2 rows": 1e-5,
    "skipped values": 1e-5,
    "skipped values, fp8": 1e-5,
    "skipped values are not read": 1e-6,
    "prefill": 2e-5,
    "greedy": 1e-9,
    "zeros": 2e-5,
    "adapters, 3 rows": 2e-5,
    "adapters, all off": 2e-5,
    "adapters, together and alone": 1e-6,
    "half precision, 1 rows, undivided": 1e-2,
    "half precision, 2 rows, undivided": 1e-2,
}


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    pytest.importorskip("triton")
    script = Path(__file__).parent / "kernel_checks.py"
    path = os.pathsep.join([str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_in_the_interpreter_a_fused_step_is_the_reference_step(errors):
    assert errors.keys() == CASES.keys()
    assert {name: error for name, error in errors.items() if not error < CASES[name]} == {}


TYPES = {  # of the arguments that are not constants
    "*fp32": "tau cos sin raw stat part qkv scales row_scale key_scale value_scale rule base",
    "*bf16": "g copy",
    "*i32": "bounds counter",
    "*i64": "positions",
    "i32": "batch count slots E",
    "fp32": "scale",
}
ONE = {"x": "*fp32", "score": "*fp32", "keys": "*i32", "values": "*i32", "out": "*fp32"}
MANY = {"x": "*bf16", "keys": "*bf16", "values": "*bf16", "out": "*bf16"}
EIGHT = {"keys": "*fp8e4nv", "values": "*fp8e4nv"}
PIECES = {"R": 8, "BK": 128, "EVEN": True, "DEPTH": 18, "KIND": "bf16", "CENTRED": False, "PDL": True}
OUT = {"N": 1536, "SEGMENTS": 2, "ADD": True}
DOT = {"ROWS": 64, "BK": 128, "BB": 32, "PRECISION": "tf32", "PDL": True}
KEPT = {**OUT, "N": 6144, "E": 1536, "MANY": 8192, "ROWS": 256, "BE": 128, "SPLIT": 24, "PARTS": 32, "PDL": True}
SCORES = {"D": 1536, "N": 1536, "PARTS": 32, "SEGMENTS": 2, "HALF": 0}
SUMS = {"N": 6144, "E": 1536, "SPLIT": 5, "ADD": True, "EVEN": True}
HEAD = {"H": 16, "C": 96, "CP": 128, "HALF": 12, "BS": 32, "SPLIT": 1, "STAGES": 3, "PRECISION": "tf32", "PDL": True}
KERNELS: dict[str, tuple[str, dict, dict]] = {  # name → kernel, types, constants
    "scores of one row": ("_scores_one", ONE, {**PIECES, "PER": 24, "K": 768, "key_scale": None}),
    "scores of one row in fp32": (
        "_scores_one", ONE | {"keys": "*fp32"},
        {**PIECES, "PER": 24, "K": 1536, "EVEN": False, "KIND": "fp32", "key_scale": None},
    ),
    "scores of one row in fp8": ("_scores_one", ONE, {**PIECES, "PER": 48, "K": 384, "KIND": "fp8", "CENTRED": True}),
    "outputs of one row": (
        "_values_one", ONE, {**PIECES, **OUT, "PER": 24, "K": 768, "value_scale": None},
    ),
    "outputs of one row in fp8": ("_values_one", ONE, {**PIECES, **OUT, "PER": 48, "K": 384, "KIND": "fp8"}),
    "outputs of one row, some skipped": ("_values_kept", ONE | {"values": "*bf16"}, {**KEPT, "value_scale": None}),
    "outputs of one row in fp8, some skipped": ("_values_kept", ONE | {"values": "*fp8e4nv"}, KEPT),
    "scores of several rows": ("_scores", MANY, {**DOT, **SCORES, "scales": None}),
    "scores of several rows in fp8": ("_scores", MANY | EIGHT, {**DOT, **SCORES}),
    "outputs of several rows": ("_values", MANY | {"out": "*fp32"}, {**DOT, **SUMS, "row_scale": None}),
    "outputs of several rows in fp8": ("_values", MANY | EIGHT | {"out": "*fp32"}, {**DOT, **SUMS, "row_scale": None}),
    "the head of several rows in fp8": (
        "_values", MANY | EIGHT | {"out": "*fp32"},
        {**DOT, **SUMS, "E": 50300, "SPLIT": 1, "ADD": False, "EVEN": False},
    ),
    "attention": ("_attention", MANY, HEAD),
    "attention in parts": ("_attention", MANY, {**HEAD, "SPLIT": 8, "STAGES": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compile_for_hopper_as_they_are_meant(name):
    """The interpreter takes what the compiler does not. What depends on nothing comes before the wait, 16 bytes at
    once; products of several rows are on the matrix units, and fetched ahead.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tokenformer.ops.kernels import decode, decode_one

    called, own, given = KERNELS[name]
    kernel, one = getattr(decode_one, called, None) or getattr(decode, called), called.endswith("_one")
    constants = {n: value for n, value in given.items() if n in kernel.arg_names}
    types = {n: t for t, names in TYPES.items() for n in names.split()} | own
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    by_sixteen = [n for n in names if signature[n] == "i32" and n != "batch"] + [
        n for n in names if signature[n][0] == "*"
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in map(names.index, by_sixteen)},
    )
    options = {"num_warps": 8 if one or called == "_values_kept" else 4, "num_stages": 4, "launch_pdl": True}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    before, _, after = text.partition("griddepcontrol.wait")
    wide = before.count(".v4.b32")
    assert wide == (18 if one else 0) or (called == "_attention" and wide > 0)
    if called == "_values_kept":  # a row that is not wanted is not asked for
        assert after.count("L1::evict_first.L2::cache_hint.v4.b32") == (8 if "value_scale" not in given else 16)
    assert "st.global" in after and "st.global" not in before
    assert ("wgmma" in text and "cp.async" in text) == (called in ("_scores", "_values"))


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
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)]
)  # both round to 8 bits
def test_on_the_gpu_a_fused_step_is_the_reference_step(shape, overlapped, dtype, tolerance):
    model = model_of(shape).to("cuda", dtype)
    for lengths in ([9], [5, 1, 12], [3] * 33):
        tuning = Tuning(pdl=overlapped, one_words=32, block=32)
        assert step_error(model, lengths, tuning) < tolerance
        assert step_error(model, lengths, tuning, fp8=True) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "fp8"])
def test_on_the_gpu_skipped_values_decode_as_the_reference_does(weights, prompts):
    model = model_of("one segment", context=128).cuda()
    plain, kernels = (Engine(model, backend=b, weights=weights, skip=0.4) for b in ("torch", "triton"))
    assert [plain.generate([p], 20)[0].ids for p in prompts] == [kernels.generate([p], 20)[0].ids for p in prompts]


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


@pytest.mark.gpu
def test_on_the_gpu_each_row_of_a_batch_has_its_own_adapters():
    """Several rows multiply on the matrix units and one row does not, so together and alone round differently."""
    found = adapter_errors("cuda", Tuning(one_words=32, block=32))
    assert {name: error for name, error in found.items() if not error < 1e-4} == {}


@pytest.mark.gpu
def test_on_the_gpu_added_ids_are_drawn_as_the_reference_draws_them(prompts):
    model = model_of("segments", layers=2, context=128, added_vocab=9, added_switch="draw", **SWITCHED).cuda()
    plain, kernels = (Engine(model, backend=b) for b in ("torch", "triton"))
    switches = [{"draw": 1.0}, {"draw": 1.0, "a": 1.0}, {"draw": 1.0, "b": -0.5}, {"draw": 1.0}][: len(prompts)]
    how = {"switches": switches, "choices": range(97, 105)}
    rows = kernels.generate(prompts, 20, **how)
    assert [row.ids for row in rows] == [row.ids for row in plain.generate(prompts, 20, **how)]
    assert {i for row in rows for i in row.ids} <= set(range(97, 105))
    assert kernels.generate(prompts, 20)[0].ids == plain.generate(prompts, 20)[0].ids
