"""LLaVA-NeXT's tower: the features of a grid's squares become one grid, with one more behind each of its rows."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from ...vision import llava_next
from .. import base
from ..shard import whole
from ..weights.slicing import Vector
from . import llava
from ._tower import normalised


class Tower(llava.Tower):
    rules: llava_next.Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for values that cannot be."""
        super().__init__(args)
        self.row_end = Vector(whole(args.hidden_size))  # the feature behind a row
        if self.tower.clip != (self.first == 1):
            raise ValueError("vision_feature_select_strategy leaves no square of features")

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of an image as the rules show it: of the whole, and of the grid row by row."""
        edge, side = self.rules.edge, self.rules.edge // self.rules.patch
        (height, width), (less_height, less_width) = self.rules.parts(*pixels.shape[:2])
        colours = normalised(pixels, self.rules)
        grid = colours[:, edge : edge + height, :width].unflatten(2, (-1, edge)).unflatten(1, (-1, edge))
        squares = torch.cat((colours[None, :, :edge, :edge], grid.permute(1, 3, 0, 2, 4).flatten(0, 1)))
        x = yield from self.seen(squares)
        joined = x[1:].view(height // edge, width // edge, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        top, left = less_height // 2, less_width // 2
        joined = joined[top : joined.shape[0] - top, left : joined.shape[1] - left]
        ends = self.row_end.weight.expand(len(joined), 1, -1)
        return torch.cat((x[0], torch.cat((joined, ends), 1).flatten(0, 1)))
