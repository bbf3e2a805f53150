"""Other people's tools (accelerate, peft, FSDP2, hooks, transformers' Trainer) compute what a plain control does,
on the reference and on the kernels: nothing reads a tensor past the module that holds it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.parallel.conftest import forkserver
from tokenformer import UserError, models
from tokenformer.config import ModelConfig
from tokenformer.infer import Engine

TINY = ModelConfig(layers=2, dim=16, heads=2, qkv_tokens=8, proj_tokens=8, ffn_tokens=[8, 8], vocab=32, context=16)
IDS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("path, bound", [("reference", 2e-6), ("triton", 2e-5)])
def test_every_tool_gives_what_a_plain_control_gives(path, bound):
    """The kernels have another order of sums where nothing is hooked (no LayerNorm): hence their bound."""
    for library in ("peft", "accelerate", "transformers", *(["triton"] if path == "triton" else [])):
        pytest.importorskip(library)
    script = Path(__file__).parent / "tool_checks.py"
    settings = {"TOKENFORMER_PATTENTION": path, "TRITON_INTERPRET": "1" if path == "triton" else "0"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=os.environ | settings, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found["far"]) == 46 and found["said"] == 1  # that projections are called one by one, once
    assert {name: error for name, error in found["far"].items() if not error < bound} == {}


def shard_on(rank: int, parts: list[str], file: str, out: str) -> None:
    """A rank of two that shards these parts of each block, then the model, and leaves its gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = models.build(TINY).double()
    for block in model.blocks:
        for part in parts:
            fully_shard(block.get_submodule(part))
    fully_shard(model)
    ids = IDS[rank : rank + 1]
    model(ids, labels=ids).loss_sum.backward()
    whole = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(whole, out)
    dist.destroy_process_group()


@pytest.mark.multi
@pytest.mark.parametrize(
    "parts",
    [
        ["attention.query", "attention.key", "attention.value", "attention.proj", "ffn"],
        ["attention.key.segments.0", "ffn.segments.1", "attention.proj"],
    ],
    ids=["Pattention", "Segment"],
)
def test_two_ranks_that_shard_by_projection_or_segment_have_the_gradients_of_one(tmp_path, parts):
    given = [(rank, parts, str(tmp_path / "store"), str(tmp_path / "gradients.pt")) for rank in range(2)]
    ranks = [forkserver().Process(target=shard_on, args=words) for words in given]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    model = models.build(TINY).double()
    model(IDS, labels=IDS).loss_sum.backward()
    found = torch.load(tmp_path / "gradients.pt")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad / 2, rtol=0, atol=1e-12)  # FSDP takes the mean


@pytest.mark.parametrize("where", ["attention.value", "attention.proj"])
@pytest.mark.parametrize("hook", ["none", "before", "after"])
def test_compiled_blocks_have_no_graph_break_and_see_hooks_that_come_before_or_after(hook, where):
    torch.compiler.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = True  # as it is before our first block is compiled
    model, plain, ids = models.build(TINY), models.build(TINY), torch.arange(12).view(2, 6)
    before = plain(ids).logits
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    if hook == "after":
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-6, atol=1e-6)
    handles = []
    for block, control in zip(model.blocks, plain.blocks, strict=True) if hook != "none" else ():
        handles.append(block.get_submodule(where).register_forward_hook(lambda module, inputs, output: -output))
        with torch.no_grad():
            control.get_submodule(where).segments[0].value_tokens.mul_(-1)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-6, atol=1e-6)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-6, atol=1e-6)


def test_the_engine_refuses_a_model_that_it_would_compute_otherwise():
    model = models.build(TINY)
    model.blocks[1].attention.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(UserError, match=r"blocks.1.attention carries a hook or an adapter, .* own generate"):
        Engine(model)
    with torch.device("meta"):
        offloaded = models.build(TINY)
    with pytest.raises(UserError, match=r"weights of embedding are offloaded, .* load them whole"):
        Engine(offloaded)
    compiled = models.build(TINY)
    compiled.blocks[0].forward = torch.compile(compiled.blocks[0].forward, backend="eager")
    assert len(Engine(compiled).generate([[1, 2]], 3)[0].ids) == 3
