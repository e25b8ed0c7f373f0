"""Pixtral's tower (Mistral AI 2024, arXiv 2410.07073), which Mistral Small 3.1 and Ministral 3 have: rotary positions
of rows and columns, and neighbours that become one token."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ...vision import whole
from ...vision.mistral3 import Rules
from .. import base
from ..layers.norm import RMSNorm
from ._tower import LARGEST, GatedFeedForward, PatchEmbedding, Whole, frequencies, normalised, rotated

EPS = 1e-5


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dim: int):
        super().__init__()
        self.heads = heads
        inner = heads * dim
        self.qkv_proj = Whole(hidden, inner, inner, inner, bias=False)
        self.o_proj = Whole(inner, hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).view(len(x), 3, self.heads, -1).unbind(1)
        q, k, v = (one.transpose(0, 1)[None] for one in (rotated(q, angles), rotated(k, angles), v))
        return self.o_proj(scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int, dim: int, activation: str):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(hidden, EPS), RMSNorm(hidden, EPS)
        self.attention = Attention(hidden, heads, dim)
        self.feed_forward = GatedFeedForward(hidden, inner, activation, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Tower(base.Tower):
    rules: Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for values that cannot be."""
        super().__init__()
        config, rules = args.vision_config or {}, cast(Rules, args.rules)
        hidden, inner = whole(config, "hidden_size", 1024, LARGEST), whole(config, "intermediate_size", 4096, LARGEST)
        heads = whole(config, "num_attention_heads", 16, LARGEST)
        self.dim = whole(config, "head_dim", max(1, hidden // heads), LARGEST)
        if self.dim % 4:
            raise ValueError(f"a head of vision_config has {self.dim} dimensions, which rows and columns cannot share")
        given = {"vision_feature_layer": -1, "projector_hidden_act": "gelu"}
        for name, known in given.items():
            value = getattr(args, name)
            if value != known:
                raise ValueError(f"{name} is {value!r}, expected {known!r}")
        rope = config.get("rope_parameters") or {}
        self.rules, self.theta = rules, float(rope.get("rope_theta") or config.get("rope_theta") or 1e4)
        of = hidden, inner, heads, self.dim, config.get("hidden_act", "silu")
        self.hidden, self.depth = hidden, whole(config, "num_hidden_layers", 24, 1 << 10)
        layers = nn.ModuleList([Layer(*of) for _ in range(self.depth)])
        self.tower = nn.ModuleDict({
            "patch_conv": PatchEmbedding(rules.patch, hidden),
            "ln_pre": RMSNorm(hidden, EPS),
            "transformer": nn.ModuleDict({"layers": layers}),
        })  # fmt: skip
        outputs, bias = args.hidden_size, args.multimodal_projector_bias
        merging = nn.ModuleDict({"merging_layer": Whole(hidden * rules.merge**2, hidden, bias=False)})
        self.projector = nn.ModuleDict({
            "norm": RMSNorm(hidden, args.rms_norm_eps),
            "patch_merger": merging,
            "linear_1": Whole(hidden, outputs, bias=bias),
            "linear_2": Whole(outputs, outputs, bias=bias),
        })  # fmt: skip
        self.layers, self.merging = [layers], [merging["merging_layer"]]

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of an image [height, width, 3] u8, row by row."""
        patch, merge = self.rules.patch, self.rules.merge
        height, width = (length // patch for length in pixels.shape[:2])
        x = normalised(pixels, self.rules).view(3, height, patch, width, patch).permute(1, 3, 0, 2, 4)
        x = self.tower["ln_pre"](self.tower["patch_conv"](x.reshape(-1, 3, patch, patch)))
        angles = self._angles(height, width, x.device)
        for layer in self.layers[0]:
            x = layer(x, angles)
            yield
        # Neighbouring patches are merged element by element: those of one channel stand together.
        x = self.projector["norm"](x).view(height // merge, merge, width // merge, merge, -1)
        x = self.merging[0](x.permute(0, 2, 4, 1, 3).flatten(0, 1).flatten(1))
        return self.projector["linear_2"](gelu(self.projector["linear_1"](x)))

    def _angles(self, height: int, width: int, device: torch.device) -> Tensor:
        """[patches, dim / 2] f32: of the frequencies every other one by the patch's row, the rest by its column."""
        turns = frequencies(self.theta, self.dim, device)
        rows = torch.arange(height, device=device)[:, None] * turns[::2]
        columns = torch.arange(width, device=device)[:, None] * turns[1::2]
        return torch.cat((rows[:, None].expand(-1, width, -1), columns.expand(height, -1, -1)), 2).flatten(0, 1)
