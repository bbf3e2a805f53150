"""Activation checkpointing and torch.compile, block by block. Both wrap a block's call and rename no parameter."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tokenformer.config_train import TrainConfig

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


def wrap(block: nn.Module, config: TrainConfig) -> None:
    """In this order: what backward computes again, then compilation."""
    if config.activation_checkpointing != "none":
        again(block, selective=config.activation_checkpointing == "selective")
    if config.compile != "none":
        block.compile(backend=config.compile, dynamic=False)


def again(block: nn.Module, selective: bool) -> None:
    forward, options = block.forward, {}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def forward_again(*args, **kwargs):  # a plain function: the compiler would not look into a partial
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    block.forward = forward_again  # on the instance: the parameters keep their names
