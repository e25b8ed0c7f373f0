"""The lightning indexer on GPUs, in Triton (indexer.py documents the computation); imported on GPUs alone.

Scores are computed by programs that share each sequence's tiles of the cache; then topk_select.cu finds each token's
best ones. All read lengths on the device and launch the same grids whatever these are, so that captured steps need no
more. A token that sees no more tokens than are chosen has no scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import device_caps, dot_precision
from ..rope.fp8_triton import exponent_of, narrow, scales_at, widen
from ..rope.rope import CosSin
from . import topk_select
from .decode_split_kv_triton import slots_of
from .mla_store_triton import STORE_HEADS, _rotate
from .mla_triton import _bytes

if TYPE_CHECKING:
    from .indexer import IndexNorm, Piece

TOGETHER = 8  # tokens of a sequence for which one program reads a tile of keys, at most
STAGES = 3  # tiles of keys that a program of one token has under way
PROGRAMS = 4  # of a kernel, for each multiprocessor


def rope_and_store_index(
    q: Tensor, k: Tensor, norm: IndexNorm, cos_sin: CosSin, cache: Tensor, slots: Tensor, scales: Tensor | None = None
) -> Tensor:
    """rope_and_store_index of indexer.py; q is rotated in place."""
    (tokens, heads, dim), rope = q.shape, cos_sin.cos.shape[-1]
    assert q.stride()[1:] == (dim, 1) and k.stride(1) == 1 and cache.is_contiguous()
    if tokens:
        store_kernel[tokens, 1 + triton.cdiv(heads, STORE_HEADS)](
            q, k, norm.weight, norm.weight if norm.bias is None else norm.bias, cos_sin.cos, cos_sin.sin, _bytes(cache),
            slots if scales is None else scales, slots, norm.eps, q.stride(0), k.stride(0), heads, dim, rope,
            triton.next_power_of_2(dim), triton.next_power_of_2(rope // 2), STORE_HEADS, cos_sin.interleaved,
            cache.shape[1], int(scales is not None), norm.bias is not None, num_warps=4,
        )  # fmt: skip
    return q


def choose(
    q: Tensor, weights: Tensor, cache: Tensor, piece: Piece, rotated: int, slots: Tensor, counts: Tensor,
    scales: Tensor | None = None, tile: int = 0, programs: int = 0,
) -> None:  # fmt: skip
    """choose_reference of indexer.py."""
    scores = score(q, weights, cache, piece, rotated, slots.shape[1], scales, tile, programs)
    topk_select.topk_select(scores, piece.tables, piece.seen, slots, counts, piece.query_len, cache.shape[1])


def score(
    q: Tensor, weights: Tensor, cache: Tensor, piece: Piece, rotated: int, topk: int, scales: Tensor | None = None,
    tile: int = 0, programs: int = 0, stages: int = STAGES,
) -> Tensor:  # fmt: skip
    """Scores [T, longest] f32 of what each token sees, where that is more than topk; what is behind is undefined."""
    tokens, heads, dim = q.shape
    assert q.stride()[1:] == (dim, 1) and weights.stride(1) == 1 and cache.is_contiguous()
    tables, query_len, seen = piece.tables, piece.query_len, piece.seen
    scores = torch.empty(tokens, piece.longest, dtype=torch.float32, device=q.device)
    tile = tile or (32 if q.element_size() == 4 else 64 if query_len == 1 else 128)
    together = 1 if query_len == 1 else TOGETHER
    groups = len(tables) * triton.cdiv(query_len, together)
    if not programs:
        programs = max(1, PROGRAMS * device_caps(q.device).num_sms // groups)
    score_kernel[min(programs, triton.cdiv(piece.longest, tile)), groups](
        q, weights, _bytes(cache), seen if scales is None else scales, tables, seen, scores, query_len, topk,
        piece.longest, q.stride(0), weights.stride(0), tables.stride(0), heads, dim, rotated,
        max(16, triton.next_power_of_2(heads)), max(16, triton.next_power_of_2(rotated)),
        max(16, triton.next_power_of_2(dim - rotated)), cache.shape[1], tile, together, int(scales is not None),
        dot_precision(q), num_warps=4, num_stages=stages if query_len == 1 else 2,
    )  # fmt: skip
    return scores


@triton.jit
def store_kernel(
    q, k, weight, bias, cos, sin, cache, scales, slots, eps, q_row, k_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, DIM_PADDED: tl.constexpr, PAIRS: tl.constexpr,
    EACH: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    """One token: its key by program 0, its queries by the others, EACH heads each. CENTERED: a layer norm, with a
    bias."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, PAIRS)
    cos += token * ROPE
    sin += token * ROPE
    if part == 0:
        slot = tl.load(slots + token)
        if slot >= 0:
            dims = tl.arange(0, DIM_PADDED)
            inside, rest = dims < DIM, (dims >= ROPE) & (dims < DIM)
            x = k + token * k_row
            y = tl.load(x + dims, mask=inside, other=0.0).to(tl.float32)
            if CENTERED:
                y = tl.where(inside, y - tl.sum(y) / DIM, 0.0)
            w = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
            y = y * tl.rsqrt(tl.sum(y * y) / DIM + eps) * w
            if CENTERED:
                y += tl.load(bias + dims, mask=inside, other=0.0).to(tl.float32)
            y = y.to(k.dtype.element_ty)
            tl.debug_barrier()  # all of the key is read before its first part is written over
            tl.store(x + dims, y, mask=dims < ROPE)
            tl.debug_barrier()  # _rotate reads what other threads have written
            to, scale = cache + slot * DIM, scales + slot // BLOCK * 2 * BLOCK + slot % BLOCK
            one = tl.zeros([1], tl.int64)
            at = one[:, None]
            _rotate(x + at, to + at, scale, one == 0, cos + at, sin + at, pairs, ROPE, INTERLEAVED, FP8)
            if FP8:
                y = y.to(tl.float32)
                exponent = exponent_of(tl.max(tl.where(rest, tl.abs(y), 0.0)))
                tl.store(scale + BLOCK, exponent.to(tl.uint8))
                y = narrow(y, exponent)
            tl.store(to + dims, y.to(cache.dtype.element_ty), mask=rest)
    else:
        heads = ((part - 1) * EACH + tl.arange(0, EACH))[:, None]
        x = q + token * q_row + heads * DIM
        same = heads * 0
        _rotate(x, x, scales, tl.ravel(heads) < HEADS, cos + same, sin + same, pairs, ROPE, INTERLEAVED, False)


