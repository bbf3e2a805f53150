"""Activation checkpointing and torch.compile, block by block. Both wrap a block's call and rename no parameter."""

import functools
import os
import shutil
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tokenformer.config import PROJECTIONS, ModelConfig
from tokenformer.config_train import TrainConfig
from tokenformer.errors import UserError
from tokenformer.train import fp8

ATEN = torch.ops.aten
# What `selective` keeps: products and attention. Norms, Θ and rotations are cheap and are recomputed.
KEEP = {
    ATEN.mm.default,
    ATEN.bmm.default,
    ATEN.addmm.default,
    ATEN._scaled_mm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(_context, op, *_args, **_kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEEP else CheckpointPolicy.PREFER_RECOMPUTE


def choose_compiler(config: TrainConfig, device: torch.device) -> str:
    """Return the compiler of the blocks on this device. Refuse inductor if there is no C++ compiler."""
    plain = {True: "inductor", False: "none", "auto": "inductor" if device.type == "cuda" else "none"}
    found = plain.get(config.compile, str(config.compile))
    cxx = os.environ.get("CXX", "g++")
    if found == "inductor" and not shutil.which(cxx):
        raise UserError(
            f"train.compile is {config.compile}, which needs the C++ compiler {cxx}, and there is none: "
            "install it, or set train.compile=none"
        )
    return found


def allow_compilations(models: Sequence[ModelConfig]) -> None:
    """Raise PyTorch's limit to what these models need, in training and evaluation, and make passing it an error.

    All blocks share one code object, and PyTorch compiles one at most 8 times: further blocks, in a run of several
    trunks or growths, would silently run uncompiled.
    """
    trunks = [trunk for model in models for trunk in model.trunks.values() or [model]]
    count = 4 * sum(map(_different_blocks, trunks))  # training and evaluation, with and without frozen parameters
    torch._dynamo.config.recompile_limit += count  # on top: other runs of this process have used theirs
    torch._dynamo.config.accumulated_recompile_limit += count
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def _different_blocks(trunk: ModelConfig) -> int:
    if trunk.kind != "tokenformer":
        return 1
    return len({str([trunk.segments(which, layer) for which in PROJECTIONS]) for layer in range(trunk.layers)})


def wrap(block: nn.Module, config: TrainConfig, compiler: str) -> None:
    """Compile a block, recompute its activations in the backward pass, compute in fp8, as the config says.

    The compiler sees what `selective` recomputes. `full` recomputes the compiled block as a whole: inside, PyTorch
    before 2.12 would keep what our operators save.
    """
    full = config.activation_checkpointing == "full"
    if config.precision == "fp8":
        fp8.attach(block, config.fp8, compiler)
    if config.activation_checkpointing == "selective":
        recompute(block, selective=True)
    if compiler != "none" and full:
        block.forward = torch.compile(block.forward, backend=compiler, dynamic=False)
    elif compiler != "none":
        block.compile(backend=compiler, dynamic=False)
    if full:
        recompute(block, selective=False)


def recompute(block: nn.Module, selective: bool) -> None:
    """Keep only a block's inputs for the backward pass (`selective`: and its products), and recompute the rest."""
    forward, options = block.forward, {}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def checkpointed(*args, **kwargs):  # a plain function: the compiler would not look into a partial
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    block.forward = checkpointed  # on the instance: the parameters keep their names
