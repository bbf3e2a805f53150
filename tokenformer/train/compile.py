"""Activation checkpointing and torch.compile, block by block. Both wrap a block's call and rename no parameter."""

import functools
import os
import shutil

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
