"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Llama checkpoints.

Dimension i of a head is paired with i + r/2, where r is the number of rotated dimensions; dimensions from r on pass
unchanged.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import jit
from .cache import cache_write_reference
from .cpu import MOST_ROWS, array, flat, one_core
from .norm import rms_norm_reference

ENOUGH = 256  # tokens, on GPUs: a warp does several heads of one, for which cosines and sines are read once


class Rotation(NamedTuple):
    """How the tokens of one step are turned; made once a step, applied in every layer.

    cos: [T, 1, r] f32, both halves alike; sin: [T, 1, r] f32, the first half negated.
    """

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """The norm that some models put on each head's query and key before they are turned."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor
    eps: float


def rotation(table: Tensor, positions: Tensor) -> Rotation:
    """table [positions, 2, r/2] f32: cosines and sines; positions [T] int64."""
    if positions.is_cuda:
        return rotation_cuda(table, positions)
    if table.is_contiguous() and (compiled := one_core(table, len(table))) and len(positions) <= MOST_ROWS:
        turn = table.new_empty(2, len(positions), 1, 2 * table.shape[2])
        compiled.rotation(array(table), positions.numpy(), turn.numpy())
        return Rotation(*turn)
    return rotation_reference(table, positions)


def rotation_reference(table: Tensor, positions: Tensor) -> Rotation:
    cos, sin = table.index_select(0, positions).unbind(1)
    return Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def rotation_cuda(table: Tensor, positions: Tensor) -> Rotation:
    half = table.shape[2]
    cos, sin = table.new_empty(2, len(positions), 1, 2 * half)
    kernel = jit.kernel("gather", "rotation", torch.float32, V=1)
    kernel((len(positions), 1, 1), min(max(-(-half // 32) * 32, 32), 256), positions, table, cos, sin, half)
    return Rotation(cos, sin)


def rope(x: Tensor, turn: Rotation) -> Tensor:
    """x [T, heads, head_dim], turned; computed in f32. x may be overwritten."""
    return rope_reference(x, turn)


def rope_reference(x: Tensor, turn: Rotation) -> Tensor:
    cos, sin = turn
    r = cos.shape[-1]
    turned = x[..., :r].float() if r < x.shape[-1] else x.float()
    turned = (turned * cos).addcmul_(turned.roll(r // 2, -1), sin).to(x.dtype)
    return turned if r == x.shape[-1] else torch.cat((turned, x[..., r:]), -1)


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Rotation,
    norms: HeadNorms | None,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """q [T, heads, head_dim] normed and turned; k, v [T, kv_heads, head_dim], k likewise, go to `slots` of the cache.

    kernels/cache.py explains slots. On GPUs tokens with a negative slot are not written. q and k may be overwritten.
    """
    if q.is_cuda:
        return rope_write_cuda(q, k, v, turn, norms, cache, slots)
    if cache[0].dtype == torch.float32 and q.stride(1) == q.shape[2] and (compiled := one_core(q)):
        return rope_write_compiled(compiled, q, k, v, turn, norms, cache, slots)
    return rope_write_reference(q, k, v, turn, norms, cache, slots)


def rope_write_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Rotation,
    norms: HeadNorms | None,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    if norms is not None:
        q = rms_norm_reference(q, norms.q_weight, norms.eps)
        k = rms_norm_reference(k, norms.k_weight, norms.eps)
    cache_write_reference(rope_reference(k, turn), v, *cache, slots)
    return rope_reference(q, turn)


def rope_write_compiled(
    compiled: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Rotation,
    norms: HeadNorms | None,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """q, k and v have heads side by side; their rows may be parts of wider ones."""
    cos, sin = turn.cos.numpy(), turn.sin.numpy()
    none = cos[:0, 0, 0]
    q_weight, k_weight, eps = (norms[0].numpy(), norms[1].numpy(), norms[2]) if norms else (none, none, 0.0)
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    keys, values = (part.view(-1, kv_heads * dim).numpy() for part in cache)
    compiled.rope_write(
        *(flat(x).numpy() for x in (q, k, v)), q.stride(0), k.stride(0), v.stride(0), heads, kv_heads, dim, cos, sin,
        q_weight, k_weight, eps, keys, values, slots.numpy(),
    )  # fmt: skip
    return q


def rope_write_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Rotation,
    norms: HeadNorms | None,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """q, k and v have heads side by side; their rows may be parts of wider ones."""
    tokens, heads, dim = q.shape
    kv_heads, turned = k.shape[1], turn.cos.shape[-1]
    keys, values = cache
    assert q.stride(1) == k.stride(1) == v.stride(1) == dim and keys.is_contiguous() and values.is_contiguous()
    rows = q.stride(0), k.stride(0), v.stride(0)
    # Two at a time: with heads of 128 that keeps all lanes of the head's warp at work.
    vector = min(jit.vector(x, dim, turned // 2, *rows, most=2 * x.element_size()) for x in (q, k, v))
    per = 1 if tokens < ENOUGH else 8
    kernel = jit.kernel(
        "rope", "rope_write", q.dtype, C=keys.dtype, DIM=dim, TURNED=turned, V=vector, Q_HEADS=heads,
        KV_HEADS=kv_heads, NORM=int(norms is not None), PER=per,
    )  # fmt: skip
    q_weight, k_weight, eps = norms if norms is not None else (q, k, 0.0)
    blocks = -(-tokens * -(-(heads + 2 * kv_heads) // per) // 4)
    kernel(
        (blocks, 1, 1), 128, q, k, v, *rows, turn.cos, turn.sin, q_weight, k_weight, eps, keys, values, slots, tokens
    )
    return q
