"""LLaVA's towers (Liu et al. 2023, arXiv 2310.03744): CLIP or SigLIP up to one of its last layers, or Pixtral, and two
linears."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

from torch import Tensor

from ...vision import llava, llava_next, mistral3
from .. import base
from ._encoder import Encoder, SquaresTower, below
from ._tower import Projector, normalised
from .mistral3 import Pixtral


class Tower(SquaresTower):
    rules: llava.Rules | llava_next.Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for values that cannot be."""
        super().__init__()
        self.rules = cast(llava.Rules, args.rules)
        layer, strategy = (
            args.original.get("vision_feature_layer", -2),
            args.original.get("vision_feature_select_strategy"),
        )
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ValueError(f"vision_feature_layer is {layer!r}, expected a whole number")
        if strategy not in (None, "default", "full"):
            raise ValueError(f"vision_feature_select_strategy is {strategy!r}, expected 'default' or 'full'")
        self.first = int(strategy != "full")  # feature of a square, of those that are used
        count = layer if layer >= 0 else layer + 1
        self.tower = Encoder(args.vision_config or {}, self.rules.edge, self.rules.patch, count, normed=False)
        self.hidden, self.depth = self.tower.hidden, self.tower.depth
        self.projector = Projector(args.original, self.hidden, args.hidden_size)

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of a square [edge, edge, 3] u8."""
        return (yield from self.seen(below(pixels, self.rules.edge, self.rules))).flatten(0, 1)

    def seen(self, squares: Tensor) -> Generator[None, None, Tensor]:
        """Features [squares, tokens, outputs] of squares [squares, 3, edge, edge]."""
        x = yield from self.tower.pieces(squares)
        return self.projector(x[:, self.first :].flatten(0, 1)).view(len(squares), x.shape[1] - self.first, -1)


class PixtralTower(base.Tower):
    rules: mistral3.Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for values that cannot be."""
        super().__init__()
        self.rules = cast(mistral3.Rules, args.rules)
        given = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        for name, known in given.items():
            if args.original.get(name, known) != known:
                raise ValueError(f"{name} is {args.original[name]!r}, expected {known!r}")
        self.tower = Pixtral(args.vision_config or {}, self.rules.patch)
        self.hidden, self.depth = self.tower.hidden, self.tower.depth
        self.projector = Projector(args.original, self.hidden, args.hidden_size)

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of an image [height, width, 3] u8, row by row."""
        return self.projector((yield from self.tower.pieces(normalised(pixels, self.rules))))
