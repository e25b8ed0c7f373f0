"""Blocks of a cache as rows: a row has a block's part of each of the cache's tensors, one after the other, so that one
copy over PCIe takes all of it; and copies of blocks, such as sequences' states, to others.

On GPUs one kernel makes the rows of all tensors' blocks, puts them back, or copies them: a launch for each of a model's
layers would take longer than the copy.
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
EACH = 8  # accesses of a thread that copies a part of a block to another block


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
        self.by_kernel = any(x.is_cuda for x in parts) and self._access % PAIR.itemsize == 0
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
            return self._launch(blocks, rows)
        for x, row in zip(self.parts, rows.split(self._lengths, 1), strict=True):
            row.copy_(x.index_select(0, blocks))

    def spread(self, rows: Tensor, blocks: Tensor) -> None:
        """Block blocks[i] of each tensor = rows[i], as of `gather`. No block is named twice."""
        if self.by_kernel:
            return self._launch(blocks, rows, spread=True)
        for x, row in zip(self.parts, rows.split(self._lengths, 1), strict=True):
            x.index_copy_(0, blocks, row)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Block target[i] of each tensor = block source[i], as of `gather`. No block is in both unless it becomes
        itself, and none twice in target."""
        if self.by_kernel:
            pieces = -(-max(self._lengths) * self.unit.itemsize // (self._access * THREADS * EACH))
            return self._launch(source, self._of_parts, target, pieces=pieces)
        for x in self.parts:
            x.index_copy_(0, target, x.index_select(0, source))

    def _launch(
        self, blocks: Tensor, rows: Tensor, others: Tensor | None = None, spread: bool = False, pieces: int = 1
    ) -> None:
        flags = dict(SPREAD=int(spread), OTHERS=int(others is not None))
        kernel = jit.kernel("block_rows", "block_rows", PAIR, V=self._access // PAIR.itemsize, THREADS=THREADS, **flags)
        width, others = self.width * self.unit.itemsize // self._access, blocks if others is None else others
        kernel((len(blocks), len(self.parts), pieces), THREADS, self._of_parts, rows, blocks, others, width)
