"""fp8_cache.py's codes and scales in Triton; imported on GPUs alone. Bits are moved by hand, as sm_80 has no e4m3."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8_cache import HIGHEST, LOWEST, split_latents

_LOWEST, _HIGHEST = tl.constexpr(LOWEST), tl.constexpr(HIGHEST)


@triton.jit
def scales_at(scales, slots, head, part: tl.constexpr, valid, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Scales of these slots' codes, f32; 0 for no slot."""
    at = ((slots // BLOCK * HEADS + head) * 2 + part) * BLOCK + slots % BLOCK
    return (tl.load(scales + at, mask=valid, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def widen(codes, by, TO: tl.constexpr):
    """Codes as numbers of dtype TO: by way of f16, which has their smallest numbers, too."""
    code = codes.to(tl.uint16)
    y = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
    return (y * (by * 256.0)).to(TO)


@triton.jit
def exponent_of(most):
    """The scale's, of numbers of which `most` is the largest, f32; a byte as int32."""
    bits = most.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, _LOWEST), _HIGHEST)


@triton.jit
def narrow(x, exponent):
    """Codes of x f32, to the nearest, ties to even."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    y = tl.minimum(tl.abs(x) * ((254 - exponent) << 23).to(tl.float32, bitcast=True), 448.0)
    bits = y.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (y + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in steps of 2^-9
    return (tl.where(y < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def round_trip(x, exponent):
    """x as codes, and as the cache will give it back, in x's dtype."""
    codes = narrow(x.to(tl.float32), exponent)
    return codes, widen(codes, (exponent << 23).to(tl.float32, bitcast=True), x.dtype)


@triton.jit
def gather_kernel(
    codes, scales, slots, out, code_row, out_row, WIDTH: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token, dims = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    slot = tl.load(slots + token)
    by = scales_at(scales, slot, 0, PART, True, 1, BLOCK)
    x = tl.load(codes + slot * code_row + dims, mask=dims < WIDTH, other=0)
    tl.store(out + token * out_row + dims, widen(x, by, out.dtype.element_ty), mask=dims < WIDTH)


@triton.jit
def blocks_kernel(
    codes, scales, blocks, out, SIZE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One block's tokens of one head."""
    to, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.load(blocks + to).to(tl.int64)
    tokens, dims = tl.arange(0, TOKENS), tl.arange(0, PADDED)
    mask = (tokens < SIZE)[:, None] & (dims < DIM)[None, :]
    rows = (tokens * HEADS + head)[:, None] * DIM + dims[None, :]
    by = scales_at(scales, block * SIZE + tokens, head, PART, tokens < SIZE, HEADS, SIZE)
    x = tl.load(codes + block * SIZE * HEADS * DIM + rows, mask=mask, other=0)
    tl.store(out + to * SIZE * HEADS * DIM + rows, widen(x, by[:, None], out.dtype.element_ty), mask=mask)


def gather_blocks(codes: Tensor, scales: Tensor, part: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of these blocks [n] int32 of keys (part 0) or values: [n, block_size, kv_heads, dim]. What no token has
    been written to may be anything."""
    size, heads, dim = codes.shape[1:]
    out = torch.empty(len(blocks), size, heads, dim, dtype=dtype, device=codes.device)
    if len(blocks):
        blocks_kernel[len(blocks), heads](
            codes.view(torch.uint8), scales, blocks, out, size, triton.next_power_of_2(size), heads, dim,
            triton.next_power_of_2(dim), part, num_warps=4,
        )  # fmt: skip
    return out


def gather_latents(cache: Tensor, scales: Tensor, slots: Tensor, latent: int, dtype: torch.dtype) -> Tensor:
    """fp8_cache.gather_latents."""
    out = torch.empty(len(slots), cache.shape[2], dtype=dtype, device=cache.device)
    parts = zip(split_latents(cache.view(torch.uint8), latent), split_latents(out, latent), strict=True)
    for i, (codes, to) in enumerate(parts):
        width = to.shape[1]
        if len(slots):
            gather_kernel[(len(slots),)](
                codes, scales, slots, to, cache.shape[2], out.shape[1], width, triton.next_power_of_2(width), i,
                cache.shape[1], num_warps=2,
            )  # fmt: skip
    return out
