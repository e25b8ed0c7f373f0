"""Copies of entries within each of many tensors: of sequences' states and their snapshots.

On GPUs one kernel copies the entries of all tensors: a launch for each of a model's layers would cost more than small
copies do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class EntryCopies:
    """Copies of entries of tensors [entries, ...] that stay where they are, contiguous and f32."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = [x.view(len(x), -1) for x in tensors]
        assert all(x.dtype == torch.float32 for x in self.tensors)
        self._cuda = any(x.is_cuda for x in self.tensors)
        if self._cuda:
            device = self.tensors[0].device
            self._starts = torch.tensor([x.data_ptr() for x in self.tensors], device=device)
            self._widths = torch.tensor([x.shape[1] for x in self.tensors], device=device)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """tensor[target] = tensor[source] in each. source, target: int64 [N] on their device; no entry is in both, and
        none twice in target."""
        if self._cuda:
            from .copy_entries_triton import copy_entries

            widest = max(x.shape[1] for x in self.tensors)
            return copy_entries(self._starts, self._widths, source, target, widest)
        copy_entries_reference(self.tensors, source, target)


def copy_entries_reference(tensors: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    for x in tensors:
        x[target] = x[source]
