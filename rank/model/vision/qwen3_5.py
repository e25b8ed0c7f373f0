"""The tower of Qwen3-VL (Qwen team 2025, arXiv 2511.21631) and Qwen3.5: a vision transformer, four of whose neighbours
become one token. Learned positions of a square grid are interpolated. Qwen3-VL hands the outputs of some layers on to
the text model's first layers."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate

from ...vision import number
from ...vision.qwen2_5_vl import Rules
from .. import base
from ..layers.embedding import PositionEmbedding
from ..layers.norm import LayerNorm
from ._tower import LARGEST, PatchEmbedding, Replicated
from .qwen2_5_vl import EPS, Block, in_order, patches, rotations


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = Replicated(hidden, inner), Replicated(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(gelu(self.linear_fc1(x), approximate="tanh"))


class Merger(nn.Module):
    def __init__(self, hidden: int, count: int, outputs: int, joined: bool = False):
        """joined: the norm is over what becomes a token, not over a patch."""
        super().__init__()
        self.inner = hidden * count
        self.norm = LayerNorm(self.inner if joined else hidden, EPS)
        self.linear_fc1, self.linear_fc2 = Replicated(self.inner, self.inner), Replicated(self.inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm.norm(x.view(-1, self.norm.outputs[0].size)).view(-1, self.inner)
        return self.linear_fc2(gelu(self.linear_fc1(x)))


class Tower(base.Tower):
    rules: Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for sizes that cannot be."""
        super().__init__()
        config, outputs = args.vision_config or {}, args.hidden_size
        rules = cast(Rules, args.rules)
        hidden, inner = number(config, "hidden_size", 1152, LARGEST), number(config, "intermediate_size", 4304, LARGEST)
        heads, depth = number(config, "num_heads", 16, LARGEST), number(config, "depth", 27, 1 << 10)
        if hidden % (4 * heads):
            raise ValueError(f"hidden_size {hidden} of vision_config is no multiple of 4 times its {heads} heads")
        if (made := number(config, "out_hidden_size", outputs, LARGEST)) != outputs:
            raise ValueError(f"out_hidden_size {made} of vision_config is not the text model's {outputs}")
        if config.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_act of vision_config is {config['hidden_act']!r}, expected 'gelu_pytorch_tanh'")
        self.rules, self.hidden, self.dim, self.depth = rules, hidden, hidden // heads, depth
        count = number(config, "num_position_embeddings", 2304, 1 << 24)
        self.side = round(count**0.5)
        if self.side**2 != count:
            raise ValueError(f"num_position_embeddings {count} of vision_config is no square")
        frames, second = number(config, "temporal_patch_size", 2, 16), bool(config.get("second_frame"))
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(rules.patch, hidden, frames, True, second)})
        self.pos_embed = PositionEmbedding(count, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, FeedForward(hidden, inner)) for _ in range(depth))
        self.merger = Merger(hidden, rules.merge**2, outputs)
        self.handed_on: list[int] = list(config.get("deepstack_visual_indexes") or ())  # layers, for the first levels
        self.levels = len(self.handed_on)
        if not {*self.handed_on} <= {*range(depth)}:
            raise ValueError(
                f"deepstack_visual_indexes {self.handed_on} of vision_config are not of its {depth} layers"
            )
        deeper = [Merger(hidden, rules.merge**2, outputs, joined=True) for _ in self.handed_on]
        self.deepstack_merger_list = nn.ModuleList(deeper)

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, (1 + levels) * outputs] of an image [height, width, 3] u8, row by row."""
        rows, columns = self.rules.grid(*pixels.shape[:2])
        x = self.patch_embed["proj"](patches(pixels, self.rules))
        x = x + self._positions(rows, columns).to(x.dtype)
        by = rotations(rows, columns, self.rules.merge, self.dim, x.device)
        found: list[Tensor] = [x] * self.levels
        for index, block in enumerate(self.blocks):
            x = block(x, by)
            if index in self.handed_on:
                level = self.handed_on.index(index)
                found[level] = self.deepstack_merger_list[level](x)
            yield
        return torch.cat((self.merger(x), *found), 1)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """The learned positions [patches, hidden] f32: the outermost patches have those at the grid's border."""
        merge, grid = self.rules.merge, self.pos_embed.weight.float().view(self.side, self.side, -1)
        size = rows * merge, columns * merge
        found = interpolate(grid.permute(2, 0, 1)[None], size=size, mode="bilinear", align_corners=True)
        return in_order(found[0].permute(1, 2, 0), merge)
