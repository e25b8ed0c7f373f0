"""Parts of Triton's attention kernels outside their loops over keys; imported on GPUs alone."""

from __future__ import annotations

import triton
import triton.language as tl

from ..rope.fp8_triton import exponent_of, round_trip


@triton.jit
def kv_splits(
    length, TILE: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr, WINDOW: tl.constexpr, ROTATE: tl.constexpr,
    QUERY: tl.constexpr,
):  # fmt: skip
    """The first token that any of a sequence's QUERY newest ones reads from the cache, and where they end; how many
    tokens each split has, whole tiles; and how many splits there are."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - (WINDOW + QUERY - 1), 0)
    last = tl.maximum(length - ROTATE, 0)
    count = tl.minimum(tl.maximum((last - first + PART // 2) // PART, 1), SPLITS)
    each = tl.maximum(tl.cdiv(tl.cdiv(last - first, count), TILE), 1) * TILE
    return first, last, each, tl.maximum(tl.cdiv(last - first, each), 1)


@triton.jit
def slots_of(tables, positions, valid, BLOCK: tl.constexpr):
    """Cache slots of these positions of the sequence whose block table starts at `tables`."""
    blocks = tl.load(tables + positions // BLOCK, mask=valid, other=0)
    return blocks.to(tl.int64) * BLOCK + positions % BLOCK


@triton.jit
def rotate(a, b, cos, sin, weight, dims, eps, DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves [heads, HALF] of heads, normed and rotated, rounded after either, as rope/rope.cu does it."""
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        wa = tl.load(weight + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        wb = tl.load(weight + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        a = (a * scale * wa[None, :]).to(dtype).to(tl.float32)
        b = (b * scale * wb[None, :]).to(dtype).to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def cos_and_sin(cos, sin, b, dims, DIM: tl.constexpr, HALF: tl.constexpr):
    """The operands of `rotate`, from row b of cos and sin [B, DIM]."""
    mask = (dims < HALF)[None, :]
    by_cos = tl.load(cos + b * DIM + dims[None, :], mask=mask, other=0.0)
    return by_cos, tl.load(sin + b * DIM + HALF + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _write_to_cache(
    keys, values, scales, ka, kb, value, slot, head, written, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A token's key, as two halves, and value, to the cache if `written`; as the cache will give them back."""
    dims, half = tl.arange(0, PADDED), tl.arange(0, HALF_PADDED)
    low = (half < HALF)[None, :]
    to = (slot * KV_HEADS + head) * DIM
    if FP8:
        most = tl.maximum(tl.max(tl.abs(ka.to(tl.float32))), tl.max(tl.abs(kb.to(tl.float32))))
        of_k, of_v = exponent_of(most), exponent_of(tl.max(tl.abs(value.to(tl.float32))))
        code_a, ka = round_trip(ka, of_k)
        code_b, kb = round_trip(kb, of_k)
        code_v, value = round_trip(value, of_v)
        at_scale = scales + (slot // BLOCK * KV_HEADS + head) * 2 * BLOCK + slot % BLOCK
        tl.store(at_scale, of_k.to(tl.uint8), mask=written)
        tl.store(at_scale + BLOCK, of_v.to(tl.uint8), mask=written)
    else:
        ka, kb = ka.to(keys.dtype.element_ty), kb.to(keys.dtype.element_ty)
        code_a, code_b, code_v = ka, kb, value
    tl.store(keys + to + half[None, :], code_a, mask=low & written)
    tl.store(keys + to + HALF + half[None, :], code_b, mask=low & written)
    tl.store(values + to + dims, code_v, mask=(dims < DIM) & written)
    return ka, kb, value


@triton.jit
def newest_key_and_value(
    k, v, cos, sin, weight, eps, newest, slot, keys, values, scales, head, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """A token's key, as two halves, and value, as the cache will give them back: the key is normed and rotated, both
    are written there if the token has a slot. Without `newest` nothing is, and they are zeros."""
    dims, half = tl.arange(0, PADDED), tl.arange(0, HALF_PADDED)
    low = (half < HALF)[None, :]
    ka = tl.load(k + half[None, :], mask=low & newest, other=0.0)
    kb = tl.load(k + half[None, :] + HALF, mask=low & newest, other=0.0)
    value = tl.load(v + dims, mask=(dims < DIM) & newest, other=0.0)
    if not FP8:
        value = value.to(values.dtype.element_ty)
    ka, kb = rotate(ka, kb, cos, sin, weight, half, eps, DIM, HALF, NORM)
    return _write_to_cache(
        keys, values, scales, ka, kb, value, slot, head, newest & (slot >= 0),
        KV_HEADS, DIM, PADDED, HALF, HALF_PADDED, BLOCK, FP8,
    )  # fmt: skip


@triton.jit
def apply_softcap(s, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(s / SOFTCAP), SOFTCAP on overflow; SOFTCAP 0: s. Both are to the base 2: times log2(e)."""
    if SOFTCAP > 0:
        s = SOFTCAP - 2 * SOFTCAP / (tl.exp(s * (2 / SOFTCAP)) + 1)
    return s


@triton.jit
def with_sink(total, top, sinks, mask):
    """The sums of softmaxes, relative to 2^top, with their heads' sinks, which are to the base e."""
    return total + tl.exp2(tl.load(sinks, mask=mask, other=0.0) * 1.4426950408889634 - top)


@triton.jit
def out_rows(first, queries, HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY: tl.constexpr):
    """Rows of out [tokens, HEADS] that a key head's queries have, token by token and of each its GROUP query heads.
    first: the row of the first."""
    if QUERY == 1:
        return first + queries
    return first + queries // GROUP * HEADS + queries % GROUP


@triton.jit
def combine(
    parts, sums, out, sinks, row, to, count, DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, QUERY: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The rows of out [rows, DIM] of a key head's QUERY * GROUP queries, which begin with `to`, from `count` parts
    each, weighted by their sums: of rows from `row` on. sinks: of the query heads."""
    ROWS: tl.constexpr = triton.next_power_of_2(QUERY * GROUP)
    # Parts at once: as many as fit in registers, for each round waits for memory.
    MOST: tl.constexpr = triton.cdiv(8192, ROWS * PADDED)
    AHEAD: tl.constexpr = MOST if MOST < SPLITS else SPLITS
    queries, splits, dims = tl.arange(0, ROWS), tl.arange(0, SPLITS), tl.arange(0, PADDED)
    mine = (queries < QUERY * GROUP)[:, None]
    first = (row + queries)[:, None] * SPLITS
    # Past the first-level cache, which need not see what other multiprocessors have written.
    every = tl.load(sums + first + splits[None, :], mask=mine & (splits < count)[None, :], other=float("-inf"),
                    cache_modifier=".cg")  # fmt: skip
    top = tl.max(tl.where(mine, every, 0.0), 1)[:, None]
    total = tl.sum(tl.exp2(every - top), 1)
    if SINKS:
        total = with_sink(total, tl.max(top, 1), sinks + queries % GROUP, queries < QUERY * GROUP)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for at in range(0, count, AHEAD):
        split = at + tl.arange(0, AHEAD)[None, :]
        mask = mine & (split < count)
        weights = tl.exp2(tl.load(sums + first + split, mask=mask, other=float("-inf"), cache_modifier=".cg") - top)
        x = tl.load(
            parts + (first + split)[:, :, None] * DIM + dims[None, None, :],
            mask=mask[:, :, None] & (dims < DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        acc += tl.sum(x * weights[:, :, None], 1)
    y = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = out + out_rows(to, queries, HEADS, GROUP, QUERY)[:, None] * DIM + dims[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=mine & (dims < DIM)[None, :])


@triton.jit
def store_or_combine(
    acc, total, best, out, parts, sums, arrived, sinks, row, to, split, count, DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY: tl.constexpr,
    SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Store what one of `count` splits has of a key head's QUERY * GROUP queries: the only one's goes to `out`, from
    row `to` on by out_rows. Of several each goes to parts [B, KV_HEADS, QUERY, GROUP, SPLITS, DIM] f32, the log2
    of its sum to `sums`, both from `row` on, and the program that finds in `arrived`, which is zero between calls, that
    the others have done so combines them. sinks: of the query heads."""
    queries, dims = tl.arange(0, ROWS), tl.arange(0, PADDED)
    real, rows = queries < QUERY * GROUP, row + queries
    whole = total
    if SINKS:  # counted once: of several parts by who adds them up
        whole = tl.where(count == 1, with_sink(total, best, sinks + queries % GROUP, real), total)
    acc = acc / tl.where(whole > 0, whole, 1.0)[:, None]  # an empty row gives zeros
    mask = real[:, None] & (dims < DIM)[None, :]
    at = out + out_rows(to, queries, HEADS, GROUP, QUERY)[:, None] * DIM + dims[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask & (count == 1))
    if SPLITS > 1 and count > 1:
        tl.store(sums + rows * SPLITS + split, best + tl.log2(total), mask=real)
        tl.store(parts + (rows * SPLITS + split)[:, None] * DIM + dims[None, :], acc, mask=mask)
        tl.debug_barrier()  # all threads' stores, before the one thread that tells of them
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
        if before == count - 1:
            combine(
                parts, sums, out, sinks, row, to, count, DIM, PADDED, HEADS, GROUP, QUERY, SPLITS, SINKS
            )  # fmt: skip
            tl.store(arrived, 0)
