"""Blocks of a cache as rows: a row has a block's part of each of the cache's tensors, one after the other, so that one
copy over PCIe takes all of it.

On GPUs one kernel makes the rows of all tensors' blocks, or puts them back: a launch for each of a model's layers would
take longer than the copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import jit

THREADS = 256
UNITS = torch.int64, torch.int32, torch.int16, torch.uint8  # what rows are to torch: the widest that fits
PAIR = torch.bfloat16  # two bytes; an access of the kernel has up to eight times as many
MAX_ACCESS = 16  # bytes of it


class BlockRows:
    """Rows of tensors [blocks, ...] that stay where they are, contiguous and on one device. Rows are [N, width] of
    `unit`, contiguous, on that device."""

    def __init__(self, tensors: Sequence[Tensor]):
        parts = [x.view(len(x), -1).view(torch.uint8) for x in tensors]
        sizes = [x.shape[1] for x in parts]
        self.unit = next(kind for kind in UNITS if math.gcd(*sizes) % kind.itemsize == 0)
        self.parts = [x.view(self.unit) for x in parts]
        self._lengths = [x.shape[1] for x in self.parts]
        self.width = sum(self._lengths)
        self._access = math.gcd(MAX_ACCESS, *sizes, *(x.data_ptr() for x in parts))  # bytes
        self.by_kernel = parts[0].is_cuda and self._access % PAIR.itemsize == 0
        if self.by_kernel:
            begins = itertools.accumulate(sizes, initial=0)
            of_parts = [
                (x.data_ptr(), size // self._access, begin // self._access)
                for x, size, begin in zip(parts, sizes, begins, strict=False)
            ]
            self._of_parts = torch.tensor(of_parts, device=parts[0].device)

    def gather(self, blocks: Tensor, rows: Tensor) -> None:
        """rows[i] = block blocks[i] of each tensor. blocks: int64 [N] on their device."""
        if self.by_kernel:
            return self._launch(blocks, rows, spread=False)
        for x, row in zip(self.parts, rows.split(self._lengths, 1), strict=True):
            row.copy_(x.index_select(0, blocks))

    def spread(self, rows: Tensor, blocks: Tensor) -> None:
        """Block blocks[i] of each tensor = rows[i], as of `gather`. No block is named twice."""
        if self.by_kernel:
            return self._launch(blocks, rows, spread=True)
        for x, row in zip(self.parts, rows.split(self._lengths, 1), strict=True):
            x.index_copy_(0, blocks, row)

    def _launch(self, blocks: Tensor, rows: Tensor, spread: bool) -> None:
        sizes = dict(V=self._access // PAIR.itemsize, THREADS=THREADS, SPREAD=int(spread))
        kernel = jit.kernel("block_rows", "block_rows", PAIR, **sizes)
        width = rows.shape[1] * rows.itemsize // self._access
        kernel((len(blocks), len(self.parts), 1), THREADS, self._of_parts, rows, blocks, width)
