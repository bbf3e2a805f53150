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

ATEN = torch.ops.aten
# What `selective` keeps: products and attention. Norms, Θ and rotations are cheap and are recomputed.
KEEP = {
    ATEN.mm.default,
    ATEN.bmm.default,
    ATEN.addmm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(_context, op, *_args, **_kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEEP else CheckpointPolicy.PREFER_RECOMPUTE


def choose_compiler(config: TrainConfig, device: torch.device) -> str:
    """Return what compiles the blocks on this device. Refuse what needs a C++ compiler where there is none."""
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
    """Let the blocks of these models be compiled, in training and in evaluation, and make any more of it an error.

    All blocks share one code object, and PyTorch compiles one at most 8 times: what comes then, in a run of several
    trunks or growths, would run uncompiled without a word.
    """
    trunks = [trunk for model in models for trunk in model.trunks.values() or [model]]
    count = 4 * sum(map(_different_blocks, trunks))  # in training and not, with and without what is frozen
    torch._dynamo.config.recompile_limit += count  # on top: other runs of this process have used theirs
    torch._dynamo.config.accumulated_recompile_limit += count
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def _different_blocks(trunk: ModelConfig) -> int:
    if trunk.kind != "tokenformer":
        return 1
    return len({str([trunk.segments(which, layer) for which in PROJECTIONS]) for layer in range(trunk.layers)})


def wrap(block: nn.Module, config: TrainConfig, compiler: str) -> None:
    """Compile a block and recompute its activations in backward, as the config says.

    The compiler sees what `selective` recomputes. `full` recomputes the compiled block as a whole: inside, PyTorch
    before 2.12 would keep what our operators save.
    """
    full = config.activation_checkpointing == "full"
    if config.activation_checkpointing == "selective":
        recompute(block, selective=True)
    if compiler != "none" and full:
        block.forward = torch.compile(block.forward, backend=compiler, dynamic=False)
    elif compiler != "none":
        block.compile(backend=compiler, dynamic=False)
    if full:
        recompute(block, selective=False)


def recompute(block: nn.Module, selective: bool) -> None:
    """Keep a block's inputs alone for backward (`selective`: and its products), and compute the rest then."""
    forward, options = block.forward, {}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def checkpointed(*args, **kwargs):  # a plain function: the compiler would not look into a partial
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    block.forward = checkpointed  # on the instance: the parameters keep their names
