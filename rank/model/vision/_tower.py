"""Parts that towers share. Every rank of a pipeline's first stage has a whole one and computes the same features."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ....kernels.activation.activation import gated_activation
from ...vision import ImageRules
from ..layers.linear import ColumnParallel
from ..shard import whole
from ..weights.slicing import Field, Ratio, ShardedModule

LARGEST = 1 << 16  # of a size in vision_config


class Whole(ColumnParallel):
    """A linear of which this rank has all: of one output, or of several side by side."""

    def __init__(self, inputs: int, *outputs: int, bias: bool = True):
        super().__init__(whole(inputs), tuple(map(whole, outputs)), bias)


class PatchEmbedding(ShardedModule):
    """A convolution whose kernels do not overlap: a linear of each patch. Of still images all frames are the same."""

    def __init__(self, patch: int, outputs: int, frames: int = 0, bias: bool = False):
        """frames: that checkpoints have weights for; 0: they know none."""
        super().__init__()
        axes = "oithw" if frames else "oihw"
        ratios = {"t": Ratio(frames), "h": Ratio(patch), "w": Ratio(patch)}
        self.fields = (Field("weight", axes, ratios=ratios), Field("bias", "o"))
        self.inputs, self.outputs = whole(3), (whole(outputs),)
        shape = (outputs, 3, frames, patch, patch) if frames else (outputs, 3, patch, patch)
        self.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, device="meta"), requires_grad=False) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """patches: [N, 3, patch, patch] f32. Returns [N, outputs]."""
        weight = self.weight.sum(2) if self.weight.dim() == 5 else self.weight
        return linear(patches.flatten(1).to(weight.dtype), weight.flatten(1), self.bias)


class GatedFeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int, activation: str, bias: bool = True):
        super().__init__()
        self.gate_up_proj = Whole(hidden, inner, inner, bias=bias)
        self.down_proj = Whole(inner, hidden, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_activation(self.gate_up_proj(x), self.activation))


def normalised(pixels: Tensor, rules: ImageRules) -> Tensor:
    """Colours [3, height, width] f32 of pixels [height, width, 3] u8."""
    mean, std = (torch.tensor(values, device=pixels.device) for values in (rules.mean, rules.std))
    return ((pixels / 255 - mean) / std).permute(2, 0, 1)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [N, heads, dim], each pair of whose halves' elements is turned by angles [N, dim / 2] f32."""
    cos, sin = (turn(angles)[:, None] for turn in (torch.cos, torch.sin))
    first, second = x.float().chunk(2, 2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), 2).to(x.dtype)


def frequencies(theta: float, dim: int, device: torch.device) -> Tensor:
    """[dim / 2] f32."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
