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
# What `selective` keeps: products and attention. Norms, Θ and rotations are cheap and are computed again.
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


def backend(config: TrainConfig, device: torch.device) -> str:
    """What compiles the blocks on this device; refused where it needs a C++ compiler and there is none."""
    plain = {True: "inductor", False: "none", "auto": "inductor" if device.type == "cuda" else "none"}
    found = plain.get(config.compile, str(config.compile))
    compiler = os.environ.get("CXX", "g++")
    if found == "inductor" and not shutil.which(compiler):
        raise UserError(
            f"train.compile is {config.compile}, which needs the C++ compiler {compiler}, and there is none: "
            "install it, or set train.compile=none"
        )
    return found


def wrap(block: nn.Module, config: TrainConfig, backend: str) -> None:
    """The compiler sees what `selective` computes again. `full` computes all of it again, by the compiled block itself:

    inside, PyTorch before 2.12 would keep what our operators save.
    """
    full = config.activation_checkpointing == "full"
    if config.activation_checkpointing == "selective":
        again(block, selective=True)
    if backend != "none" and full:
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
    elif backend != "none":
        block.compile(backend=backend, dynamic=False)
    if full:
        again(block, selective=False)


def again(block: nn.Module, selective: bool) -> None:
    forward, options = block.forward, {}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def forward_again(*args, **kwargs):  # a plain function: the compiler would not look into a partial
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    block.forward = forward_again  # on the instance: the parameters keep their names
