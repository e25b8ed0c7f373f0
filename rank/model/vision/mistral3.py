"""Pixtral's tower (Mistral AI 2024, arXiv 2410.07073), which Mistral Small 3.1 and Ministral 3 have: rotary positions
of rows and columns, and neighbours that become one token."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ....kernels.rope.rope import rotate
from ...vision import number
from ...vision.mistral3 import Rules
from .. import base
from ..layers.norm import RMSNorm
from ._tower import (
    LARGEST,
    GatedFeedForward,
    PatchEmbedding,
    Projector,
    Replicated,
    Rotation,
    frequencies,
    in_rows,
    normalised,
    rotation,
)

EPS = 1e-5


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dim: int):
        super().__init__()
        self.heads = heads
        inner = heads * dim
        self.qkv_proj = Replicated(hidden, inner, inner, inner, bias=False)
        self.o_proj = Replicated(inner, hidden, bias=False)

    def forward(self, x: Tensor, by: Rotation) -> Tensor:
        qkv = self.qkv_proj(x).view(len(x), 3 * self.heads, -1)
        rotate(qkv[:, : 2 * self.heads], *by)
        q, k, v = qkv.view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)[:, None]
        return self.o_proj(scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int, dim: int, activation: str):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(hidden, EPS), RMSNorm(hidden, EPS)
        self.attention = Attention(hidden, heads, dim)
        self.feed_forward = GatedFeedForward(hidden, inner, activation, bias=False)

    def forward(self, x: Tensor, by: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), by)
        return x + self.feed_forward(self.ffn_norm(x))


class Pixtral(nn.Module):
    """Its modules are called as in checkpoints."""

    def __init__(self, config: dict[str, Any], patch: int):
        """config: vision_config. Raises ValueError for values that cannot be."""
        super().__init__()
        hidden, inner = number(config, "hidden_size", 1024, LARGEST), number(config, "intermediate_size", 4096, LARGEST)
        heads = number(config, "num_attention_heads", 16, LARGEST)
        self.dim = number(config, "head_dim", max(1, hidden // heads), LARGEST)
        if self.dim % 4:
            raise ValueError(f"a head of vision_config has {self.dim} dimensions, which rows and columns cannot share")
        rope = config.get("rope_parameters") or {}
        self.hidden, self.patch = hidden, patch
        self.theta = float(rope.get("rope_theta") or config.get("rope_theta") or 1e4)
        of = hidden, inner, heads, self.dim, config.get("hidden_act", "silu")
        self.patch_conv, self.ln_pre = PatchEmbedding(patch, hidden), RMSNorm(hidden, EPS)
        self.depth = number(config, "num_hidden_layers", 24, 1 << 10)
        layers = nn.ModuleList([Layer(*of) for _ in range(self.depth)])
        self.transformer, self.layers = nn.ModuleDict({"layers": layers}), [layers]

    def pieces(self, colours: Tensor) -> Generator[None, None, Tensor]:
        """[patches, hidden] of colours [3, height, width] f32, row by row."""
        x = self.ln_pre(self.patch_conv(in_rows(colours, self.patch)))
        height, width = (length // self.patch for length in colours.shape[1:])
        by = rotation(self._angles(height, width, x.device))
        for layer in self.layers[0]:
            x = layer(x, by)
            yield
        return x

    def _angles(self, height: int, width: int, device: torch.device) -> Tensor:
        """[patches, dim / 2] f32: of the frequencies every other one by the patch's row, the rest by its column."""
        turns = frequencies(self.theta, self.dim, device)
        rows = torch.arange(height, device=device)[:, None] * turns[::2]
        columns = torch.arange(width, device=device)[:, None] * turns[1::2]
        return torch.cat((rows[:, None].expand(-1, width, -1), columns.expand(height, -1, -1)), 2).flatten(0, 1)


class Merger(Projector):
    """Neighbours become one token of the text model's size."""

    def __init__(self, config: dict[str, Any], hidden: int, merge: int, outputs: int, eps: float):
        super().__init__(config, hidden, outputs, bias=False)
        self.norm = RMSNorm(hidden, eps)
        self.patch_merger = nn.ModuleDict({"merging_layer": Replicated(hidden * merge**2, hidden, bias=False)})
        self.merge = merge

    def forward(self, x: Tensor) -> Tensor:
        """x: [height, width, hidden]. Patches are merged element by element: those of one channel stand together."""
        merge = self.merge
        x = self.norm(x).unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).permute(0, 2, 4, 1, 3)
        return super().forward(self.patch_merger["merging_layer"](x.flatten(0, 1).flatten(1)))


class Tower(base.Tower):
    rules: Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for values that cannot be."""
        super().__init__()
        self.rules = cast(Rules, args.rules)
        if (layer := args.original.get("vision_feature_layer", -1)) != -1:
            raise ValueError(f"vision_feature_layer is {layer!r}, expected -1")
        self.tower = Pixtral(args.vision_config or {}, self.rules.patch)
        self.hidden, self.depth = self.tower.hidden, self.tower.depth
        self.projector = Merger(args.original, self.tower.hidden, self.rules.merge, args.hidden_size, args.rms_norm_eps)

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of an image [height, width, 3] u8, row by row."""
        height, width = (length // self.rules.patch for length in pixels.shape[:2])
        x = yield from self.tower.pieces(normalised(pixels, self.rules))
        return self.projector(x.view(height, width, -1))
