"""Gemma 3's tower (Gemma team 2025, arXiv 2503.19786): SigLIP, whose features are averaged over neighbours."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

from torch import Tensor
from torch.nn.functional import avg_pool2d

from ...vision.gemma3 import Rules
from .. import base
from ..layers.norm import RMSNorm
from ..shard import whole
from ..weights.slicing import Field, ShardedModule, parameter
from ._encoder import Encoder, SquaresTower, below


class Projector(ShardedModule):
    fields = (Field("mm_input_projection_weight", "io"),)

    def __init__(self, hidden: int, outputs: int, eps: float):
        super().__init__()
        self.inputs, self.outputs = whole(hidden), (whole(outputs),)
        self.mm_input_projection_weight = parameter(hidden, outputs)
        self.mm_soft_emb_norm = RMSNorm(hidden, eps, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.mm_soft_emb_norm(x) @ self.mm_input_projection_weight


class Tower(SquaresTower):
    rules: Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for values that cannot be."""
        super().__init__()
        config, self.rules = args.vision_config or {}, cast(Rules, args.rules)
        self.tower = Encoder({"model_type": "siglip_vision_model"} | config, self.rules.edge, self.rules.patch)
        self.hidden, self.depth = self.tower.hidden, self.tower.depth
        self.projector = Projector(self.hidden, args.hidden_size, float(config.get("layer_norm_eps", 1e-6)))

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of squares [height, edge, 3] u8, square by square and row by row."""
        patches = self.rules.edge // self.rules.patch
        x = yield from self.tower.pieces(below(pixels, self.rules.edge, self.rules))
        x = avg_pool2d(x.mT.unflatten(2, (patches, patches)), patches // self.rules.side).flatten(2).mT
        return self.projector(x.flatten(0, 1).contiguous())
