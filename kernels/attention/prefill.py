"""The kernel prefill.cu: prompts on Hopper, over a cache whose blocks TMA brings."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import jit
from ..candidate import Candidate
from ..device import device_caps, upload
from ..rope.fp8_cache import E4M3
from .backend import LOG2_E, Part
from .kv_boxes import DIMS, boxed, tensor_maps

ROWS = 128  # of queries that a block takes at once
KEYS = 128, 128, 96, 80  # of a tile, of heads of up to 64, 128, 192 and 256 elements
SMEM_BYTES = 227 << 10  # bytes of shared memory
REGISTERS = 196  # of a thread, for scores, weights, sums and q; more would spill
WIDENED_BYTES = 1 << 28  # of keys and values in e4m3 that prompts' steps have in 16 bits, of one layer


def supports(part: Part) -> bool:
    if part.decodes or part.reach is not None or part.values.shape != part.keys.shape:
        return False
    return supports_prefill(part.q, part.keys) if part.scales is None else supports_widened(part)


def supports_widened(part: Part) -> bool:
    """Whether the prompts' blocks of a cache in e4m3 are to be widened for prefill.cu, which takes 16 bits alone: they
    are written and read once more, which is little against what many tokens multiply, where there is memory for it."""
    q, keys = part.q, part.keys
    if sum(part.rows.query_lens[part.first : part.stop]) < ROWS:
        return False
    size, kv_heads, dim = keys.shape[1:]
    blocks = sum(-(-length // size) for length in part.rows.kv_lens[part.first : part.stop])
    fits = 2 * blocks * size * kv_heads * dim * q.element_size() <= WIDENED_BYTES
    return fits and boxed(q, keys, E4M3) and device_caps(q.device).hopper


class WidenedBlocks(NamedTuple):
    """The blocks of a part's sequences, one after the other."""

    blocks: Tensor  # [n] int32, of the cache
    tables: Tensor  # [sequences of the step, most blocks of one] int32: the sequences' blocks among these


def widened_blocks(part: Part) -> WidenedBlocks:
    """Made once a step."""
    key = "widened blocks", part.first
    found = part.rows.scratch.get(key)
    if found is None:
        rows, size = part.rows, part.keys.shape[1]
        counts = np.array([-(-length // size) for length in rows.kv_lens[part.first : part.stop]])
        starts = np.cumsum(counts) - counts
        tables = np.zeros((len(rows.kv_lens), counts.max()), np.int32)
        tables[part.first : part.stop] = starts[:, None] + np.arange(counts.max())
        device = rows.block_tables.device
        sequence = upload(np.repeat(np.arange(part.first, part.stop), counts), device)
        place = upload(np.arange(counts.sum()) - np.repeat(starts, counts), device)
        blocks = rows.block_tables[sequence, place].contiguous()
        found = part.rows.scratch[key] = WidenedBlocks(blocks, upload(tables, device))
    return found


def run(part: Part) -> None:
    """The list of rows is the same for all layers, which leave it for each other."""
    q, keys, values, rows, tables = part.q, part.keys, part.values, part.rows, part.rows.block_tables
    items = rows.scratch.get("prefill_work")
    if items is None:
        listed = prefill_work(rows.query_lens, rows.kv_lens, part.first, part.stop)
        items = rows.scratch["prefill_work"] = upload(listed, q.device)
    if (scales := part.scales) is not None:
        from ..rope import fp8_triton

        some, caches = widened_blocks(part), enumerate((keys, values))
        keys, values = (fp8_triton.gather_blocks(x, scales, i, some.blocks, q.dtype) for i, x in caches)
        tables = some.tables
    prefill(q, keys, values, tables, items, part.out, *part.params)


def supports_prefill(q: Tensor, keys: Tensor) -> bool:
    """Whether `prefill` takes q [T, heads, dim] and caches like keys."""
    return boxed(q, keys, q.dtype) and device_caps(q.device).hopper


def prefill_work(query_lens: list[int], kv_lens: list[int], first: int, stop: int) -> np.ndarray:
    """Work items, which blocks take one by one, the longest first: [n, 8] int32 of sequence, first row, rows, position,
    length.

    Of sequences first:stop, whose query_lens[i] newest tokens of kv_lens[i] are in the step, row after row.
    """
    items = []
    row = sum(query_lens[:first])
    for i in range(first, stop):
        count, length = query_lens[i], kv_lens[i]
        for at in range(0, count, ROWS):
            items.append((i, row + at, min(ROWS, count - at), length - count + at, length, 0, 0, 0))
        row += count
    items.sort(key=lambda item: -(item[2] + item[3]))
    return np.array(items, np.int32)


class PrefillSmem(NamedTuple):
    tile: int  # keys
    stages: int  # tiles of keys, and as many of values, that lie in shared memory
    q_in_regs: int  # steps of 16 elements of q that lie in registers
    shared: int  # bytes of shared memory


def prefill_smem(dim: int) -> PrefillSmem:
    """How prefill.cu shares out its memory and registers: in shared memory a head has runs of 64 elements."""
    runs = -(-dim // 64)
    tile, row = KEYS[runs - 1], runs * 128  # bytes
    stages = ((SMEM_BYTES - 1024) // row - ROWS) // (2 * tile)
    q_in_regs = (REGISTERS - tile // 2 - tile // 4 - dim // 2) // 4
    return PrefillSmem(tile, stages, min(q_in_regs, dim // 16), 1024 + (ROWS + 2 * stages * tile) * row)


def prefill(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, items: Tensor, out: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """The rows of `items`, which is prefill_work() on the device; q and out [T, heads, dim], out contiguous."""
    (rows, heads, dim), (_, size, kv_heads, _), device = q.shape, keys.shape, q.device
    kernel, box, shared = _made(device, q.dtype, heads, kv_heads, dim, size, window, softcap > 0, sinks is not None)
    of_q = jit.tensor_map(q.data_ptr(), rows, heads * dim, ROWS, q.stride(0))
    of_k, of_v = tensor_maps(keys, values, (box,))
    count = items.shape[0]
    grid = min(device_caps(device).num_sms, count * heads)
    kernel(
        (grid, 1, 1), 384, of_q, of_k, of_v, items, count, tables, tables.stride(0), out,
        q if sinks is None else sinks, scale * LOG2_E, float(softcap), shared=shared,
    )  # fmt: skip


class _Made(NamedTuple):
    """A program, and how it is launched."""

    kernel: jit.Kernel
    box: int  # tokens of a cache's box
    shared: int  # bytes of shared memory


@functools.cache
def _made(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, size: int, window: int,
    capped: bool, sinks: bool,
) -> _Made:  # fmt: skip
    """Kept, as each layer of each step asks for it. device: the current one."""
    tile, stages, q_in_regs, shared = prefill_smem(dim)
    box = math.gcd(size, tile)
    kernel = jit.kernel(
        "prefill", "prefill", dtype, shared, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, SIZE=size, BOX=box,
        TILE=tile, STAGES=stages, Q_IN_REGS=q_in_regs, WINDOW=window, SOFTCAP=int(capped), SINKS=int(sinks),
    )  # fmt: skip
    return _Made(kernel, box, shared)


CANDIDATE = Candidate(
    "prefill.cu", "sm_90",
    f"prompts, causal; heads of {DIMS[0]} to {DIMS[-1]} elements, a multiple of {DIMS.step}; f16 or bf16, caches of "
    f"the same, or of e4m3 from {ROWS} tokens on, up to {WIDENED_BYTES >> 20} MiB of them widened",
    supports, run,
)  # fmt: skip
