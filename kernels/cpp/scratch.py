"""Memory that operations of a step use on the way."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Scratch:
    """Scratch tensors of steps of so many tokens. Who asks for the same shape and dtype again gets the same memory:
    operations run one after the other, so that what was in it has been read by then."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        # The counter of each_block (experts.h). By numpy, as what torch computes cannot be recorded.
        self.taken = torch.from_numpy(np.zeros(1, np.int64))
        self._kept: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def empty(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Not filled. like: on the device that is wanted."""
        key = shape, dtype
        if key not in self._kept:
            self._kept[key] = like.new_empty(shape, dtype=dtype)
        return self._kept[key]
