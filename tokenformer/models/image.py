"""The image model: patches, positions, blocks that are not causal, final norm, class head.

Unusual: images of any size are read whose sides are multiples of the patch; learned positions are interpolated to
their grid. Legend: B batch, C channels, P patch, R × S grid of patches, T positions, D dim, L layers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.config import ModelConfig
from tokenformer.errors import UserError
from tokenformer.models.init import init_weights, initial
from tokenformer.models.layers import Linear, Norm
from tokenformer.models.names import ONE, POSITION, TABLE, ZERO, Role
from tokenformer.models.trunk import Trunk, View
from tokenformer.ops.rotary import angles

POOLS = {"class": "class", "token": "class", "mean": "mean", "avg": "mean"}  # timm's names of `pool`, and ours


class ImageModel(Trunk):
    """A Vision TokenFormer, or a ViT to compare with, as its config says.

    >>> shape = {"layers": 1, "dim": 32, "heads": 4, "image_size": 32, "patch": 8, "classes": 10}
    >>> model = ImageModel(ModelConfig(of="image", qkv_tokens=16, proj_tokens=16, ffn_tokens=64, **shape))
    >>> model(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> model.forward_features(torch.rand(2, 3, 64, 32)).shape
    torch.Size([2, 33, 32])
    """

    ends: ClassVar[Mapping[str, Role]] = {
        "class_token": ZERO,
        "positions": POSITION,
        "patches.weight": TABLE,
        "patches.bias": ZERO,
        "first_norm.weight": ONE,
        "first_norm.bias": ZERO,
        **Trunk.ends,
        "head.weight": TABLE,
        "head.bias": ZERO,
    }
    checked = (*Trunk.checked, "grid", "patch", "channels")
    # ways in beside forward; FSDP must know them, and gathers once more what one of them used inside of forward
    entries = ("forward_features", "forward_intermediates")
    patches: Linear

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        c = config
        super().__init__(c, patches=Linear(c.channels * c.patch**2, c.dim, bias=True))
        self.images: dict[str, Any] = {}  # how its pixels are made, and the names of its classes (images.json)
        self.class_token = nn.Parameter(torch.empty(c.dim)) if c.pool == "class" else None
        self.positions = nn.Parameter(torch.empty(c.length, c.dim)) if c.positions == "learned" else None
        self.first_norm = Norm(c, affine=True) if c.first_norm else None
        self.head = Linear(c.dim, c.classes, bias=True) if c.classes else None
        if self.patches.weight.device.type != "meta":
            init_weights(self, self.config, seed)

    def forward(self, pixels: Tensor, drop: Tensor | None = None) -> Tensor:
        """`pixels` (B, C, height, width), normalised → logits (B, classes). `drop`: see `View`."""
        return self.forward_head(self.run(*self.embed(pixels, drop)))

    def forward_features(self, pixels: Tensor, drop: Tensor | None = None) -> Tensor:
        """All positions after the final norm (B, T, D), the class token first where there is one."""
        return self.run(*self.embed(pixels, drop))

    def forward_head(self, features_BTD: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of `forward_features`; with `pre_logits`, or without a head, what the head reads (B, D)."""
        pooled_BD = features_BTD.mean(1) if self.class_token is None else features_BTD[:, 0]
        return pooled_BD if pre_logits or self.head is None else self.head(pooled_BD)

    def forward_intermediates(
        self,
        pixels: Tensor,
        indices: int | Sequence[int] | None = None,
        *,
        norm: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        return_prefix_tokens: bool = False,
        stop_early: bool = False,
    ) -> Any:
        """`forward_features`, and maps (B, D, R, S) of the patches behind some blocks; names and forms are timm's.

        `indices`: layer numbers (negative ones from the end), or how many of the last blocks; absent = all. `norm`
        applies the final norm to the maps. With `output_fmt` NLC these are (B, R·S, D); with `return_prefix_tokens`
        each comes with what stands before the patches (B, 1 or 0, D). `intermediates_only` returns the maps alone.
        `stop_early` computes no block behind the last one that was asked for, and the features are those behind it.
        """
        count = len(self.blocks)
        last = count if indices is None else indices
        wanted = list(range(count - last, count) if isinstance(last, int) else last)
        if not all((0 if isinstance(last, int) else -count) <= i < count for i in wanted):
            raise UserError(f"indices is {indices}, but the model has {count} blocks: give numbers of them, from 0")
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt is {output_fmt}: give NCHW (maps) or NLC (a row for each patch)")
        wanted = [i % count for i in wanted]
        seen: dict[int, Tensor] = {}
        x_BTD, view = self.embed(pixels, None)
        view = self.with_active(view, x_BTD)
        for layer, block in enumerate(self.blocks):
            if stop_early and layer > max(wanted, default=-1):
                break
            x_BTD = block(x_BTD, view)
            if layer in wanted:
                seen[layer] = self.norm(x_BTD) if norm else x_BTD
        grid = self.grid_of(pixels)
        before = x_BTD.shape[1] - grid[0] * grid[1]
        maps: list[Any] = [seen[layer][:, before:] for layer in wanted]
        maps = maps if output_fmt == "NLC" else [found.mT.unflatten(2, grid) for found in maps]
        if return_prefix_tokens:
            maps = [(found, seen[layer][:, :before]) for found, layer in zip(maps, wanted, strict=True)]
        return maps if intermediates_only else (self.norm(x_BTD), maps)

    def embed(self, pixels: Tensor, drop: Tensor | None) -> tuple[Tensor, View]:
        """Patches with their positions (B, T, D), and what the blocks may know."""
        if not pixels.is_floating_point():
            raise UserError(f"the model reads normalised floating point pixels, not {pixels.dtype}: convert them first")
        grid, patch = self.grid_of(pixels), self.config.patch
        pixels = pixels.to(self.compute_dtype or self.patches.weight.dtype)
        cut = pixels.unflatten(3, (grid[1], patch)).unflatten(2, (grid[0], patch))  # (B, C, R, P, S, P)
        x_BTD = self.patches(cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))
        if self.class_token is not None:
            x_BTD = torch.cat([self.class_token.to(x_BTD.dtype).expand(len(x_BTD), 1, -1), x_BTD], dim=1)
        if self.positions is not None:
            x_BTD = x_BTD + resized(self.positions, self.config.grid, grid).to(x_BTD.dtype)
        if self.first_norm is not None:
            x_BTD = self.first_norm(x_BTD)
        return x_BTD, View(self.turns(grid, x_BTD), causal=False, drop=drop)

    def grid_of(self, pixels: Tensor) -> tuple[int, int]:
        c = self.config
        if pixels.ndim != 4 or pixels.shape[1] != c.channels or pixels.shape[2] % c.patch or pixels.shape[3] % c.patch:
            raise UserError(
                f"the model reads images (batch, {c.channels}, height, width) whose sides are multiples of the patch "
                f"{c.patch}, not {list(pixels.shape)}: resize them"
            )
        return pixels.shape[2] // c.patch, pixels.shape[3] // c.patch

    def turns(self, grid: tuple[int, int], x_BTD: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin of each position; another grid spans the same angles as the config's. A class token stays."""
        c = self.config
        if c.positions != "rotary":
            return None
        sides = [torch.arange(n, device=x_BTD.device) * (own / n) for n, own in zip(grid, c.grid, strict=True)]
        both = torch.cartesian_prod(*sides).T
        rows, columns = (angles(side, c.rotary_dims // 2, c.rotary_base, x_BTD.dtype) for side in both)
        cos, sin = (torch.cat(pair, dim=-1) for pair in zip(rows, columns, strict=True))
        if self.class_token is not None:
            cos, sin = F.pad(cos, (0, 0, 1, 0), value=1.0), F.pad(sin, (0, 0, 1, 0))
        return cos, sin

    @property
    def num_classes(self) -> int:
        return self.config.classes

    @property
    def num_features(self) -> int:
        """Width of what the head reads; `embed_dim` and `head_hidden_size` are timm's other names of it."""
        return self.config.dim

    embed_dim = head_hidden_size = num_features

    def get_classifier(self) -> nn.Module | None:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None, *, seed: int = 0) -> None:
        """Replace the head by a new one for so many classes, which have no names yet; 0: none.

        `global_pool` is there for callers of timm's models, and may name the model's own pooling alone.
        """
        own = {"class": "its class token", "mean": "the mean of its patches"}[self.config.pool]
        if global_pool is not None and POOLS.get(str(global_pool)) != self.config.pool:
            raise UserError(f"global_pool is {global_pool}, but the model pools by {own}: leave it out")
        self.config, old = dataclasses.replace(self.config, classes=num_classes), self.patches.weight
        self.images = {name: about for name, about in self.images.items() if name != "classes"}
        self.head = Linear(self.config.dim, num_classes, bias=True).to(old) if num_classes else None
        for name, parameter in self.head.named_parameters() if self.head is not None else ():
            first = initial(f"head.{name}", tuple(parameter.shape), self.config, seed, self.ends)
            parameter.data.copy_(first)


def resized(positions_TD: Tensor, grid: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """Learned positions for another grid of patches, bicubic; what stands before the patches (a class token) stays.

    >>> resized(torch.zeros(1 + 4, 8), (2, 2), (3, 4)).shape
    torch.Size([13, 8])
    """
    if grid == to:
        return positions_TD
    first_TD, patches_TD = positions_TD.split([len(positions_TD) - grid[0] * grid[1], grid[0] * grid[1]])
    wide = patches_TD.to(torch.promote_types(patches_TD.dtype, torch.float32))
    image = wide.T.unflatten(1, grid)[None]
    image = F.interpolate(image, size=to, mode="bicubic", antialias=True)
    return torch.cat([first_TD, image[0].flatten(1).T.to(positions_TD.dtype)])


def fit_tensors(given: dict[str, Tensor], was: ModelConfig, now: ModelConfig) -> dict[str, Tensor]:
    """Interpolate learned positions to another size of images; leave out a head for another number of classes."""
    if "positions" in given and was.patch == now.patch:
        given["positions"] = resized(given["positions"], was.grid, now.grid)
    left_out = () if was.classes == now.classes else ("head.weight", "head.bias")
    return {name: tensor for name, tensor in given.items() if name not in left_out}
