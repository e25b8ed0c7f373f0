"""Qwen2-VL's tower (Qwen team 2024, arXiv 2409.12191): all patches attend to each other, and four neighbours become one
token."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

from torch import Tensor, nn

from ...vision import number
from ...vision.qwen2_5_vl import Rules
from .. import base
from ..layers.norm import LayerNorm
from ._tower import LARGEST, FeedForward, PatchEmbedding
from .qwen2_5_vl import Block, Merger, patches, rotations


class Tower(base.Tower):
    rules: Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for values that cannot be."""
        super().__init__()
        config, outputs, rules = args.vision_config or {}, args.hidden_size, cast(Rules, args.rules)
        hidden, heads = number(config, "embed_dim", 1280, LARGEST), number(config, "num_heads", 16, LARGEST)
        inner = int(hidden * float(config.get("mlp_ratio", 4)))
        if hidden % (4 * heads) or not 1 <= inner <= LARGEST:
            raise ValueError(f"embed_dim {hidden} of vision_config does not go with its num_heads and mlp_ratio")
        if (made := number(config, "hidden_size", outputs, LARGEST)) != outputs:
            raise ValueError(f"hidden_size {made} of vision_config is not the text model's {outputs}")
        self.rules, self.hidden, self.dim = rules, hidden, hidden // heads
        frames, second = number(config, "temporal_patch_size", 2, 16), bool(config.get("second_frame"))
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(rules.patch, hidden, frames, second=second)})
        self.depth, act = number(config, "depth", 32, 1 << 10), config.get("hidden_act", "quick_gelu")
        mlps = (FeedForward(hidden, inner, act) for _ in range(self.depth))
        self.blocks = nn.ModuleList(Block(hidden, heads, mlp) for mlp in mlps)
        self.merger = Merger(hidden, rules.merge**2, outputs, LayerNorm)

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of an image [height, width, 3] u8, row by row."""
        rows, columns = self.rules.grid(*pixels.shape[:2])
        x = self.patch_embed["proj"](patches(pixels, self.rules))
        by = rotations(rows, columns, self.rules.merge, self.dim, x.device)
        for block in self.blocks:
            x = block(x, by)
            yield
        return self.merger(x)
