"""Multi-head latent attention on GPUs, in Triton (mla.py documents the computation); imported on GPUs alone.

As a backend it attends to latents as they are cached: one key head of [latent + rope] elements for all query heads,
whose first part is the value, too. A tile of the cache is read once for both. Long sequences of a decode step are split
over programs (Flash-Decoding, Dao et al. 2023). Another kernel attends to expanded keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..device import device_caps, dot_precision, overlaps
from ..rope.fp8_cache import E4M3
from ..rope.fp8_triton import scales_at, widen
from .backend import LOG2_E, AttentionParams, Part
from .decode_split_kv_triton import slots_of

if TYPE_CHECKING:
    from .mla import Context

# Figures are of 16 heads on an H200, in us of a layer (2026-11-25, benchmarks/results/h200-mla-2026-11-25.txt).
# Most of a decode step for each multiprocessor, which has one at a time: more would wait to find nothing to do. Up to
# twice as many took, of 64 sequences of 256 tokens, 22.9 instead of 21.3 without absorb_kernel, of 256 47.2 instead of
# 45.8, of 16 as long.
PROGRAMS = 3
MAX_KV_SPLITS = 64
SPLIT = 256  # tokens: about what is worth a program of its own, where all multiprocessors have one
LARGE_TILE = 64  # tokens of a tile, in shared memory of sm_90 and sm_100
GROUP = 16  # most query heads of a program
COLUMNS = 128  # of a head's latent outputs that one program adds up; others were not timed
COMBINED_HEADS_FROM = 64  # sequences: of as many a program adds up several heads; chosen without timing others
VALUES = 32  # of a head that one program makes: 1.9 of 1 and 16 sequences, 3.1 of 64, 5.1 of 256; others were not timed


@triton.jit
def _weigh(s, acc, total, best):
    """Online softmax of scores [rows, tile], -inf where a row does not see a key: weights, and what was summed."""
    top = tl.maximum(best, tl.max(s, 1))
    base = tl.where(top > float("-inf"), top, 0.0)  # a row that has seen no key yet would subtract infinities
    p = tl.exp2(s - base[:, None])
    old = tl.exp2(best - base)
    return p, acc * old[:, None], total * old + tl.sum(p, 1), top


@triton.jit
def _latent_tiles(
    x, xr, cache, scales, table, start, stop, seen, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr, BLOCK: tl.constexpr, ENTRY: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Tokens start:stop of a sequence for query rows x [ROWS, latent] and xr [ROWS, rope], of which row i sees those
    before seen[i]. ENTRY: tokens of an entry of the table: BLOCK, or 1."""
    dims, rope_dims, tile = tl.arange(0, LATENT_PADDED), tl.arange(0, ROPE_PADDED), tl.arange(0, TILE)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT_PADDED], tl.float32)
    for at in range(start, stop, TILE):
        valid = at + tile < stop
        slots = slots_of(table, at + tile, valid, ENTRY)
        base = cache + (slots * (LATENT + ROPE))[:, None]
        y = tl.load(base + dims[None, :], mask=valid[:, None] & (dims < LATENT)[None, :], other=0)
        yr = tl.load(base + LATENT + rope_dims[None, :], mask=valid[:, None] & (rope_dims < ROPE)[None, :], other=0)
        if FP8:
            y = widen(y, scales_at(scales, slots, 0, 0, valid, 1, BLOCK)[:, None], x.dtype)
            yr = widen(yr, scales_at(scales, slots, 0, 1, valid, 1, BLOCK)[:, None], x.dtype)
        s = tl.dot(x, tl.trans(y), input_precision=PRECISION)
        s = tl.dot(xr, tl.trans(yr), s, input_precision=PRECISION) * scale
        s = tl.where(valid[None, :] & ((at + tile)[None, :] < seen[:, None]), s, float("-inf"))
        p, acc, total, best = _weigh(s, acc, total, best)
        acc = tl.dot(p.to(y.dtype), y, acc, input_precision=PRECISION)
    return acc / tl.where(total > 0, total, 1.0)[:, None], best + tl.log2(total)


