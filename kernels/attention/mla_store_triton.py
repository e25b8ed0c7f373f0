"""Stores the latents of multi-head latent attention on GPUs, in Triton (mla.py); imported on GPUs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rope.fp8_triton import exponent_of, narrow
from ..rope.rope import CosSin

if TYPE_CHECKING:
    from .mla import LatentNorm

STORE_HEADS = 8  # query heads that one program rotates


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
        heads, width, latent, rope, triton.next_power_of_2(latent), triton.next_power_of_2(rope // 2), STORE_HEADS,
        cos_sin.interleaved, cache.shape[1], int(scales is not None), num_warps=4,
    )  # fmt: skip


@triton.jit
def _rotate(
    x, to, scale, rows, mask, cos, sin, pairs, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr
):
    """Vectors of ROPE elements at x + rows, rotated, to `to` + rows; computed in f32. sin: its first half negated.

    FP8: `to` gets codes, of one vector, and `scale` theirs.
    """
    HALF: tl.constexpr = ROPE // 2
    first = 2 * pairs if INTERLEAVED else pairs
    second = first + 1 if INTERLEAVED else pairs + HALF
    real = pairs < HALF
    c = tl.load(cos + pairs, mask=real, other=0.0)[None, :]
    s = tl.load(sin + HALF + pairs, mask=real, other=0.0)[None, :]
    mask = mask[:, None] & real[None, :]
    a = tl.load(x + rows[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + rows[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # `to` may be x: all is read before any of it is written
    ya, yb = (a * c - b * s).to(x.dtype.element_ty), (b * c + a * s).to(x.dtype.element_ty)
    if FP8:
        ya, yb = ya.to(tl.float32), yb.to(tl.float32)
        exponent = exponent_of(tl.maximum(tl.max(tl.abs(ya)), tl.max(tl.abs(yb))))
        tl.store(scale, exponent.to(tl.uint8))
        ya, yb = narrow(ya, exponent), narrow(yb, exponent)
    tl.store(to + rows[:, None] + first[None, :], ya.to(to.dtype.element_ty), mask=mask)
    tl.store(to + rows[:, None] + second[None, :], yb.to(to.dtype.element_ty), mask=mask)


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
        slot = tl.load(slots + token)
        if slot >= 0:
            dims = tl.arange(0, LATENT_PADDED)
            x = tl.load(latents + token * latents_row + dims, mask=dims < LATENT, other=0.0).to(tl.float32)
            w = tl.load(weight + dims, mask=dims < LATENT, other=0.0).to(tl.float32)
            y = x * tl.rsqrt(tl.sum(x * x) / LATENT + eps) * w
            to = cache + slot * (LATENT + ROPE)
            y = y.to(latents.dtype.element_ty)
            scale = scales + slot // BLOCK * 2 * BLOCK + slot % BLOCK
            if FP8:
                y = y.to(tl.float32)
                exponent = exponent_of(tl.max(tl.abs(y)))
                tl.store(scale, exponent.to(tl.uint8))
                y = narrow(y, exponent)
            tl.store(to + dims, y.to(cache.dtype.element_ty), mask=dims < LATENT)
            one = tl.zeros([1], tl.int64)
            _rotate(
                latents + token * latents_row + LATENT, to + LATENT, scale + BLOCK, one, one == 0, cos, sin, pairs,
                ROPE, INTERLEAVED, FP8,
            )  # fmt: skip
    else:
        heads = (part - 1) * EACH + tl.arange(0, EACH)
        x = q + token * q_row + WIDTH - ROPE
        _rotate(x, x, scales, heads * WIDTH, heads < HEADS, cos, sin, pairs, ROPE, INTERLEAVED, False)