@triton.jit
def _queries(
    q, weights, row, q_row, weights_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, HEADS_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
):  # fmt: skip
    """Both parts of a token's queries [elements, heads], and the weights of their heads, f32."""
    heads, dims, rest = tl.arange(0, HEADS_PADDED), tl.arange(0, ROPE_PADDED), tl.arange(0, REST_PADDED)
    real = (heads < HEADS)[None, :]
    queries = q + row * q_row + heads[None, :] * DIM
    xr = tl.load(queries + dims[:, None], mask=real & (dims < ROPE)[:, None], other=0.0)
    xn = tl.load(queries + ROPE + rest[:, None], mask=real & (rest < DIM - ROPE)[:, None], other=0.0)
    return xr, xn, tl.load(weights + row * weights_row + heads, mask=heads < HEADS, other=0.0).to(tl.float32)


@triton.jit
def _scored(kr, kn, xr, xn, w, PRECISION: tl.constexpr):
    s = tl.dot(kr, xr, input_precision=PRECISION)
    s = tl.dot(kn, xn, s, input_precision=PRECISION)
    return tl.sum(tl.maximum(s, 0.0) * w[None, :], 1)


@triton.jit(do_not_specialize=["query_len", "topk", "scores_row", "table_row"])
def score_kernel(
    q, weights, cache, scales, tables, seen, scores, query_len, topk, scores_row, q_row, weights_row, table_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, HEADS_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TOGETHER: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th tile of a sequence for up to TOGETHER of its query_len tokens. Tiles are fetched ahead
    where that is one: Triton does so in loops that have no loop in them."""
    groups = tl.cdiv(query_len, TOGETHER)  # of a sequence
    sequence = tl.program_id(1) // groups
    first = (sequence * query_len + tl.program_id(1) % groups * TOGETHER).to(tl.int64)
    last = tl.minimum(first + TOGETHER, (sequence + 1) * query_len)
    length = tl.load(seen + last - 1)
    if length > topk:
        dims, rest = tl.arange(0, ROPE_PADDED), tl.arange(0, REST_PADDED)
        table = tables + sequence.to(tl.int64) * table_row
        if TOGETHER == 1:
            xr, xn, w = _queries(
                q, weights, first, q_row, weights_row, HEADS, DIM, ROPE, HEADS_PADDED, ROPE_PADDED, REST_PADDED
            )
        for tile in range(tl.program_id(0), tl.cdiv(length, TILE), tl.num_programs(0)):
            positions = tile * TILE + tl.arange(0, TILE)
            valid = positions < length
            slots = slots_of(table, positions, valid, BLOCK)
            keys = cache + (slots * DIM)[:, None]
            kr = tl.load(keys + dims[None, :], mask=valid[:, None] & (dims < ROPE)[None, :], other=0)
            kn = tl.load(keys + ROPE + rest[None, :], mask=valid[:, None] & (rest < DIM - ROPE)[None, :], other=0)
            if FP8:
                kr = widen(kr, scales_at(scales, slots, 0, 0, valid, 1, BLOCK)[:, None], q.dtype.element_ty)
                there = valid & (DIM > ROPE)  # else nothing may have written the second part's scale
                kn = widen(kn, scales_at(scales, slots, 0, 1, there, 1, BLOCK)[:, None], q.dtype.element_ty)
            if TOGETHER == 1:
                tl.store(scores + first * scores_row + positions, _scored(kr, kn, xr, xn, w, PRECISION), mask=valid)
            else:
                for row in range(first, last):
                    xr, xn, w = _queries(
                        q, weights, row, q_row, weights_row, HEADS, DIM, ROPE, HEADS_PADDED, ROPE_PADDED, REST_PADDED
                    )
                    tl.store(scores + row * scores_row + positions, _scored(kr, kn, xr, xn, w, PRECISION), mask=valid)
