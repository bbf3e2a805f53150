"""Config → model on the meta device → split over the ranks: token → pipeline → per-block wrapping → values → shard.

Unusual: a block is made, filled with this rank's part of each whole parameter and sharded before the next one is made,
so that no rank ever holds more than its share and one block.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as register_forward

from tokenformer.config import ModelConfig
from tokenformer.parallel.layout import Layout, Split
from tokenformer.parallel.mesh import Place, keeps_whole_gradients
from tokenformer.parallel.pipeline import Pipeline, make_stages, pipeline_ranks
from tokenformer.parallel.tokens import split_tokens

Build = Callable[[ModelConfig], Any]  # config → model
Values = Callable[[str, tuple[int, ...]], Tensor]  # a whole parameter's values by name and shape
Wrap = Callable[[nn.Module], None]  # what is done to each block before it is sharded


class Parallelizer:
    """Splits every model of a run over the ranks: the first, that of a checkpoint, and those that grow from it."""

    def __init__(self, build: Build, place: Place, device: torch.device, dtype: torch.dtype | None, wrap: Wrap) -> None:
        """`dtype` is what the models compute in; None: the type of their parameters."""
        self.build, self.place, self.device, self.dtype, self.wrap = build, place, device, dtype, wrap

    def make(self, config: ModelConfig, values: Values | None) -> Layout:
        """Make the model of a config, split over the ranks. Without `values` they come later (from a checkpoint)."""
        place = self.place
        with torch.device("meta"):
            model = self.build(config)
        for part in (model, *model.trunks().values()):
            part.compute_dtype = self.dtype
        splits = {name: Split(tuple(p.shape)) for name, p in model.named_parameters()}
        if place.alone:
            model.to_empty(device=self.device)
            fill(model, "", splits, place, values)
            return self.wrap_in_place(model)
        if place.degrees.token > 1:
            splits = split_tokens(model, place)
        if place.degrees.pipeline > 1:
            holders, parts = pipeline_ranks(model, place), make_stages(model, place)
            for part in parts:
                self._fill_and_shard(part, splits, values)
            return Layout(parts[0], place, splits, parts, holders, Pipeline(parts, place, self.device))
        self._fill_and_shard(model, splits, values)
        return Layout(model, place, splits)

    def wrap_in_place(self, model: Any) -> Layout:
        """Wrap the blocks of a model that has its values, in one process."""
        for trunk in model.trunks().values():
            for block in trunk.blocks:
                self.wrap(block)
        return Layout(model, self.place)

    def _fill_and_shard(self, model: Any, splits: dict[str, Split], values: Values | None) -> None:
        """Fill and shard each block of each trunk, then what lies outside the blocks, which the root holds."""
        inside: set[nn.Module] = set()
        for prefix, trunk in model.trunks().items():
            for name, block in trunk.blocks.named_children():
                block.to_empty(device=self.device)
                fill(block, f"{prefix}blocks.{name}.", splits, self.place, values)
                self.wrap(block)
                shard(block, self.place, self.dtype)
                inside |= set(block.modules())
        for name, module in model.named_modules():
            if module not in inside:
                module.to_empty(device=self.device, recurse=False)
                fill(module, f"{name}." if name else "", splits, self.place, values, recurse=False)
        shard(model, self.place, None, root=True)


@torch.no_grad()
def fill(
    module: nn.Module, prefix: str, splits: dict[str, Split], place: Place, values: Values | None, recurse: bool = True
) -> None:
    """Give each parameter its part of the whole, as the token degree splits it; FSDP comes later."""
    if values is None:
        return
    for name, parameter in module.named_parameters(recurse=recurse):
        split = splits[prefix + name]
        parameter.copy_(values(prefix + name, split.shape)[split.box(place.token, 0, 1)])


def shard(module: nn.Module, place: Place, dtype: torch.dtype | None, root: bool = False) -> None:
    """Apply FSDP2 over the ranks that see different data: shard, replicate, sum gradients.

    Blocks are gathered in the type they compute in; what the root holds is not. FSDP shards neither single numbers
    (every rank holds them, and `Layout` sums their gradients) nor the empty parts of segments that are whole elsewhere.
    """
    c, d, mesh = place.config, place.degrees, place.mesh
    assert mesh is not None
    if d.replicate * d.shard == 1:
        return
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if c.offload else OffloadPolicy()
    sharded = fully_shard(
        module,
        mesh=mesh["replicate", "shard"] if d.replicate > 1 else mesh["shard"],
        reshard_after_forward=c.reshard_after_forward and not root,
        mp_policy=policy,
        offload_policy=offload,
        ignored_params={p for p in module.parameters() if not p.ndim or not p.numel()},
    )
    assert isinstance(sharded, FSDPModule)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    for name in getattr(module, "entries", ()):  # other methods than forward by which a task enters the model
        register_forward(module, name)


def before_backward(model: Any, place: Place, last: bool) -> None:
    """Prepare a backward pass of a step. The `last` one sums gradients over all ranks.

    Before that they add up on this rank, whole, or as its part of what its shard group sums each time
    (`parallel.accumulate`), and parameters that stay gathered after forward stay so until the step ends.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or not keeps_whole_gradients(place.degrees, place.config))
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or place.config.reshard_after_forward)
