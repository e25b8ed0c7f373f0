"""Stores the latents of multi-head latent attention on GPUs, in Triton (mla.py); imported on GPUs alone.

Where all sequences decode, one kernel also multiplies queries with the keys' weights: they are unused otherwise.
Beside prompts another does, of rotated queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..device import dot_precision, overlaps
from ..rope.fp8_triton import exponent_of, narrow
from ..rope.rope import CosSin

if TYPE_CHECKING:
    from .mla import LatentNorm

STORE_HEADS = 8  # query heads that one program rotates
COLUMNS = 128  # of a head's latent query that one program makes; others were not timed
# Tokens: of as many, programs have 16, else 32. Programs of up to 64 took 10.9 us of 64 tokens where these take 3.4,
# and 20.2 of 256 where these take 6.5 (16 heads, H200, 2026-11-25, benchmarks/results/h200-mla-2026-11-25.txt).
FEW = 64


def rope_and_store_latents(
    q: Tensor, latents: Tensor, norm: LatentNorm, cos_sin: CosSin, cache: Tensor, slots: Tensor,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """rope_and_store_latents of mla.py."""
    tokens, heads, width = q.shape
    latent, rope = len(norm.weight), cos_sin.cos.shape[-1]
    assert q.stride()[1:] == (width, 1) and latents.stride(1) == 1 and cache.is_contiguous()
    if tokens == 0:
        return
    if scales is not None:
        cache = cache.view(torch.uint8)
    store_kernel[tokens, 1 + triton.cdiv(heads, STORE_HEADS)](
        q, latents, norm.weight, cos_sin.cos, cos_sin.sin, cache, slots if scales is None else scales, slots, norm.eps,
         q.stride(0), latents.stride(0),
        heads, width, latent, rope, triton.next_power_of_2(latent), _padded(rope // 2), STORE_HEADS,
        cos_sin.interleaved, cache.shape[1], int(scales is not None), num_warps=4,
    )  # fmt: skip


def absorb_and_store_latents(
    q: Tensor, latents: Tensor, norm: LatentNorm, cos_sin: CosSin, cache: Tensor, slots: Tensor, up: Tensor,
    queries: Tensor, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """rope_and_store_latents, but that q stays as it is, and queries [T, heads, latent + rope] become what attends to
    latents: q's first part times the keys' weights of up [heads, nope + value, latent], and its rotated rest."""
    tokens, heads, width = q.shape
    latent, rope = len(norm.weight), cos_sin.cos.shape[-1]
    assert q.stride()[1:] == (width, 1) and latents.stride(1) == 1 and cache.is_contiguous()
    assert up.is_contiguous() and queries.is_contiguous()
    rows, columns = _tile(q, latent)
    blocks, overlap = triton.cdiv(latent, columns), overlaps(q)
    programs, rotated = heads * blocks * triton.cdiv(tokens, rows), triton.next_power_of_2(triton.cdiv(rows, blocks))
    absorb_kernel[(programs + tokens,)](
        q, latents, norm.weight, cos_sin.cos, cos_sin.sin, cache if scales is None else cache.view(torch.uint8),
        slots if scales is None else scales, slots, up, queries, norm.eps, q.stride(0), latents.stride(0), tokens,
        programs, heads, width, up.shape[1], latent, rope, triton.next_power_of_2(latent),
        _padded(rope // 2), max(16, triton.next_power_of_2(width - rope)), rows, rotated, columns,
        cos_sin.interleaved, cache.shape[1], int(scales is not None),
        dot_precision(q), overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


def absorb_rotated(q: Tensor, up: Tensor, queries: Tensor) -> None:
    """Queries as of `absorb_and_store_latents`, of q [T, heads, nope + rope] that is rotated already."""
    (tokens, heads, width), latent = q.shape, up.shape[2]
    rope = queries.shape[2] - latent
    assert q.stride()[1:] == (width, 1) and up.is_contiguous() and queries.is_contiguous()
    rows, columns = _tile(q, latent)
    absorb_rotated_kernel[triton.cdiv(latent, columns), heads, triton.cdiv(tokens, rows)](
        q, up, queries, q.stride(0), tokens, heads, width, up.shape[1], latent, rope, _padded(rope),
        max(16, triton.next_power_of_2(width - rope)), rows, columns, dot_precision(q), num_warps=4,
    )  # fmt: skip


def _padded(size: int) -> int:
    """The power of 2 that holds so many, which may be none."""
    return triton.next_power_of_2(max(1, size))


def _tile(q: Tensor, latent: int) -> tuple[int, int]:
    """Tokens, and columns of one head's latent queries, that a program makes of q [T, heads, nope + rope]."""
    most = COLUMNS if q.element_size() == 2 else COLUMNS // 4
    return 16 if len(q) <= FEW else 32, min(most, max(16, triton.next_power_of_2(latent)))