@triton.jit
def _splits(length, most, fill, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """How many KV splits a sequence has, and the tokens of each. fill: splits that find a multiprocessor idle."""
    count = tl.maximum((length + SPLIT // 2) // SPLIT, tl.minimum(tl.cdiv(length, TILE), fill))
    count = tl.minimum(tl.maximum(count, 1), most)
    each = tl.maximum(tl.cdiv(tl.cdiv(length, count), TILE), 1) * TILE
    return tl.maximum(tl.cdiv(length, each), 1), each


@triton.jit
def _seen(lengths, token, QUERY: tl.constexpr):
    """How many tokens of its sequence a token sees, of which each sequence has QUERY; 0 where the sequence has none."""
    if QUERY == 1:
        return tl.load(lengths + token)
    return tl.maximum(tl.load(lengths + token // QUERY) - (QUERY - 1) + (token % QUERY).to(tl.int32), 0)


@triton.jit(do_not_specialize=["table_row", "most", "fill"])  # they differ from step to step
def decode_kernel(
    q, cache, scales, tables, lengths, out, parts, sums, scale, q_row, table_row, most, fill,
    HEADS: tl.constexpr, HEADS_EACH: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr,
    LATENT_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr, BLOCK: tl.constexpr, ENTRY: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
    QUERY: tl.constexpr,
):  # fmt: skip
    """One part of one sequence for HEADS_EACH query heads of one of its QUERY newest tokens, in ROWS rows. The heads
    fill them: rows of several tokens would read the cache no less often.

    A token of one part is written to `out` [B * QUERY, HEADS, LATENT]. Of several parts each goes to `parts`
    [B * QUERY, HEADS, most, LATENT] f32, and the log2 of its sum to `sums` [B * QUERY, HEADS, most].
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    b, group, split = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.program_id(2)
    length = _seen(lengths, b, QUERY)
    count, each = _splits(length, most, fill, SPLIT, TILE)
    if split >= count:
        return
    rows, dims, rope_dims = tl.arange(0, ROWS), tl.arange(0, LATENT_PADDED), tl.arange(0, ROPE_PADDED)
    heads = group * HEADS_EACH + rows
    mine = ((rows < HEADS_EACH) & (heads < HEADS))[:, None]
    at = q + b * q_row + heads[:, None] * (LATENT + ROPE)
    x = tl.load(at + dims[None, :], mask=mine & (dims < LATENT)[None, :], other=0.0)
    xr = tl.load(at + LATENT + rope_dims[None, :], mask=mine & (rope_dims < ROPE)[None, :], other=0.0)
    seen = tl.zeros([ROWS], tl.int32) + length
    start = split * each
    y, total = _latent_tiles(
        x, xr, cache, scales, tables + b // QUERY * table_row, start, tl.minimum(start + each, length), seen, scale,
        LATENT, ROPE, ROWS, LATENT_PADDED, ROPE_PADDED, BLOCK, ENTRY, TILE, FP8, PRECISION,
    )  # fmt: skip
    row = b * HEADS + heads
    mask = mine & (dims < LATENT)[None, :]
    if count == 1:
        tl.store(out + row[:, None] * LATENT + dims[None, :], y.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(parts + (row * most + split)[:, None] * LATENT + dims[None, :], y, mask=mask)
        tl.store(sums + row * most + split, total, mask=(rows < HEADS_EACH) & (heads < HEADS))


@triton.jit(do_not_specialize=["most", "fill"])
def combine_kernel(
    parts, sums, lengths, out, most, fill,
    HEADS: tl.constexpr, EACH: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
    MOST: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    """COLUMNS elements of EACH heads of a token of several parts: `out` [B * QUERY, HEADS, LATENT] from its parts,
    weighted by their sums."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    b = tl.program_id(1).to(tl.int64)
    count, _ = _splits(_seen(lengths, b, QUERY), most, fill, SPLIT, TILE)
    if count == 1:
        return
    heads, columns = tl.program_id(2) * EACH + tl.arange(0, EACH), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    splits, at_once = tl.arange(0, MOST), tl.arange(0, AT_ONCE)
    mine, inside = heads < HEADS, columns < LATENT
    rows = b * HEADS + heads
    at = rows[:, None] * most + splits[None, :]
    every = tl.load(sums + at, mask=mine[:, None] & (splits < count)[None, :], other=float("-inf"))
    top = tl.where(mine, tl.max(every, 1), 0.0)
    total = tl.sum(tl.exp2(every - top[:, None]), 1)
    acc = tl.zeros([EACH, COLUMNS], tl.float32)
    for first in range(0, count, AT_ONCE):
        some = first + at_once
        there, part = mine[:, None] & (some < count)[None, :], rows[:, None] * most + some[None, :]
        weight = tl.exp2(tl.load(sums + part, mask=there, other=float("-inf")) - top[:, None])
        x = tl.load(
            parts + part[:, :, None] * LATENT + columns[None, None, :],
            mask=there[:, :, None] & inside[None, None, :], other=0.0,
        )  # fmt: skip
        acc += tl.sum(weight[:, :, None] * x, 1)
    y = acc / tl.where(mine, total, 1.0)[:, None]
    to = out + rows[:, None] * LATENT + columns[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["tokens"])
def values_kernel(
    mixed, up, out, tokens,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """COLUMNS values of one head of ROWS tokens: out [tokens, HEADS, VALUE] = mixed [tokens, HEADS, LATENT] times the
    last VALUE rows of the head's matrix of up [HEADS, NOPE + VALUE, LATENT]."""
    head, columns = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dims = tl.arange(0, LATENT_PADDED)
    from_up = up + (head.to(tl.int64) * (NOPE + VALUE) + NOPE) * LATENT + columns[:, None] * LATENT + dims[None, :]
    w = tl.load(from_up, mask=(columns < VALUE)[:, None] & (dims < LATENT)[None, :], other=0.0)
    if OVERLAP:  # weights are older than any kernel
        gdc_wait()
        gdc_launch_dependents()
    rows = (tl.program_id(2) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = (rows < tokens)[:, None]
    at = rows[:, None] * HEADS + head
    x = tl.load(mixed + at * LATENT + dims[None, :], mask=there & (dims < LATENT)[None, :], other=0.0)
    y = tl.dot(x, tl.trans(w), input_precision=PRECISION)
    tl.store(out + at * VALUE + columns[None, :], y.to(out.dtype.element_ty), mask=there & (columns < VALUE)[None, :])


@triton.jit(do_not_specialize=["first", "table_row"])
def prefill_kernel(
    q, cache, scales, tables, lengths, starts, out, scale, first, q_row, table_row,
    HEADS: tl.constexpr, HEADS_EACH: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr,
    LATENT_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS / HEADS_EACH tokens of one sequence, the `first + program_id(2)`-th, for HEADS_EACH query heads: a power of
    two. Its tokens of this step are rows starts[i]:starts[i + 1] of q and the last ones of its `lengths`."""
    TOKENS: tl.constexpr = ROWS // HEADS_EACH
    i = first + tl.program_id(2)
    begin, end = tl.load(starts + i), tl.load(starts + i + 1)
    token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS  # the long ones first
    if token < end - begin:
        length = tl.load(lengths + i)
        rows, dims, rope_dims = tl.arange(0, ROWS), tl.arange(0, LATENT_PADDED), tl.arange(0, ROPE_PADDED)
        heads, tokens = tl.program_id(1) * HEADS_EACH + rows % HEADS_EACH, token + rows // HEADS_EACH
        mine = ((heads < HEADS) & (begin + tokens < end))[:, None]
        at = q + (begin + tokens).to(tl.int64)[:, None] * q_row + heads[:, None] * (LATENT + ROPE)
        x = tl.load(at + dims[None, :], mask=mine & (dims < LATENT)[None, :], other=0.0)
        xr = tl.load(at + LATENT + rope_dims[None, :], mask=mine & (rope_dims < ROPE)[None, :], other=0.0)
        computed = length - (end - begin)
        y, _ = _latent_tiles(
            x, xr, cache, scales, tables + i.to(tl.int64) * table_row, 0,
            tl.minimum(computed + token + TOKENS, length), computed + tokens + 1, scale,
            LATENT, ROPE, ROWS, LATENT_PADDED, ROPE_PADDED, BLOCK, BLOCK, TILE, FP8, PRECISION,
        )  # fmt: skip
        to = out + ((begin + tokens).to(tl.int64) * HEADS + heads)[:, None] * LATENT + dims[None, :]
        tl.store(to, y.to(out.dtype.element_ty), mask=mine & (dims < LATENT)[None, :])


@triton.jit
def expanded_kernel(
    q, kv, rotated, starts, kv_starts, out, scale, q_row, kv_row, rotated_row, out_row,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, NOPE_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one sequence for one head; its context is rows kv_starts[i]:kv_starts[i + 1] of kv."""
    head, i = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts + i), tl.load(starts + i + 1)
    context, length = tl.load(kv_starts + i), tl.load(kv_starts + i + 1) - tl.load(kv_starts + i)
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the long ones first
    if row < end - begin:
        rows, tile = row + tl.arange(0, ROWS), tl.arange(0, TILE)
        dims, rope_dims, wide = tl.arange(0, NOPE_PADDED), tl.arange(0, ROPE_PADDED), tl.arange(0, VALUE_PADDED)
        mine = (begin + rows < end)[:, None]
        at = q + (begin + rows).to(tl.int64)[:, None] * q_row + head * (NOPE + ROPE)
        x = tl.load(at + dims[None, :], mask=mine & (dims < NOPE)[None, :], other=0.0)
        xr = tl.load(at + NOPE + rope_dims[None, :], mask=mine & (rope_dims < ROPE)[None, :], other=0.0)
        seen = length - (end - begin) + rows + 1
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
        stop = tl.minimum(length - (end - begin) + row + ROWS, length)
        for start in range(0, stop, TILE):
            valid = (start + tile < stop)[:, None]
            token = (context + start + tile).to(tl.int64)[:, None]
            keys = kv + token * kv_row + head * (NOPE + VALUE)
            k = tl.load(keys + dims[None, :], mask=valid & (dims < NOPE)[None, :], other=0.0)
            kr = tl.load(rotated + token * rotated_row + rope_dims[None, :], mask=valid & (rope_dims < ROPE)[None, :],
                         other=0.0)  # fmt: skip
            s = tl.dot(x, tl.trans(k), input_precision=PRECISION)
            s = tl.dot(xr, tl.trans(kr), s, input_precision=PRECISION) * scale
            s = tl.where((start + tile)[None, :] < tl.minimum(seen, stop)[:, None], s, float("-inf"))
            p, acc, total, best = _weigh(s, acc, total, best)
            v = tl.load(keys + NOPE + wide[None, :], mask=valid & (wide < VALUE)[None, :], other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        to = out + (begin + rows).to(tl.int64)[:, None] * out_row + head * VALUE + wide[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=mine & (wide < VALUE)[None, :])


def supports(part: Part) -> bool:
    """Values are the first part of the keys, of one head; q and the cache are whole."""
    q, keys, values, params = part.q, part.keys, part.values, part.params
    shared = keys.shape[2] == 1 and keys.data_ptr() == values.data_ptr() and values.shape[3] < keys.shape[3]
    same = keys.dtype == (q.dtype if part.scales is None else E4M3)
    plain = part.current_kv is None and part.reach is None and same and params == AttentionParams(params.scale)
    return shared and plain and keys.is_contiguous() and q.stride()[1:] == (q.shape[2], 1)


def run(part: Part) -> None:
    cache, latent, rows, scale = part.keys[:, :, 0], part.values.shape[3], part.rows, part.params.scale
    tables, lengths = rows.block_tables, rows.lengths
    if part.decodes:
        q, out = part.decoding
        programs, longest = len(q) * triton.cdiv(q.shape[1], GROUP), max(rows.kv_lens[: part.stop])
        splits = choose_kv_splits(programs, longest, device_caps(q.device).num_sms)
        decode(q, cache, latent, tables, lengths, out, scale, splits, part.scales, rows.query_len, part.table_size)
    else:
        first, count, starts = part.first, part.stop - part.first, rows.query_starts
        longest = max(rows.query_lens[first : part.stop])
        prefill(part.q, cache, latent, tables, lengths, starts, part.out, scale, first, count, longest, part.scales)


def choose_kv_splits(programs: int, longest: int, num_sms: int) -> int:
    """A power of two: the most KV splits of a sequence, when `programs` run for each split."""
    splits = 1
    while splits < MAX_KV_SPLITS and 2 * programs * splits <= PROGRAMS * num_sms:
        # A tile is worth a program as long as most multiprocessors are idle: 2048 chosen tokens of one sequence of 16
        # heads take 9.8 us by 32 splits, 16.1 by 8; of four 12.8 by 16, 18.3 by 32 (H200).
        if longest <= splits * (LARGE_TILE if 4 * programs * splits <= num_sms else SPLIT):
            break
        splits *= 2
    return splits


def _large_tiles(x: Tensor) -> bool:
    """Whether a multiprocessor has shared memory for large tiles, of 16-bit elements."""
    return x.element_size() == 2 and (not x.is_cuda or device_caps(x.device).has_tma)


def _bytes(cache: Tensor) -> Tensor:
    """Codes as kernels take them."""
    return cache.view(torch.uint8) if cache.dtype == E4M3 else cache


def decode(
    q: Tensor, cache: Tensor, latent: int, tables: Tensor, lengths: Tensor, out: Tensor, scale: float, most: int,
    scales: Tensor | None = None, query_len: int = 1, table_size: int = 0, tile: int = 0, split: int = SPLIT,
    fill: int = 0, stages: int = 2,
) -> None:  # fmt: skip
    """n tokens, the query_len newest of each sequence, of up to `most` splits: q [n, heads, latent + rope], out [n,
    heads, latent], contiguous. A sequence of length 0 gives zeros. table_size: tokens of a table's entry; 0: of a block
    of the cache. fill: splits of a sequence that find a multiprocessor idle; asked of the device unless given."""
    n, heads, width = q.shape
    tile, groups, overlap = tile or (LARGE_TILE if _large_tiles(q) else 16), triton.cdiv(heads, GROUP), overlaps(q)
    fill = fill or (device_caps(q.device).num_sms // (n * groups) if q.is_cuda else 1)
    parts = sums = out
    if most > 1:
        parts = torch.empty(n, heads, most, latent, dtype=torch.float32, device=q.device)
        sums = torch.empty(n, heads, most, dtype=torch.float32, device=q.device)
    decode_kernel[groups, n, most](
        q, _bytes(cache), lengths if scales is None else scales, tables, lengths, out, parts, sums, scale * LOG2_E,
        q.stride(0), tables.stride(0), most, fill,
        heads, GROUP, latent, width - latent, GROUP, max(16, triton.next_power_of_2(latent)),
        max(16, triton.next_power_of_2(width - latent)), cache.shape[1], table_size or cache.shape[1], tile, split,
        int(scales is not None),
        dot_precision(q), overlap, query_len, num_warps=8 if _large_tiles(q) else 4, num_stages=stages,
        launch_pdl=overlap,
    )  # fmt: skip
    if most > 1:
        each = 1 if n < COMBINED_HEADS_FROM else GROUP
        columns = min(COLUMNS, triton.next_power_of_2(latent))
        combine_kernel[triton.cdiv(latent, columns), n, triton.cdiv(heads, each)](
            parts, sums, lengths, out, most, fill, heads, each, latent, columns, GROUP // each, MAX_KV_SPLITS, split,
            tile, overlap, query_len, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip


def values(mixed: Tensor, up: Tensor, nope: int, out: Tensor | None = None) -> Tensor:
    """out [T, heads, value]: mixed [T, heads, latent] times the values' weights of up [heads, nope + value, latent]."""
    (tokens, heads, latent), value, overlap = mixed.shape, up.shape[1] - nope, overlaps(mixed)
    assert mixed.is_contiguous() and up.is_contiguous()
    out = mixed.new_empty(tokens, heads, value) if out is None else out
    assert out.is_contiguous()
    rows = min(max(16, triton.next_power_of_2(tokens)), 64 if _large_tiles(mixed) else 16)
    columns = min(VALUES, max(16, triton.next_power_of_2(value)))
    values_kernel[triton.cdiv(value, columns), heads, triton.cdiv(tokens, rows)](
        mixed, up, out, tokens, heads, nope, value, latent, max(16, triton.next_power_of_2(latent)), rows, columns,
        dot_precision(mixed), overlap, num_warps=4 if rows < 64 else 8, launch_pdl=overlap,
    )  # fmt: skip
    return out


def prefill(
    q: Tensor, cache: Tensor, latent: int, tables: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, scale: float,
    first: int, count: int, longest: int, scales: Tensor | None = None, rows: int = 0, tile: int = 0,
) -> None:  # fmt: skip
    """Sequences first:first + count of the tables, with up to `longest` tokens each; q [T, heads, latent + rope], out
    [T, heads, latent], contiguous."""
    heads, width = q.shape[1:]
    rows, tile = rows or (64 if _large_tiles(q) else 16), tile or (32 if _large_tiles(q) else 16)
    each = min(GROUP, triton.next_power_of_2(heads))
    prefill_kernel[triton.cdiv(longest, rows // each), triton.cdiv(heads, each), count](
        q, _bytes(cache), lengths if scales is None else scales, tables, lengths, starts, out, scale * LOG2_E, first,
        q.stride(0), tables.stride(0), heads, each, latent, width - latent, rows,
        max(16, triton.next_power_of_2(latent)),
        max(16, triton.next_power_of_2(width - latent)), cache.shape[1], tile, int(scales is not None),
        dot_precision(q),
        num_warps=8 if _large_tiles(q) else 4, num_stages=2,
    )  # fmt: skip


def prefill_expanded(
    q: Tensor, kv: Tensor, rotated: Tensor, context: Context, params: AttentionParams, out: Tensor,
    rows: int = 0, tile: int = 0,
) -> None:  # fmt: skip
    """expanded_reference of mla.py."""
    value, rope = out.shape[2], rotated.shape[1]
    nope = kv.shape[2] - value
    assert all(x.stride()[1:] == (x.shape[2], 1) for x in (q, kv, out)), "heads lie side by side"
    rows, tile = rows or (128 if _large_tiles(q) else 32), tile or (64 if _large_tiles(q) else 16)
    expanded_kernel[triton.cdiv(max(context.query_lens), rows), kv.shape[1], len(context.query_lens)](
        q, kv, rotated, context.query_starts, context.kv_starts, out, params.scale * LOG2_E, q.stride(0), kv.stride(0),
        rotated.stride(0), out.stride(0), nope, rope, value, max(16, triton.next_power_of_2(nope)),
        max(16, triton.next_power_of_2(rope)), max(16, triton.next_power_of_2(value)), rows, tile, dot_precision(q),
        num_warps=8 if _large_tiles(q) else 4, num_stages=2,
    )  # fmt: skip
