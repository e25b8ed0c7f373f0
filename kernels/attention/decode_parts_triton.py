"""What the Triton kernels of attention do beside their loops over keys; imported on GPUs alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_of(tables, positions, valid, BLOCK: tl.constexpr):
    """Where the cache holds these positions of the sequence whose block table starts at `tables`."""
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
def combine(
    parts, sums, out, sinks, row, count, DIM: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Rows row:row + GROUP of out [rows, DIM] from `count` parts each, weighted by their sums. sinks: of these rows."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    # Parts at once: as many as fit in registers, for each round waits for memory.
    MOST: tl.constexpr = triton.cdiv(8192, HEADS * PADDED)
    AHEAD: tl.constexpr = MOST if MOST < SPLITS else SPLITS
    heads, splits, dims = tl.arange(0, HEADS), tl.arange(0, SPLITS), tl.arange(0, PADDED)
    mine = (heads < GROUP)[:, None]
    first = (row + heads)[:, None] * SPLITS
    # Past the first-level cache, which need not see what other multiprocessors have written.
    every = tl.load(sums + first + splits[None, :], mask=mine & (splits < count)[None, :], other=float("-inf"),
                    cache_modifier=".cg")  # fmt: skip
    top = tl.max(tl.where(mine, every, 0.0), 1)[:, None]
    total = tl.sum(tl.exp2(every - top), 1)
    if SINKS:
        total = with_sink(total, tl.max(top, 1), sinks + heads, heads < GROUP)
    acc = tl.zeros([HEADS, PADDED], tl.float32)
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
    at = out + (row + heads)[:, None] * DIM + dims[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=mine & (dims < DIM)[None, :])
