"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

The first r dimensions of a head are rotated in pairs, the others pass unchanged. Pairs are (i, i + r/2), the half-split
layout of Llama's checkpoints, or (2i, 2i + 1), the interleaved one of the paper, of GLM's and Cohere's checkpoints.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..cpp import ops
from ..norm.norm import rms_norm_reference
from . import fp8_cache

ENOUGH = 256  # tokens, on GPUs: a warp does several heads of one, for which cosines and sines are read once
CPU_MAX_DIM = 512  # as in rope.cpp


class CosSin(NamedTuple):
    """How the tokens of one step are rotated; made once a step, applied in every layer.

    cos: [T, 1, r] f32, both halves alike; sin: [T, 1, r] f32, the first half negated. That is so in either layout.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    # [T, 1, 1] f32: each token's factor on its queries, by which attention's temperature depends on the position. It is
    # not applied here, and has no place where queries are normed after it.
    q_scale: Tensor | None = None
    # The rotation of the first token of the window that each lies in, where rope parameters have a stride.
    of_window: CosSin | None = None


class KVCache(NamedTuple):
    """The KV cache of a layer, as PagedKV asks for it (Kwon et al. 2023, arXiv 2309.06180)."""

    keys: Tensor  # [blocks, block_size, kv_heads, head_dim]
    values: Tensor
    scales: Tensor | None = None  # of keys and values in e4m3, [blocks, kv_heads, 2, block_size] (fp8_cache.py)


class QKNorm(NamedTuple):
    """The norm that some models put on each head's query and key before they are rotated."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor
    eps: float


class CurrentKV(NamedTuple):
    """A step's keys and values before they are normed and rotated, and where they go."""

    k: Tensor  # [T, kv_heads, head_dim], as v; it may be overwritten
    v: Tensor
    cos_sin: CosSin
    norms: QKNorm | None  # of the queries, too
    slots: Tensor  # [T] int64, block * block_size + offset, none twice; tokens with a negative one are not written


def cos_sin(table: Tensor, positions: Tensor) -> CosSin:
    """table [positions, 2, r/2] f32: cosines and sines; positions [T] int64."""
    if positions.is_cuda:
        return cos_sin_cuda(table, positions)
    if table.is_contiguous() and positions.is_contiguous() and ops.takes(table):
        cos, sin = table.new_empty(2, len(positions), 1, 2 * table.shape[2])
        ops.op("embedding", "cos_sin_f32")(positions, table, cos, sin, len(positions), table.shape[2])
        return CosSin(cos, sin)
    return cos_sin_reference(table, positions)


