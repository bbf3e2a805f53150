"""Activation checkpointing and torch.compile, block by block. Both wrap a block's call and rename no parameter."""

import functools
from collections.abc import Iterable

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


def wrap(blocks: Iterable[nn.Module], config: TrainConfig) -> None:
    """In this order: what backward computes again, then compilation of each block."""
    for block in blocks:
        if config.activation_checkpointing != "none":
            options = {}
            if config.activation_checkpointing == "selective":
                options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
            again = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options
            )
            block.forward = again  # on the instance: the parameters keep their names
        if config.compile != "none":
            block.compile(backend=config.compile, dynamic=False)
