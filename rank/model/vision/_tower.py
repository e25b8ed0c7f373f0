"""Parts that towers share. Every rank of a pipeline's first stage has a whole one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from ....kernels.activation.activation import gated_activation
from ...vision import ImageRules
from ..layers.linear import ColumnParallel
from ..shard import whole
from ..weights.slicing import Field, Ratio, ShardedModule, parameter

LARGEST = 1 << 16  # of a size in vision_config


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_pytorch_tanh": functools.partial(gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),  # GELU's quick approximation, arXiv 1606.08415
}


def activation_of(name: str, key: str) -> Callable[[Tensor], Tensor]:
    """Raises ValueError for a name in config.json, under that key, that is none of ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{key} is {name!r}, expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class Replicated(ColumnParallel):
    """A linear of which this rank has all: of one output, or of several side by side."""

    def __init__(self, inputs: int, *outputs: int, bias: bool = True):
        super().__init__(whole(inputs), tuple(map(whole, outputs)), bias)


class PatchEmbedding(ShardedModule):
    """A convolution whose kernels do not overlap: a linear of each patch. Of still images all frames are the same."""

    def __init__(self, patch: int, outputs: int, frames: int = 0, bias: bool = False, second: bool = False):
        """frames: that checkpoints have weights for; 0: they know none. second: the weights for a second frame are a
        tensor of their own."""
        super().__init__()
        if second:
            frames = 0
        axes = "oithw" if frames else "oihw"
        ratios = {"t": Ratio(frames), "h": Ratio(patch), "w": Ratio(patch)}
        self.fields = (Field("weight", axes, ratios=ratios), Field("bias", "o"), Field("second", axes, ratios=ratios))
        self.inputs, self.outputs = whole(3), (whole(outputs),)
        shape = (outputs, 3, frames, patch, patch) if frames else (outputs, 3, patch, patch)
        self.weight = parameter(shape)
        self.bias = parameter(outputs) if bias else None
        self.second = parameter(shape) if second else None

    def forward(self, patches: Tensor) -> Tensor:
        """patches: [N, 3, patch, patch] f32. Returns [N, outputs]."""
        weight = self.weight.sum(2) if self.weight.dim() == 5 else self.weight
        if self.second is not None:
            weight = weight + self.second
        return linear(patches.flatten(1).to(weight.dtype), weight.flatten(1), self.bias)


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int, activation: str, outputs: int = 0):
        """activation: as config.json calls it. outputs: 0: as many as inputs. Raises ValueError."""
        super().__init__()
        self.activation = activation_of(activation, "hidden_act of vision_config")
        self.fc1, self.fc2 = Replicated(hidden, inner), Replicated(inner, outputs or hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class Projector(nn.Module):
    """LLaVA's (Liu et al. 2023, arXiv 2310.03744): two linears to the text model's size."""

    def __init__(self, config: dict[str, Any], inputs: int, outputs: int, bias: bool = True):
        """config: config.json. bias: whether there is one, where config.json has no key for it. Raises ValueError."""
        super().__init__()
        self.activation = activation_of(config.get("projector_hidden_act", "gelu"), "projector_hidden_act")
        bias = bool(config.get("multimodal_projector_bias", bias))
        self.linear_1, self.linear_2 = Replicated(inputs, outputs, bias=bias), Replicated(outputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.activation(self.linear_1(x)))


class GatedFeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int, activation: str, bias: bool = True):
        super().__init__()
        self.gate_up_proj = Replicated(hidden, inner, inner, bias=bias)
        self.down_proj = Replicated(inner, hidden, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_activation(self.gate_up_proj(x), self.activation))


def normalised(pixels: Tensor, rules: ImageRules) -> Tensor:
    """Colours [3, height, width] f32 of pixels [height, width, 3] u8."""
    # Numbers, as a tensor's copy to a GPU would wait for the steps before.
    scales = zip(pixels.unbind(2), rules.mean, rules.std, strict=True)
    return torch.stack([(colour / 255 - mean) / std for colour, mean, std in scales])


def in_rows(colours: Tensor, patch: int) -> Tensor:
    """Patches [N, 3, patch, patch] of colours [3, height, width], row by row."""
    height, width = (length // patch for length in colours.shape[1:])
    x = colours[:, : height * patch, : width * patch].contiguous().view(3, height, patch, width, patch)
    return x.permute(1, 3, 0, 2, 4).reshape(-1, 3, patch, patch)


Rotation = tuple[Tensor, Tensor]  # cosines and sines [N, dim / 2] f32 of each patch


def rotation(angles: Tensor) -> Rotation:
    """Patches turned by angles [N, dim / 2] f32."""
    return torch.cos(angles), torch.sin(angles)


def frequencies(theta: float, dim: int, device: torch.device) -> Tensor:
    """[dim / 2] f32."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
