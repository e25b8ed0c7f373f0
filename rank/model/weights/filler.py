"""Fills a model layer by layer: a layer gets memory when its first bytes come, and is finished when its last have.

So a model that is quantised while it is loaded is never in memory as a whole before.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .slicing import ShardedModule, Slice, slices


class Filler:
    def __init__(self, layers: Iterable[ShardedModule], device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        self._left = {layer: sum(part.numel for part in slices(layer)) for layer in layers}  # elements to come
        self._made: dict[nn.Parameter, nn.Parameter] = {}  # by their likes on the meta device: shared ones stay shared
        self._empty: set[ShardedModule] = set(self._left)  # those without memory

    def target(self, part: Slice) -> Tensor:
        """Where a slice's elements go."""
        self._make(part.module)
        return part.target

    def arrived(self, part: Slice, count: int) -> None:
        """So many elements of a slice are in their place."""
        if not count:
            return
        self._left[part.module] -= count
        if not self._left[part.module]:
            part.module.finish()
            del self._left[part.module]

    def close(self) -> None:
        """Everything has arrived: finish what has no bytes of its own, as a tied head or a share that is padding."""
        for layer in self._left:
            self._make(layer)
        for layer in self._left:
            layer.finish()

    def _make(self, layer: ShardedModule) -> None:
        """Memory for a layer's parameters: zeros, as what a slice does not fill is padding."""
        if layer not in self._empty:
            return
        self._empty.remove(layer)
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if parameter not in self._made:
                data = torch.zeros(parameter.shape, device=self._device, dtype=self._dtype)
                self._made[parameter] = nn.Parameter(data, requires_grad=False)
            setattr(layer, name, self._made[parameter])