@triton.jit
def _rotate(x, to, scale, mask, cos, sin, pairs, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr):
    """Vectors of ROPE elements at x, rotated by those at cos and sin, to `to`; computed in f32. All four point to
    [vectors, 1]. sin: its first half negated.

    FP8: `to` gets codes, of one vector, and `scale` theirs.
    """
    HALF: tl.constexpr = ROPE // 2
    first = 2 * pairs if INTERLEAVED else pairs
    second = first + 1 if INTERLEAVED else pairs + HALF
    real = pairs < HALF
    mask = mask[:, None] & real[None, :]
    c = tl.load(cos + pairs[None, :], mask=mask, other=0.0)
    s = tl.load(sin + HALF + pairs[None, :], mask=mask, other=0.0)
    a = tl.load(x + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + second[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # `to` may be x: all is read before any of it is written
    ya, yb = (a * c - b * s).to(x.dtype.element_ty), (b * c + a * s).to(x.dtype.element_ty)
    if FP8:
        ya, yb = ya.to(tl.float32), yb.to(tl.float32)
        exponent = exponent_of(tl.maximum(tl.max(tl.abs(ya)), tl.max(tl.abs(yb))))
        tl.store(scale, exponent.to(tl.uint8))
        ya, yb = narrow(ya, exponent), narrow(yb, exponent)
    tl.store(to + first[None, :], ya.to(to.dtype.element_ty), mask=mask)
    tl.store(to + second[None, :], yb.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _store_latent(
    x, weight, cos, sin, cache, scales, slot, eps, pairs,
    LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PADDED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One token's latent and the key behind it, at x, to this slot."""
    if slot >= 0:
        dims = tl.arange(0, LATENT_PADDED)
        y = tl.load(x + dims, mask=dims < LATENT, other=0.0).to(tl.float32)
        w = tl.load(weight + dims, mask=dims < LATENT, other=0.0).to(tl.float32)
        y = (y * tl.rsqrt(tl.sum(y * y) / LATENT + eps) * w).to(x.dtype.element_ty)
        to = cache + slot * (LATENT + ROPE)
        scale = scales + slot // BLOCK * 2 * BLOCK + slot % BLOCK
        if FP8:
            y = y.to(tl.float32)
            exponent = exponent_of(tl.max(tl.abs(y)))
            tl.store(scale, exponent.to(tl.uint8))
            y = narrow(y, exponent)
        tl.store(to + dims, y.to(cache.dtype.element_ty), mask=dims < LATENT)
        one = tl.zeros([1], tl.int64)
        at = one[:, None]
        _rotate(
            x + LATENT + at, to + LATENT + at, scale + BLOCK, one == 0, cos + at, sin + at, pairs, ROPE, INTERLEAVED,
            FP8,
        )  # fmt: skip


@triton.jit
def store_kernel(
    q, latents, weight, cos, sin, cache, scales, slots, eps, q_row, latents_row,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PADDED: tl.constexpr,
    PAIRS: tl.constexpr, EACH: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One token: its latent and shared key by program 0, its queries by the others, EACH heads each."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, PAIRS)
    cos += token * ROPE
    sin += token * ROPE
    if part == 0:
        _store_latent(
            latents + token * latents_row, weight, cos, sin, cache, scales, tl.load(slots + token), eps, pairs,
            LATENT, ROPE, LATENT_PADDED, INTERLEAVED, BLOCK, FP8,
        )  # fmt: skip
    else:
        heads = ((part - 1) * EACH + tl.arange(0, EACH))[:, None]
        x = q + token * q_row + WIDTH - ROPE + heads * WIDTH
        same = heads * 0
        _rotate(x, x, scales, tl.ravel(heads) < HEADS, cos + same, sin + same, pairs, ROPE, INTERLEAVED, False)


@triton.jit
def _keys_weights(up, head, dims, columns, NOPE: tl.constexpr, UP: tl.constexpr, LATENT: tl.constexpr):
    """A head's of up [heads, UP, LATENT]: its first NOPE rows, of these columns."""
    from_up = up + head.to(tl.int64) * UP * LATENT + dims[:, None] * LATENT + columns[None, :]
    return tl.load(from_up, mask=(dims < NOPE)[:, None] & (columns < LATENT)[None, :], other=0.0)


@triton.jit
def _absorb(
    from_q, w, to, there, dims, columns, NOPE: tl.constexpr, LATENT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Stores these columns of latent queries at `to`: q's rows at from_q times w. from_q, to and there are [rows,
    1]."""
    x = tl.load(from_q + dims[None, :], mask=there & (dims < NOPE)[None, :], other=0.0)
    y = tl.dot(x, w, input_precision=PRECISION)
    tl.store(to + columns[None, :], y.to(to.dtype.element_ty), mask=there & (columns < LATENT)[None, :])


@triton.jit(do_not_specialize=["tokens", "programs"])
def absorb_kernel(
    q, latents, weight, cos, sin, cache, scales, slots, up, queries, eps, q_row, latents_row, tokens, programs,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, UP: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    LATENT_PADDED: tl.constexpr, PAIRS: tl.constexpr, NOPE_PADDED: tl.constexpr, ROWS: tl.constexpr,
    ROTATED: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The first programs make COLUMNS of one head's latent queries of ROWS tokens, and rotate the rest of ROTATED of
    them. The last `tokens` programs store one token's latent each."""
    NOPE: tl.constexpr = WIDTH - ROPE
    BLOCKS: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    pid, pairs = tl.program_id(0), tl.arange(0, PAIRS)
    if pid >= programs:
        if OVERLAP:
            gdc_wait()
            gdc_launch_dependents()
        token = (pid - programs).to(tl.int64)
        _store_latent(
            latents + token * latents_row, weight, cos + token * ROPE, sin + token * ROPE, cache, scales,
            tl.load(slots + token), eps, pairs, LATENT, ROPE, LATENT_PADDED, INTERLEAVED, BLOCK, FP8,
        )  # fmt: skip
    else:
        head, block, tile = pid // BLOCKS % HEADS, pid % BLOCKS, pid // (BLOCKS * HEADS)
        dims, columns = tl.arange(0, NOPE_PADDED), block * COLUMNS + tl.arange(0, COLUMNS)
        w = _keys_weights(up, head, dims, columns, NOPE, UP, LATENT)
        if OVERLAP:  # weights are older than any kernel
            gdc_wait()
            gdc_launch_dependents()
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        there = rows < tokens
        from_q = q + rows[:, None] * q_row + head * WIDTH
        to = queries + (rows[:, None] * HEADS + head) * (LATENT + ROPE)
        _absorb(from_q, w, to, there[:, None], dims, columns, NOPE, LATENT, PRECISION)
        some = block * ROTATED + tl.arange(0, ROTATED)
        mine = tile * ROWS + some.to(tl.int64)
        at = mine[:, None] * ROPE
        x = q + mine[:, None] * q_row + head * WIDTH + NOPE
        to = queries + (mine[:, None] * HEADS + head) * (LATENT + ROPE) + LATENT
        _rotate(
            x, to, scales, (some < ROWS) & (mine < tokens), cos + at, sin + at, pairs, ROPE, INTERLEAVED, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def absorb_rotated_kernel(
    q, up, queries, q_row, tokens,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, UP: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr, NOPE_PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """COLUMNS of one head's latent queries of ROWS tokens; the programs of the first ones copy the rotated rest."""
    NOPE: tl.constexpr = WIDTH - ROPE
    head, columns = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dims, rope_dims = tl.arange(0, NOPE_PADDED), tl.arange(0, ROPE_PADDED)
    w = _keys_weights(up, head, dims, columns, NOPE, UP, LATENT)
    rows = (tl.program_id(2) * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    there = rows < tokens
    from_q, to = q + rows * q_row + head * WIDTH, queries + (rows * HEADS + head) * (LATENT + ROPE)
    _absorb(from_q, w, to, there, dims, columns, NOPE, LATENT, PRECISION)
    if tl.program_id(0) == 0:
        mask = there & (rope_dims < ROPE)[None, :]
        rest = tl.load(from_q + NOPE + rope_dims[None, :], mask=mask)
        tl.store(to + LATENT + rope_dims[None, :], rest, mask=mask)
