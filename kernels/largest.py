"""The likeliest token of each row of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from . import jit

PARTS = 32  # blocks that share a row, at most
BLOCKS = 512  # that keep a GPU busy


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest element of each row of x [S, V], f32 [S], and where the first such stands, int64 [S].

    A row with NaN in it: torch finds the NaN, the GPU's kernel the largest of the others, or the first element.
    """
    if x.is_cuda and len(x):
        return largest_cuda(x.contiguous())
    return largest_reference(x)


def largest_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = x.max(-1)
    return values.float(), ids


def largest_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    vector = jit.vector(x, width)
    parts = max(1, min(PARTS, BLOCKS // rows, width // vector // 256))
    values, ids = x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.int64)
    part_values, part_ids = values, ids
    arrived = values
    if parts > 1:
        part_values = x.new_empty(rows, parts, dtype=torch.float32)
        part_ids = x.new_empty(rows, parts, dtype=torch.int32)
        arrived = jit.counters(x.device, torch.cuda.current_stream().cuda_stream)
    kernel = jit.kernel("largest", "largest", x.dtype, V=vector)
    kernel((parts, rows, 1), 256, x, width, values, ids, part_values, part_ids, arrived)
    return values, ids
