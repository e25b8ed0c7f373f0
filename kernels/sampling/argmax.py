"""The likeliest token of each row of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import jit
from ..cpp import ops
from ..device import current_stream

PARTS = 32  # blocks that share a row, at most
BLOCKS = 512  # that keep a GPU busy


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest element of each row of x [S, V], f32 [S], and where the first such stands, int64 [S].

    A row with NaN in it: torch finds the NaN, the kernels the largest of the others, or the first element.
    """
    if x.is_cuda and len(x):
        return argmax_cuda(x.contiguous())
    if len(x) and x.stride(1) == 1 and ops.takes(x):
        return argmax_cpu(x)
    return argmax_reference(x)


def candidates(best: tuple[Tensor, Tensor], offset: int) -> Tensor:
    """[2, S] f32 of argmax's values and ids: the values, and ids + offset, which are exact below 2^24."""
    values, ids = best
    if len(ids) and ops.takes(values):
        out = values.new_empty(2, len(ids))
        ops.op("argmax", "candidates_f32")(values, ids, out, len(ids), offset)
        return out
    return torch.stack((values, (ids + offset).float()))


def elect(found: Tensor) -> Tensor:
    """The ids [S] int64 of the largest of candidates [parts, 2, S]; of equal values the first part's."""
    parts, _, rows = found.shape
    if rows and found.is_contiguous() and ops.takes(found):
        ids = found.new_empty(rows, dtype=torch.int64)
        ops.op("argmax", "elect_f32")(found, ids, rows, parts)
        return ids
    return found[:, 1].gather(0, found[:, 0].argmax(0)[None])[0].long()


def argmax_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = x.max(-1)
    return values.float(), ids


def argmax_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [S, V], S > 0, the elements of a row side by side."""
    rows, width = x.shape
    threads = torch.get_num_threads()
    values, ids = x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.int64)
    part_values = x.new_empty(threads, rows, dtype=torch.float32)
    part_ids = x.new_empty(threads, rows, dtype=torch.int64)
    given = x, values, part_values, ids, part_ids, rows, width, x.stride(0)
    ops.run((ops.typed("argmax", "find", x.dtype), given), (ops.op("argmax", "choose_f32"), given))
    return values, ids


def argmax_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    vector = jit.vector(x, width)
    parts = max(1, min(PARTS, BLOCKS // rows, width // vector // 256))
    values, ids = x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.int64)
    part_values, part_ids = values, ids
    arrived = values
    if parts > 1:
        part_values = x.new_empty(rows, parts, dtype=torch.float32)
        part_ids = x.new_empty(rows, parts, dtype=torch.int32)
        arrived = jit.counters(x.device, current_stream())
    kernel = jit.kernel("argmax", "argmax", x.dtype, V=vector)
    kernel((parts, rows, 1), 256, x, width, values, ids, part_values, part_ids, arrived)
    return values, ids
