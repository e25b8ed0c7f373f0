"""Idefics 3's tower (Laurençon et al. 2024, arXiv 2408.12637): SigLIP over squares; neighbours become one token."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

import torch
from torch import Tensor, nn

from ...vision.idefics3 import Rules
from .. import base
from ._encoder import Encoder, SquaresTower
from ._tower import Replicated, normalised


class Tower(SquaresTower):
    rules: Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for values that cannot be."""
        super().__init__()
        self.rules = cast(Rules, args.rules)
        given = {"hidden_size": 1152, "num_attention_heads": 16} | (args.vision_config or {})
        self.tower = Encoder(given | {"model_type": "siglip_vision_model"}, self.rules.edge, self.rules.patch)
        self.hidden, self.depth = self.tower.hidden, self.tower.depth
        self.merge = self.rules.edge // self.rules.patch // self.rules.side
        self.projector = nn.ModuleDict({"proj": Replicated(self.hidden * self.merge**2, args.hidden_size, bias=False)})

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of squares as the rules show them: the image's, row by row, and the whole's."""
        edge, merge, side = self.rules.edge, self.merge, self.rules.side
        colours = normalised(pixels, self.rules)
        cut = colours[:, edge:].unflatten(2, (-1, edge)).unflatten(1, (-1, edge)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        squares = torch.cat((cut, colours[None, :, :edge, :edge]))
        x = yield from self.tower.pieces(squares)
        x = x.view(-1, side, merge, side, merge, self.hidden).transpose(2, 3)
        return self.projector["proj"](x.flatten(3).flatten(0, 2))