def cos_sin_reference(table: Tensor, positions: Tensor) -> CosSin:
    cos, sin = table.index_select(0, positions).unbind(1)
    return CosSin(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def cos_sin_cuda(table: Tensor, positions: Tensor) -> CosSin:
    half = table.shape[2]
    cos, sin = table.new_empty(2, len(positions), 1, 2 * half)
    kernel = jit.kernel("embedding", "cos_sin", torch.float32, V=1)
    kernel((len(positions), 1, 1), min(max(-(-half // 32) * 32, 32), 256), positions, table, cos, sin, half)
    return CosSin(cos, sin)


def apply_rotary(x: Tensor, cos_sin: CosSin) -> Tensor:
    """x [T, heads, head_dim], rotated; computed in f32. x may be overwritten."""
    return apply_rotary_reference(x, cos_sin)


def apply_rotary_reference(x: Tensor, cos_sin: CosSin) -> Tensor:
    cos, sin, interleaved = cos_sin[:3]
    r = cos.shape[-1]
    rotated = x[..., :r].float() if r < x.shape[-1] else x.float()
    if interleaved:
        rotated = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    rotated = (rotated * cos).addcmul_(rotated.roll(r // 2, -1), sin).to(x.dtype)
    if interleaved:
        rotated = rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return rotated if r == x.shape[-1] else torch.cat((rotated, x[..., r:]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [N, heads, dim] in place, in the half-split layout, computed in f32. cos, sin: [N, dim / 2] f32."""
    if x.is_cuda:
        from . import rope_triton  # a CPU may have no Triton

        rope_triton.rotate(x, cos, sin)
    else:
        rotate_reference(x, cos, sin)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    (first, second), cos, sin = x.float().chunk(2, 2), cos[:, None], sin[:, None]
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), 2))


def rope_and_store_kv(q: Tensor, new: CurrentKV, cache: tuple[Tensor, ...]) -> Tensor:
    """q [T, heads, head_dim] normed and rotated; new keys, likewise, and values go to their slots of the cache, as
    KVCache has it. q may be overwritten."""
    if q.is_cuda:
        return rope_and_store_kv_cuda(q, new, cache)
    if supports_cpu(q, new, cache):
        return rope_and_store_kv_cpu(q, new, cache)
    return rope_and_store_kv_reference(q, new, cache)


def rope_and_store_kv_reference(q: Tensor, new: CurrentKV, cache: tuple[Tensor, ...]) -> Tensor:
    k, v, cos_sin, norms, slots = new
    if norms is not None:
        q = rms_norm_reference(q, norms.q_weight, norms.eps)
        k = rms_norm_reference(k, norms.k_weight, norms.eps)
    store_kv_reference(apply_rotary_reference(k, cos_sin), v, cache, slots)
    return apply_rotary_reference(q, cos_sin)


def store_kv_reference(k: Tensor, v: Tensor, cache: tuple[Tensor, ...], slots: Tensor) -> None:
    """The caches' dtype may differ from k's."""
    keys, values, scales = KVCache(*cache)
    if scales is not None:
        fp8_cache.store(k, keys, scales, 0, slots)
        fp8_cache.store(v, values, scales, 1, slots)
        return
    keys.view(-1, *keys.shape[2:]).index_copy_(0, slots, k.to(keys.dtype))
    values.view(-1, *values.shape[2:]).index_copy_(0, slots, v.to(values.dtype))


def supports_cpu(q: Tensor, new: CurrentKV, cache: tuple[Tensor, ...]) -> bool:
    dim, cos_sin = q.shape[2], new.cos_sin
    side_by_side = all(x.stride()[1:] == (dim, 1) for x in (q, new.k, new.v))
    kept = fp8_cache.E4M3 if len(cache) == 3 else q.dtype
    plain = all(x.is_contiguous() for x in (cos_sin.cos, cos_sin.sin, *cache)) and cache[0].dtype == kept
    return side_by_side and plain and new.v.shape[2] == dim <= CPU_MAX_DIM and ops.takes(q)


def rope_and_store_kv_cpu(q: Tensor, new: CurrentKV, cache: tuple[Tensor, ...]) -> Tensor:
    k, v, cos_sin, norms, slots = new
    tokens, heads, dim = q.shape
    q_weight, k_weight, eps = norms if norms is not None else (None, None, 0.0)
    keys, values, scales = KVCache(*cache)
    ops.typed("rope", "rope", q.dtype)(
        q, k, v, cos_sin.cos, cos_sin.sin, q_weight, k_weight, keys, values, scales, slots, tokens, heads,
        k.shape[1], dim, keys.shape[1], cos_sin.cos.shape[-1], int(cos_sin.interleaved), q.stride(0), k.stride(0),
        v.stride(0), float(eps),
    )  # fmt: skip
    return q


def rope_and_store_kv_cuda(q: Tensor, new: CurrentKV, cache: tuple[Tensor, ...]) -> Tensor:
    """q, k and v have heads side by side; their rows may be parts of wider ones."""
    k, v, cos_sin, norms, slots = new
    tokens, heads, dim = q.shape
    kv_heads, rotated = k.shape[1], cos_sin.cos.shape[-1]
    keys, values, scales = KVCache(*cache)
    assert q.stride(1) == k.stride(1) == v.stride(1) == dim and keys.is_contiguous() and values.is_contiguous()
    rows = q.stride(0), k.stride(0), v.stride(0)
    # Two at a time: with heads of 128 that keeps all lanes of the head's warp at work.
    vector = jit.common_vector((q, k, v), dim, rotated // 2, *rows, most=2 * q.element_size())
    per = 1 if tokens < ENOUGH else 8
    kernel = jit.kernel(
        "rope", "rope_and_store_kv", q.dtype, C=keys.dtype if scales is None else q.dtype, DIM=dim, ROTATED=rotated,
        V=vector, Q_HEADS=heads, KV_HEADS=kv_heads, NORM=int(norms is not None), PER=per, SIZE=keys.shape[1],
        FP8=int(scales is not None), INTERLEAVED=int(cos_sin.interleaved),
    )  # fmt: skip
    q_weight, k_weight, eps = norms if norms is not None else (q, k, 0.0)
    blocks = -(-tokens * -(-(heads + 2 * kv_heads) // per) // 4)
    kernel(
        (blocks, 1, 1), 128, q, k, v, *rows, cos_sin.cos, cos_sin.sin, q_weight, k_weight, eps, keys, values,
        values if scales is None else scales, slots, tokens,
    )  # fmt: skip
    return q
