"""Attention over the paged cache on GPUs, in Triton, where nothing else takes it; imported on GPUs alone.

Online softmax after FlashAttention-2 (Dao 2023, arXiv 2307.08691); the split over a sequence after Flash-Decoding (Dao
et al. 2023). Exponentials are to the base 2. Every load of keys and values is masked by the sequence's length, so that
whatever lies in unused slots, a NaN too, stays out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import jit
from ..device import current_stream, device_caps, dot_precision
from ..rope.fp8_triton import scales_at, widen
from ..rope.rope import CurrentKV
from .backend import LOG2_E, Part
from .decode_split_kv_triton import (
    apply_softcap,
    cos_and_sin,
    kv_splits,
    newest_key_and_value,
    rotate,
    slots_of,
    store_or_combine,
    with_sink,
)

# Splits of a decode step's sequences are chosen to give each multiprocessor about this many programs.
PROGRAMS = 4
MAX_KV_SPLITS = 32
PART = 256  # tokens: about what is worth a program of its own, and adding its result to the others'


@triton.jit(do_not_specialize=["table_row"])  # it differs from step to step
def decode_kernel(
    q, k, v, cos, sin, q_weight, k_weight, slots, keys, values, scales, tables, lengths, out, parts, sums, arrived,
    sinks, scale, eps, q_row, k_row, v_row, table_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    """One part of one sequence for the query heads of one key head and the sequence's QUERY newest tokens: ROWS >= 16
    rows, of which QUERY * HEADS / KV_HEADS count, token by token. So keys and values are read once for all tokens.

    With ROTATE, where QUERY is 1, the step's newest token is still in q, k and v: heads are normed (NORM) and rotated
    here, the sequence's last part writes key and value to the cache and takes them from registers, and the loops cover
    only the tokens before, so that no program reads what another one writes. Without, the cache holds it and q is
    rotated.

    A sequence has as many splits as its length asks for, at most SPLITS; programs beyond have nothing to do.
    """
    if OVERLAP:  # as launch_dependents() and grid_wait() of cuda/common.cuh
        gdc_launch_dependents()
        gdc_wait()
    tl.static_assert(QUERY == 1 or not ROTATE)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = (DIM + 1) // 2
    HALF_PADDED: tl.constexpr = PADDED // 2 if PADDED > 16 else 16
    head, b, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + b)
    first, last, each, count = kv_splits(length, TILE, SPLITS, PART, WINDOW, ROTATE, QUERY)
    if split >= count:
        return
    start = first + split * each
    stop = tl.minimum(start + each, last)

    rows, half = tl.arange(0, ROWS), tl.arange(0, HALF_PADDED)
    row = (b * KV_HEADS + head) * (QUERY * GROUP)  # of parts and sums
    to = b * (QUERY * HEADS) + head * GROUP  # of out
    if QUERY == 1:
        from_q = q + b * q_row + (head * GROUP + rows)[:, None] * DIM + half[None, :]
    else:
        token = (b * QUERY + rows // GROUP) * q_row
        from_q = q + (token + (head * GROUP + rows % GROUP) * DIM)[:, None] + half[None, :]
    real = (rows < QUERY * GROUP)[:, None]
    xa = tl.load(from_q, mask=real & (half < HALF)[None, :], other=0.0)
    xb = tl.load(from_q + HALF, mask=real & (half < DIM - HALF)[None, :], other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    if ROTATE:
        newest = (split == count - 1) & (length > 0)
        by_cos, by_sin = cos_and_sin(cos, sin, b, half, DIM, HALF)
        xa, xb = rotate(xa, xb, by_cos, by_sin, q_weight, half, eps, DIM, HALF, NORM)
        ka, kb, new = newest_key_and_value(
            k + b * k_row + head * DIM, v + b * v_row + head * DIM, by_cos, by_sin, k_weight, eps, newest,
            tl.load(slots + b), keys, values, scales, head,
            KV_HEADS, DIM, PADDED, HALF, HALF_PADDED, BLOCK, NORM, FP8,
        )  # fmt: skip
        products = xa.to(tl.float32) * ka.to(tl.float32) + xb.to(tl.float32) * kb.to(tl.float32)
        best = tl.where(newest, apply_softcap(tl.sum(products, 1) * scale, SOFTCAP), float("-inf"))
        total = tl.where(newest, total + 1, total)
        acc += new.to(tl.float32)[None, :]
    acc, total, best = _decode_tiles(
        acc, total, best, xa, xb, keys, values, scales, tables + b * table_row, head, start, stop,
        length - QUERY + rows // GROUP, scale,
        KV_HEADS, DIM, PADDED, HALF, HALF_PADDED, BLOCK, TILE, WINDOW, SOFTCAP, FP8, PRECISION, QUERY,
    )  # fmt: skip
    store_or_combine(
        acc, total, best, out, parts, sums, arrived + b * KV_HEADS + head, sinks + head * GROUP, row, to,
        split, count, DIM, PADDED, ROWS, HEADS, GROUP, QUERY, SPLITS, SINKS,
    )  # fmt: skip


@triton.jit
def _decode_tiles(
    acc, total, best, xa, xb, keys, values, scales, table, head, start, stop, positions, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    """Keys start:stop, in tiles, for query rows at `positions` whose halves are xa and xb. Where QUERY is 1, every row
    sees them all."""
    dims, half, tile = tl.arange(0, PADDED), tl.arange(0, HALF_PADDED), tl.arange(0, TILE)
    for at in range(start, stop, TILE):
        valid = at + tile < stop
        at_slots = slots_of(table, at + tile, valid, BLOCK)
        base = (at_slots * KV_HEADS + head) * DIM
        from_keys = keys + base[None, :] + half[:, None]
        ya = tl.load(from_keys, mask=valid[None, :] & (half < HALF)[:, None], other=0)
        yb = tl.load(from_keys + HALF, mask=valid[None, :] & (half < DIM - HALF)[:, None], other=0)
        if FP8:
            by = scales_at(scales, at_slots, head, 0, valid, KV_HEADS, BLOCK)[None, :]
            ya, yb = widen(ya, by, xa.dtype), widen(yb, by, xa.dtype)
        s = tl.dot(xb, yb, tl.dot(xa, ya, input_precision=PRECISION), input_precision=PRECISION) * scale
        s = tl.where(valid[None, :], apply_softcap(s, SOFTCAP), float("-inf"))
        if QUERY > 1:
            seen = positions[:, None] >= (at + tile)[None, :]
            if WINDOW > 0:
                seen &= positions[:, None] < (at + tile)[None, :] + WINDOW
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        # A row that has seen no key yet would subtract infinities.
        base_of = tl.where(top > float("-inf"), top, 0.0) if QUERY > 1 else top
        p = tl.exp2(s - base_of[:, None])
        old = tl.exp2(best - base_of)
        y = tl.load(values + base[:, None] + dims[None, :], mask=valid[:, None] & (dims < DIM)[None, :], other=0)
        if FP8:
            y = widen(y, scales_at(scales, at_slots, head, 1, valid, KV_HEADS, BLOCK)[:, None], xa.dtype)
        total = total * old + tl.sum(p, 1)
        acc = acc * old[:, None] + tl.dot(p.to(y.dtype), y, input_precision=PRECISION)
        best = top
    return acc, total, best


@triton.jit
def _tiles(
    acc, total, best, x, keys, values, scales, table, head, start, stop, positions, ends, length,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys start:stop, in whole tiles, for query rows x at `positions`, which see keys up to `ends`. Unless MASKED,
    every row sees them all."""
    dims, tile = tl.arange(0, PADDED), tl.arange(0, TILE)
    for at in range(start, stop, TILE):
        valid = at + tile < length
        at_slots = slots_of(table, at + tile, valid, BLOCK)
        base = (at_slots * KV_HEADS + head) * DIM
        k = tl.load(keys + base[None, :] + dims[:, None], mask=valid[None, :] & (dims < DIM)[:, None], other=0)
        if FP8:
            k = widen(k, scales_at(scales, at_slots, head, 0, valid, KV_HEADS, BLOCK)[None, :], x.dtype)
        s = apply_softcap(tl.dot(x, k, input_precision=PRECISION), SOFTCAP)
        if MASKED:
            seen = ends[:, None] >= (at + tile)[None, :]
            if WINDOW > 0:
                seen &= positions[:, None] < (at + tile)[None, :] + WINDOW
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        # A row that has seen no key yet would subtract infinities.
        base_of = tl.where(top > float("-inf"), top, 0.0) if MASKED else top
        p = tl.exp2(s - base_of[:, None])
        old = tl.exp2(best - base_of)
        v = tl.load(values + base[:, None] + dims[None, :], mask=valid[:, None] & (dims < DIM)[None, :], other=0)
        if FP8:
            v = widen(v, scales_at(scales, at_slots, head, 1, valid, KV_HEADS, BLOCK)[:, None], x.dtype)
        total = total * old + tl.sum(p, 1)
        acc = acc * old[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        best = top
    return acc, total, best


@triton.jit(do_not_specialize=["first", "table_row"])
def prefill_kernel(
    q, keys, values, scales, tables, lengths, starts, reach, out, sinks, scale, first, q_row, table_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    FP8: tl.constexpr, PRECISION: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one sequence, the `first + program_id(2)`-th, for one query head.

    Its tokens of this step are rows starts[i]:starts[i + 1] of q and the last ones of its `lengths`. With REACH, they
    see the keys up to those that `reach` has; without, up to themselves.
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
        ends = positions
        if REACH:
            ends = tl.load(reach + begin + rows, mask=begin + rows < end, other=0)
            stop = tl.maximum(stop, tl.max(ends, 0) + 1)
        middle = (computed + row + 1) // TILE * TILE  # keys before are seen by all rows
        from_ = 0
        if WINDOW > 0:
            from_ = tl.maximum(computed + row + 1 - WINDOW, 0) // TILE * TILE
            middle = from_
        else:
            acc, total, best = _tiles(
                acc, total, best, x, keys, values, scales, table, head // group, 0, middle, positions, ends, length,
                KV_HEADS, DIM, PADDED, BLOCK, TILE, 0, SOFTCAP, False, FP8, PRECISION,
            )  # fmt: skip
        acc, total, best = _tiles(
            acc, total, best, x, keys, values, scales, table, head // group, middle, stop, positions, ends, length,
            KV_HEADS, DIM, PADDED, BLOCK, TILE, WINDOW, SOFTCAP, True, FP8, PRECISION,
        )  # fmt: skip
        if SINKS:
            total = with_sink(total, best, sinks + head, True)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + at * (HEADS * DIM) + head * DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=mine)


def _overlaps(x: Tensor) -> bool:
    return x.is_cuda and device_caps(x.device).has_pdl


def supports(part: Part) -> bool:
    return part.values.shape == part.keys.shape


def run(part: Part) -> None:
    keys, values, tables, lengths = part.keys, part.values, part.rows.block_tables, part.rows.lengths
    if part.decodes:
        (q, out), query_len = part.decoding, part.rows.query_len
        splits = _kv_splits(part)
        decode(q, keys, values, tables, lengths, out, *part.params, splits, part.current_kv, part.scales, query_len)
    else:
        first, count, starts = part.first, part.stop - part.first, part.rows.query_starts
        longest = max(part.rows.query_lens[first : part.stop])
        of = part.q, keys, values, tables, lengths, starts, part.out
        prefill(*of, *part.params, first, count, longest, part.scales, part.reach)


def _kv_splits(part: Part) -> int:
    """The largest number of KV splits of a decoding sequence."""
    longest, window = max(part.rows.kv_lens[: part.stop]), part.params.window
    programs, num_sms = part.stop * part.keys.shape[2], device_caps(part.q.device).num_sms
    splits = choose_kv_splits(programs, min(longest, window or longest), num_sms)
    # Without `current_kv`, in a step with prompts: all that there may be, or none. Each number is a kernel of its own,
    # to be compiled in the middle of work.
    return MAX_KV_SPLITS if part.current_kv is None and splits > 1 else splits


def choose_kv_splits(programs: int, longest: int, num_sms: int) -> int:
    """A power of two: the most KV splits of a sequence, when `programs` run for each split."""
    splits = 1
    while splits < MAX_KV_SPLITS and programs * splits * 2 <= PROGRAMS * num_sms and longest > splits * PART:
        splits *= 2
    return splits


def decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, scale: float, window: int,
    softcap: float, sinks: Tensor | None, splits: int, current_kv: CurrentKV | None = None,
    scales: Tensor | None = None, query_len: int = 1, tile: int = 0, part: int = 0,
) -> None:  # fmt: skip
    """The query_len newest tokens of each of n sequences: q and out [n * query_len, heads, head_dim], heads side by
    side, out contiguous.

    With `current_kv`, of one token each, q is neither normed nor rotated yet, and the caches do not hold these tokens
    yet.
    """
    tokens, heads, dim = q.shape
    n, kv_heads = tokens // query_len, keys.shape[2]
    padded = max(16, triton.next_power_of_2(dim))
    narrow = q.element_size() == 2
    tile = tile or ((128 if splits > 1 else 64) if narrow and padded <= 128 else 32)
    overlap = _overlaps(q)
    parts = sums = out
    arrived = lengths
    if splits > 1:
        assert n * kv_heads <= jit.COUNTERS  # choose_kv_splits does not make so many
        parts = torch.empty(tokens, heads, splits, dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(tokens, heads, splits, dtype=torch.float32, device=q.device)
        arrived = jit.counters(q.device, current_stream() if q.is_cuda else 0)
    # Stand-ins for arguments that a kernel of rotated tokens does not touch.
    k, v, (cos, sin, *_), norms, slots = current_kv if current_kv else (q, q, (q, q), None, lengths)
    q_weight, k_weight, eps = norms if norms else (q, q, 0.0)
    if scales is not None:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    decode_kernel[kv_heads, n, splits](
        q, k, v, cos, sin, q_weight, k_weight, slots, keys, values, lengths if scales is None else scales, tables,
        lengths, out, parts, sums, arrived,
        q if sinks is None else sinks, scale * LOG2_E, eps, q.stride(0), k.stride(0), v.stride(0),
        tables.stride(0), heads, kv_heads, dim, padded,
        max(16, triton.next_power_of_2(query_len * heads // kv_heads)), keys.shape[1], tile, splits, part or PART,
        window,
        softcap * LOG2_E, int(sinks is not None), int(current_kv is not None), int(norms is not None),
        int(scales is not None), dot_precision(q), overlap, query_len,
        num_warps=4, num_stages=4 if narrow and padded <= 128 else 2, launch_pdl=overlap,
    )  # fmt: skip


def prefill(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None, first: int, count: int, longest: int,
    scales: Tensor | None = None, reach: Tensor | None = None, rows: int = 0, tile: int = 0,
) -> None:  # fmt: skip
    """Sequences first:first + count of the tables, with up to `longest` tokens each; q and out [T, heads, head_dim].
    reach: as Part has it."""
    heads, dim = q.shape[1:]
    padded = max(16, triton.next_power_of_2(dim))
    narrow = q.element_size() == 2
    rows = rows or ((128 if padded <= 128 else 64) if narrow else 32)
    rows = max(16, min(rows, triton.next_power_of_2(longest)))
    tile = tile or (64 if narrow and padded <= 128 else 32)
    if scales is not None:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    prefill_kernel[triton.cdiv(longest, rows), heads, count](
        q, keys, values, lengths if scales is None else scales, tables, lengths, starts,
        lengths if reach is None else reach, out, q if sinks is None else sinks,
        scale * LOG2_E, first, q.stride(0), tables.stride(0),
        heads, keys.shape[2], dim, padded, rows, keys.shape[1], tile, window, softcap * LOG2_E,
        int(sinks is not None), int(scales is not None), dot_precision(q), int(reach is not None),
        num_warps=8 if rows >= 128 else 4, num_stages=3 if narrow and padded <= 128 else 2,
    )  # fmt: skip
