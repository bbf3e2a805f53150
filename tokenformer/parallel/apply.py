"""A model on the meta device → laid over the ranks: token → pipeline → per-block wrapping → values → shard.

Unusual: a block is made, filled with this rank's part of each whole parameter and sharded before the next one is made,
so that no rank ever holds more than its share and one block.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from tokenformer.models import LanguageModel
from tokenformer.parallel.layout import Layout, Split
from tokenformer.parallel.mesh import Place
from tokenformer.parallel.pipeline import Pipeline, cut, holders
from tokenformer.parallel.tokens import split_tokens

Source = Callable[[str, tuple[int, ...]], Tensor]  # a whole parameter's values by name and shape


def parallelize(
    model: LanguageModel, place: Place, device: torch.device, source: Source | None, wrap: Callable[[nn.Module], None]
) -> Layout:
    """`source` gives the first values (None: they come later); `wrap` is what is done to each block before sharding."""
    splits = {name: Split(tuple(p.shape)) for name, p in model.named_parameters()}
    if place.alone:
        model.to_empty(device=device)
        fill(model, "", splits, place, source)
        for block in model.blocks:
            wrap(block)
        return Layout(model, place, splits)
    if place.degrees.token > 1:
        splits = split_tokens(model, place)
    if place.degrees.pipeline > 1:
        held, parts = holders(model, place), cut(model, place)
        for part in parts:
            lay(part, splits, place, device, source, wrap)
        return Layout(parts[0], place, splits, parts, held, Pipeline(parts, place, device))
    lay(model, splits, place, device, source, wrap)
    return Layout(model, place, splits)


def lay(
    model: LanguageModel,
    splits: dict[str, Split],
    place: Place,
    device: torch.device,
    source: Source | None,
    wrap: Callable[[nn.Module], None],
) -> None:
    """Block by block, then the rest."""
    for name, block in model.blocks.named_children():
        block.to_empty(device=device)
        fill(block, f"blocks.{name}.", splits, place, source)
        wrap(block)
        shard(block, place, model.compute_dtype)
    for name, child in model.named_children():
        if name != "blocks":
            child.to_empty(device=device)
            fill(child, f"{name}.", splits, place, source)
    shard(model, place, None, root=True)


@torch.no_grad()
def fill(module: nn.Module, prefix: str, splits: dict[str, Split], place: Place, source: Source | None) -> None:
    """Each parameter gets its part of the whole (as the token degree cuts it; FSDP has not cut yet)."""
    if source is None:
        return
    for name, parameter in module.named_parameters():
        split = splits[prefix + name]
        parameter.copy_(source(prefix + name, split.shape)[split.box(place.token, 0, 1)])


def shard(module: nn.Module, place: Place, dtype: torch.dtype | None, root: bool = False) -> None:
    """FSDP2 over the ranks that see other data: split over `shard`, copied over `replicate`, gradients summed.

    Blocks are gathered in the type they compute in, which is what they would be cast to; what the root holds is not.
    """
    c, d, mesh = place.config, place.degrees, place.mesh
    assert mesh is not None
    if d.replicate * d.shard == 1:
        return
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if c.offload else OffloadPolicy()
    again = c.reshard_after_forward and not root
    empty = {p for p in module.parameters() if not p.numel()}  # of segments that are whole elsewhere
    laid = fully_shard(
        module,
        mesh=mesh["replicate", "shard"] if d.replicate > 1 else mesh["shard"],
        reshard_after_forward=again,
        mp_policy=policy,
        offload_policy=offload,
        ignored_params=empty,
    )
    assert isinstance(laid, FSDPModule)
    laid.set_gradient_divide_factor(1.0)
    laid.set_force_sum_reduction_for_comms(True)
