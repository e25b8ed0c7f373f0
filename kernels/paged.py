"""Attention over the paged cache on GPUs, in Triton; attention.py imports this where there is one.

Online softmax after FlashAttention-2 (Dao 2023, arXiv 2307.08691); the split over a sequence after Flash-Decoding (Dao
et al. 2023). Exponentials are to the base 2. Every load of keys and values is masked by the sequence's length, so that
whatever lies in unused slots, a NaN too, stays out.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = 1.4426950408889634
# Splits of a decode step's sequences are chosen to give each multiprocessor about this many programs.
PROGRAMS = 4
MAX_SPLITS = 32


@triton.jit
def _slots(tables, positions, valid, BLOCK: tl.constexpr):
    """Where the cache holds these positions of the sequence whose block table starts at `tables`."""
    blocks = tl.load(tables + positions // BLOCK, mask=valid, other=0)
    return blocks.to(tl.int64) * BLOCK + positions % BLOCK


@triton.jit
def decode_kernel(
    q, keys, values, tables, lengths, out, parts, sums, scale, q_row, table_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One part of one sequence for the query heads of one key head: ROWS >= 16 rows, of which HEADS / KV_HEADS count.

    With SPLITS > 1 the part's result goes to parts [B, HEADS, SPLITS, DIM] f32 and the log2 of its sum to `sums`.
    """
    if OVERLAP:  # as wait() and release() of cuda/common.cuh
        gdc_wait()
        gdc_launch_dependents()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head, b, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + b)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    each = tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE
    start = first + split * each
    stop = tl.minimum(start + each, length)
    rows, dims, tile = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, TILE)
    mine = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    x = tl.load(q + b * q_row + (head * GROUP + rows)[:, None] * DIM + dims[None, :], mask=mine, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for at in range(start, stop, TILE):
        valid = at + tile < stop
        base = (_slots(tables + b * table_row, at + tile, valid, BLOCK) * KV_HEADS + head) * DIM
        k = tl.load(keys + base[None, :] + dims[:, None], mask=valid[None, :] & (dims < DIM)[:, None], other=0.0)
        s = tl.dot(x, k, input_precision=PRECISION) * scale
        s = tl.where(valid[None, :], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        old = tl.exp2(best - top)
        v = tl.load(values + base[:, None] + dims[None, :], mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)
        total = total * old + tl.sum(p, 1)
        acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        best = top
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # an empty row gives zeros
    heads = b * HEADS + head * GROUP + rows
    if SPLITS == 1:
        tl.store(out + heads[:, None] * DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=mine)
    else:
        tl.store(sums + heads * SPLITS + split, best + tl.log2(total), mask=rows < GROUP)
        if start < stop:
            tl.store(parts + (heads * SPLITS + split)[:, None] * DIM + dims[None, :], acc, mask=mine)


@triton.jit
def combine_kernel(
    parts, sums, out, DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr
):
    """out [row, DIM] from the row's parts, each weighted by its sum. Parts whose sum is -inf were not written."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    sums_here = tl.load(sums + row * SPLITS + splits)
    top = tl.max(sums_here, 0)
    weights = tl.where(sums_here > float("-inf"), tl.exp2(sums_here - top), 0.0)
    mask = (sums_here > float("-inf"))[:, None] & (dims < DIM)[None, :]
    x = tl.load(parts + (row * SPLITS + splits)[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    y = tl.sum(x * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + dims, y.to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit
def _tiles(
    acc, total, best, x, keys, values, table, head, start, stop, positions, length,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys start:stop, in whole tiles, for query rows x at `positions`. Unless MASKED, every row sees them all."""
    dims, tile = tl.arange(0, PADDED), tl.arange(0, TILE)
    for at in range(start, stop, TILE):
        valid = at + tile < length
        base = (_slots(table, at + tile, valid, BLOCK) * KV_HEADS + head) * DIM
        k = tl.load(keys + base[None, :] + dims[:, None], mask=valid[None, :] & (dims < DIM)[:, None], other=0.0)
        s = tl.dot(x, k, input_precision=PRECISION)
        if MASKED:
            seen = positions[:, None] >= (at + tile)[None, :]
            if WINDOW > 0:
                seen &= positions[:, None] < (at + tile)[None, :] + WINDOW
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        # A row that has seen no key yet would subtract infinities.
        base_of = tl.where(top > float("-inf"), top, 0.0) if MASKED else top
        p = tl.exp2(s - base_of[:, None])
        old = tl.exp2(best - base_of)
        v = tl.load(values + base[:, None] + dims[None, :], mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)
        total = total * old + tl.sum(p, 1)
        acc = acc * old[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        best = top
    return acc, total, best


@triton.jit
def prompt_kernel(
    q, keys, values, tables, lengths, starts, out, scale, first, q_row, table_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one sequence, the `first + program_id(2)`-th, for one query head.

    Its tokens of this step are rows starts[i]:starts[i + 1] of q and the last ones of its `lengths`.
    """
    head, i = tl.program_id(1), first + tl.program_id(2)
    begin, end = tl.load(starts + i), tl.load(starts + i + 1)
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the long ones first
    if row < end - begin:
        length = tl.load(lengths + i)
        rows, dims = row + tl.arange(0, ROWS), tl.arange(0, PADDED)
        mine = (begin + rows < end)[:, None] & (dims < DIM)[None, :]
        at = (begin + rows).to(tl.int64)[:, None]
        x = tl.load(q + at * q_row + head * DIM + dims[None, :], mask=mine, other=0.0)
        x = (x.to(tl.float32) * scale).to(x.dtype)
        computed = length - (end - begin)
        positions = computed + rows
        table = tables + i.to(tl.int64) * table_row
        acc = tl.zeros([ROWS, PADDED], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        group: tl.constexpr = HEADS // KV_HEADS
        stop = tl.minimum(computed + row + ROWS, length)
        middle = (computed + row + 1) // TILE * TILE  # keys before are seen by all rows
        from_ = 0
        if WINDOW > 0:
            from_ = tl.maximum(computed + row + 1 - WINDOW, 0) // TILE * TILE
            middle = from_
        else:
            acc, total, best = _tiles(
                acc, total, best, x, keys, values, table, head // group, 0, middle, positions, length,
                KV_HEADS, DIM, PADDED, BLOCK, TILE, 0, False, PRECISION,
            )  # fmt: skip
        acc, total, best = _tiles(
            acc, total, best, x, keys, values, table, head // group, middle, stop, positions, length,
            KV_HEADS, DIM, PADDED, BLOCK, TILE, WINDOW, True, PRECISION,
        )  # fmt: skip
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + at * (HEADS * DIM) + head * DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=mine)


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether kernels may start before their predecessors have ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def choose_splits(programs: int, longest: int, processors: int) -> int:
    """A power of two: parts that each sequence is cut in, when `programs` run for each part."""
    splits = 1
    while splits < MAX_SPLITS and programs * splits * 2 <= PROGRAMS * processors and longest > splits * 64:
        splits *= 2
    return splits


def decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, scale: float, window: int,
    splits: int, tile: int = 0, stages: int = 0, warps: int = 4,
) -> None:  # fmt: skip
    """The newest token of each of n sequences: q and out [n, heads, head_dim], heads side by side, out contiguous."""
    n, heads, dim = q.shape
    kv_heads = keys.shape[2]
    padded = max(16, triton.next_power_of_2(dim))
    narrow = q.element_size() == 2
    tile = tile or (64 if narrow and padded <= 128 else 32)
    overlap = _overlaps(q.device)
    parts = sums = out
    if splits > 1:
        parts = torch.empty(n, heads, splits, dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(n, heads, splits, dtype=torch.float32, device=q.device)
    decode_kernel[kv_heads, n, splits](
        q, keys, values, tables, lengths, out, parts, sums, scale * LOG2_E, q.stride(0), tables.stride(0),
        heads, kv_heads, dim, padded, max(16, triton.next_power_of_2(heads // kv_heads)), keys.shape[1], tile, splits,
        window, "tf32" if narrow else "ieee", overlap, num_warps=warps,
        num_stages=stages or (4 if narrow and padded <= 128 else 2), launch_pdl=overlap,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[n * heads,](parts, sums, out, dim, padded, splits, overlap, num_warps=2, launch_pdl=overlap)


def prompts(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor,
    scale: float, window: int, first: int, count: int, longest: int,
    rows: int = 0, tile: int = 0, stages: int = 0, warps: int = 0,
) -> None:  # fmt: skip
    """Sequences first:first + count of the tables, with up to `longest` tokens each; q and out [T, heads, head_dim]."""
    heads, dim = q.shape[1:]
    padded = max(16, triton.next_power_of_2(dim))
    narrow = q.element_size() == 2
    rows = rows or ((128 if padded <= 128 else 64) if narrow else 32)
    rows = max(16, min(rows, triton.next_power_of_2(longest)))
    tile = tile or (64 if narrow and padded <= 128 else 32)
    prompt_kernel[triton.cdiv(longest, rows), heads, count](
        q, keys, values, tables, lengths, starts, out, scale * LOG2_E, first, q.stride(0), tables.stride(0),
        heads, keys.shape[2], dim, padded, rows, keys.shape[1], tile, window, "tf32" if narrow else "ieee",
        num_warps=warps or (8 if rows >= 128 else 4), num_stages=stages or (3 if narrow and padded <= 128 else 2),
    )  # fmt: skip
