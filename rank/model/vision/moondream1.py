"""Moondream 2's tower (vikhyatk/moondream2), after SigLIP (Zhai et al. 2023, arXiv 2303.15343): the crops' features
become one grid, which is averaged down to the whole image's, and both together are an image's features."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from ...vision import number
from ...vision.moondream1 import Rules
from .. import base, shard
from ..layers.norm import LayerNorm
from ..weights.slicing import Field, Ratio, ShardedModule, parameter
from ._encoder import Layer
from ._tower import LARGEST, FeedForward, Replicated, normalised

EPS, ACTIVATION = 1e-5, "gelu_pytorch_tanh"
ONE = Ratio(1, 0, shared=True)  # entry of an axis


class Positions(ShardedModule):
    """Learned positions, which checkpoints hold as [1, patches, hidden]."""

    fields = (Field("weight", "boi", ratios={"b": ONE}),)

    def __init__(self, patches: int, hidden: int):
        super().__init__()
        self.inputs, self.outputs = shard.whole(hidden), (shard.whole(patches),)
        self.weight = parameter(1, patches, hidden)


class Tower(base.Tower):
    rules: Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for sizes that cannot be."""
        super().__init__()
        config, rules = args.vision_config or {}, cast(Rules, args.rules)
        hidden, inner = number(config, "enc_dim", 1152, LARGEST), number(config, "enc_ff_dim", 4304, LARGEST)
        heads = number(config, "enc_n_heads", 16, LARGEST)
        if hidden % heads:
            raise ValueError(f"enc_dim {hidden} is no multiple of its {heads} heads")
        if (outputs := number(config, "proj_out_dim", args.hidden_size, LARGEST)) != args.hidden_size:
            raise ValueError(f"proj_out_dim {outputs} is not the text model's {args.hidden_size}")
        self.rules, self.hidden, self.depth = rules, hidden, number(config, "enc_n_layers", 27, 1 << 10)
        self.patch_emb = Replicated(3 * rules.patch**2, hidden)
        self.pos_emb = Positions(rules.edge**2, hidden)
        self.blocks = nn.ModuleList([Layer(hidden, inner, heads, ACTIVATION, EPS) for _ in range(self.depth)])
        self.post_ln = LayerNorm(hidden, EPS)
        inner = number(config, "proj_inner_dim", 8192, LARGEST)
        self.proj_mlp = FeedForward(2 * hidden, inner, ACTIVATION, outputs)

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of an image as the rules show it: the whole, and below it the crops'."""
        size, window, edge = self.rules.crop, self.rules.window, self.rules.edge
        x = normalised(pixels, self.rules)
        parts = x[:, size:].unfold(1, size, window).unfold(2, size, window)  # [3, rows, columns, size, size]
        rows, columns = parts.shape[1:3]
        crops = torch.cat((x[:, :size, :size][None], parts.permute(1, 2, 0, 3, 4).flatten(0, 1)))
        features = yield from self._encode(crops)
        joined = self._joined(features[1:].view(rows, columns, edge, edge, -1))
        pooled = adaptive_avg_pool2d(joined.permute(2, 0, 1), edge).permute(1, 2, 0).flatten(0, 1)
        return self.proj_mlp(torch.cat((features[0], pooled), 1))

    def _encode(self, crops: Tensor) -> Generator[None, None, Tensor]:
        """Features [N, patches, hidden] of crops [N, 3, size, size]."""
        patch, edge = self.rules.patch, self.rules.edge
        x = crops.view(-1, 3, edge, patch, edge, patch).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        positions = self.pos_emb.weight
        x = (self.patch_emb(x.flatten(0, 1).to(positions.dtype)).view(len(crops), edge**2, -1) + positions).flatten(
            0, 1
        )
        for block in self.blocks:
            x = block(x, len(crops))
            yield
        return self.post_ln(x).view(len(crops), edge**2, -1)

    def multiplications(self) -> tuple[float, float]:
        attention = 2 * self.depth * self.hidden * self.rules.edge**2  # of a crop's patches alone
        return (self.num_weights + attention) / self.rules.patch**2, 0.0

    def _joined(self, crops: Tensor) -> Tensor:
        """One grid [rows, columns, hidden] of crops' features [rows of crops, columns of crops, edge, edge, hidden]:
        between two, each has the half of what they share that is nearer to it."""
        margin, edge = self.rules.margin, self.rules.edge
        step = edge - 2 * margin

        def places(count: int) -> tuple[Tensor, Tensor]:
            at = torch.arange(count * step + 2 * margin, device=crops.device)
            crop = ((at - margin).div(step, rounding_mode="floor")).clamp(0, count - 1)
            return crop, at - crop * step

        (row, inner_row), (column, inner_column) = places(crops.shape[0]), places(crops.shape[1])
        return crops[row[:, None], column, inner_row[:, None], inner_column]
